"""How alike two estimators weigh trajectories: hand-worked numbers and degenerate batches."""

import math

import numpy as np
import pytest

from rllm_lightning.lab.replay import agreement_of, correlation, effective_share, ranks, zero_share
from rllm_lightning.lab.replay.episodes import choose_steps

NAN = math.nan


def test_a_factor_changes_no_correlation_no_cosine_and_no_sign():
    a = np.array([0.75, -0.25, -0.25, -0.25, 0.1])
    found = agreement_of(3 * a, a)
    assert found.pearson == pytest.approx(1, abs=1e-15)
    assert found.spearman == pytest.approx(1, abs=1e-15)
    assert found.cosine == pytest.approx(1, abs=1e-15)
    assert found.factor == pytest.approx(3, rel=1e-15)
    assert (found.flips, found.one_sided) == (0, 0)


def test_a_shift_changes_the_cosine_but_not_the_correlation():
    # rewards 1, 0, 0, 0 and the same minus their mean: cosine .75 / (1 · √.75) = √.75; three of four are pushed by the second only
    found = agreement_of(np.array([1.0, 0, 0, 0]), np.array([0.75, -0.25, -0.25, -0.25]))
    assert found.pearson == pytest.approx(1)
    assert found.cosine == pytest.approx(math.sqrt(0.75))
    assert found.factor == pytest.approx(1.0)  # .75 / .75
    assert (found.flips, found.one_sided) == (0, 0.75)


def test_signs_flip_where_one_pushes_up_and_the_other_down():
    found = agreement_of(np.array([1.0, 1.0, -1.0, 0.0]), np.array([1.0, -2.0, 2.0, 3.0]))
    assert found.flips == 0.5  # the second and the third; the last is pushed by one only
    assert found.one_sided == 0.25
    assert agreement_of(np.array([1.0, -1.0]), np.array([-2.0, 2.0])).pearson == pytest.approx(-1)


def test_what_an_estimator_dropped_is_left_out_of_the_pair():
    a, b = np.array([1.0, -1.0, 5.0]), np.array([2.0, -2.0, NAN])
    assert agreement_of(a, b).cosine == pytest.approx(1)
    assert all(math.isnan(value) for value in agreement_of(np.array([NAN]), np.array([1.0])))
    assert all(math.isnan(value) for value in agreement_of(np.array([]), np.array([])))


def test_equal_advantages_have_no_correlation():
    zeros = np.zeros(3)
    found = agreement_of(zeros, np.array([1.0, 2.0, 3.0]))
    assert math.isnan(found.pearson)
    assert math.isnan(found.spearman)
    assert math.isnan(found.cosine)
    assert (found.flips, found.one_sided) == (0, 1)
    assert math.isnan(correlation(np.full(3, 0.1 + 0.2), np.array([1.0, 2.0, 3.0])))
    assert math.isnan(correlation(np.array([0.3, 0.1 + 0.2, 0.3]), np.array([1.0, 2.0, 3.0])))  # float residue is no variation


def test_correlations_hold_for_tiny_and_huge_numbers():
    a, b = np.array([1.0, 2.0, 4.0]), np.array([1.0, 3.0, 4.0])
    for unit in (1e-200, 1e200):
        assert correlation(unit * a, b) == pytest.approx(correlation(a, b), rel=1e-12)


def test_equal_values_share_their_mean_rank():
    assert ranks(np.array([5.0, 1.0, 5.0, 3.0])).tolist() == [3.5, 1.0, 3.5, 2.0]
    assert ranks(np.array([0.3, 0.1 + 0.2, 0.0])).tolist() == [2.5, 2.5, 1.0]  # 0.1 + 0.2 is not 0.3
    # ranks 1, 2, 3 and 1, 3, 2: 1 - 6·2 / (3·8) = .5
    assert agreement_of(np.array([1.0, 2.0, 30.0]), np.array([1.0, 9.0, 2.0])).spearman == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("advantages", "share"),
    [
        ([1, 0, 0, 0], 0.25),
        ([1, -1, 1, -1], 1.0),
        ([0.75, -0.25, -0.25, -0.25], 0.75),  # 1.5² / .75 = 3 of 4
        ([0, 0], 0.0),
        ([2, NAN], 0.5),
        ([1e-200, 1e-200], 1.0),
    ],
)
def test_the_effective_sample_size_counts_what_carries_the_update(advantages, share):
    assert effective_share(np.array(advantages, dtype=float)) == pytest.approx(share)
    assert effective_share(1e3 * np.array(advantages, dtype=float)) == pytest.approx(share)


def test_the_share_of_zeros_is_of_what_was_kept():
    assert zero_share(np.array([0.0, 1e-9, 1.0, NAN])) == pytest.approx(2 / 3)
    assert math.isnan(zero_share(np.array([NAN])))
    assert math.isnan(effective_share(np.array([])))


@pytest.mark.parametrize(
    ("text", "chosen"), [("", [1, 2, 3, 7]), ("2", [2]), ("1-3", [1, 2, 3]), ("3-", [3, 7]), ("7, 1-2", [1, 2, 7]), ("0-1", [1])]
)
def test_steps_are_named_by_numbers_and_ranges(text, chosen):
    assert choose_steps([1, 2, 3, 7], text) == chosen


@pytest.mark.parametrize(
    ("text", "message"), [("x", "expected 7, 1-20"), ("1-2-3", "expected 7, 1-20"), ("4-6", "none in 4-6"), ("9", "it has 1 to 7")]
)
def test_steps_that_are_not_there_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        choose_steps([1, 2, 3, 7], text)
