"""FSDP2 on two processes: the result is that of one process, weights are shared out, and checkpoints are those of any strategy.

Weights are compared under SGD without clipping where a factor could hide (AdamW and clipping are nearly scale-invariant).
"""

import csv
import io

import pytest
import torch
from transformers import AutoModelForCausalLM

from rllm_lightning.config import ConfigError, load_config
from rllm_lightning.trainer.backend import LightningBackend

FSDP2 = "lightning.strategy=fsdp2"
KL = "rllm.algorithm.kl_beta=0.1"
TWICE = ["training.num_minibatches=2", "training.num_epochs_per_batch=2"]
TINY = ["model.name=builtin:tiny", "model.dtype=float32"]
EXACT, SINGLE = 1e-12, 1e-6  # largest gap of a weight, in float64 and with parts that are float32
VARIANTS = {  # name -> (overrides, workflow, limit)
    "ragged": ([*TWICE, "training.micro_batch_tokens=40", "rllm.trainer.total_batches=3"], "informed", EXACT),
    "float32": (["model.dtype=float32", *TWICE], "informed", SINGLE),
    "empty-rank": (["training.num_minibatches=2", "rllm.trainer.total_batches=6"], "sparse", EXACT),
    "reference-and-values": ([KL, "rllm.algorithm.adv_estimator=gae", "rllm.algorithm.value_coeff=0.5"], "informed", EXACT),
    "all-tokens": (
        ["rllm.algorithm.loss_fn=kl_cov", "rllm.algorithm.loss_kwargs={fraction: 0.3}", *TWICE, "training.micro_batch_tokens=40"],
        "complete",
        EXACT,
    ),
    "adamw-clipped": (["training.optimizer=adamw", "training.learning_rate=1e-4", "training.max_grad_norm=0.01"], "informed", EXACT),
    "warm-start": (["warm_start.steps=2", "warm_start.batch_size=2", KL], "informed", EXACT),
    "adapters": ([*TINY, "model.lora_rank=2", KL], "informed", SINGLE),
    "recomputed": (["model.gradient_checkpointing=true", "rollout_engine.fast=false"], "informed", EXACT),
}
STEPS = 4
LONG = [
    f"rllm.trainer.total_batches={STEPS}",
    "rllm.algorithm.adv_estimator=rae",
    "rllm.algorithm.warmup_steps=4",  # both halves agree about it
    "training.num_minibatches=2",
    "training.optimizer=adamw",
    "training.learning_rate=1e-3",
    "warm_start.steps=1",  # which the reference policy has behind it too
    "warm_start.batch_size=2",
    KL,
]
HALF = [*LONG, "rllm.trainer.total_batches=2"]
AGAIN = [*LONG, "rllm.trainer.resume=auto"]
# an answer is 3 tokens long on the first rank, 60 on the second
UNEVEN = ["rollout_engine.name=uneven", "data.train_batch_size=2", "data.max_response_length=64"]


def variants(*settings):
    return {name: {"overrides": [*settings, *overrides], "kind": kind} for name, (overrides, kind, _) in VARIANTS.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("resumed")


@pytest.fixture(scope="module")
def exact(exact_model):
    return [f"model.name={exact_model}", "model.dtype=float64"]


@pytest.fixture(scope="module")
def sharded(run_cases, exact, folder):
    """All runs on two ranks. "half-a", "half-b" and "half-c" stop after two steps; the others of a letter go on from there."""

    def case(overrides, *settings, kind="informed"):
        return {"overrides": [*exact, *overrides, *settings], "kind": kind}

    here = {letter: f"run_root={folder / letter}" for letter in "abc"}
    runs = {
        "whole": case(LONG, FSDP2),
        "half-a": case(HALF, here["a"], FSDP2),
        "from-fsdp2": case(AGAIN, here["a"], FSDP2),
        "half-b": case(HALF, here["b"]),
        "from-ddp": case(AGAIN, here["b"], FSDP2),
        "half-c": case(HALF, here["c"], FSDP2),
        "uneven": case(UNEVEN, FSDP2, kind="complete"),
    }
    return run_cases(variants(*exact, FSDP2) | runs, 2, timeout=120)


@pytest.fixture(scope="module")
def single(run_cases, exact, folder, sharded):
    """The same on one process, after `sharded`: it goes on from what that left."""
    run = {"overrides": [*exact, *AGAIN, f"run_root={folder / 'c'}"], "kind": "informed"}
    return run_cases(variants(*exact) | {"from-fsdp2": run}, 1)


def rows_of(result):
    return [
        {key: float(value) for key, value in row.items() if value and not key.startswith("time/")}
        for row in csv.DictReader(io.StringIO(result["rows"]))
    ]


def gap(result, other):
    assert result["weights"].keys() == other["weights"].keys()
    return max(float((value - other["weights"][name]).abs().max()) for name, value in result["weights"].items())


def test_weights_and_metrics_are_those_of_one_process(sharded, single):
    """B29 among them: minibatches that leave a rank without a row, and batches that leave both without."""
    for name, (*_, limit) in VARIANTS.items():
        assert gap(sharded[name], single[name]) <= limit, name
        assert rows_of(sharded[name]) == [pytest.approx(row, rel=1e-5, abs=1e-6) for row in rows_of(single[name])], name


def test_the_runs_are_as_eventful_as_said(single):
    rows = rows_of(single["empty-rank"])
    assert {row["batch/skipped"] for row in rows} == {0.0, 1.0}, "a batch without a group is skipped by all"
    assert 1.0 in {row.get("groups/num_groups") for row in rows}, "one group leaves a rank without"
    assert rows_of(single["adamw-clipped"])[0]["optim/grad_norm"] > 0.01


def test_each_rank_holds_its_part_of_the_weights(sharded, single):
    """Some parameters are odd in length: the first rank's part is then the larger one."""
    assert sharded["ragged"]["held"] == pytest.approx(0.5, abs=0.05)
    assert single["ragged"]["held"] == 1.0


def test_the_model_folder_holds_whole_weights(sharded, single):
    for name in ("ragged", "adapters"):
        models = [
            AutoModelForCausalLM.from_pretrained(f"{result[name]['directory']}/checkpoints/model", dtype="auto")
            for result in (sharded, single)
        ]
        for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
            assert ours.dtype == theirs.dtype
            torch.testing.assert_close(ours, theirs, atol=SINGLE, rtol=0)


def test_a_checkpoint_is_resumed_under_any_strategy(sharded, single):
    """Weights, reference, moments and schedule are those of the run that was not stopped; with as many processes bit for bit."""
    for result in (sharded["from-fsdp2"], sharded["from-ddp"]):
        assert gap(result, sharded["whole"]) == 0
        assert rows_of(result) == rows_of(sharded["whole"])
    assert single["from-fsdp2"]["step"] == STEPS
    assert gap(single["from-fsdp2"], sharded["whole"]) <= EXACT


def test_ranks_sample_answers_of_different_lengths(sharded):
    """B28: EOS forced at 3 and at 60. Both ranks return, and the next optimizer step works."""
    for row in rows_of(sharded["uneven"]):
        assert row["rollout/response_length/mean"] == (3 + 60) / 2
        assert row["rollout/response_length/max"] == 60
        assert row["optim/grad_norm"] > 0
    assert [row["optim/steps"] for row in rows_of(sharded["uneven"])] == [1.0, 2.0]


@pytest.mark.parametrize("setting", ["model.compile=true", "lightning.precision=bf16-true"])
def test_what_does_not_go_with_sharding_is_refused_by_its_key(setting):
    with pytest.raises(ConfigError, match=rf"{setting.partition('=')[0]}: .* lightning.strategy=fsdp2"):
        LightningBackend(load_config([setting, FSDP2])).validate_config()
