"""A run that was stopped and resumed is the run that was not: bit for bit with as many processes, closely with another number.

The run has it all: epochs of two batches, a learning rate that warms up over most of it, accumulated groups that wait for the
next batch, an estimator with a state, AdamW, two minibatches, validations between.
"""

import csv
import io
import shutil
from pathlib import Path

import pytest

STEPS = 6
WHOLE = [
    f"rllm.trainer.total_batches={STEPS}",
    "rllm.trainer.save_freq=1",
    "rllm.trainer.keep_checkpoints=0",
    "rllm.algorithm.adv_estimator=rae",
    "rllm.algorithm.lr_schedule=linear",
    "rllm.algorithm.warmup_steps_ratio=0.8",
    "rllm.rejection_sample.enable=true",
    "rllm.rejection_sample.mode=episode",
    "rllm.rejection_sample.min_partial_solve_tasks=3",
    "training.num_minibatches=2",
    "training.optimizer=adamw",
    "training.learning_rate=1e-3",
]


def rows_of(result):
    return [
        {key: value for key, value in row.items() if value and not key.startswith("time/")}
        for row in csv.DictReader(io.StringIO(result["rows"]))
    ]


def copies(run, folder):
    """The run directory as it was after each step but the last."""
    found = {}
    for step in range(1, STEPS):
        found[step] = folder / f"after-{step}"
        shutil.copytree(run["directory"], found[step])
    return found


@pytest.fixture(scope="module")
def whole(run_cases, exact_model):
    cases = {"whole": {"overrides": [f"model.name={exact_model}", *WHOLE], "kind": "informed"}}
    return run_cases(cases, 2)["whole"]


@pytest.mark.parametrize("world_size", [2, pytest.param(1, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long)])
def test_every_step_is_a_place_to_resume_from(run_cases, exact_model, whole, tmp_path, world_size):
    """B31: parameters, episodes and rows, each step once; at the edge of an epoch, after a validation, inside an accumulation."""
    folders = copies(whole, tmp_path)
    cases = {
        f"from-{step}": {
            "overrides": [f"model.name={exact_model}", *WHOLE, f"rllm.trainer.resume={folder / 'checkpoints' / f'step_{step}.ckpt'}"],
            "kind": "informed",
        }
        for step, folder in folders.items()
    }
    for name, resumed in run_cases(cases, world_size).items():
        assert resumed["step"] == STEPS
        assert Path(resumed["directory"]).name.startswith("after-"), "the run goes on in its own folder"
        assert [row["step"] for row in rows_of(resumed)] == [str(step) for step in range(1, STEPS + 1)]
        gaps = {key: float((value - resumed["weights"][key]).abs().max()) for key, value in whole["weights"].items()}
        if world_size == 2:
            assert max(gaps.values()) == 0, name
            assert rows_of(resumed) == rows_of(whole), name
            assert resumed["episodes"] == whole["episodes"], name
            assert resumed["state"] == whole["state"], name
        else:
            assert max(gaps.values()) < 1e-6, name
            assert resumed["episodes"].keys() == whole["episodes"].keys()


def test_the_run_is_as_eventful_as_said(whole):
    skipped = [row["batch/skipped"] for row in rows_of(whole)]
    assert {"0.0", "1.0"} == set(skipped)
    rates = [float(row["optim/learning_rate"]) for row in rows_of(whole) if "optim/learning_rate" in row]
    assert rates == sorted(rates)
    assert len(set(rates)) > 1
    assert whole["state"]["estimator_state"]
