"""From trajectory groups to advantages on steps: routing by role, precomputed advantages, errors and metrics."""

import logging

import numpy as np
import pytest

from rllm_lightning.algorithms.advantage import (
    RLLM_ADV_ESTIMATOR_REGISTRY,
    collect_reward_and_advantage_from_trajectory_groups,
    register_rllm_adv_estimator,
)
from rllm_lightning.config import AlgorithmConfig, load_config


@pytest.fixture
def register(monkeypatch):
    """Registers an estimator for one test."""
    monkeypatch.setattr(RLLM_ADV_ESTIMATOR_REGISTRY, "_entries", dict(RLLM_ADV_ESTIMATOR_REGISTRY._entries))
    RLLM_ADV_ESTIMATOR_REGISTRY.load_home()
    return register_rllm_adv_estimator


def collect(groups, collect_advantage=True, estimator_state=None, **config):
    return collect_reward_and_advantage_from_trajectory_groups(
        groups, AlgorithmConfig(**config), collect_advantage, estimator_state=estimator_state
    )


def test_every_step_of_a_trajectory_gets_its_advantage_as_a_python_float(make):
    group = make.group([1, 0, 0, 0])
    group.trajectories[0] = make.trajectory(1.0, step_rewards=[0, 1])
    collect([group], norm_adv_by_std_in_grpo=False)
    first = [step.advantage for step in group.trajectories[0].steps]
    assert first == [0.75, 0.75]
    assert type(first[0]) is float


def test_each_role_goes_through_its_own_estimator(make, advantages_of):
    groups = [make.group([1, 0], "a:solver"), make.group([1, 2, 6], "a:judge"), make.group([3], "a:critic")]
    collect(groups, estimator="reinforce", estimator_map={"judge": "rloo", "solver": ("grpo", "ppo")}, norm_adv_by_std_in_grpo=False)
    assert advantages_of(groups) == [[0.5, -0.5], [-3, -1.5, 4.5], [3]]


def test_all_groups_of_a_role_go_through_one_call(make, advantages_of):
    """B06: whichever ranks the groups came from: centred std 3.5531676 over both, not 1 in each."""
    groups = [make.group([0, 1], "a:solver"), make.group([5], "a:judge"), make.group([0, 10], "b:solver")]
    collect(groups, estimator="reinforce_plus_plus_baseline")
    first, _, second = advantages_of(groups)
    assert first == pytest.approx([-0.1407195, 0.1407195], abs=1e-7)
    assert second == pytest.approx([-1.4071947, 1.4071947], abs=1e-7)


def test_the_switch_of_the_config_takes_the_std_out(make, advantages_of):
    """B48: rllm.algorithm.norm_adv_by_std_in_grpo=false, [1, 0, 0, 0]: the distances to the mean .25; with true divided by .4330137."""
    for text, expected in (("false", [0.75, -0.25, -0.25, -0.25]), ("true", [1.7320468, *[-0.5773489] * 3])):
        config = AlgorithmConfig.from_config(load_config([f"rllm.algorithm.norm_adv_by_std_in_grpo={text}"]))
        groups = [make.group([1, 0, 0, 0], "a:solver")]
        collect_reward_and_advantage_from_trajectory_groups(groups, config)
        assert advantages_of(groups) == [pytest.approx(expected, abs=1e-7)]


def test_groups_of_different_tasks_do_not_share_a_baseline(make, advantages_of):
    """B07: [1, 1] and [0, 0] teach nothing; merged they would give +-1."""
    groups = [make.group([1, 1], "gsm8k:1:solver"), make.group([0, 0], "gsm8k:2:solver")]
    collect(groups)
    assert advantages_of(groups) == [[0, 0], [0, 0]]


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce", "reinforce_plus_plus_baseline", "dr_grpo", "prpo", "maxrl"])
@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
def test_a_failed_scorer_is_an_error_that_names_group_trajectory_and_role(make, estimator, bad):
    """B05."""
    group = make.group([1, bad, 0], "task7:solver")
    with pytest.raises(ValueError, match=rf"task7:solver.*{group.trajectories[1].uid}.*solver") as error:
        collect([group], estimator=estimator)
    assert str(bad) in str(error.value)
    with pytest.raises(ValueError, match="task7"):
        collect([group], collect_advantage=False)


def test_rollouts_by_ones_learn_with_every_estimator_whose_baseline_is_the_group(make, advantages_of):
    """B02: rollout.n=1 with the raw reward, not silence."""
    for estimator in ("grpo", "rloo", "reinforce", "grpo_verl"):
        groups = [make.group([1], "a:solver"), make.group([0], "b:solver")]
        collect(groups, estimator=estimator)
        assert advantages_of(groups) == [[pytest.approx(1, abs=1e-5)], [0]]


# ---------------------------------------------------------------------------------------------- custom estimators


def test_an_estimator_in_rllms_plain_signature_runs_unchanged(make, register, advantages_of):
    """B49: a registered custom name is found and runs."""
    seen = {}

    @register("my_adv")
    def my_adv(rewards, **kwargs):
        seen.update(kwargs)
        return [r * 2 for r in rewards], rewards

    groups = [make.group([1, 0])]
    collect(groups, estimator="my_adv")
    assert advantages_of(groups) == [[2, 0]]
    assert seen["traj_groups"] == groups
    assert {"norm_adv_by_std_in_grpo", "algorithm_config"} <= set(seen)


def test_an_estimator_in_rllms_signature_with_config_runs_unchanged(make, register, advantages_of):
    """B49."""

    @register("my_config_adv")
    def my_config_adv(rewards, algorithm_config, **kwargs):
        sign = 1 if algorithm_config.norm_adv_by_std_in_grpo else -1
        return [sign * r for r in rewards], rewards

    groups = [make.group([1, 0])]
    collect(groups, estimator_map={"solver": "my_config_adv"}, norm_adv_by_std_in_grpo=False)
    assert advantages_of(groups) == [[-1, 0]]


def test_an_estimator_gets_only_the_keywords_that_it_declares(make, register, advantages_of):
    @register("bare")
    def bare(rewards, traj_groups, *, alpha=0.5):
        assert len(traj_groups) == len(rewards)
        return [alpha * r for r in rewards], rewards

    groups = [make.group([1, 0])]
    collect(groups, estimator="bare", estimator_kwargs={"alpha": 3.0})
    assert advantages_of(groups) == [[3, 0]]
    assert RLLM_ADV_ESTIMATOR_REGISTRY.get("bare").kwargs == ("alpha",)


def test_a_plain_registration_has_the_safe_scope_and_reads_needs_from_the_parameters(register):
    @register("needy")
    def needy(rewards, lengths, algorithm_config, power, alpha=1.0, **kwargs):
        return rewards, rewards

    entry = RLLM_ADV_ESTIMATOR_REGISTRY.get("needy")
    assert (entry.scope, entry.per, entry.needs) == ("role-batch", "trajectory", ("lengths",))
    assert (entry.kwargs, entry.required) == (("power", "alpha"), ("power",))


def test_a_misspelt_keyword_is_an_error_and_not_lost(make, register):
    """B49: also where the estimator would swallow it in **kwargs."""

    @register("swallows")
    def swallows(rewards, alpha=1.0, **kwargs):
        return rewards, rewards

    for estimator in ("swallows", "grpo", "reinforce"):
        with pytest.raises(ValueError, match=f"'alhpa' of {estimator}"):
            collect([make.group([1, 0])], estimator=estimator, estimator_kwargs={"alhpa": 2})


def test_each_estimator_takes_its_own_among_the_keywords(make, advantages_of):
    """k belongs to pass_at_k, ddof to grpo: with std ddof 1 of [1, 0] = .7071068, .5 / .7071078 = .7071058."""
    groups = [make.group([1, 0], "a:solver"), make.group([1, 0, 0], "a:judge")]
    collect(groups, estimator_map={"judge": "pass_at_k"}, estimator_kwargs={"k": 3, "ddof": 1})
    assert advantages_of(groups)[0] == pytest.approx([0.7071058, -0.7071058], abs=1e-7)
    assert advantages_of(groups)[1] == [1, 0, 0]  # best of 3 falls from 1 to 0 without the first, and stays without another


def test_a_required_keyword_that_is_missing_is_named(make, register):
    @register("powered")
    def powered(rewards, power):
        return rewards, rewards

    with pytest.raises(ValueError, match=r"'powered' needs a value for power: set rllm\.algorithm\.estimator_kwargs\.power \(.*state_keys"):
        collect([make.group([1, 0])], estimator="powered")


def test_an_unknown_estimator_is_an_error_with_suggestions(make):
    """B49."""
    with pytest.raises(ValueError, match="did you mean 'grpo'"):
        collect([make.group([1, 0])], estimator="grpoo")


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda rewards: rewards[:1], "got 1 for 2 groups"),
        (lambda rewards: [r[:1] for r in rewards], r"shape \(1,\) for 2 trajectories"),
        (lambda rewards: [np.array([0, np.nan])] * 2, "not finite"),
    ],
)
def test_a_misshapen_result_is_an_error_that_names_the_estimator(make, register, result, message):
    register("broken")(lambda rewards: (result(rewards), rewards))
    with pytest.raises(ValueError, match=f"'broken'.*{message}"):
        collect([make.group([1, 0], "a:solver"), make.group([1, 0], "b:solver")], estimator="broken")


@pytest.mark.parametrize("result", [[[0.0, 0.0]] * 2, np.zeros((2, 2)), None])
def test_anything_but_a_pair_is_an_error_that_names_the_estimator(make, register, result):
    """B01: also where it happens to have two entries."""
    register("bare")(lambda rewards: result)
    with pytest.raises(ValueError, match=r"'bare'.*expected a pair"):
        collect([make.group([1, 0], "a:solver"), make.group([1, 0], "b:solver")], estimator="bare")


@pytest.mark.parametrize(
    ("per", "result", "message"),
    [
        ("step", [np.zeros(2), np.zeros(1)], r"shape \(1,\) for 2 steps"),
        ("token", [[np.zeros(2)], [np.zeros(2)] * 2], "got 1 for 2 steps"),
        ("token", [[np.zeros(2)] * 2, [np.zeros(2), np.zeros(3)]], r"shape \(3,\) for 2 response tokens"),
    ],
)
def test_misshapen_steps_and_tokens_are_errors_that_name_the_trajectory(make, register, per, result, message):
    register("broken", per=per)(lambda rewards: ([result], [result]))
    group = make.group([1, 0])
    group.trajectories = [make.trajectory(1, step_rewards=[0, 0]) for _ in range(2)]
    with pytest.raises(ValueError, match=f"trajectory .*{message}"):
        collect([group], estimator="broken")


def test_a_dropped_group_has_no_advantage_and_is_not_counted(make, advantages_of):
    groups = [make.group([1], "a:solver"), make.group([1, 0], "b:solver")]
    metrics = collect(groups, estimator_kwargs={"singleton": "drop"}, norm_adv_by_std_in_grpo=False)
    assert advantages_of(groups) == [[None], [0.5, -0.5]]
    assert metrics["advantage/solver/max"] == 0.5


# -------------------------------------------------------------------------------------------------- precomputed ones


def test_precomputed_numbers_stand_for_all_tokens_and_lists_for_one_each(make, caplog):
    group = make.group([1, 0, 0])
    steps = [t.steps[0] for t in group.trajectories]
    steps[0].advantage, steps[1].advantage = 3, [1, 2.5]
    metrics = collect([group], use_precomputed_advantage=True)
    assert [step.advantage for step in steps] == [[3.0, 3.0], [1.0, 2.5], [0.0, 0.0]]
    assert [record.message for record in caplog.records] == ["1 steps of groups with precomputed advantages have none; they count as 0"]
    assert metrics["advantage/solver/mean"] == pytest.approx((3 + 3 + 1 + 2.5 + 0 + 0) / 6)


def test_a_precomputed_list_of_another_length_is_0_with_a_warning_that_names_the_group(make, caplog):
    group = make.group([1, 0], "task7:solver")
    group.trajectories[0].steps[0].advantage = [1.0, 2.0, 3.0]
    collect([group], use_precomputed_advantage=True)
    assert group.trajectories[0].steps[0].advantage == [0.0, 0.0]
    assert "task7:solver" in caplog.text
    assert "3 precomputed advantages for 2 response tokens" in caplog.text


@pytest.mark.parametrize("bad", ["1.0", True, {"a": 1}, [1.0, None], float("nan"), [1.0, float("inf")]])
def test_anything_else_precomputed_is_an_error_that_names_group_and_step(make, bad):
    group = make.group([1, 0], "task7:solver")
    group.trajectories[1] = make.trajectory(0.0, step_rewards=[0, 0])
    group.trajectories[1].steps[1].advantage = bad
    with pytest.raises(ValueError, match=r"task7:solver.*step 1"):
        collect([group], use_precomputed_advantage=True)


def test_groups_without_precomputed_advantages_go_through_the_estimator(make, advantages_of):
    groups = [make.group([1, 0], "a:solver"), make.group([1, 0], "b:solver")]
    groups[0].trajectories[0].steps[0].advantage = 7.0
    collect(groups, use_precomputed_advantage=True, norm_adv_by_std_in_grpo=False)
    assert advantages_of(groups) == [[[7, 7], [0, 0]], [0.5, -0.5]]


def test_precomputed_advantages_are_overwritten_with_one_warning_unless_asked_for(make, advantages_of, caplog):
    groups = [make.group([1, 0], "a:solver"), make.group([1, 0], "b:judge")]
    for group in groups:
        group.trajectories[0].steps[0].advantage = 7.0
    with caplog.at_level(logging.WARNING):
        collect(groups, norm_adv_by_std_in_grpo=False)
    assert advantages_of(groups) == [[0.5, -0.5], [0.5, -0.5]]
    assert len(caplog.records) == 1
    assert "2 groups" in caplog.text


# ----------------------------------------------------------------------------------------------------------- metrics


def test_metrics_of_a_batch(make):
    """Rewards 1,0,0,0 | 1,1 | 0,0 | 0.5,0.5 | 1 over groups a-e."""
    rewards = {"a": [1, 0, 0, 0], "b": [1, 1], "c": [0, 0], "d": [0.5, 0.5], "e": [1]}
    metrics = collect([make.group(r, f"{task}:solver") for task, r in rewards.items()], estimator="dr_grpo")
    assert all(type(value) is float for value in metrics.values())
    # 11 rewards with sum 1 + 2 + 0 + 1 + 1 = 5 and sum of squares 1 + 2 + 0 + .5 + 1 = 4.5
    assert metrics["reward/solver/mean"] == pytest.approx(5 / 11)
    assert metrics["reward/solver/std"] == pytest.approx((4.5 / 11 - (5 / 11) ** 2) ** 0.5)
    assert (metrics["reward/solver/max"], metrics["reward/solver/min"]) == (1, 0)
    # advantages .75, -.25 x 3 and seven zeros
    assert metrics["advantage/solver/mean"] == pytest.approx(0, abs=1e-15)
    assert metrics["advantage/solver/max"] == 0.75
    assert metrics["advantage/solver/fraction_zero"] == pytest.approx(7 / 11)
    # of the four groups of two or more: a differs, b is too easy, c too hard, d neither
    assert (metrics["batch/solver/total"], metrics["batch/solver/informative"]) == (4, 1)
    assert metrics["batch/solver/fractions/effective"] == metrics["batch/solver/fractions/too_easy"] == 0.25
    assert metrics["batch/solver/fractions/too_hard"] == 0.25
    # group means 0, .25, .5, 1: the median lies between .25 and .5, p10 at .3 of the way from 0 to .25
    assert metrics["batch/solver/group_reward_mean/p50"] == pytest.approx(0.375)
    assert metrics["batch/solver/group_reward_mean/p10"] == pytest.approx(0.075)
    # group stds 0, 0, 0, .4330127: p90 at .7 of the way from the third to the fourth
    assert metrics["batch/solver/group_reward_std/p90"] == pytest.approx(0.7 * (3 / 16) ** 0.5)


def test_without_advantages_only_reward_metrics_come_back_and_steps_stay_untouched(make, advantages_of):
    groups = [make.group([1, 0])]
    metrics = collect(groups, collect_advantage=False)
    assert set(metrics) == {"reward/solver/mean", "reward/solver/std", "reward/solver/max", "reward/solver/min"}
    assert advantages_of(groups) == [[None, None]]


@pytest.mark.parametrize("groups", [[], [[]]])
def test_nothing_gives_no_metrics(make, groups):
    assert collect([make.group(rewards) for rewards in groups]) == {}


def test_groups_of_one_have_no_difficulty(make):
    metrics = collect([make.group([1], "a:solver"), make.group([0], "b:solver")])
    assert metrics["batch/solver/total"] == metrics["batch/solver/informative"] == 0
    assert not [key for key in metrics if "fractions" in key or "group_reward" in key]


@pytest.mark.parametrize("reward", [10**400, "much", [1.0], float("nan"), None])
def test_a_reward_that_is_no_finite_number_is_named_with_its_trajectory(make, reward):
    group = make.group([1, 0], "a:solver")
    group.trajectories[1].reward = reward
    with pytest.raises(ValueError, match=f"group 'a:solver', trajectory {group.trajectories[1].uid}.*its reward is"):
        collect([group])


def test_what_an_estimator_refuses_is_told_with_its_role(make):
    with pytest.raises(ValueError, match=r"estimator 'maxrl', role 'solver': .*at least 0"):
        collect([make.group([1, -1], "a:solver")], estimator="maxrl")
    group = make.group([1, 0], "a:solver")
    for trajectory in group.trajectories:
        trajectory.steps[0].reward = 1.0
        trajectory.steps[0].info["state_key"] = {"not": "hashable"}
    with pytest.raises(ValueError, match=r"'gigpo', role 'solver': needs 'state_keys'.*hashable"):
        collect([group], estimator="gigpo")
