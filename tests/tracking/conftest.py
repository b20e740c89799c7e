"""A run directory in a temporary folder, an environment in which W&B reaches nothing outside of it, and a W&B server on loopback."""

import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rllm_lightning.config import Config
from rllm_lightning.registry import register_task
from rllm_lightning.tracking.run_directory import RunDirectory
from rllm_lightning.types import Episode, Step, TerminationReason, Trajectory


@pytest.fixture(autouse=True)
def hermetic(tmp_path, monkeypatch):
    """No login, no sweep, no service address of another process; W&B's folders and the network's way out are dead ends."""
    for name in list(os.environ):
        if name.startswith("WANDB_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb-config"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # the discard port: nothing listens
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@register_task("tracking_demo")
def tracking_demo(seed: int, *, level: int = 1, api_key: str = "", note: str = "", untyped: Any = None) -> Any:
    """A task that is never made: its keys are what matters."""


@pytest.fixture
def make_config(tmp_path):
    """A typed config from `section.key: value` pairs, its run directories in the temporary folder."""

    def make(**overrides):
        pairs = {"run_root": str(tmp_path / "runs"), "seed": 7, "task.name": "tracking_demo"}
        pairs |= {"rllm.trainer.project_name": "demo", "rllm.trainer.experiment_name": "first"} | overrides
        return Config.from_config(pairs)

    return make


@pytest.fixture
def config(make_config):
    return make_config()


@pytest.fixture
def run(config):
    return RunDirectory.create(config)


@pytest.fixture
def make_episode():
    def make(task_id="sum:1", rollout=0, reward=1.0, advantage=0.5, prompt="1+1=?", response="2"):
        chat = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
        step = Step(
            prompt_ids=[1, 2], response_ids=[3], logprobs=[-0.1], chat_completions=chat, model_response=response, advantage=advantage
        )
        trajectory = Trajectory(name="solver", steps=[step], reward=reward)
        reason = TerminationReason.ENV_DONE
        return Episode(id=f"{task_id}:{rollout}", is_correct=reward > 0, termination_reason=reason, trajectories=[trajectory])

    return make


class WandbServer:
    """Just enough of W&B's two interfaces for a plain online run: it keeps what the runs send."""

    def __init__(self):
        self.runs = {}  # variables of UpsertBucket, by run id, later ones over earlier ones
        self.rows = []
        self.exit_codes = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer = outer.graphql(body) if self.path == "/graphql" else outer.file_stream(body)
                data = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def graphql(self, request):
        if request["operationName"] == "Viewer":
            return {"data": {"viewer": {"id": "1", "entity": "tester", "username": "tester", "flags": "{}", "teams": {"edges": []}}}}
        if request["operationName"] == "RunResumeStatus":
            return {"data": {"model": {"bucket": None}}}
        if request["operationName"] != "UpsertBucket":
            return {"data": {}, "errors": [{"message": "unknown here"}]}
        given = {key: value for key, value in request["variables"].items() if value is not None}
        name = given["name"]
        self.runs[name] = self.runs.get(name, {}) | given
        project = {"id": "1", "name": given.get("project", "p"), "entity": {"id": "1", "name": "tester"}}
        bucket = {
            "id": name,
            "name": name,
            "displayName": name,
            "historyLineCount": 0,
            "config": "{}",
            "project": project,
            "sweepName": None,
        }
        return {"data": {"upsertBucket": {"bucket": bucket, "inserted": True}}}

    def file_stream(self, request):
        for line in request.get("files", {}).get("wandb-history.jsonl", {}).get("content", []):
            self.rows.append({key: value for key, value in json.loads(line).items() if key[0] != "_"})
        if request.get("complete"):
            self.exit_codes.append(request["exitcode"])
        return {"exitcode": None, "limits": {}}

    def stop(self):
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def wandb_server(monkeypatch):
    server = WandbServer()
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    yield server
    server.stop()
