"""rllm_lightning.lab.compare.statistics: against scipy, worked-out numbers, and a plain bootstrap of the interquartile mean."""

import math
import random
import statistics as plain_statistics

import numpy as np
import pytest
from scipy import stats

from rllm_lightning.lab.compare import statistics

SCORES = np.array([0.81, 0.78, 0.86, 0.80, 0.84, 0.79, 0.83])
OTHERS = np.array([0.76, 0.79, 0.80, 0.78, 0.79, 0.77, 0.75])


# ----------------------------------------------------------------------------------------------------------------- one group


def test_the_interval_of_the_mean_is_students():
    # 1, 2, 3: mean 2, sd 1, t(.975, 2) = 4.302653, half width 4.302653 / sqrt(3) = 2.484138
    found = statistics.mean_interval(np.array([1.0, 2.0, 3.0]))
    assert found == pytest.approx((2.0, 2 - 2.484138, 2 + 2.484138), abs=1e-6)


def test_the_interquartile_mean_leaves_out_a_quarter_at_either_end():
    # 8 values: 2 go at either end, (3 + 4 + 5 + 6) / 4; 5 values: 1 at either end, (2 + 3 + 4) / 3
    assert statistics.interquartile_mean(np.array([7, 1, 2, 100, 3, 4, 5, 6.0])) == pytest.approx((3 + 4 + 5 + 6) / 4)
    assert statistics.interquartile_mean(np.array([100, 1, 2, 3, 4.0])) == pytest.approx(3.0)


def test_the_interquartile_mean_of_three_is_their_mean():
    assert statistics.interquartile_mean(np.array([1.0, 2.0, 9.0])) == pytest.approx(4.0)


def plain_standard_error(scores, num_resamples):
    """The bootstrap standard error of the interquartile mean, as plainly as it can be written."""
    generator = random.Random(1)
    estimates = []
    for _ in range(num_resamples):
        drawn = sorted(generator.choice(scores) for _ in scores)
        cut = len(drawn) // 4
        kept = drawn[cut : len(drawn) - cut]
        estimates.append(sum(kept) / len(kept))
    return plain_statistics.stdev(estimates)


@pytest.mark.parametrize("n", [3, 4, 7])
def test_the_interval_of_the_interquartile_mean_is_the_plain_bootstraps(n):
    value, low, high = statistics.interquartile_mean_interval(SCORES[:n])
    assert (low + high) / 2 == pytest.approx(value)
    # standard errors from 10,000 and 20,000 resamples: each is known to about 1 / sqrt(2 * 10,000) = 0.7%
    assert (high - value) / statistics.critical_ratio(n) == pytest.approx(plain_standard_error(SCORES[:n].tolist(), 20_000), rel=0.03)


def test_the_critical_ratio_of_three_seeds_is_students_for_a_biased_standard_error():
    # of three the interquartile mean is the mean, whose bootstrap standard error is sqrt(2 / 3) of the usual one
    assert statistics.critical_ratio(3) == pytest.approx(stats.t.ppf(0.975, 2) * math.sqrt(3 / 2), rel=0.02)


def test_the_critical_ratio_goes_over_into_students():
    assert statistics.critical_ratio(50) == pytest.approx(statistics.critical_ratio(51), rel=0.03)


def test_the_bootstrap_of_an_interquartile_mean_is_the_same_each_time():
    assert statistics.interquartile_mean_interval(SCORES) == statistics.interquartile_mean_interval(SCORES)


@pytest.mark.parametrize("interval", [statistics.mean_interval, statistics.interquartile_mean_interval])
@pytest.mark.parametrize("scores", [[0.7], [0.7, 0.7, 0.7], [0.1 + 0.2, 0.3, 0.3]])
def test_one_seed_or_equal_values_have_a_value_and_no_interval(interval, scores):
    value, low, high = interval(np.array(scores))
    assert value == pytest.approx(scores[-1])
    assert math.isnan(low)
    assert math.isnan(high)


# ---------------------------------------------------------------------------------------------------------------- two groups


def test_the_paired_test_is_scipys():
    expected = stats.ttest_rel(SCORES, OTHERS)
    found = statistics.paired_test(SCORES, OTHERS)
    assert found.p == pytest.approx(expected.pvalue)
    assert found.mean[1:] == pytest.approx(tuple(expected.confidence_interval()))


@pytest.mark.parametrize("num", [7, 4])
def test_welchs_test_is_scipys(num):
    expected = stats.ttest_ind(SCORES, OTHERS[:num], equal_var=False)
    found = statistics.welch_test(SCORES, OTHERS[:num])
    assert found.p == pytest.approx(expected.pvalue)
    assert found.mean[1:] == pytest.approx(tuple(expected.confidence_interval()))


def test_many_data_sets_at_once_are_each_one_alone():
    a, b = np.stack([SCORES, OTHERS]), np.stack([OTHERS, SCORES[::-1]])
    for test in (statistics.paired_test, statistics.welch_test):
        together = test(a, b)
        for k in range(2):
            alone = test(a[k], b[k])
            assert together.p[k] == pytest.approx(alone.p)
            assert [x[k] for x in (*together.mean, *together.improvement)] == pytest.approx([*alone.mean, *alone.improvement])


@pytest.mark.parametrize(("test", "scale"), [(statistics.paired_test, math.sqrt(7)), (statistics.welch_test, math.sqrt(7))])
def test_the_interval_of_the_improvement_inverts_the_noncentral_t(test, scale):
    found = test(SCORES, OTHERS)
    if test is statistics.paired_test:
        t, df = stats.ttest_rel(SCORES, OTHERS).statistic, 6
    else:
        result = stats.ttest_ind(SCORES, OTHERS, equal_var=False)
        t, df = result.statistic, result.df
    # P = Φ(noncentrality / sqrt(n)), with equal n in both; the quantiles at which t stands are .5 and the two ends
    quantiles = [stats.nct.cdf(t, df, scale * stats.norm.ppf(p)) for p in found.improvement]
    assert quantiles == pytest.approx([0.5, 0.975, 0.025], abs=1e-6)


def test_equal_means_are_no_improvement_either_way():
    a, b = np.array([1.0, 2.0, 3.0]), np.array([3.0, 2.0, 1.0])
    for test in (statistics.paired_test, statistics.welch_test):
        found = test(a, b).improvement
        assert found.value == pytest.approx(0.5)
        assert found.low == pytest.approx(1 - found.high)


def test_the_improvement_turns_with_the_groups():
    for test in (statistics.paired_test, statistics.welch_test):
        there, back = test(SCORES, OTHERS).improvement, test(OTHERS, SCORES).improvement
        assert list(there) == pytest.approx([1 - back.value, 1 - back.high, 1 - back.low], abs=1e-6)


def test_one_difference_in_all_seeds_has_the_p_value_of_flipping_signs():
    # 5 differences of one sign: 2 of the 2^5 ways to give them signs are as extreme, 2 / 32
    found = statistics.paired_test(SCORES[:5], SCORES[:5] - 0.1)
    assert found.p == 0.0625
    assert found.mean.value == pytest.approx(0.1)
    assert np.isnan([found.mean.low, found.mean.high, *found.improvement]).all()


def test_constant_groups_have_the_p_value_of_dealing_anew():
    # 3 and 3 values can be dealt in C(6, 3) = 20 ways, 2 of which are as extreme
    assert statistics.welch_test(np.full(3, 0.5), np.full(3, 0.7)).p == pytest.approx(0.1)


@pytest.mark.parametrize("test", [statistics.paired_test, statistics.welch_test])
def test_identical_constant_groups_have_a_p_value_of_one(test):
    found = test(np.full(3, 0.1 + 0.2), np.full(3, 0.3))
    assert found.p == 1.0
    assert np.isnan(found.improvement.value)


def test_one_constant_group_still_has_an_interval():
    # with no variance in one group Welch's t is Student's of the other
    found = statistics.welch_test(np.full(3, 0.5), SCORES)
    assert found.p == pytest.approx(stats.ttest_1samp(SCORES, 0.5).pvalue)


@pytest.mark.parametrize("test", [statistics.paired_test, statistics.welch_test])
def test_one_seed_has_a_difference_and_nothing_else(test):
    found = test(np.array([0.5]), np.array([0.2]))
    assert found.mean.value == pytest.approx(0.3)
    assert np.isnan([found.mean.low, found.p, *found.improvement]).all()


@pytest.mark.parametrize("test", [statistics.paired_test, statistics.welch_test])
def test_groups_are_equal_within_a_margin_just_where_the_interval_lies_within_it(test):
    found = test(SCORES, OTHERS)
    margin = max(abs(found.mean.low), abs(found.mean.high))
    assert statistics.equivalence_p(found, margin) == pytest.approx(0.05)
    assert statistics.equivalence_p(found, 1.1 * margin) < 0.05 < statistics.equivalence_p(found, 0.9 * margin)


def test_equivalence_of_equal_values_cannot_be_said():
    assert np.isnan(statistics.equivalence_p(statistics.paired_test(SCORES, SCORES), 0.03))


# ------------------------------------------------------------------------------------------------------- many comparisons, power


def test_holm_steps_down():
    # sorted .01, .03, .04 are multiplied by 3, 2, 1: .03, .06, .04, and none may lie below the one before: .03, .06, .06
    assert statistics.holm(np.array([0.01, 0.04, 0.03])) == pytest.approx([0.03, 0.06, 0.06])


def test_holm_ends_at_one_and_leaves_out_what_is_no_comparison():
    assert statistics.holm(np.array([0.6, 0.7])) == pytest.approx([1.0, 1.0])
    assert statistics.holm(np.array([0.01, np.nan, 0.03])) == pytest.approx([0.02, np.nan, 0.03], nan_ok=True)


@pytest.mark.parametrize(
    ("paired", "expected"),
    [(False, 64), (True, 34)],  # half a standard deviation at 80% and 5%: the numbers of Cohen's tables
)
def test_the_seeds_needed_are_those_of_the_tables(paired, expected):
    assert statistics.seeds_needed(1.0, 0.5, paired) == expected


def test_more_comparisons_need_more_seeds():
    assert statistics.seeds_needed(1.0, 0.5, True, num_comparisons=6) > statistics.seeds_needed(1.0, 0.5, True)


def test_the_seeds_needed_are_at_least_two_and_may_be_unknown():
    assert statistics.seeds_needed(1e-9, 0.03, True) == 2
    assert statistics.seeds_needed(1.0, 0.03, True) is None
    assert statistics.seeds_needed(0.0, 0.03, True) is None
    assert statistics.seeds_needed(math.nan, 0.03, False) is None
