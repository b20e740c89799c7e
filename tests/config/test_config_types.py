"""The configuration types as they are used from Python."""

import dataclasses
import warnings

import pytest

from rllm_lightning.config import (
    AlgorithmConfig,
    CompactFilteringConfig,
    Config,
    ConfigError,
    RejectionSamplingConfig,
    TransformConfig,
    load_config,
    rLLMAdvantageEstimator,
)
from rllm_lightning.types import TerminationReason


def test_the_estimator_enum_takes_any_name_for_other():
    assert rLLMAdvantageEstimator("anything") is rLLMAdvantageEstimator.OTHER
    assert [rLLMAdvantageEstimator(name).name for name in ("grpo", "reinforce", "reinforce_plus_plus_baseline", "rloo", "other")] == [
        "GRPO",
        "REINFORCE",
        "REINFORCE_PLUS_PLUS_BASELINE",
        "RLOO",
        "OTHER",
    ]
    assert rLLMAdvantageEstimator.GRPO == "grpo"


def test_an_algorithm_built_in_python_has_the_defaults_of_the_api():
    algorithm = AlgorithmConfig()
    expected = {
        "use_rllm": False,
        "estimator": rLLMAdvantageEstimator.GRPO,
        "estimator_map": {},
        "loss_fn_map": {},
        "stepwise_advantage_mode": "broadcast",
        "norm_adv_by_std_in_grpo": True,
        "use_precomputed_advantage": False,
        "loss_fn": None,
        "lr_schedule": "constant",
        "warmup_steps": -1,
        "warmup_steps_ratio": 0.0,
    }
    assert {name: getattr(algorithm, name) for name in expected} == expected


@pytest.mark.parametrize("given", ["rloo", rLLMAdvantageEstimator.RLOO])
def test_a_built_in_estimator_is_its_enum_member_however_it_is_given(given):
    assert AlgorithmConfig(estimator=given).estimator is rLLMAdvantageEstimator.RLOO
    assert AlgorithmConfig.from_config({"rllm": {"algorithm": {"adv_estimator": given}}}).estimator is rLLMAdvantageEstimator.RLOO


def test_an_estimator_map_holds_estimators_or_pairs_with_a_loss(typed):
    expected = {"solver": rLLMAdvantageEstimator.RLOO, "judge": ("my_adv", "cispo")}
    assert AlgorithmConfig(estimator_map={"solver": "rloo", "judge": ("my_adv", "cispo")}).estimator_map == expected
    config = typed("rllm.algorithm.estimator_map={'solver': 'rloo', 'judge': ['my_adv', 'cispo']}")
    assert config.rllm.algorithm.estimator_map == expected
    algorithm = config.rllm.algorithm
    assert [algorithm.estimator_of(role) for role in ("solver", "judge", "none")] == ["rloo", "my_adv", "grpo"]
    assert [algorithm.loss_of(role) for role in ("solver", "judge", "none")] == ["importance_sampling", "cispo", "ppo"]


@pytest.mark.parametrize("entry", ["3", "[rloo]", "[rloo, ppo, x]", "[rloo, 3]", "{a: b}", "null"])
def test_an_estimator_map_refuses_anything_else(entry, problems_of):
    (problem,) = problems_of(f"rllm.algorithm.estimator_map={{solver: {entry}}}")
    assert problem.startswith("rllm.algorithm.estimator_map.solver: expected an estimator or [estimator, loss_fn], got ")


@pytest.mark.parametrize(
    ("settings", "role", "loss"),
    [
        ({}, "solver", "ppo"),
        ({"estimator": "rloo"}, "solver", "importance_sampling"),
        ({"estimator": "my_adv"}, "solver", "importance_sampling"),
        ({"loss_fn": "cispo"}, "solver", "cispo"),
        ({"loss_fn": "cispo", "loss_fn_map": {"solver": "ppo"}}, "solver", "ppo"),
        ({"loss_fn_map": {"grpo": "cispo"}}, "solver", "cispo"),
        ({"loss_fn": "ppo", "loss_fn_map": {"grpo": "cispo"}}, "solver", "ppo"),
        ({"loss_fn": "cispo", "estimator_map": {"solver": ("rloo", "ppo")}}, "solver", "ppo"),
    ],
)
def test_the_loss_of_a_role_is_the_most_specific_one(settings, role, loss):
    """3.3: loss_fn null picks ppo for grpo and importance_sampling for every other estimator."""
    assert AlgorithmConfig(**settings).loss_of(role) == loss


def test_per_step_warns_and_becomes_broadcast(typed):
    with pytest.warns(DeprecationWarning, match="per_step"):
        assert AlgorithmConfig(stepwise_advantage_mode="per_step").stepwise_advantage_mode == "broadcast"
    with pytest.warns(DeprecationWarning, match="per_step"):
        config = typed("rllm.stepwise_advantage.mode=per_step")
    assert config.rllm.stepwise_advantage.mode == "broadcast"
    with pytest.warns(DeprecationWarning, match="per_step"):
        algorithm = AlgorithmConfig.from_config({"rllm": {"stepwise_advantage": {"mode": "per_step"}}})
    assert algorithm.stepwise_advantage_mode == "broadcast"


def test_no_warning_without_a_reason():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_config(["rllm.algorithm.adv_estimator=my_adv", "rllm.stepwise_advantage.mode=broadcast"])


def test_the_old_home_of_norm_by_std_is_honoured(typed, problems_of):
    old = "rllm.stepwise_advantage.norm_adv_by_std_in_grpo"
    new = "rllm.algorithm.norm_adv_by_std_in_grpo"
    config = load_config([f"{old}=false"])
    assert config.rllm.algorithm.norm_adv_by_std_in_grpo is False
    assert config.rllm.stepwise_advantage.norm_adv_by_std_in_grpo is None  # one home, also in config.yaml
    assert typed(f"{old}=false", f"{new}=off").rllm.algorithm.norm_adv_by_std_in_grpo is False
    wanted = [f"{new}=true and {old}=false differ; give one"]
    assert problems_of(f"{old}=false", f"{new}=true") == wanted
    with pytest.raises(ConfigError, match="differ; give one"):
        AlgorithmConfig.from_config(
            {"rllm": {"algorithm": {"norm_adv_by_std_in_grpo": True}, "stepwise_advantage": {"norm_adv_by_std_in_grpo": False}}}
        )


def test_an_algorithm_is_read_from_its_one_place_in_a_full_config():
    config = load_config(["rllm.algorithm.adv_estimator=rloo", "rllm.algorithm.kl_beta=0.1"])
    assert AlgorithmConfig.from_config(config) == Config.from_config(config).rllm.algorithm
    foreign = {"algorithm": {"adv_estimator": "grpo"}, "actor": {"lr": 1}, "rllm": {"algorithm": {"adv_estimator": "rloo"}, "agent": {}}}
    assert AlgorithmConfig.from_config(foreign).estimator is rLLMAdvantageEstimator.RLOO
    assert AlgorithmConfig.from_config({}) == AlgorithmConfig()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"rllm": {"algorithm": {"adv_estimatr": "rloo"}}}, "did you mean rllm.algorithm.adv_estimator"),
        ({"rllm": {"algorithm": {"adv_estimator": "grpoo"}}}, "did you mean 'grpo'"),
        ({"rllm": {"algorithm": {"kl_beta": "x"}}}, "rllm.algorithm.kl_beta: expected a number"),
        ({"rllm": 3}, "rllm: expected a section"),
        ({"rllm": {"algorithm": 3}}, "rllm.algorithm: expected a section"),
        (3, "config: expected a DictConfig or a dict, got 3"),
    ],
)
def test_a_wrong_algorithm_is_a_config_error(config, words):
    with pytest.raises(ConfigError, match=words):
        AlgorithmConfig.from_config(config)


@pytest.mark.parametrize("reason", TerminationReason)
def test_compact_filtering_masks_the_reasons_that_are_switched_on(reason):
    every = {f"mask_{other.value}": True for other in TerminationReason}
    assert CompactFilteringConfig(enable=True, **{f"mask_{reason.value}": True}).should_mask(reason)
    assert not CompactFilteringConfig(enable=True, **{**every, f"mask_{reason.value}": False}).should_mask(reason)
    assert not CompactFilteringConfig(enable=False, **every).should_mask(reason)


def test_no_reason_counts_as_unknown():
    assert CompactFilteringConfig(enable=True, mask_unknown=True).should_mask(None)
    assert not CompactFilteringConfig(enable=True, mask_error=True).should_mask(None)


def test_the_other_configuration_types_have_the_defaults_of_the_api():
    assert dataclasses.asdict(TransformConfig()) == {
        "impute_missing_names": True,
        "default_traj_name": "default_traj_name",
        "drop_unnamed_traj": False,
        "broadcast": True,
    }
    assert dataclasses.asdict(RejectionSamplingConfig()) == {
        "mode": "none",
        "min_partial_solve_tasks": 1,
        "min_trajs_per_group": 2,
        "filter_uniform_groups": False,
    }
    assert not any(dataclasses.asdict(CompactFilteringConfig()).values())
