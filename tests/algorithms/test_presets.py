"""GRPO's family: every knob and every named preset, by hand."""

import numpy as np
import pytest

from rllm_lightning.algorithms.ragged import Ragged
from rllm_lightning.algorithms.rl_algo import normalise
from rllm_lightning.registry import ESTIMATORS

STD = (3 / 16) ** 0.5  # population std of [1, 0, 0, 0]
PRESETS = ["grpo", "grpo_trl", "grpo_verl", "grpo_nemo", "dr_grpo", "grpo_batch_std", "median_mad"]


def first(name, groups, **keywords):
    """The first advantage of the first group."""
    advantages, _ = ESTIMATORS.get(name)([np.array(group, dtype=float) for group in groups], **keywords)
    return advantages[0][0]


def test_presets_mean_what_their_libraries_mean():
    """First advantage of [1, 0, 0, 0] and of a group of one with reward 1. ddof 1: std sqrt(.75/3) = .5."""
    lone = 1 / (1 + 1e-6)
    expected = {
        "grpo": (0.75 / (STD + 1e-6), lone),  # 1.7320468
        "grpo_trl": (0.75 / (0.5 + 1e-4), 0),  # 1.4997
        "grpo_verl": (0.75 / (0.5 + 1e-6), lone),  # 1.499997
        "grpo_nemo": (1, 0),  # the others are 0, 0, 0: mean 0, std 0, left unscaled
        "dr_grpo": (0.75, 0),
    }
    for name, values in expected.items():
        assert (first(name, [[1, 0, 0, 0]]), first(name, [[1]])) == pytest.approx(values, rel=1e-12), name


def test_grpo_nemo_leaves_the_trajectory_out_of_mean_and_std():
    """The second of [1, 0, 0, 0]: others 1, 0, 0 have mean 1/3 and std (ddof 1) sqrt(2/3/2) = .5773503; -1/3 over that."""
    (advantages,), _ = ESTIMATORS.get("grpo_nemo")([np.array([1.0, 0, 0, 0])])
    assert advantages[1:] == pytest.approx(-1 / 3 / ((1 / 3) ** 0.5 + 1e-6), rel=1e-12)


def test_grpo_nemo_finds_a_small_spread_beside_one_large_reward():
    """Others of the last: 0, 1e-5, 2e-5 with mean and std (ddof 1) 1e-5."""
    (advantages,), _ = ESTIMATORS.get("grpo_nemo")([np.array([0, 1e-5, 2e-5, 1e3])])
    assert advantages[3] == pytest.approx((1e3 - 1e-5) / (1e-5 + 1e-6), rel=1e-9)


def test_grpo_batch_std_divides_by_the_std_of_all_rewards():
    """Rewards 1, 0, 0, 10: mean 2.75, squares 101 - 4 * 7.5625 = 70.75, ddof 1: sqrt(70.75/3) = 4.8562674."""
    advantages, _ = ESTIMATORS.get("grpo_batch_std")([np.array([1.0, 0]), np.array([0, 10.0])])
    std = (70.75 / 3) ** 0.5
    assert np.concatenate(advantages) == pytest.approx(np.array([0.5, -0.5, -5, 5]) / (std + 1e-4), rel=1e-12)
    assert ESTIMATORS.get("grpo_batch_std").scope == "role-batch"


def test_median_mad_measures_from_the_median():
    """[1, 2, 6]: median 2, distances 1, 0, 4, MAD 1."""
    (advantages,), _ = ESTIMATORS.get("median_mad")([np.array([1.0, 2, 6])])
    assert advantages == pytest.approx(np.array([-1, 0, 4]) / (1.4826 + 1e-6), rel=1e-12)
    assert first("median_mad", [[1, 0, 0, 0]], epsilon=0.5) == 2  # median 0, MAD 0


@pytest.mark.parametrize(
    ("knobs", "expected"),
    [
        ({"ddof": 1}, 0.75 / (0.5 + 1e-6)),
        ({"epsilon": 0.1}, 0.75 / (STD + 0.1)),
        ({"episilon": 0.1}, 0.75 / (STD + 0.1)),
        ({"epsilon": 0}, 0.75 / STD),
        ({"epsilon": 0.9, "eps_mode": "clamp_std"}, 0.75 / 0.9),
        ({"epsilon": 0.1, "eps_mode": "clamp_std"}, 0.75 / STD),
        ({"epsilon": 0.81, "eps_mode": "clamp_var"}, 0.75 / 0.9),
        ({"epsilon": 0.1, "eps_mode": "clamp_var"}, 0.75 / STD),
        ({"baseline": "loo", "scale": "none"}, 1),
        ({"baseline": "median"}, 1 / (STD + 1e-6)),
        ({"baseline": "none"}, 1 / (STD + 1e-6)),
        ({"scale": "mean", "epsilon": 0}, 0.75 / 0.25),
        ({"scale": "none"}, 0.75),
        ({"baseline": "loo", "ddof": 1}, 1),
        ({"scale": "batch_std"}, 0.75 / (STD + 1e-6)),
    ],
)
def test_every_knob_of_grpo(knobs, expected):
    assert first("grpo", [[1, 0, 0, 0]], **knobs) == pytest.approx(expected, rel=1e-12)


def test_the_scale_mad_and_the_mean_of_others():
    """[1, 2, 6, 7]: median 4, distances 3, 2, 2, 3, MAD 2.5; others of the first have mean 5."""
    assert first("grpo", [[1, 2, 6, 7]], scale="mad", epsilon=0) == pytest.approx((1 - 4) / (1.4826 * 2.5))
    assert first("grpo", [[1, 2, 6, 7]], baseline="loo", scale="mad", epsilon=0) == pytest.approx((1 - 5) / (1.4826 * 2.5))


def test_the_scale_mean_gives_nothing_where_the_mean_is_not_positive():
    assert first("grpo", [[1, -1]], scale="mean") == 0
    assert first("grpo", [[1, -2]], scale="mean") == 0


def test_without_a_baseline_equal_rewards_keep_their_value():
    """REINFORCE in the group: no spread is no reason to be silent, and no scale."""
    assert first("grpo", [[0.7, 0.7]], baseline="none") == 0.7
    assert first("grpo", [[0.7, 0.7]], baseline="none", scale="none") == 0.7


def test_a_group_of_one():
    groups = [[3], [1, 0]]
    assert first("grpo", groups) == 3 / (1 + 1e-6)
    assert first("grpo", groups, scale="none") == 3
    assert first("grpo", groups, singleton="zero") == 0
    with pytest.raises(ValueError, match="group 0 holds one trajectory"):
        first("grpo", groups, singleton="error")
    advantages, _ = ESTIMATORS.get("grpo")([np.array([3.0]), np.array([1.0, 0])], singleton="drop")
    assert advantages[0] is None
    assert advantages[1] == pytest.approx([0.999998, -0.999998])


def test_a_dropped_group_is_no_part_of_the_batchs_std():
    """std of 1, 0 is .5 with ddof 0; with the 100 it would be 46.9."""
    advantages, _ = ESTIMATORS.get("grpo_batch_std")([np.array([1.0, 0]), np.array([100.0])], singleton="drop", ddof=0, epsilon=0)
    assert advantages[0].tolist() == [1, -1]
    advantages, _ = ESTIMATORS.get("grpo_batch_std")([np.array([1.0, 0]), np.array([100.0])], ddof=0, epsilon=0)
    assert advantages[0][0] < 0.02
    assert advantages[1].tolist() == [0]


@pytest.mark.parametrize("name", ["grpo", "grpo_trl", "grpo_verl", "grpo_batch_std", "dr_grpo"])
def test_the_flag_takes_the_scale_from_every_preset(name):
    """B48: the flag is honoured by each of them, and contradicting it is an error."""
    assert first(name, [[1, 0, 0, 0]], norm_adv_by_std_in_grpo=False) == 0.75
    with pytest.raises(ValueError, match="norm_adv_by_std_in_grpo=false asks for no scale"):
        first(name, [[1, 0, 0, 0]], norm_adv_by_std_in_grpo=False, scale="std")


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize(
    "knob", [{"ddof": 2}, {"epsilon": -1}, {"epsilon": "x"}, {"eps_mode": "?"}, {"baseline": "?"}, {"scale": "?"}, {"singleton": "?"}]
)
def test_a_value_that_a_knob_has_not_is_named(name, knob):
    (key, value) = next(iter(knob.items()))
    with pytest.raises(ValueError, match=rf"estimator_kwargs\.{key}.*{value!r}".replace("?", r"\?")):
        first(name, [[1, 0]], **knob)
    with pytest.raises(ValueError, match="'epsilonn'"):
        first(name, [[1, 0]], epsilonn=1)


@pytest.mark.parametrize(("rewards", "expected"), [([1e308, -1e308], [1, -1]), ([5e-324, 0], [2.5e-318, -2.5e-318])])
def test_the_ends_of_float64(rewards, expected):
    """Sums and squares of 1e308 overflow, those of 5e-324 vanish: both are divided out first. 2.5e-324 / 1e-6 for the second."""
    assert normalise(Ragged.of([rewards])) == pytest.approx(expected, rel=2e-2)


def test_advantages_beyond_float64_are_its_largest_number():
    """1.7e308 - (-1.7e308/3) is no float64."""
    (advantages,), _ = ESTIMATORS.get("dr_grpo")([np.array([1.7e308, -1.7e308, -1.7e308])])
    assert advantages[0] == np.finfo(np.float64).max
    assert advantages[1] == pytest.approx(-1.7e308 / 3 * 2)
