"""The intervals hold what they say, at 3 to 10 seeds: measured on made-up seeds from known distributions."""

import pytest

from rllm_lightning.lab.compare.coverage import DISTRIBUTIONS, measure_coverage

NUM = 2_000  # comparisons; a share of .95 then has a standard error of .005
NORMAL, PASS_RATE, CEILING, HEAVY = DISTRIBUTIONS


@pytest.mark.parametrize("distribution", [NORMAL, PASS_RATE, HEAVY], ids=lambda d: d.name)
@pytest.mark.parametrize("n", [3, 5, 10])
def test_intervals_hold_the_truth_and_equal_groups_are_not_told_apart(distribution, n):
    found = measure_coverage(distribution, n, NUM)
    bootstrap = found.covered.pop("percentile bootstrap of the mean")
    assert all(0.93 <= share <= 0.975 for share in found.covered.values()), found.covered
    assert all(share <= 0.05 + 0.01 for share in found.alarms.values()), found.alarms  # .01: two standard errors
    assert bootstrap < 0.92  # why it is not used


def test_near_the_ceiling_differences_hold_and_means_are_as_short_as_the_docs_say():
    found = measure_coverage(CEILING, 5, NUM)
    assert found.covered["paired difference"] >= 0.93
    assert found.covered["difference (Welch)"] >= 0.93
    assert 0.90 <= found.covered["mean"] < 0.93
    assert all(share <= 0.05 for share in found.alarms.values())


def test_a_measurement_is_the_same_each_time():
    assert measure_coverage(NORMAL, 3, 50) == measure_coverage(NORMAL, 3, 50)
