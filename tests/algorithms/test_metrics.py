"""pass@k, validation and workflow metrics, and carrying sums with counts."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm_lightning.algorithms.metrics import (
    Sums,
    advantage_metrics,
    difficulty_metrics,
    pass_at_k,
    reward_metrics,
    termination_metrics,
    validation_metrics,
    workflow_metrics,
)
from rllm_lightning.types import TerminationReason


@given(st.integers(0, 7), st.data())
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_right_answer(n, data):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, 8))
    subsets = list(combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == (sum(map(any, subsets)) / len(subsets) if subsets else None)


def test_pass_at_k_without_enough_answers_is_not_a_number():
    """B54: n=2, c=0, k=4 gave 1."""
    assert pass_at_k(2, 0, 4) is None
    assert pass_at_k(2, 2, 4) is None


def test_pass_at_k_of_many_answers_is_exact():
    """1 - (9999/10000) = .0001 for k = 1; C(9999, 5000) alone is beyond float64."""
    assert pass_at_k(10_000, 1, 1) == 1e-4
    assert pass_at_k(10_000, 1, 5_000) == 0.5


@pytest.mark.parametrize(("n", "c", "k"), [(2, 3, 1), (2, -1, 1), (2, 1, 0)])
def test_pass_at_k_refuses_impossible_counts(n, c, k):
    with pytest.raises(ValueError, match=f"n={n}, c={c}, k={k}"):
        pass_at_k(n, c, k)


@pytest.fixture
def validation(make):
    """B54: task A has 1 of 4 right, task B 2 wrong answers and 2 that timed out."""
    ended = [TerminationReason.ENV_DONE] * 6 + [TerminationReason.TIMEOUT] * 2
    solved = [True] + [False] * 7
    ids = [f"gsm8k:{task}:{i}" for task in "AB" for i in range(4)]
    return [
        make.episode(id_, is_correct=ok, reason=why, task={"data_source": "gsm8k"}, metrics={} if why == "timeout" else {"solver_acc": ok})
        for id_, ok, why in zip(ids, solved, ended, strict=True)
    ]


def test_failed_episodes_stay_in_the_denominator(validation):
    """B54: mean 1/8 = .125, not 1/6; pass@2 = ((1 - 3/6) + 0) / 2 = .25; pass@4 = (1 + 0) / 2 = .5."""
    metrics = validation_metrics(validation, n_val=4)
    assert metrics == {"val/gsm8k/pass@1": 0.125, "val/gsm8k/pass@2": 0.25, "val/gsm8k/pass@4": 0.5, "val/gsm8k/solver_acc": 0.125}


def test_pass_at_n_val_is_there_for_any_n_val_and_left_out_without_enough_episodes(validation):
    assert {"val/gsm8k/pass@1", "val/gsm8k/pass@2", "val/gsm8k/pass@3"} <= set(validation_metrics(validation, n_val=3))
    assert "val/gsm8k/pass@8" not in validation_metrics(validation, n_val=8)
    assert validation_metrics([], n_val=4) == {}


def test_sources_are_apart_and_a_task_that_names_none_is_unknown(make):
    episodes = [
        make.episode("a:0", is_correct=True, task={"data_source": "math"}),
        make.episode("b:0", is_correct=False, task={"data_source": "code"}),
        make.episode("c:0", is_correct=True, task={"question": "?"}),
        make.episode("d:0", is_correct=False, task="a question"),
    ]
    assert validation_metrics(episodes, n_val=1) == {"val/math/pass@1": 1, "val/code/pass@1": 0, "val/unknown/pass@1": 0.5}


def test_workflow_metrics_are_means_over_the_episodes_that_report_them(make):
    """Turns 2 and 4 -> 3; what is no number is left out; an accuracy that a failed episode lacks is 0."""
    episodes = [
        make.episode("a:0", metrics={"turns": np.int64(2), "solver_acc": np.bool_(True), "note": "x", "none": None}),
        make.episode("a:1", metrics={"turns": 4.0}, reason=TerminationReason.ERROR),
        make.episode("a:2", metrics={}),
    ]
    assert workflow_metrics(episodes).means() == {"batch/turns": 3, "batch/solver_acc": 0.5}


def test_termination_reasons_are_shares_and_all_named(make):
    episodes = [make.episode("a:0", reason=TerminationReason.TIMEOUT), make.episode("a:1"), make.episode("a:2"), make.episode("a:3")]
    metrics = termination_metrics(episodes).means()
    assert set(metrics) == {f"batch/termination_reason/{reason.value}" for reason in TerminationReason}
    assert metrics["batch/termination_reason/timeout"] == 0.25
    assert metrics["batch/termination_reason/unknown"] == 0.75
    assert termination_metrics([]).means() == {}


def test_parts_are_merged_by_sum_and_count():
    """B06: sum 2 over 1 token on one rank, 0 over 3 on the other: 2/4 = .5, and not the mean of means 1.0."""
    first, second = Sums(), Sums()
    first.add("loss", 2.0, 1)
    second.add("loss", 0.0, 3)
    second.add("empty", 0.0, 0)
    gathered = Sums(second.totals)
    assert first.merge(gathered).means() == {"loss": 0.5}
    assert second.totals == {"loss": [0.0, 3.0], "empty": [0.0, 0.0]}


@given(st.lists(st.lists(st.floats(-1e3, 1e3), max_size=4), min_size=1, max_size=4))
def test_a_merged_mean_does_not_depend_on_the_cut(parts):
    """B06."""
    merged = Sums()
    for part in parts:
        sums = Sums()
        for value in part:
            sums.add("x", value)
        merged.merge(sums)
    values = [value for part in parts for value in part]
    assert merged.means() == ({"x": pytest.approx(sum(values) / len(values), abs=1e-9)} if values else {})


def test_summaries_of_large_numbers_are_finite():
    metrics = reward_metrics("solver", [np.array([1.7e308, 1.7e308]), np.array([-1.7e308, -1.7e308])])
    assert metrics == {"reward/solver/mean": 0, "reward/solver/std": 1.7e308, "reward/solver/max": 1.7e308, "reward/solver/min": -1.7e308}
    assert advantage_metrics("solver", np.zeros(0)) == {}


def test_an_advantage_below_1e_8_counts_as_0():
    assert advantage_metrics("solver", np.array([0, 9e-9, -9e-9, 2e-8]))["advantage/solver/fraction_zero"] == 0.75


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("large", [1e160, 1.7e308])
def test_the_difficulty_of_enormous_rewards_is_a_number(large):
    metrics = difficulty_metrics("solver", [np.array([0.0, large]), np.array([-large, -large]), np.array([large, large])])
    assert metrics["batch/solver/group_reward_std/p90"] == pytest.approx(0.8 * large / 2)
    assert metrics["batch/solver/group_reward_mean/p50"] == large / 2
    assert [metrics[f"batch/solver/fractions/{name}"] for name in ("effective", "too_easy", "too_hard")] == [pytest.approx(1 / 3)] * 3
