import subprocess
import sys

import pytest
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from rllm_lightning.registry import TRACKERS, register_tracker
from rllm_lightning.tracking.metrics_table import read_metrics
from rllm_lightning.tracking.tracker import Tracker
from rllm_lightning.tracking.trackers import make_trackers


@register_tracker("memory")
def memory(config, run):
    return Memory(run)


class Memory(Tracker):
    def log_metrics(self, metrics, step=None):
        self.logged = (dict(metrics), step)


def test_the_config_chooses_trackers_by_name_each_once(make_config, run):
    config = make_config(**{"rllm.trainer.logger": ["csv", "memory", "csv"]})
    assert [type(tracker).__name__ for tracker in make_trackers(config, run)] == ["CSVTracker", "Memory"]


def test_no_trackers_are_a_choice_too(make_config, run):
    assert make_trackers(make_config(**{"rllm.trainer.logger": []}), run) == []


def test_an_unknown_tracker_fails_with_the_config(make_config):
    with pytest.raises(ValueError, match=r"unknown tracker 'wandbb'; did you mean 'wandb'\?"):
        make_config(**{"rllm.trainer.logger": ["wandbb"]})


def test_every_tracker_is_a_lightning_logger_at_home_in_the_run_directory(make_config, run):
    config = make_config(**{"wandb.mode": "disabled"})
    for name in ("console", "csv", "wandb"):
        tracker = TRACKERS.get(name)(config, run)
        assert isinstance(tracker, Logger)
        assert (tracker.name, tracker.version, tracker.save_dir) == (run.path.name, run.id, str(run.path))


def test_looking_names_up_imports_neither_lightning_nor_torch():
    program = "import sys; import rllm_lightning.tracking.trackers; print({'torch', 'lightning', 'wandb', 'rich'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_other_ranks_write_nothing(make_config, run, monkeypatch):
    """B44: one run, on rank 0."""
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    before = sorted(run.path.iterdir())
    for tracker in make_trackers(make_config(), run):
        tracker.begin(0, 5)
        tracker.log_metrics({"a": 1.0}, 1)
        tracker.log_episodes([], 1)
        tracker.finalize("success")
        tracker.close(0)
    assert sorted(run.path.iterdir()) == before
    assert "wandb" not in sys.modules or sys.modules["wandb"].run is None


def test_validation_before_training_and_each_steps_own_are_rows_of_one_table(make_config, run):
    """B45: train steps 1 to 4, validation at 0, 2, 4."""
    (tracker,) = make_trackers(make_config(**{"rllm.trainer.logger": ["csv"]}), run)
    tracker.begin(0, 4)
    for step in range(5):
        metrics = {"reward/a/mean": step / 4} if step else {}
        tracker.log_metrics(metrics | ({"val/x/pass@1": step / 8} if step % 2 == 0 else {}), step)
    tracker.finalize("success")
    tracker.close(0)
    assert read_metrics(run.metrics_csv) == [
        {"step": 0, "val/x/pass@1": 0.0},
        {"step": 1, "reward/a/mean": 0.25},
        {"step": 2, "reward/a/mean": 0.5, "val/x/pass@1": 0.25},
        {"step": 3, "reward/a/mean": 0.75},
        {"step": 4, "reward/a/mean": 1.0, "val/x/pass@1": 0.5},
    ]


def test_a_resumed_run_continues_the_table(make_config, run):
    config = make_config(**{"rllm.trainer.logger": ["csv"]})
    (first,) = make_trackers(config, run)
    first.begin(0)
    for step in (1, 2, 3):
        first.log_metrics({"a": float(step)}, step)
    (second,) = make_trackers(config, run)
    second.begin(2)
    second.log_metrics({"a": 30.0}, 3)
    assert [row["a"] for row in read_metrics(run.metrics_csv)] == [1.0, 2.0, 30.0]
