"""Loggers of others. Their packages need not be installed here: what is tested is how a run drives them."""

import importlib.util
import logging
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from rllm_lightning.config import ConfigError
from rllm_lightning.tracking.foreign_trackers import ForeignTracker, tensorboard_tracker
from rllm_lightning.tracking.trackers import EXTRAS, check_trackers, make_trackers


class Recorder(Logger):
    """Notes what it is told, and fails where it is asked to."""

    def __init__(self, step=None, failing=()):
        self.made_at, self.failing, self.calls = step, failing, []

    name = version = "recorder"

    def log_metrics(self, metrics, step=None):
        self._note("log_metrics", metrics, step)

    def log_hyperparams(self, params):
        self._note("log_hyperparams", params)

    def save(self):
        self._note("save")

    def finalize(self, status):
        self._note("finalize", status)

    def _note(self, name, *arguments):
        if name in self.failing:
            raise ConnectionError("no server")
        self.calls.append((name, *arguments))


@pytest.fixture
def recorded(make_config, run):
    """A tracker around a `Recorder`, and what that was told."""

    def make(failing=(), rename=str):
        made = []
        config = make_config(**{"task.api_key": "sk-hidden"})
        tracker = ForeignTracker(config, run, lambda step: made.append(Recorder(step, failing)) or made[-1], rename)
        return tracker, made

    return make


def test_it_is_made_when_the_run_begins_with_the_config_without_secrets(recorded):
    tracker, made = recorded()
    assert made == []
    tracker.begin(0)
    ((name, params),) = made[0].calls
    assert name == "log_hyperparams"
    assert params["seed"] == 7
    assert params["task"]["api_key"] == "***"


def test_every_step_arrives_under_allowed_names_without_what_is_no_number(recorded):
    """B45: step 0 is a step. B43: NaN is left out."""
    tracker, made = recorded(rename=lambda key: key.replace("@", "_at_"))
    tracker.begin(0)
    tracker.log_metrics({"val/x/pass@1": 0.5, "a": float("nan")}, 0)
    tracker.log_metrics({"a": True}, 1)
    assert made[0].calls[1:] == [("log_metrics", {"val/x/pass_at_1": 0.5}, 0), ("log_metrics", {"a": 1}, 1)]


@pytest.mark.parametrize(("exit_code", "status"), [(0, "success"), (1, "failed"), (130, "KILLED"), (143, "KILLED")])
def test_lightnings_own_end_only_saves_and_ours_says_how_it_ended(recorded, exit_code, status):
    tracker, made = recorded()
    tracker.begin(0)
    tracker.finalize("success")
    tracker.close(exit_code)
    tracker.close(0)
    assert made[0].calls[1:] == [("save",), ("finalize", status)]


def test_a_resumed_run_tells_the_step_and_repeats_no_parameters(recorded):
    tracker, made = recorded()
    tracker.begin(3)
    assert (made[0].made_at, made[0].calls) == (3, [])


def test_a_logger_that_fails_is_left_alone_with_one_warning(recorded, caplog):
    tracker, made = recorded(failing=["log_metrics"])
    tracker.begin(0)
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            tracker.log_metrics({"a": 1.0}, step)
        tracker.close(0)
    (message,) = caplog.messages
    assert message.startswith("Recorder failed (ConnectionError: no server); nothing more is logged there")
    assert len(made[0].calls) == 1


def test_other_ranks_make_nothing(recorded, monkeypatch):
    """B44"""
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    tracker, made = recorded()
    tracker.begin(0)
    tracker.log_metrics({"a": 1.0}, 1)
    tracker.close(0)
    assert made == []


def test_tensorboards_files_lie_in_the_run_directory(make_config, run):
    tracker = tensorboard_tracker(make_config(), run)
    tracker.begin(0)
    tracker.log_metrics({"a": 1.0}, 0)
    tracker.close(0)
    assert isinstance(tracker.logger, TensorBoardLogger)
    assert list((run.path / "tensorboard").glob("events.out.tfevents.*"))


def test_trackio_gets_the_same_run_name_and_steps_after_a_resume(make_config, run, monkeypatch):
    """The package is stood in for: what is asked of it is what its documentation names."""
    asked, rows = [], []
    handle = SimpleNamespace(log=lambda metrics, step: rows.append((metrics, step)), finish=lambda: rows.append("end"))
    stand_in = ModuleType("trackio")
    stand_in.init = lambda **arguments: asked.append(arguments) or handle
    stand_in.__spec__ = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "trackio", stand_in)
    for first in (0, 1):
        (tracker,) = make_trackers(make_config(**{"rllm.trainer.logger": ["trackio"]}), run)
        tracker.begin(first)
        tracker.log_metrics({"a": 0.5}, first)
        tracker.close(0)
    assert [(each["project"], each["name"], each["resume"]) for each in asked] == [("demo", run.path.name, "allow")] * 2
    assert rows == [({"a": 0.5}, 0), "end", ({"a": 0.5}, 1), "end"]


@pytest.mark.parametrize("name", EXTRAS)
def test_a_missing_package_is_named_with_its_extra_before_anything_is_loaded(make_config, run, monkeypatch, name):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None if module == EXTRAS[name] else found(module))
    config = make_config(**{"rllm.trainer.logger": ["console", name]})
    for check in (lambda: check_trackers(config), lambda: make_trackers(config, run)):
        with pytest.raises(ConfigError, match=rf"^rllm\.trainer\.logger: {name} needs .*; pip install 'rllm-lightning\[{name}\]'$"):
            check()


def test_the_check_does_not_cost_lightning():
    program = (
        "import sys\n"
        "from rllm_lightning.config import Config\n"
        "from rllm_lightning.tracking.trackers import check_trackers\n"
        "check_trackers(Config.from_config({'rllm.trainer.logger': ['csv', 'wandb'], 'task.name': 'jsonl', 'task.train_file': 'x'}))\n"
        "print('lightning' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert answer.stdout == "False\n", answer.stderr
