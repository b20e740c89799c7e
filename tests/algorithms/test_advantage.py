"""The four estimators that rLLM's users know: values, signatures, degenerate groups."""

import inspect
import subprocess
import sys

import numpy as np
import pytest

from rllm_lightning.algorithms.advantage import (
    RLLM_ADV_ESTIMATOR_REGISTRY,
    calculate_grpo_advantages,
    calculate_reinforce_advantages,
    calculate_reinforce_plus_plus_baseline_advantages,
    calculate_rloo_advantages,
    get_rllm_adv_estimator,
    register_rllm_adv_estimator,
)
from rllm_lightning.algorithms.rl_algo import calculate_grpo_advantages_per_group, calculate_rloo_advantages_per_group
from rllm_lightning.config import rLLMAdvantageEstimator

FOUR = [
    calculate_grpo_advantages,
    calculate_reinforce_advantages,
    calculate_reinforce_plus_plus_baseline_advantages,
    calculate_rloo_advantages,
]


def test_grpo_divides_centred_rewards_by_the_population_std_plus_epsilon(arrays):
    """B04: ddof 0. mean .25, std sqrt(3/16) = .4330127; .75 / .4330137 = 1.7320468, -.25 / .4330137 = -.5773489."""
    (advantages,), _ = calculate_grpo_advantages(arrays([1, 0, 0, 0]))
    std = (3 / 16) ** 0.5
    assert advantages == pytest.approx([0.75 / (std + 1e-6)] + [-0.25 / (std + 1e-6)] * 3, rel=1e-12)
    assert advantages == pytest.approx([1.7320468, -0.5773489, -0.5773489, -0.5773489], abs=1e-7)


def test_grpo_scales_each_group_by_its_own_std(arrays):
    """B04: stds .5 and 5, so .5/.500001 = .999998 and 5/5.000001 = .9999998."""
    (first, second), _ = calculate_grpo_advantages(arrays([0, 1], [0, 10]))
    assert first == pytest.approx([-0.999998000004, 0.999998000004], abs=1e-12)
    assert second == pytest.approx([-0.99999980000004, 0.99999980000004], abs=1e-12)


def test_grpo_without_the_std_is_the_distance_to_the_mean(arrays):
    """B48: norm_adv_by_std_in_grpo=false."""
    (advantages,), _ = calculate_grpo_advantages(arrays([1, 0, 0, 0]), norm_adv_by_std_in_grpo=False)
    assert advantages.tolist() == [0.75, -0.25, -0.25, -0.25]


def test_grpo_takes_epsilon_in_both_spellings(arrays):
    """.5 / (.5 + .5) = .5."""
    for keyword in ("epsilon", "episilon"):
        (advantages,), _ = calculate_grpo_advantages(arrays([0, 1]), **{keyword: 0.5})
        assert advantages == pytest.approx([-0.5, 0.5], abs=1e-12)


def test_grpo_refuses_a_misspelt_keyword(arrays):
    """B49: rLLM's **kwargs swallowed it."""
    with pytest.raises(ValueError, match="epsilonn"):
        calculate_grpo_advantages(arrays([0, 1]), epsilonn=0.5)


def test_grpo_ignores_what_every_estimator_may_be_handed(arrays):
    (advantages,), _ = calculate_grpo_advantages(arrays([0, 1]), algorithm_config=object(), traj_groups=[])
    assert advantages == pytest.approx([-0.999998, 0.999998], abs=1e-9)


def test_one_trajectory_has_mean_0_and_std_1_in_grpo(arrays):
    (advantages,), _ = calculate_grpo_advantages(arrays([1]))
    assert advantages == pytest.approx([1 / (1 + 1e-6)], rel=1e-15)


def test_rloo_subtracts_the_mean_of_the_others(arrays):
    """B01: 1 - (2+6)/2 = -3, 2 - 3.5 = -1.5, 6 - 1.5 = 4.5."""
    (advantages,), _ = calculate_rloo_advantages(arrays([1, 2, 6]))
    assert advantages.tolist() == [-3, -1.5, 4.5]


@pytest.mark.parametrize(("groups", "expected"), [([[1]], [[1]]), ([[1, 0], [1]], [[1, -1], [1]]), ([[1], [0]], [[1], [0]]), ([], [])])
def test_rloo_of_one_trajectory_is_its_reward_and_always_a_pair_of_lists(arrays, groups, expected):
    """B01: the branch for one trajectory returned a bare array, where callers unpack a pair."""
    advantages, returns = calculate_rloo_advantages(arrays(*groups))
    assert [a.tolist() for a in advantages] == expected
    assert len(returns) == len(expected)


def test_reinforce_plus_plus_baseline_has_one_std_over_the_batch(arrays):
    """B04, B06: centred -.5, .5, -5, 5; variance (2*.25 + 2*25)/4 = 12.625, std 3.5531676."""
    (first, second), _ = calculate_reinforce_plus_plus_baseline_advantages(arrays([0, 1], [0, 10]))
    std = 12.625**0.5
    assert first == pytest.approx([-0.5 / (std + 1e-6), 0.5 / (std + 1e-6)], rel=1e-12)
    assert second == pytest.approx([-1.4071947, 1.4071947], abs=1e-7)


def test_reinforce_plus_plus_baseline_learns_from_one_rollout_a_prompt(arrays):
    """B02: a group of one has baseline 0: centred 1 and 0, std .5, 1/.500001 = 1.999996."""
    advantages, _ = calculate_reinforce_plus_plus_baseline_advantages(arrays([1], [0]))
    assert [a.tolist() for a in advantages] == [[pytest.approx(1.999996, abs=1e-9)], [0]]


def test_reinforce_plus_plus_baseline_leaves_a_batch_without_spread_unscaled(arrays):
    """Two lone rewards of 1 have std 0; dividing by epsilon alone would give a million."""
    advantages, _ = calculate_reinforce_plus_plus_baseline_advantages(arrays([1], [1]))
    assert [a.tolist() for a in advantages] == [[1 / (1 + 1e-6)], [1 / (1 + 1e-6)]]


def test_reinforce_is_the_reward_in_an_array_of_its_own(arrays):
    rewards = arrays([1, 0], [3])
    advantages, _ = calculate_reinforce_advantages(rewards)
    assert [a.tolist() for a in advantages] == [[1, 0], [3]]
    advantages[0][0] = 7
    assert rewards[0][0] == 1


@pytest.mark.parametrize("rewards", [[0.7] * 3, [0.1 + 0.2, 0.3, 0.3], [-1e9, -1e9 + 1e-6]])
@pytest.mark.parametrize(
    "estimator", [calculate_grpo_advantages, calculate_rloo_advantages, calculate_reinforce_plus_plus_baseline_advantages]
)
def test_equal_rewards_give_exactly_0(arrays, estimator, rewards):
    """A spread below 1e-12 of the magnitude is float residue, which std + 1e-6 would blow up."""
    (advantages,), _ = estimator(arrays(rewards))
    assert advantages.tolist() == [0] * len(rewards)


def test_float32_rewards_are_cast_before_anything_is_subtracted():
    (advantages,), _ = calculate_grpo_advantages([np.full(5, 1000.1, np.float32)])
    assert advantages.tolist() == [0] * 5
    (advantages,), _ = calculate_grpo_advantages([np.array([1, 0], np.float32)])
    assert advantages.dtype == np.float64


@pytest.mark.parametrize("estimator", FOUR)
def test_no_groups_give_two_empty_lists_and_an_empty_group_an_empty_array(estimator):
    """B01."""
    assert estimator([]) == ([], [])
    advantages, returns = estimator([np.array([]), np.array([0.0, 1.0])])
    assert [len(a) for a in advantages] == [len(r) for r in returns] == [0, 2]


@pytest.mark.parametrize("estimator", FOUR)
@pytest.mark.parametrize("bad", [None, float("nan"), float("inf"), "1"])
def test_what_is_no_number_is_refused_and_placed(estimator, bad):
    """B05."""
    with pytest.raises(ValueError):
        estimator([np.array([0.0]), np.array([1, bad, 0], dtype=object)])
    with pytest.raises(ValueError, match="group 1, position 2"):
        estimator([np.array([0.0]), np.array([1, 0, np.nan])])


def test_per_group_functions_return_a_pair_of_arrays():
    advantages, returns = calculate_grpo_advantages_per_group(np.array([1, 0, 0, 0]))
    assert advantages == pytest.approx([1.7320468, -0.5773489, -0.5773489, -0.5773489], abs=1e-7)
    assert returns == pytest.approx(advantages)
    assert calculate_grpo_advantages_per_group([1, 0], norm_adv_by_std_in_grpo=False)[0].tolist() == [0.5, -0.5]
    assert calculate_rloo_advantages_per_group(np.array([1, 2, 6]))[0].tolist() == [-3, -1.5, 4.5]
    assert calculate_rloo_advantages_per_group([1])[0].tolist() == [1]  # B01
    assert calculate_grpo_advantages_per_group([])[0].tolist() == []


def test_signatures_are_those_of_rllm():
    def signature(function):
        return [(p.name, p.kind is p.VAR_KEYWORD, p.default) for p in inspect.signature(function).parameters.values()]

    empty, rewards, kwargs = inspect.Parameter.empty, ("rewards", False, inspect.Parameter.empty), ("kwargs", True, inspect.Parameter.empty)
    norm, episilon = ("norm_adv_by_std_in_grpo", False, True), ("episilon", False, 1e-6)
    assert signature(calculate_grpo_advantages) == [rewards, norm, episilon, kwargs]
    assert signature(calculate_reinforce_advantages) == [rewards, kwargs]
    assert signature(calculate_reinforce_plus_plus_baseline_advantages) == [rewards, ("epsilon", False, 1e-6), kwargs]
    assert signature(calculate_rloo_advantages) == [rewards, kwargs]
    assert signature(calculate_grpo_advantages_per_group) == [rewards, norm, episilon]
    assert signature(calculate_rloo_advantages_per_group) == [rewards]
    assert signature(get_rllm_adv_estimator)[0] == ("name", False, empty)


def test_registered_names_are_found_as_text_and_as_enum_member():
    assert get_rllm_adv_estimator("grpo") is calculate_grpo_advantages
    assert get_rllm_adv_estimator(rLLMAdvantageEstimator.RLOO) is calculate_rloo_advantages
    assert RLLM_ADV_ESTIMATOR_REGISTRY.get("reinforce").scope == "trajectory"


def test_an_unknown_name_lists_the_registered_ones_and_the_closest():
    """B49."""
    with pytest.raises(ValueError, match=r"grpoo.*did you mean 'grpo'.*reinforce"):
        get_rllm_adv_estimator("grpoo")


def test_a_name_is_registered_once():
    with pytest.raises(ValueError, match="registered twice"):
        register_rllm_adv_estimator("grpo")(lambda rewards: (rewards, rewards))


def test_every_built_in_has_an_enum_member_formula_and_source():
    built_in = {member.value for member in rLLMAdvantageEstimator} - {"other"}
    assert built_in <= set(RLLM_ADV_ESTIMATOR_REGISTRY.names())
    for name in built_in:
        entry = RLLM_ADV_ESTIMATOR_REGISTRY.get(name)
        assert entry.formula
        assert "\n" not in entry.formula
        assert entry.source, name
        assert entry.function.__doc__, name


def test_the_algorithms_import_without_torch():
    modules = ["advantage", "transform", "rejection_sampling", "metrics", "rl_algo"]
    code = "; ".join(f"import rllm_lightning.algorithms.{m}" for m in modules) + "; import sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
