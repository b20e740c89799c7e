import contextlib
import subprocess
import sys

import lightning
import pytest
import wandb
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.utils.data import DataLoader

from rllm_lightning.registry import TRACKERS, register_tracker
from rllm_lightning.tracking.metrics_table import read_metrics
from rllm_lightning.tracking.table import Table
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


def test_tables_of_the_run_are_there_before_it_begins(make_config, run):
    table = Table(["property", "grpo"], [["scope", "group"]])
    (tracker,) = make_trackers(make_config(**{"rllm.trainer.logger": ["memory"]}), run, {"estimator_card": table})
    assert tracker.tables == {"estimator_card": table}
    (tracker,) = make_trackers(make_config(**{"rllm.trainer.logger": ["memory"]}), run)
    assert tracker.tables == {}


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
    assert wandb.run is None


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


class Counting(lightning.LightningModule):
    """Logs three steps of its own counting, as our trainer does, and may fail at the third."""

    def __init__(self, error=None):
        super().__init__()
        self.automatic_optimization = False
        self.error, self.step = error, 0

    def training_step(self, batch, index):
        self.step += 1
        if self.step == 3 and self.error:
            raise self.error
        for logger in self.loggers:
            logger.log_metrics({"reward/a/mean": self.step / 4}, step=self.step)

    def configure_optimizers(self):
        return None


@pytest.mark.filterwarnings("ignore")  # Lightning's advice on a module without optimizer and workers
@pytest.mark.parametrize(
    ("error", "exit_code", "status"), [(None, 0, "done"), (ValueError("boom"), 1, "failed"), (SystemExit(143), 143, "interrupted")]
)
def test_lightning_drives_the_trackers_and_their_end_is_ours(make_config, run, capsys, error, exit_code, status):
    """Lightning calls `finalize("success" | "failed")` in `fit`; what is logged after it, and the real status, still arrive."""
    config = make_config(**{"wandb.mode": "offline"})
    trackers = make_trackers(config, run)
    trainer = lightning.Trainer(
        logger=trackers, max_epochs=1, accelerator="cpu", enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False
    )
    with contextlib.suppress(ValueError, SystemExit):
        trainer.fit(Counting(error), DataLoader(range(3)))
    for tracker in trackers:
        tracker.log_metrics({"val/x/pass@1": 0.5}, 4)
        tracker.close(exit_code)
    steps = [row["step"] for row in read_metrics(run.metrics_csv)]
    assert steps == ([1, 2, 4] if error else [1, 2, 3, 4])
    assert f"{status} at step 4" in capsys.readouterr().out
    assert wandb.run is None


def test_a_resumed_run_continues_the_table(make_config, run):
    config = make_config(**{"rllm.trainer.logger": ["csv"]})
    (first,) = make_trackers(config, run)
    first.begin(0)
    for step in (1, 2, 3):
        first.log_metrics({"a": float(step)}, step)
    (second,) = make_trackers(config, run)
    second.begin(2)
    assert [row["a"] for row in read_metrics(run.metrics_csv)] == [1.0, 2.0]
    second.log_metrics({"a": 30.0}, 3)
    assert [row["a"] for row in read_metrics(run.metrics_csv)] == [1.0, 2.0, 30.0]
