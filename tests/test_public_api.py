"""The names and signatures that users of rLLM's unified trainer know, written down by hand from the specification.

A function may take more than is written here, by keyword and with a default; it may not lose or reorder anything.
"""

import dataclasses
import importlib
import inspect

import pytest

import rllm_lightning
from rllm_lightning import types

SIGNATURES = {
    # advantages
    "register_rllm_adv_estimator": "(name)",
    "get_rllm_adv_estimator": "(name)",
    "collect_reward_and_advantage_from_trajectory_groups": "(groups, algorithm_config, collect_advantage=True)",
    "calculate_grpo_advantages": "(rewards, norm_adv_by_std_in_grpo=True, episilon=1e-06, **kwargs)",
    "calculate_reinforce_advantages": "(rewards, **kwargs)",
    "calculate_reinforce_plus_plus_baseline_advantages": "(rewards, epsilon=1e-06, **kwargs)",
    "calculate_rloo_advantages": "(rewards, **kwargs)",
    "calculate_grpo_advantages_per_group": "(rewards, norm_adv_by_std_in_grpo=True, episilon=1e-06)",
    "calculate_rloo_advantages_per_group": "(rewards)",
    # grouping and filtering
    "transform_episodes_to_trajectory_groups": (
        "(episodes, transform_config, compact_filtering_config=None, metrics_prefix='groups', traj_grouping_hook=...)"
    ),
    "apply_rejection_sampling_and_filtering": "(episodes, groups, config, state)",
    # configuration
    "CompactFilteringConfig": (
        "(enable=False, mask_max_prompt_length_exceeded=False, mask_max_response_length_exceeded=False, mask_env_done=False, "
        "mask_max_turns_exceeded=False, mask_timeout=False, mask_unknown=False, mask_error=False)"
    ),
    "TransformConfig": "(impute_missing_names=True, default_traj_name='default_traj_name', drop_unnamed_traj=False, broadcast=True)",
    "RejectionSamplingConfig": "(mode='none', min_partial_solve_tasks=1, min_trajs_per_group=2, filter_uniform_groups=False)",
    "AlgorithmConfig.from_config": "(config)",
    "CompactFilteringConfig.should_mask": "(self, reason)",
    # types
    "Step.from_model_output": "(model_output, messages=None, action=None)",
    "Trajectory.is_cumulative": "(self)",
    # workflows
    "Workflow": "(rollout_engine, executor, timeout=1000000.0, gamma=0.0, reward_bonus_coeff=0.0, **kwargs)",
    "Workflow.run": "async (self, task, uid, **kwargs)",
    "Workflow.run_with_termination_handling": "async (self, task, uid, **kwargs)",
    "Workflow.commit": "(self, name=None, agent=None, trajectory=None, reset=False)",
    "Workflow.reset": "(self, task=None, uid=None)",
    "Workflow.collect_trajectories": "(self)",
    "Workflow.compute_trajectory_reward": "(self, trajectory)",
    "Workflow.adjust_step_rewards": "(self, trajectory)",
    "Workflow.assign_episode_correctness": "(self, episode)",
    "Workflow.collect_metrics": "(self, episode)",
    "Workflow.postprocess_episode": "(self, episode, termination_reason=None, error=None)",
    "Workflow.is_multithread_safe": "(self)",
    "Workflow.run_in_executor": "async (self, fn, *args, **kwargs)",
    "UnifiedWorkflowEngine": (
        "(workflow_cls, workflow_args, rollout_engine, config=None, n_parallel_tasks=None, retry_limit=None, raise_on_error=None, "
        "episode_logger=None)"
    ),
    "UnifiedWorkflowEngine.execute_tasks": "async (self, tasks, task_ids=None, is_validation=False, **kwargs)",
    # backend and trainer
    "BackendProtocol.init_rollout_engine": "(self, **configs)",
    "BackendProtocol.validate_config": "(self)",
    "BackendProtocol.get_dataloader": "(self, dataset, trainer_state)",
    "BackendProtocol.shutdown": "(self)",
    "BackendProtocol.generate_episodes": "async (self, batch, agent_workflow_engine, is_validation=False)",
    "BackendProtocol.transform_to_backend_batch": "(self, trainer_state)",
    "BackendProtocol.process_backend_batch": "async (self, trainer_state)",
    "BackendProtocol.compute_advantages": "(self, trainer_state, algorithm_config)",
    "BackendProtocol.update_policy": "(self, trainer_state)",
    "BackendProtocol.on_train_start": "async (self, trainer_state)",
    "BackendProtocol.on_train_end": "async (self, trainer_state)",
    "BackendProtocol.on_epoch_start": "async (self, trainer_state)",
    "BackendProtocol.on_epoch_end": "async (self, trainer_state)",
    "BackendProtocol.on_batch_start": "async (self, trainer_state)",
    "BackendProtocol.on_batch_end": "async (self, trainer_state)",
    "BackendProtocol.on_policy_updated": "async (self, trainer_state)",
    "BackendProtocol.on_validation_start": "async (self, trainer_state)",
    "BackendProtocol.on_validation_end": "async (self, trainer_state)",
    "TrainerState.reset_batch": "(self)",
    "UnifiedTrainer": (
        "(backend_cls, config, workflow_class, train_dataset=None, val_dataset=None, workflow_args=None, backend_args=None, *, "
        "traj_grouping_hook=None, traj_group_adv_estimator_map=None, tables=None, **kwargs)"
    ),
    "UnifiedTrainer.fit": "(self)",
    "UnifiedTrainer.fit_async": "async (self)",
    "UnifiedTrainer.shutdown": "(self)",
    "AgentTrainer": "(config, workflow_class, train_dataset=None, val_dataset=None, backend='lightning', **kwargs)",
    "AgentTrainer.train": "(self)",
    # one place to add
    "register_policy_loss": "(name)",
    "register_task": "(name)",
    "register_workflow": "(name)",
    "register_rollout_engine": "(name)",
    "register_tracker": "(name)",
    "load_plugins": "(modules)",
    "load_config": "(argv=())",
}


def parameters(signature):
    """ "(a, b=1, *, c=None)" -> its parameters without annotations; `...` stands for any default."""
    scope: dict = {}
    exec(f"def f{signature.removeprefix('async ')}: pass", scope)
    return list(inspect.signature(scope["f"]).parameters.values())


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_public_signature_is_that_of_the_specification(name):
    first, _, attribute = name.partition(".")
    found = getattr(rllm_lightning, first)
    found = getattr(found, attribute) if attribute else found
    expected = parameters(SIGNATURES[name])
    actual = list(inspect.signature(found).parameters.values())

    def shape(parameter):
        return (parameter.name, parameter.kind)

    own = [p for p in actual if shape(p) in map(shape, expected)]
    assert list(map(shape, own)) == list(map(shape, expected))
    assert [p.default for p, wanted in zip(own, expected, strict=True) if wanted.default is not ...] == [
        wanted.default for wanted in expected if wanted.default is not ...
    ]
    further = [p for p in actual if p not in own]
    assert all(p.kind is p.KEYWORD_ONLY or p.default is not p.empty or p.kind is p.VAR_KEYWORD for p in further)
    positional = [p for p in actual if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional[: len([p for p in own if p.kind is p.POSITIONAL_OR_KEYWORD])] == [p for p in own if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert inspect.iscoroutinefunction(found) is SIGNATURES[name].startswith("async")


# Public name -> the module of the specification that has it too.
HOMES = {
    "types": ["Step", "Trajectory", "Episode", "TrajectoryGroup", "TerminationReason", "TerminationEvent", "ModelOutput", "Action"],
    "algorithms.advantage": [
        "RLLM_ADV_ESTIMATOR_REGISTRY",
        "register_rllm_adv_estimator",
        "get_rllm_adv_estimator",
        "collect_reward_and_advantage_from_trajectory_groups",
        "calculate_grpo_advantages",
        "calculate_reinforce_advantages",
        "calculate_reinforce_plus_plus_baseline_advantages",
        "calculate_rloo_advantages",
    ],
    "algorithms.rl_algo": ["calculate_grpo_advantages_per_group", "calculate_rloo_advantages_per_group"],
    "algorithms.transform": ["transform_episodes_to_trajectory_groups"],
    "algorithms.rejection_sampling": ["apply_rejection_sampling_and_filtering"],
    "config": [
        "rLLMAdvantageEstimator",
        "AlgorithmConfig",
        "CompactFilteringConfig",
        "TransformConfig",
        "RejectionSamplingConfig",
        "load_config",
    ],
    "workflows": ["Workflow", "UnifiedWorkflowEngine"],
    "rollout.engine": ["RolloutEngine"],
    "trainer": ["BackendProtocol", "TrainerState", "UnifiedTrainer", "AgentTrainer"],
    "registry": ["Registry", "load_plugins", "register_policy_loss", "register_task", "register_workflow", "register_rollout_engine"],
}


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in HOMES.items() for name in names])
def test_a_public_name_is_the_same_in_its_module_and_in_the_package(module, name):
    assert getattr(importlib.import_module(f"rllm_lightning.{module}"), name) is getattr(rllm_lightning, name)


def test_every_exported_name_exists_and_is_listed():
    for name in rllm_lightning.__all__:
        assert getattr(rllm_lightning, name) is vars(rllm_lightning)[name]  # loaded once, then a plain attribute
    assert set(rllm_lightning.__all__) <= set(dir(rllm_lightning))
    with pytest.raises(AttributeError, match="has no attribute 'Stepp'"):
        _ = rllm_lightning.Stepp


def test_the_algorithm_config_begins_with_rllms_fields():
    names = [field.name for field in dataclasses.fields(rllm_lightning.AlgorithmConfig)]
    rllm = ["estimator", "estimator_map", "loss_fn_map", "stepwise_advantage_mode", "norm_adv_by_std_in_grpo", "use_precomputed_advantage"]
    assert [name for name in names if name in rllm] == sorted(rllm, key=names.index)
    assert {*rllm, "use_rllm", "loss_fn", "lr_schedule", "warmup_steps", "warmup_steps_ratio"} <= set(names)


def test_the_trainer_state_has_the_fields_of_the_specification():
    names = {field.name for field in dataclasses.fields(rllm_lightning.TrainerState)}
    assert names >= {
        "rs_state",
        "global_step",
        "epoch",
        "total_steps",
        "is_training",
        "weight_version",
        "timing_dict",
        "metrics",
        "extra_info",
        "episodes",
        "trajectory_groups",
        "backend_batch",
    }
    state = rllm_lightning.TrainerState()
    assert (state.has_episodes, state.has_trajectory_groups, state.has_backend_batch) == (False, False, False)


def test_the_abstract_methods_of_a_backend_are_those_of_the_pipeline():
    assert rllm_lightning.BackendProtocol.__abstractmethods__ >= {"generate_episodes", "update_policy"}
    assert rllm_lightning.Workflow.__abstractmethods__ == {"run"}
    assert rllm_lightning.RolloutEngine.__abstractmethods__ == {"get_model_response"}


def test_episode_and_group_ids_are_properties_of_the_specification():
    assert isinstance(inspect.getattr_static(types.Episode, "rollout_idx"), property)
    assert isinstance(inspect.getattr_static(types.TrajectoryGroup, "group_role"), property)
