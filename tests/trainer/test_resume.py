"""What a run goes on from, and what is refused."""

import itertools
import json
import random
import shutil

import pytest
import torch

from rllm_lightning.algorithms.metrics import validation_score
from rllm_lightning.config import Config, ConfigError, load_config
from rllm_lightning.trainer.checkpoints import random_state, restore_random_state
from rllm_lightning.trainer.interruption import Interrupted
from rllm_lightning.trainer.resume import checkpoint_to_resume, is_complete
from tests.trainer.conftest import make_tasks


def test_auto_begins_a_run_where_there_is_none_and_goes_on_with_it_later(fit):
    first = fit("rllm.trainer.total_batches=2", "rllm.trainer.resume=auto")
    longer = fit("rllm.trainer.total_batches=4", "rllm.trainer.resume=auto")
    assert longer.directory == first.directory
    assert longer.column("step") == [1, 2, 3, 4]
    assert load_config([], default=str(first.directory.config_yaml)).rllm.trainer.total_batches == 4  # what ran last


def test_auto_takes_a_run_with_the_same_config_alone(fit):
    first = fit("rllm.trainer.total_batches=1", "rllm.trainer.resume=auto")
    other = fit("rllm.trainer.total_batches=1", "rllm.trainer.resume=auto", "seed=1")
    named = fit("rllm.trainer.total_batches=1", "rllm.trainer.resume=auto", "rllm.trainer.experiment_name=default-two")
    assert len({run.directory for run in (first, other, named)}) == 3
    assert fit("rllm.trainer.total_batches=2", "rllm.trainer.resume=auto").directory == first.directory


def test_auto_passes_over_a_run_that_has_saved_nothing(fit):
    first = fit("rllm.trainer.total_batches=1", "rllm.trainer.resume=auto")
    second = fit("rllm.trainer.total_batches=1", "rllm.trainer.resume=never")
    shutil.rmtree(second.directory.checkpoints)
    assert fit("rllm.trainer.total_batches=2", "rllm.trainer.resume=auto").directory == first.directory


def test_under_slurm_nothing_is_picked_up_that_was_not_named(fit, tmp_path, monkeypatch):
    """Lightning takes an `hpc_ckpt_*` of its root folder before all else, which is the working directory unless told."""
    (tmp_path / "hpc_ckpt_1.ckpt").write_bytes(b"no checkpoint")
    monkeypatch.chdir(tmp_path)
    for name, value in {"JOB_ID": 1, "JOB_NAME": "train", "NTASKS": 1, "PROCID": 0, "LOCALID": 0, "NODEID": 0, "NODELIST": "here"}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    assert fit("rllm.trainer.total_batches=1").column("step") == [1]


@pytest.mark.parametrize("way", ["auto", "directory"])
def test_a_finished_run_says_so_and_is_left_alone(fit, make_trainer, caplog, way):
    run = fit("rllm.trainer.total_batches=2")
    before = {path: path.read_bytes() for path in run.directory.path.rglob("*") if path.is_file()}
    again = make_trainer("rllm.trainer.total_batches=2", f"rllm.trainer.resume={'auto' if way == 'auto' else run.directory.path}")
    again.fit()
    assert "is finished" in caplog.text
    assert again.run_path == str(run.directory.path)
    assert {path: path.read_bytes() for path in run.directory.path.rglob("*") if path.is_file()} == before


def test_keys_that_differ_are_named(fit, make_trainer):
    run = fit("rllm.trainer.total_batches=1")
    changes = ["training.learning_rate=0.5", "rllm.algorithm.adv_estimator=rloo", "rllm.trainer.total_batches=3", "wandb.tags=[x]"]
    with pytest.raises(ConfigError) as caught:
        make_trainer(*changes, f"rllm.trainer.resume={run.directory.path}")
    end = f"in the run that is resumed ({run.directory.path}); leave it as it was, or start a run of its own"
    former = load_config([], default=str(run.directory.config_yaml))
    assert caught.value.problems == [
        f"rllm.algorithm.adv_estimator: is 'rloo', but was {former.rllm.algorithm.adv_estimator!r} {end}",
        f"training.learning_rate: is 0.5, but was {former.training.learning_rate} {end}",
    ]


def test_what_is_no_checkpoint_is_told_from_what_is_not_there(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("seed: 1")
    (tmp_path / "notes.txt").write_text("x")
    for name, what in {
        "docs": "is a folder, but no run directory",
        "run": "has no whole checkpoint",
        "notes.txt": "is no whole checkpoint",
        "none": "does not exist",
    }.items():
        with pytest.raises(ConfigError, match=rf"^rllm\.trainer\.resume: '.*/{name}' {what}; give a \.ckpt file or a run directory"):
            checkpoint_to_resume(Config.from_config({"rllm.trainer.resume": str(tmp_path / name)}))


def test_a_checkpoint_that_was_taken_elsewhere_still_knows_its_config(fit, make_trainer, tmp_path):
    run = fit("rllm.trainer.total_batches=1")
    shutil.copy(run.directory.checkpoints / "last.ckpt", tmp_path / "taken.ckpt")
    with pytest.raises(ConfigError, match=r"training\.learning_rate"):
        make_trainer("training.learning_rate=0.5", f"rllm.trainer.resume={tmp_path / 'taken.ckpt'}").fit()
    resumed = fit("rllm.trainer.total_batches=2", f"rllm.trainer.resume={tmp_path / 'taken.ckpt'}")
    assert resumed.directory != run.directory
    assert resumed.column("step") == [2]


def test_a_damaged_last_checkpoint_is_passed_over(fit, caplog):
    run = fit("rllm.trainer.total_batches=2", "rllm.trainer.save_freq=1")
    last = run.directory.checkpoints / "last.ckpt"
    last.unlink()  # a hard link to step_2.ckpt
    data = bytearray((run.directory.checkpoints / "step_2.ckpt").read_bytes())
    data[len(data) // 2] ^= 0xFF
    last.write_bytes(data)
    (run.directory.checkpoints / "step_2.ckpt").write_bytes(data[: len(data) // 3])
    resumed = fit("rllm.trainer.total_batches=3", f"rllm.trainer.resume={run.directory.path}", "rllm.trainer.save_freq=1")
    assert caplog.text.count("is damaged") == 2
    assert resumed.column("step") == [1, 2, 3]
    assert torch.load(last, weights_only=True)["rllm_lightning"]["global_step"] == 3


def test_a_checkpoint_with_any_damage_is_refused_or_loads_to_the_same(fit):
    """Bytes of the archive's headers too, where `zipfile` raises errors of many kinds."""
    saved = fit("rllm.trainer.total_batches=1").directory.checkpoints / "last.ckpt"
    sound = saved.read_bytes()
    index = sound.rindex(b"PK\x01\x02") // 2 + len(sound) // 2
    draw = random.Random(0)
    whole = {key: str(value) for key, value in torch.load(saved, weights_only=True).items()}
    verdicts = []
    for position in [draw.randrange(len(sound)) for _ in range(40)] + [draw.randrange(index, len(sound)) for _ in range(80)]:
        saved.write_bytes(sound[:position] + bytes([sound[position] ^ draw.randrange(1, 256)]) + sound[position + 1 :])
        verdicts.append(is_complete(saved))
        if verdicts[-1]:
            assert {key: str(value) for key, value in torch.load(saved, weights_only=True).items()} == whole, position
    assert verdicts.count(False) > 60
    for length in (0, 1, len(sound) // 2, len(sound) - 1):
        saved.write_bytes(sound[:length])
        assert not is_complete(saved)


def test_a_run_that_was_killed_before_its_report_gets_one(fit, make_trainer):
    run = fit("rllm.trainer.total_batches=1")
    run.directory.report_html.unlink()
    make_trainer("rllm.trainer.total_batches=1", "rllm.trainer.resume=auto").fit()
    assert run.directory.report_html.exists()


def test_resuming_from_an_early_checkpoint_gives_up_the_later_ones(fit):
    run = fit("rllm.trainer.total_batches=4", "rllm.trainer.save_freq=1", "rllm.trainer.keep_checkpoints=0")
    early = run.directory.checkpoints / "step_1.ckpt"
    fit("rllm.trainer.total_batches=2", "rllm.trainer.save_freq=1", "rllm.trainer.keep_checkpoints=2", f"rllm.trainer.resume={early}")
    assert sorted(path.name for path in run.directory.checkpoints.glob("*.ckpt")) == ["last.ckpt", "step_1.ckpt", "step_2.ckpt"]


def test_the_checkpoint_with_the_best_validation_stays(fit, monkeypatch):
    scores = iter([0.5, 0.9, 0.9, 0.2])
    monkeypatch.setattr("rllm_lightning.trainer.module.validation_score", lambda metrics: next(scores))
    args = ["rllm.trainer.save_freq=1", "rllm.trainer.keep_checkpoints=1", "rllm.trainer.test_freq=1"]
    run = fit("rllm.trainer.total_batches=4", *args, val=make_tasks(2, "held"))
    best = torch.load(run.directory.checkpoints / "best.ckpt", weights_only=True)["rllm_lightning"]
    assert (best["global_step"], best["best_score"]) == (2, 0.9)  # of equals the first
    assert sorted(path.name for path in run.directory.checkpoints.glob("*.ckpt")) == ["best.ckpt", "last.ckpt", "step_4.ckpt"]


def best_of(directory):
    """Step and score of `best.ckpt`; None where there is none."""
    path = directory.checkpoints / "best.ckpt"
    best = torch.load(path, weights_only=True)["rllm_lightning"] if path.exists() else None
    return best and (best["global_step"], best["best_score"])


def test_the_best_checkpoint_is_that_of_the_course_that_is_resumed(fit, monkeypatch):
    """Also where the process was killed between writing a step's file and naming it the best, or went on to a better one."""
    args = ["rllm.trainer.save_freq=1", "rllm.trainer.keep_checkpoints=0", "rllm.trainer.test_freq=1"]
    monkeypatch.setattr("rllm_lightning.trainer.module.validation_score", lambda metrics: next(course))
    course = iter([0.5, 0.7, 0.9, 0.1])
    run = fit("rllm.trainer.total_batches=4", *args, val=make_tasks(2, "held"))
    checkpoints = run.directory.checkpoints
    assert best_of(run.directory) == (3, 0.9)
    course = iter([0.1])
    fit("rllm.trainer.total_batches=3", *args, f"rllm.trainer.resume={checkpoints / 'step_2.ckpt'}", val=make_tasks(2, "held"))
    assert best_of(run.directory) == (2, 0.7)
    (checkpoints / "best.ckpt").unlink()
    for score in (0.6, 0.5):  # the second time it is there already
        course = iter([score])
        fit("rllm.trainer.total_batches=3", *args, f"rllm.trainer.resume={checkpoints / 'step_2.ckpt'}", val=make_tasks(2, "held"))
        assert best_of(run.directory) == (2, 0.7)
        assert not list(checkpoints.glob(".*"))


def stop_in(trainer, hook, nth=1):
    """Interrupt a run in the `nth` call of a hook of its backend."""
    original, calls = getattr(trainer.backend, hook), itertools.count(1)

    async def stop(state):
        if next(calls) == nth:
            trainer.stop.request()
        return await original(state)

    setattr(trainer.backend, hook, stop)
    with pytest.raises(Interrupted):
        trainer.fit()


@pytest.mark.parametrize(("hook", "nth"), [("on_batch_start", 1), ("on_validation_start", 2), ("on_validation_start", 3)])
def test_an_interruption_does_not_change_which_checkpoint_is_the_best(fit, make_trainer, monkeypatch, hook, nth):
    """In the first step, with the validation before it behind it, the better one of all; in a validation after which the run saves."""
    args = ["rllm.trainer.total_batches=4", "rllm.trainer.save_freq=2", "rllm.trainer.test_freq=1", "rllm.trainer.val_before_train=true"]
    scores = {0: 0.9, 1: 0.8, 2: 0.7, 3: 0.6, 4: 0.5}
    trainer = make_trainer(*args, val=make_tasks(2, "held"))
    monkeypatch.setattr("rllm_lightning.trainer.module.validation_score", lambda metrics: scores[now.module.trainer_state.global_step])
    now = trainer
    stop_in(trainer, hook, nth)
    assert best_of(trainer.run_directory) is None
    now = make_trainer(*args, f"rllm.trainer.resume={trainer.run_directory.path}", val=make_tasks(2, "held"))
    now.fit()
    assert best_of(now.run_directory) == (2, 0.7)


def test_the_score_is_the_mean_over_data_sources():
    assert validation_score({"val/a/pass@1": 0.2, "val/b/pass@1": 0.6, "val/a/pass@4": 1.0, "val/reward/solver/mean": 3.0}) == 0.4
    assert validation_score({"val/reward/solver/mean": 3.0}) == -float("inf")


def test_a_validation_that_an_interruption_kept_from_ending_is_made_up_for(fit, make_trainer):
    """The resumed run's table is that of a run that was never stopped."""
    args = ["rllm.trainer.total_batches=4", "rllm.trainer.test_freq=2"]
    whole = fit(*args, val=make_tasks(2, "held"))
    trainer = make_trainer(*args, "rllm.trainer.experiment_name=stopped", val=make_tasks(2, "held"))
    stop_in(trainer, "on_validation_start")
    assert json.loads(trainer.run_directory.summary_json.read_text())["steps"] == 2
    resume = f"rllm.trainer.resume={trainer.run_directory.path}"
    resumed = fit(*args, "rllm.trainer.experiment_name=stopped", resume, val=make_tasks(2, "held"))
    assert resumed.deterministic_rows() == whole.deterministic_rows()


def test_process_wide_generators_go_on_where_they_were():
    import numpy as np

    def draw():
        return random.random(), np.random.rand(), float(torch.rand(()))

    saved = random_state()
    first = draw()
    restore_random_state(saved)
    assert draw() == first
