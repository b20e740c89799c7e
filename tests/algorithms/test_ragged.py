"""Ragged groups: statistics over groups of any size, empty ones too."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm_lightning.algorithms.ragged import Ragged, divide, nest

groups_of_numbers = st.lists(st.lists(st.floats(-1e6, 1e6), max_size=6), max_size=6)


@given(groups_of_numbers)
def test_statistics_are_those_of_each_group_alone(groups):
    ragged = Ragged.of(groups)
    for values, total, mean, highest, lowest, middle, std in zip(
        groups, ragged.sum_G, ragged.mean_G, ragged.max_G, ragged.min_G, ragged.median_G, ragged.std_G(), strict=True
    ):
        if not values:
            assert total == mean == highest == lowest == middle == std == 0
            continue
        assert total == pytest.approx(sum(values), rel=1e-12, abs=1e-6)
        assert mean == pytest.approx(np.mean(values), rel=1e-12, abs=1e-6)
        assert (highest, lowest, middle) == (max(values), min(values), pytest.approx(np.median(values), rel=1e-12))
        assert std == pytest.approx(np.std(values), rel=1e-6, abs=1e-5)


@given(groups_of_numbers)
def test_splitting_undoes_laying_out(groups):
    ragged = Ragged.of(groups)
    assert [part.tolist() for part in ragged.split(ragged.flat_N)] == groups


@given(groups_of_numbers)
def test_by_size_meets_every_entry_once(groups):
    met = [i for index in Ragged.of(groups).by_size() for i in index.ravel()]
    assert sorted(met) == list(range(sum(map(len, groups))))


def test_values_are_cast_to_float64_before_use():
    assert Ragged.of([[1, 2], (True, False), np.array([3], np.float32)]).flat_N.tolist() == [1, 2, 1, 0, 3]


@pytest.mark.parametrize("groups", [[[[1.0]]], [np.zeros((2, 2))], [["x"]], [[None]], [[np.inf]]])
def test_what_is_not_one_row_of_finite_numbers_a_group_is_refused(groups):
    with pytest.raises(ValueError):
        Ragged.of(groups)


def test_units_are_powers_of_two_that_bring_extremes_to_a_moderate_size():
    r, unit_G = Ragged.of([[1, -3], [1e300, 1], [-3e-320], [], [0]]).in_units()
    assert unit_G[[0, 3, 4]].tolist() == [1, 1, 1]
    assert np.frexp(unit_G)[0].tolist() == [0.5] * 5
    assert 0.5 <= r.flat_N[2] <= 1
    assert abs(r.flat_N[4]) > 1e-24
    _, unit_G = Ragged.of([[1.0], [1e300]]).in_units(common=True)
    assert unit_G[0] == unit_G[1] > 1e299


def test_a_spread_is_measured_against_the_magnitude():
    assert Ragged.of([[1, 1 + 1e-13], [1, 1 + 1e-11], [1e-30, 2e-30], [0, 0], [5], [], [-1.7e308, 1.7e308]]).differs_G.tolist() == [
        False,
        True,
        True,
        False,
        False,
        False,
        True,
    ]


def test_dividing_nothing_by_nothing_is_0_and_what_overflows_is_cut_by_nest():
    quotients = divide(np.array([0.0, 1.0, -1.0]), np.array([0.0, 0.0, 2.0]))
    assert quotients.tolist() == [0, np.inf, -0.5]
    assert [part.tolist() for part in nest(quotients, np.array([1, 2]))] == [[0], [np.finfo(np.float64).max, -0.5]]
