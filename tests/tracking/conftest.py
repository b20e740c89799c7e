"""A run directory in a temporary folder, an environment in which W&B reaches nothing outside of it, and a W&B server on loopback."""

import os
import sys
from typing import Any

import pytest

from rllm_lightning.config import Config
from rllm_lightning.registry import register_task
from rllm_lightning.tracking.run_directory import RunDirectory
from rllm_lightning.types import Episode, Step, TerminationReason, Trajectory
from tests.tracking.wandb_server import WandbServer


@pytest.fixture(autouse=True)
def hermetic(tmp_path, monkeypatch):
    """No login, no sweep, no scheduler, no service address of another process; W&B's folders and the network's way out are dead ends."""
    for name in list(os.environ):
        if name.startswith(("WANDB_", "SLURM_", "MLFLOW_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb-config"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # the discard port: nothing listens
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    yield
    if (wandb := sys.modules.get("wandb")) is not None:  # it remembers the environment of the first use, and a run left open
        open_run = wandb.run is not None
        wandb.teardown()
        assert not open_run


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
def follow():
    """Takes a W&B run from its begin to its end: `follow(config, run, {step: metrics}, exit_code, begin)`."""
    from rllm_lightning.tracking.wandb_tracker import WandbTracker

    def go(config, run, metrics_by_step, exit_code=0, begin=0):
        tracker = WandbTracker(config, run)
        tracker.begin(begin)
        for step, metrics in metrics_by_step.items():
            tracker.log_metrics(metrics, step)
        tracker.finalize("success")
        tracker.close(exit_code)

    return go


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


@pytest.fixture
def wandb_server(monkeypatch):
    server = WandbServer()
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    yield server
    server.stop()
