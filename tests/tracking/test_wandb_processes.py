"""W&B runs of processes of their own: what survives when one is killed or fails, ranks, and what of its surroundings gets in."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rllm_lightning.tracking.metrics_table import read_metrics
from rllm_lightning.tracking.wandb_tracker import STEP
from tests.tracking import offline

ROOT = Path(__file__).parents[2]

# A run directory and overrides in; the trackers' life around what the test does in between.
PROGRAM = """
import os, sys, time
from rllm_lightning.config import Config, load_config
from rllm_lightning.tracking.run_directory import RunDirectory
from rllm_lightning.tracking.trackers import make_trackers
run = RunDirectory.open(sys.argv[1])
config = Config.from_config(load_config(sys.argv[2:]))
trackers = make_trackers(config, run)
def begin():
    for tracker in trackers: tracker.begin(0)
def log(step):
    for tracker in trackers: tracker.log_metrics({"a": step / 2}, step)
def close(exit_code):
    for tracker in trackers: tracker.close(exit_code)
"""


@pytest.fixture
def start(run):
    """Begin `PROGRAM` and a body in a process of its own, which does not outlive the test."""
    processes = []

    def begin(body, *argv, **environment):
        command = [sys.executable, "-c", PROGRAM + body, str(run.path), "rllm.trainer.logger=[csv,wandb]", *argv]
        environment = os.environ | {"PYTHONPATH": str(ROOT)} | environment
        processes.append(subprocess.Popen(command, env=environment, cwd=run.path.parent, text=True, stderr=subprocess.PIPE))
        return processes[-1]

    yield begin
    for process in processes:
        process.kill()
        process.wait()


def wait_for_rows(run, number):
    deadline = time.monotonic() + 60
    while not run.metrics_csv.exists() or len(read_metrics(run.metrics_csv)) < number:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_killed_process_leaves_every_row_but_those_of_the_last_second(start, run):
    """Killed 5 seconds after its first row, a row every tenth of a second; W&B by itself would have written none: it waits for 15 s.

    The table `metrics.csv` has them all. What W&B has is a beginning of it: at most two flushes are missing (1 s each), 20 rows.
    """
    process = start("begin()\nfor step in range(1000): log(step); time.sleep(0.1)")
    wait_for_rows(run, 1)
    time.sleep(5)
    process.send_signal(signal.SIGKILL)
    process.wait()
    table = [row["step"] for row in read_metrics(run.metrics_csv)]
    shown = [row[STEP] for row in offline.history(run.wandb)]
    assert table == list(range(len(table)))
    assert len(table) > 30
    assert shown == table[: len(shown)]
    assert len(table) - len(shown) <= 20


def test_a_failing_process_keeps_all_rows_and_ends_its_run_as_failed(start, run):
    process = start("try: begin(); log(0); log(1); raise ValueError('boom')\nfinally: close(1)")
    process.communicate(timeout=60)
    assert process.returncode == 1
    assert offline.offline_run(run.wandb) == ([{STEP: 0, "a": 0.0}, {STEP: 1, "a": 0.5}], 1)
    assert [row["step"] for row in read_metrics(run.metrics_csv)] == [0, 1]


def test_two_ranks_make_one_run_of_one_config(start, run, tmp_path):
    """B44: two processes under a sweep; one W&B run, which only the first makes, and both see the swept learning rate."""
    path = tmp_path / "sweep-values.yaml"
    path.write_text("training.learning_rate: {value: 0.125}")
    sweep = {"WANDB_SWEEP_ID": "sw33p", "WANDB_SWEEP_PARAM_PATH": str(path), "WORLD_SIZE": "2"}
    body = """
import json, wandb
init, made = wandb.init, []
wandb.init = lambda **arguments: made.append(arguments) or init(**arguments)
begin(); log(0); close(0)
with open(f"rank{os.environ['RANK']}.json", "w") as file: json.dump([len(made), config.training.learning_rate], file)
"""
    ranks = [start(body, "training.learning_rate=0.125", RANK=str(rank), LOCAL_RANK=str(rank), **sweep) for rank in range(2)]
    for process in ranks:
        _, error = process.communicate(timeout=60)
        assert process.returncode == 0, error
    assert [json.loads((run.path.parent / f"rank{rank}.json").read_text()) for rank in range(2)] == [[1, 0.125], [0, 0.125]]
    assert offline.offline_run(run.wandb) == ([{STEP: 0, "a": 0.0}], 0)


PLANTED = {
    "HF_TOKEN": "hf_planted1",
    "MY_SERVICE_API_KEY": "planted2-of-the-environment",
    "SLURM_JWT": "eyJ.planted3",
    "DATABASE_URL": "postgres://me:planted4@host/db",
    "WANDB_API_KEY": "planted5" * 5,
}
TASK = """
from rllm_lightning.registry import register_task
@register_task("noted")
def noted(seed: int, *, api_key: str = "", note: str = ""): ...
"""
HARMLESS = ["task.note=token-mean", "data.max_response_length=77", "wandb.notes=the-tokenizer-of-passwords"]


def test_no_secret_of_the_surroundings_reaches_the_run(start, run):
    """In the environment, the scheduler's variables, the command line, the config, the repository's address, prompts and answers."""
    for command in (["init", "-q"], ["remote", "add", "origin", "https://planted7:planted8@github.com/a/b.git"]):
        subprocess.run(["git", *command], cwd=run.path.parent, check=True)
    body = """
from rllm_lightning.types import Episode, Step, Trajectory
text = f"{os.environ['HF_TOKEN']} at https://me:planted9@host"
step = Step(prompt_ids=[1], response_ids=[2], logprobs=[-1.0], chat_completions=[{"role": "user", "content": text}], model_response=text)
begin()
for tracker in trackers: tracker.log_episodes([Episode(id="a:0", trajectories=[Trajectory(steps=[step], reward=1.0)])], 0)
log(0); close(0)
"""
    (run.path.parent / "noted_task.py").write_text(TASK)
    chosen = ["plugins=[noted_task]", "task.name=noted", "wandb.tags=[hf_planted1]", *HARMLESS]
    process = start(body, *chosen, '{"task.api_key": "planted6"}', WANDB_MODE="offline", **PLANTED)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 0, error
    found = [path for path in run.path.rglob("*") if path.is_file() and b"planted" in path.read_bytes()]
    assert found == []
    config = offline.values(offline.records(run.wandb, "run")[0].config.update)
    assert (config["task"]["note"], config["data"]["max_response_length"]) == ("token-mean", 77)
    assert offline.records(run.wandb, "run")[0].notes == "the-tokenizer-of-passwords"


def test_harmless_look_alikes_leave_the_metadata_there(start, run):
    """A command line with `token` and `password` in it, a job of the scheduler, an ordinary repository: all shown as they are."""
    for command in (["init", "-q"], ["remote", "add", "origin", "git@github.com:a/b.git"]):
        subprocess.run(["git", *command], cwd=run.path.parent, check=True)
    process = start("begin(); log(0); close(0)", "wandb.notes=the-tokenizer-of-passwords", SLURM_JOB_ID="12345678")
    _, error = process.communicate(timeout=60)
    assert process.returncode == 0, error
    metadata = next(record for record in offline.records(run.wandb, "environment") if record.args)
    assert "wandb.notes=the-tokenizer-of-passwords" in metadata.args
    assert dict(metadata.slurm) == {"job_id": "12345678"}
    assert metadata.git.remote_url == "git@github.com:a/b.git"
