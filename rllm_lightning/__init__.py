"""rLLM's advantage estimators and `UnifiedTrainer` on PyTorch Lightning.

Every public name is importable from here; each is loaded from its module when it is first asked for, so that
`import rllm_lightning` costs no torch import.
"""

from __future__ import annotations

from rllm_lightning.lazy import lazy_names

__version__ = "0.1.0"

__all__, __getattr__, __dir__ = lazy_names(
    __name__,
    {
        "types": "Action Episode ModelOutput RewardOutput Step TerminationEvent TerminationReason Trajectory TrajectoryGroup",
        "registry": "Registry load_plugins register_environment register_policy_loss register_rollout_engine register_scorer "
        "register_task register_tracker register_workflow",
        "config": "AlgorithmConfig CompactFilteringConfig Config ConfigError RejectionSamplingConfig TransformConfig load_config "
        "rLLMAdvantageEstimator",
        "algorithms.advantage": "RLLM_ADV_ESTIMATOR_REGISTRY calculate_grpo_advantages calculate_reinforce_advantages "
        "calculate_reinforce_plus_plus_baseline_advantages calculate_rloo_advantages "
        "collect_reward_and_advantage_from_trajectory_groups get_rllm_adv_estimator register_rllm_adv_estimator",
        "algorithms.rl_algo": "calculate_grpo_advantages_per_group calculate_rloo_advantages_per_group",
        "algorithms.transform": "transform_episodes_to_trajectory_groups",
        "algorithms.rejection_sampling": "RejectionSamplingState apply_rejection_sampling_and_filtering",
        "rollout.engine": "EngineSetup RequestContext RolloutEngine SamplingParams",
        "rollout.scripted": "ScriptedEngine",
        "rollout.hf": "HFEngine",
        "workflows.workflow": "Workflow",
        "workflows.environment": "Environment",
        "workflows.single_turn": "SingleTurnWorkflow",
        "workflows.multi_turn": "MultiTurnWorkflow",
        "workflows.solver_judge": "SolverJudgeWorkflow",
        "workflows.engine": "UnifiedWorkflowEngine",
        "tasks.task": "TaskSet",
        "trainer.protocol": "BackendProtocol TrainerState",
        "trainer.backend": "LightningBackend",
        "trainer.module": "UnifiedLightningModule",
        "trainer.unified_trainer": "AgentTrainer UnifiedTrainer",
    },
)
