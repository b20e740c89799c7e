"""The result does not depend on the number of processes: episodes, metrics and weights of one, two and three are the same.

Weights are compared in float64 under SGD without clipping, which hides no factor (AdamW and clipping are nearly scale-invariant).
"""

import csv
import io
import json

import pytest

from rllm_lightning.algorithms.aggregation import AGGREGATION_MODES
from rllm_lightning.registry import ESTIMATORS

EIGHT = "rllm.trainer.total_batches=8"
VARIANTS = {  # name -> (overrides, workflow)
    "plain": ([EIGHT], "informed"),
    "two-minibatches-twice": ([EIGHT, "training.num_minibatches=2", "training.num_epochs_per_batch=2"], "informed"),
    "filtered": (
        [
            EIGHT,
            "rllm.rejection_sample.enable=true",
            "rllm.rejection_sample.mode=group",
            "rllm.rejection_sample.filter_uniform_groups=true",
            "rllm.rejection_sample.min_trajs_per_group=2",
        ],
        "informed",
    ),
    "accumulated": (
        [
            EIGHT,
            "rllm.rejection_sample.enable=true",
            "rllm.rejection_sample.mode=episode",
            "rllm.rejection_sample.min_partial_solve_tasks=4",
        ],
        "informed",
    ),
    "empty-rank": ([EIGHT, "training.num_minibatches=2"], "sparse"),
    "curriculum": ([EIGHT], "rising"),
    "one-task": ([EIGHT, "data.train_batch_size=1"], "informed"),
    "micro-1": (["training.micro_batch_tokens=1"], "informed"),
    "micro-64": (["training.micro_batch_tokens=64"], "informed"),
    "plain-rows": (["training.tree=false", "rollout_engine.fast=false"], "informed"),
    "kl-in-reward": (["rllm.algorithm.kl_beta=0.1", "rllm.algorithm.kl_in=reward", "training.num_minibatches=2"], "informed"),
    "kl-in-loss": (["rllm.algorithm.kl_beta=0.1", "rllm.algorithm.entropy_coeff=0.01"], "informed"),
    "clipped": (["training.max_grad_norm=0.01"], "informed"),
    "warm-start": (["warm_start.steps=2", "warm_start.batch_size=2"], "informed"),
    "multi-turn": (
        ["data.max_prompt_length=100", "rllm.workflow.workflow_args={max_turns: 3}", "training.num_minibatches=2"],
        "multi_turn",
    ),
    "solver-judge": (
        ["data.max_prompt_length=120", "rllm.algorithm.estimator_map={judge: [rloo, ppo]}", "training.num_epochs_per_batch=2"],
        "solver_judge",
    ),
    "filtered-rank": (
        [
            "data.shuffle=false",
            "data.train_batch_size=4",
            "rllm.rejection_sample.enable=true",
            "rllm.rejection_sample.mode=group",
            "rllm.rejection_sample.filter_uniform_groups=true",
        ],
        "every-other-alike",
    ),
}
FURTHER = {"gae": ["rllm.algorithm.value_coeff=0.5"], "rae": []}
# These look at one group at a time, and groups are whole everywhere: for all of them `grpo` and `gigpo` (steps) stand in `make test`.
OF_A_GROUP = {name for name, estimator in ESTIMATORS.items() if estimator.scope == "group"} - {"grpo", "gigpo"}


def exactly(model):
    return [f"model.name={model}", "model.dtype=float64"]


def estimator_cases(model, estimators):
    cases, exact = {}, exactly(model)
    for estimator in sorted(estimators):
        overrides = [f"rllm.algorithm.adv_estimator={estimator}", *FURTHER.get(estimator, [])]
        kind = "complete" if estimator == "remax" else "informed"  # it needs the greedy answer to every task
        cases[f"estimator-{estimator}"] = {"overrides": exact + overrides, "kind": kind}
    return cases


def all_cases(model):
    exact = exactly(model)
    cases = {name: {"overrides": exact + overrides, "kind": kind} for name, (overrides, kind) in VARIANTS.items()}
    cases |= estimator_cases(model, set(ESTIMATORS) - OF_A_GROUP)
    for mode in AGGREGATION_MODES:
        overrides = [f"rllm.algorithm.loss_agg_mode={mode}", "training.num_minibatches=2"]
        cases[f"mode-{mode}"] = {"overrides": exact + overrides, "kind": "informed"}
    for loss in ("kl_cov", "clip_cov"):  # they compare all tokens of a minibatch
        overrides = [f"rllm.algorithm.loss_fn={loss}", "training.num_minibatches=2", "training.num_epochs_per_batch=2"]
        overrides += ["rllm.algorithm.loss_kwargs={fraction: 0.3}", "training.micro_batch_tokens=40", "training.learning_rate=1.0"]
        cases[f"loss-{loss}"] = {"overrides": exact + overrides, "kind": "complete"}
    # where nothing has moved yet, the pull of kl_cov must not follow rounding errors
    overrides = ["rllm.algorithm.loss_fn=kl_cov", "training.num_minibatches=2", "training.num_epochs_per_batch=2", EIGHT]
    overrides += ["rllm.algorithm.loss_kwargs={fraction: 0.3}"]
    cases["loss-kl_cov-unmoved"] = {"overrides": exact + overrides, "kind": "informed"}
    for parts in (1, 2):
        overrides = ["rllm.trainer.total_batches=3", f"training.num_minibatches={parts}"]
        cases[f"one-weight-{parts}"] = {"overrides": overrides, "kind": "complete", "backend": "one-weight"}
    single = ["model.name=builtin:tiny", "training.optimizer=adamw", "training.learning_rate=1e-4", "training.max_grad_norm=1.0", EIGHT]
    return cases | {"adamw-float32": {"overrides": single, "kind": "informed"}}


@pytest.fixture(scope="module")
def one(run_cases, exact_model):
    return run_cases(all_cases(exact_model), 1)


@pytest.fixture(scope="module")
def several(run_cases, exact_model, request):
    return run_cases(all_cases(exact_model), request.param)


def rows_of(result):
    return [
        {key: float(value) for key, value in row.items() if value and not key.startswith("time/")}
        for row in csv.DictReader(io.StringIO(result["rows"]))
    ]


def episodes_of(result):
    """All but what floating-point sums of another order may change in the last digits."""
    return {name: [json.loads(line) for line in text.splitlines()] for name, text in result["episodes"].items()}


def assert_same(value, other, where):
    if isinstance(value, dict):
        assert value.keys() == other.keys(), where
        for key in value:
            assert_same(value[key], other[key], f"{where}/{key}")
    elif isinstance(value, list):
        assert len(value) == len(other), where
        for index, (left, right) in enumerate(zip(value, other, strict=True)):
            assert_same(left, right, f"{where}/{index}")
    elif isinstance(value, float):
        assert other == pytest.approx(value, rel=1e-6, abs=1e-6), where
    else:
        assert value == other, where


@pytest.mark.parametrize("several", [2, pytest.param(3, marks=pytest.mark.long)], indirect=True)
def test_episodes_metrics_and_weights_are_those_of_one_process(one, several):
    """B06, B09, B22, B29, B38: whitening, denominators, random streams, ranks without a row (all groups of the first one's tasks
    filtered; then those of both), averaged gradients; answers, conversations, and solvers with their judge."""
    assert_equal(one, several)


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, 3])
def test_neither_do_estimators_of_a_group_depend_on_the_processes(run_cases, exact_model, world_size):
    cases = estimator_cases(exact_model, OF_A_GROUP)
    assert_equal(run_cases(cases, 1), run_cases(cases, world_size))


def assert_equal(one, several):
    assert one.keys() == several.keys()
    for name, expected in one.items():
        found = several[name]
        assert found["step"] == expected["step"]
        assert_same(episodes_of(expected), episodes_of(found), f"{name}/episodes")
        assert_same(rows_of(expected), rows_of(found), f"{name}/metrics")
        assert_same(expected["state"], found["state"], f"{name}/state")
        limit = 1e-5 if name == "adamw-float32" else 1e-12
        gaps = {key: float((value - found["weights"][key]).abs().max()) for key, value in expected["weights"].items()}
        assert max(gaps.values()) <= limit, (name, max(gaps, key=gaps.get), max(gaps.values()))


@pytest.mark.parametrize("several", [2, pytest.param(3, marks=pytest.mark.long)], indirect=True)
@pytest.mark.parametrize("parts", [1, 2])
def test_gradients_of_all_ranks_are_averaged(several, parts):
    """B38: gradients 2 and 0 on one weight of 1, SGD with rate .1: .9 on both after a step, .7 after three; also in two micro-batches."""
    assert several[f"one-weight-{parts}"]["weights"]["weight"].item() == pytest.approx(1 - 3 * 0.1, abs=1e-12)


def test_the_cases_are_what_they_are_called(one):
    """Weights move, a filter filters, a sparse batch leaves nothing or few groups; else equality would show little."""
    start = one["micro-1"]["weights"]
    assert any(not start[key].equal(one["plain"]["weights"][key]) for key in start)
    assert any(row["groups/num_trajs_after_filter"] not in (9.0, 6.0) for row in rows_of(one["plain"]))
    assert any(
        row["batch/groups_after_filter"] < row["groups/num_groups"] for row in rows_of(one["filtered"]) if "groups/num_groups" in row
    )
    assert {row["batch/skipped"] for row in rows_of(one["accumulated"])} == {0.0, 1.0}
    assert {row["curriculum/level"] for row in rows_of(one["curriculum"])} >= {0.0, 1.0, 2.0}
    assert min(row["groups/num_groups"] for row in rows_of(one["empty-rank"])) <= 1
    assert max(row["batch/num_turns"] for row in rows_of(one["multi-turn"])) > 1
    assert all(row["groups/num_groups"] == 2 * 3 - (row["step"] == 2) * 2 for row in rows_of(one["solver-judge"]))
    first, second = rows_of(one["filtered-rank"])
    assert (first["groups/num_groups"], first["batch/groups_after_filter"], second["batch/skipped"]) == (4, 2, 1)
