"""Secrets are planted wherever a user may have put one; then every byte that a run leaves or prints is searched for them."""

import http.server
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from experiments import run as run_script
from rllm_lightning.tracking.terminal import show_exception
from tests.quick import QUICK

ROOT = Path(__file__).parents[2]
MARK = "pl4nt3d"  # in every secret, so that one that is masked in part, or written with escapes, is found too

TASK = '''
"""A task that says what it was told: in its questions, in its log, and in the error that it may end with."""

import logging
import os

from rllm_lightning import TaskSet, register_task


@register_task("telling")
def telling(seed: int, *, note: str = "", source: str = "", api_key: str = "", service: dict = {}, notes: list = [], fails: bool = False):
    def reward(task, response):
        logging.getLogger("telling").warning("asking %s with %s and %s\\nERROR: %s", source, api_key, note, os.environ["HF_TOKEN"])
        if fails:
            raise RuntimeError(f"the service refused {api_key} of {source} ({note}, {service['login']['password']})")
        return float(len(response))

    told = f"{note} {source} {os.environ['HF_TOKEN']} {api_key}"
    rows = [{"id": f"{i}", "question": f"{i} {told}", "answer": told, "data_source": "telling"} for i in range(4)]
    return TaskSet(rows[:2], rows[2:], reward)
'''


def secret(number):
    return f"{MARK}-{number:02d}-{number * 7919:06d}"


ENVIRONMENT = {
    "WANDB_API_KEY": (secret(1) * 3)[:40],
    "HF_TOKEN": f"hf_{secret(2)}",
    "OPENAI_API_KEY": f"sk-{secret(3)}",
    "SLURM_JWT": secret(4),
    "PLAIN": f"{secret(5)}\"q\\uote'd",  # no name of a secret; JSON, YAML and HTML write it with escapes
    "LIST_ITEM": secret(6),
    "MY_PASSWORD": secret(7),
}
GIVEN = [
    "task.note=see ${oc.env:PLAIN}!",
    "task.notes=[plain, '${oc.env:LIST_ITEM}']",
    f"task.source=https://user:{secret(8)}@host/x?api_key={secret(9)}&n=1",
    "--task.api_key",
    f"sk-{secret(10)}",
    f"task.service={{login: {{user: me, password: {secret(11)}}}, headers: {{Authorization: 'Bearer {secret(12)}'}}}}",
    f"wandb.notes=with {ENVIRONMENT['MY_PASSWORD']} and https://me:{secret(13)}@host/",
]
JOB = [
    *[word for word in QUICK if not word.startswith(("task.", "rllm.trainer.logger"))],
    "plugins=[telling_task]",
    "task.name=telling",
    "rllm.trainer.logger=[csv]",
    "rllm.trainer.total_batches=1",
    "rllm.trainer.val_before_train=true",
    "wandb.mode=offline",
]


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    """Of the command, with all secrets planted. The working directory is a clone from an address that holds one."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "telling_task.py").write_text(TASK)
    subprocess.run(["git", "init", "-q"], cwd=home, check=True)
    subprocess.run(["git", "remote", "add", "origin", f"https://user:{secret(14)}@host/x.git"], cwd=home, check=True)
    for name, value in (ENVIRONMENT | {"HOME": str(home), "WANDB_BASE_URL": "http://127.0.0.1:9"}).items():
        monkeypatch.setenv(name, value)
    for kind in ("DATA_DIR", "CACHE_DIR", "ARTIFACT_DIR", "DIR", "SILENT"):  # all is to lie in the run's folder
        monkeypatch.delenv(f"WANDB_{kind}", raising=False)
    monkeypatch.chdir(home)
    return [*JOB, *GIVEN, "data.max_prompt_length=4096", f"run_root={tmp_path / 'runs'}"]


def places(folder, printed):
    """Where a secret stands: `file: the text around it`."""
    found = [f"printed: {printed[max(0, m.start() - 80) : m.end() + 40]}" for m in re.finditer(MARK, printed)]
    for path in folder.rglob("*"):
        data = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        for match in re.finditer(MARK.encode(), f"{path} ".encode() + data):
            found.append(
                f"{path.relative_to(folder)}: {(str(path).encode() + b' ' + data)[max(0, match.start() - 80) : match.end() + 40]!r}"
            )
    return found


def test_no_byte_of_a_run_holds_a_secret(arguments, tmp_path):
    command = [sys.executable, str(ROOT / "experiments" / "run.py"), *arguments, "rllm.trainer.logger=[console,csv,wandb]"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False)
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed
    names = {path.name for path in (tmp_path / "runs").rglob("*")}
    assert {"config.yaml", "metrics.csv", "summary.json", "report.html", "last.ckpt", "train_step_1.jsonl", "tokens.json"} <= names
    assert any(name.endswith(".wandb") for name in names)
    assert "WARNING: asking https://***@host/x" in printed  # what was to be masked has been there
    assert not (found := places(tmp_path / "runs", printed)), "\n".join(found[:20])


def test_no_byte_of_a_run_that_fails_over_a_secret_holds_it(arguments, tmp_path, capfd):
    with pytest.raises((RuntimeError, ValueError), match=MARK) as caught:  # the error itself says all
        run_script.main([*arguments, "task.fails=true", "rllm.trainer.val_before_train=false"])
    show_exception(caught.type, caught.value, caught.tb)
    printed = "".join(capfd.readouterr())
    assert "the service refused *** of https://***@host/x" in printed
    assert not (found := places(tmp_path / "runs", printed)), "\n".join(found[:20])


def test_what_a_server_repeats_is_not_repeated(arguments, tmp_path, capfd):
    class Refusing(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            sent = self.rfile.read(int(self.headers["Content-Length"])).decode()
            said = f"wrong key {self.headers['Authorization']} in {sent}".encode()
            self.send_response(401)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *args):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    engine = [
        "rollout_engine.name=openai",
        f"rollout_engine.base_url=http://127.0.0.1:{server.server_address[1]}/v1",
        "rollout_engine.model=x",
        "rollout_engine.api_key_env=OPENAI_API_KEY",
        f"rollout_engine.extra_body={{user: '${{oc.env:LIST_ITEM}}', session_token: {secret(15)}}}",
    ]
    code = run_script.main([*arguments, *engine, "rllm.trainer.val_only=true", "rllm.workflow.n_parallel_tasks=1"])
    server.shutdown()
    server.server_close()
    printed = "".join(capfd.readouterr())
    assert code == 1, printed
    assert "status 401: wrong key Bearer ***" in printed
    assert not (found := places(tmp_path / "runs", printed)), "\n".join(found[:20])
