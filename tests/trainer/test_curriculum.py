"""Training tasks that get harder, through the real loop."""

import json

import torch

from rllm_lightning.tasks.curriculum import Curriculum
from tests.trainer.conftest import make_tasks

ARGS = ["rllm.trainer.total_batches=6", "rllm.trainer.save_freq=1", "rllm.trainer.keep_checkpoints=0", "rllm.trainer.test_freq=3"]


def levels(threshold, window=4):
    """Three levels of four tasks; a batch holds two."""
    return Curriculum([make_tasks(4, f"level{level}") for level in range(3)], threshold, window)


def sources_of(run, step, mode="train"):
    lines = (run.directory.episodes / f"{mode}_step_{step}.jsonl").read_text().splitlines()
    return {json.loads(line)["task"]["data_source"] for line in lines}


def test_a_batch_is_of_the_level_that_the_batches_before_it_led_to(fit):
    run = fit(*ARGS, train=levels(threshold=0.0), val=make_tasks(2, "held"))
    assert run.column("curriculum/level") == [0, 0, 1, 1, 2, 2]  # four tasks a window, two a batch
    assert [sources_of(run, step) for step in range(1, 7)] == [{f"level{level}"} for level in (0, 0, 1, 1, 2, 2)]
    assert sources_of(run, 3, "val") == sources_of(run, 6, "val") == {"held"}


def test_the_pass_rate_decides(fit):
    """Nothing is ever right: the level stays."""
    run = fit(*ARGS, train=levels(threshold=1.0), reward=lambda task, response: 0.0)
    assert run.column("curriculum/level") == [0] * 6
    assert run.column("curriculum/pass_rate") == [0] * 6


def test_a_resumed_run_is_the_run_that_was_not_stopped(fit):
    """B31, with a curriculum: within a window, right after a rise, at the edge of an epoch; bit for bit."""
    whole = fit(*ARGS, train=levels(threshold=0.0), val=make_tasks(2, "held"))
    written = whole.deterministic_rows()  # a resumed run goes on in the same file
    for step in (5, 3, 2, 1):
        resume = f"rllm.trainer.resume={whole.directory.checkpoints / f'step_{step}.ckpt'}"
        run = fit(*ARGS, resume, train=levels(threshold=0.0), val=make_tasks(2, "held"))
        assert run.state.global_step == 6
        assert run.deterministic_rows() == written
        for name, value in whole.trainer.module.policy.state_dict().items():
            assert torch.equal(run.trainer.module.policy.state_dict()[name], value), name


def test_the_state_is_in_the_checkpoint_as_plain_data(fit):
    run = fit(*ARGS, train=levels(threshold=0.0))
    saved = torch.load(run.directory.checkpoints / "step_3.ckpt", weights_only=True)["rllm_lightning"]["tasks"]
    assert saved == {"level": 1, "recent": saved["recent"]}
    assert len(saved["recent"]) == 2
