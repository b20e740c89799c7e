"""The configuration: one dataclass a section, each knob declared once, and `load_config(argv)`.

    presets, key=value overrides  ->  references  ->  typed by the dataclasses below  ->  names and keywords checked
             config_sources.py                         schema.py, values.py              config_checks.py

`load_config` returns an OmegaConf `DictConfig` holding every key; `Config.from_config` turns one (or a plain dict) into the
typed dataclasses that the library reads. To add a knob: add a field here (below `rllm`) or in `config_sections.py`, with one
comment line giving unit and scope. Checks of one value's range or across fields stand in `__post_init__`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig

from rllm_lightning import config_checks, config_sources, schema
from rllm_lightning.config_sections import (
    SEEDS,
    DataConfig,
    LightningConfig,
    ModelConfig,
    RolloutEngineConfig,
    SamplingSection,
    TaskConfig,
    TrainingConfig,
    WandbConfig,
    WarmStartConfig,
)
from rllm_lightning.config_sources import as_dict_config
from rllm_lightning.registry import load_plugins
from rllm_lightning.schema import check
from rllm_lightning.types import DEFAULT_TRAJ_NAME, TerminationReason
from rllm_lightning.values import Mismatch, coerce


class ConfigError(ValueError):
    """A configuration that cannot run. `problems` holds one line for each thing that is wrong."""

    def __init__(self, problems: Sequence[str]):
        self.problems = list(dict.fromkeys(" ".join(problem.splitlines()) for problem in problems))
        super().__init__("\n".join(self.problems))


class rLLMAdvantageEstimator(StrEnum):
    """The built-in advantage estimators. Any other name is `OTHER`; configs keep the name itself beside this enum."""

    GRPO = "grpo"
    REINFORCE = "reinforce"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    RLOO = "rloo"
    GRPO_TRL = "grpo_trl"
    GRPO_VERL = "grpo_verl"
    GRPO_NEMO = "grpo_nemo"
    DR_GRPO = "dr_grpo"
    GRPO_BATCH_STD = "grpo_batch_std"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    PRPO = "prpo"
    OPO = "opo"
    GPG = "gpg"
    MAXRL = "maxrl"
    MAPO = "mapo"
    MEDIAN_MAD = "median_mad"
    PASS_AT_K = "pass_at_k"
    GRPO_PASSK = "grpo_passk"
    GDPO = "gdpo"
    REMAX = "remax"
    GAE = "gae"
    GIGPO = "gigpo"
    TURN_LEVEL = "turn_level"
    RAE = "rae"
    DISTILL = "distill"
    OTHER = "other"

    @classmethod
    def _missing_(cls, value: object) -> rLLMAdvantageEstimator:
        return cls.OTHER


EstimatorName = rLLMAdvantageEstimator | str


def estimator_name(estimator: EstimatorName) -> str:
    """The registered name of an estimator given as enum member or text."""
    return estimator.value if isinstance(estimator, rLLMAdvantageEstimator) else str(estimator)


def _as_estimator(name: Any) -> EstimatorName:
    """The enum member of a built-in name, else the name itself: a custom name is never lost."""
    if isinstance(name, rLLMAdvantageEstimator) or not isinstance(name, str):
        return name
    member = rLLMAdvantageEstimator(name)
    return name if member is rLLMAdvantageEstimator.OTHER else member


# ------------------------------------------------------------------------------------------------------------ rllm.*


@dataclass
class RolloutCorrectionConfig:
    """Importance weights between the sampler's and the trainer's log-probs."""

    mode: Literal["none", "tis", "mask"] = "none"  # none; tis: weight truncated at cap; mask: weight, 0 where it exceeds cap
    level: Literal["token", "sequence"] = "token"  # ratio of each token, or of the whole response
    cap: float = 2.0  # largest weight (> 0)
    bypass_mode: bool = False  # take the sampler's log-probs as the old ones instead of recomputing them

    def __post_init__(self) -> None:
        check(self, cap="(0, inf)")


@dataclass
class AlgorithmConfig:
    """Advantage estimator, policy loss and learning-rate schedule (`rllm.algorithm`)."""

    use_rllm: bool = False  # needed (true) for traj_group_adv_estimator_map, without other effect
    estimator: EstimatorName = field(default=rLLMAdvantageEstimator.GRPO, metadata={"key": "adv_estimator"})
    estimator_map: dict[str, Any] = field(default_factory=dict)  # role -> estimator, or [estimator, loss_fn]
    loss_fn_map: dict[str, str] = field(default_factory=dict)  # role -> loss, or estimator -> loss where loss_fn is null
    estimator_kwargs: dict[str, Any] = field(default_factory=dict)  # further keywords of the estimator
    stepwise_advantage_mode: Literal["broadcast", "per_step"] = field(default="broadcast", metadata={"key": None})
    norm_adv_by_std_in_grpo: bool = True  # divide group-centred rewards by the group's std
    use_precomputed_advantage: bool = False  # use the advantages that a workflow put on its steps
    loss_fn: str | None = None  # null: ppo for grpo, importance_sampling for every other estimator
    loss_kwargs: dict[str, Any] = field(default_factory=dict)  # further keywords of the loss, such as clip_low
    loss_agg_mode: Literal[
        "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "prompt-mean"
    ] = "token-mean"  # how per-token losses become one number, by global counts
    loss_norm_length: int | None = None  # tokens; the constant of seq-mean-token-sum-norm (null: data.max_response_length)
    kl_beta: float = 0.0  # weight of the KL to the reference policy (0: no reference is kept)
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_in: Literal["loss", "reward"] = "loss"  # a term of the loss, or subtracted from each trajectory's reward
    entropy_coeff: float = 0.0  # weight of the entropy bonus
    value_coeff: float = 0.1  # weight of the value head's squared error, where an estimator needs values
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = -1  # optimizer steps; below 0: use warmup_steps_ratio
    warmup_steps_ratio: float = 0.0  # share of all optimizer steps, in [0, 1]

    def __post_init__(self) -> None:
        self.estimator = _as_estimator(self.estimator)
        entries = {role: _as_map_entry(entry) for role, entry in self.estimator_map.items()}
        self.estimator_map = {role: entry for role, entry in entries.items() if _is_map_entry(entry)}
        if self.stepwise_advantage_mode == "per_step":
            warnings.warn("stepwise_advantage mode 'per_step' is deprecated; 'broadcast' is used", DeprecationWarning, stacklevel=3)
            self.stepwise_advantage_mode = "broadcast"
        check(
            self,
            *(
                (role in self.estimator_map, f"estimator_map.{role}: expected an estimator or [estimator, loss_fn], got {entry!r}")
                for role, entry in entries.items()
            ),
            loss_norm_length="[1, inf)",
            kl_beta="[0, inf)",
            warmup_steps_ratio="[0, 1]",
        )

    def estimator_of(self, role: str) -> str:
        """The name of the estimator that trajectories of `role` go through."""
        entry = self.estimator_map.get(role, self.estimator)
        return estimator_name(entry[0] if isinstance(entry, tuple) else entry)

    def loss_of(self, role: str) -> str:
        """The name of the policy loss of `role`: its map entry, else `loss_fn`, else the default of its estimator."""
        entry = self.estimator_map.get(role)
        if isinstance(entry, tuple):
            return entry[1]
        if role in self.loss_fn_map:
            return self.loss_fn_map[role]
        if self.loss_fn is not None:
            return self.loss_fn
        estimator = self.estimator_of(role)
        return self.loss_fn_map.get(estimator, "ppo" if estimator == "grpo" else "importance_sampling")

    @classmethod
    def from_config(cls, config: DictConfig | Mapping[str, Any]) -> AlgorithmConfig:
        """The algorithm of a full config: `config.rllm.algorithm`, and the mode under `config.rllm.stepwise_advantage`.

        Raises:
            ConfigError: a key or value does not fit.
        """
        problems: list[str] = []
        tree = config_sources.resolve(config_sources.read_python(config, Config, problems), Config, problems)
        problems += config_checks.check_two_homes(tree)
        rllm = tree.get("rllm")
        if isinstance(rllm, Mapping):
            rllm = {key: value for key, value in rllm.items() if key in ("algorithm", "stepwise_advantage")}
        algorithm = schema.build(RLLMConfig, rllm, problems, "rllm.", Config).algorithm
        problems += config_checks.check_algorithm(algorithm)
        if problems:
            raise ConfigError(problems)
        return algorithm


def _as_map_entry(entry: Any) -> Any:
    if isinstance(entry, list | tuple) and len(entry) == 2:
        return (_as_estimator(entry[0]), entry[1])
    return _as_estimator(entry)


def _is_map_entry(entry: Any) -> bool:
    return all(isinstance(part, str) for part in (entry if isinstance(entry, tuple) else (entry,)))


@dataclass
class StepwiseAdvantageConfig:
    mode: Literal["broadcast", "per_step"] = "broadcast"  # per_step is deprecated and means broadcast
    norm_adv_by_std_in_grpo: bool | None = None  # old home of rllm.algorithm.norm_adv_by_std_in_grpo (null: not given)


@dataclass
class CompactFilteringConfig:
    """Which termination reasons take an episode out of training (`rllm.compact_filtering`)."""

    enable: bool = False
    mask_max_prompt_length_exceeded: bool = False
    mask_max_response_length_exceeded: bool = False
    mask_env_done: bool = False
    mask_max_turns_exceeded: bool = False
    mask_timeout: bool = False
    mask_unknown: bool = False
    mask_error: bool = False

    def should_mask(self, reason: TerminationReason | None) -> bool:
        """Whether an episode that ended for `reason` (None counts as unknown) is left out."""
        return self.enable and getattr(self, f"mask_{(reason or TerminationReason.UNKNOWN).value}")


@dataclass
class TransformConfig:
    """How episodes become trajectory groups."""

    impute_missing_names: bool = True  # an unnamed trajectory gets "{default_traj_name}_{position}"
    default_traj_name: str = DEFAULT_TRAJ_NAME
    drop_unnamed_traj: bool = False  # leave unnamed trajectories out instead
    broadcast: bool = True  # a missing trajectory reward is filled from its steps


@dataclass
class RejectionSamplingConfig:
    """Which groups are trained on."""

    mode: Literal["none", "episode", "group"] = "none"
    min_partial_solve_tasks: int = 1  # episode mode: partly solved tasks to wait for
    min_trajs_per_group: int = 2  # group mode: smaller groups are dropped
    filter_uniform_groups: bool = False  # group mode: drop groups whose rewards are all equal

    def __post_init__(self) -> None:
        check(self, min_partial_solve_tasks="[1, inf)", min_trajs_per_group="[1, inf)")


@dataclass
class RejectionSampleSection(RejectionSamplingConfig):
    """`rllm.rejection_sample`: the filter and how many more tasks are drawn for it."""

    enable: bool = False  # false: mode is none
    multiplier: float = 1.0  # tasks drawn a batch, as a multiple of data.train_batch_size

    def __post_init__(self) -> None:
        super().__post_init__()
        check(
            self,
            (self.multiplier == 1 or self.enable, f"multiplier: {self.multiplier} needs rllm.rejection_sample.enable=true"),
            (self.mode == "none" or self.enable, f"mode: {self.mode} needs rllm.rejection_sample.enable=true"),
            multiplier="[1, inf)",
        )


@dataclass
class WorkflowConfig:
    name: str = "single_turn"  # registered workflow
    workflow_args: dict[str, Any] = field(default_factory=dict)  # keywords of the workflow's constructor
    n_parallel_tasks: int = 256  # workflows running at once, per rank
    retry_limit: int = 1  # runs of a task at the most, while it ends in an error
    raise_on_error: bool = True  # after the last try: raise, or keep the failed episode
    timeout: float = 1e6  # seconds, per run of a workflow
    gamma: float = 0.0  # discount of step rewards (0: none)
    reward_bonus_coeff: float = 0.0  # weight of the bonus shaping of step rewards

    def __post_init__(self) -> None:
        check(self, n_parallel_tasks="[1, inf)", retry_limit="[1, inf)", timeout="(0, inf]", gamma="[0, 1]")


@dataclass
class RolloutConfig:
    n: int = 8  # rollouts of a task in training
    n_val: int = 1  # rollouts of a task in validation

    def __post_init__(self) -> None:
        check(self, n="[1, 65536]", n_val="[1, 65536]")  # beyond, a number is a slip, and lists of that length are made at the start


@dataclass
class TrainerConfig:
    total_epochs: int = 1  # passes over the training tasks (ignored where total_batches > 0)
    total_batches: int = -1  # > 0: stop after exactly so many batches, cycling over epochs
    logger: list[str] = field(default_factory=lambda: ["console", "csv", "wandb"])  # registered trackers
    project_name: str = "rllm-lightning"
    experiment_name: str = "default"
    test_freq: int = 10  # batches between validations (<= 0: only before and after training)
    save_freq: int = -1  # batches between checkpoints (<= 0: only at the end)
    keep_checkpoints: int = 2  # newest step checkpoints that stay (<= 0: all); best.ckpt, the one with the best validation, stays too
    val_before_train: bool = True
    val_only: bool = False  # validate and stop
    resume: str | None = None  # null or never; auto: the newest run of this name and config; a run directory or checkpoint file


@dataclass
class EpisodeLoggingConfig:
    log_episodes: bool = True  # write every episode to the run directory
    episode_log_dir: str | None = None  # null: {run directory}/episodes


@dataclass
class RLLMConfig:
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    stepwise_advantage: StepwiseAdvantageConfig = field(default_factory=StepwiseAdvantageConfig)
    compact_filtering: CompactFilteringConfig = field(default_factory=CompactFilteringConfig)
    rejection_sample: RejectionSampleSection = field(default_factory=RejectionSampleSection)
    workflow: WorkflowConfig = field(default_factory=WorkflowConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    episode_logging: EpisodeLoggingConfig = field(default_factory=EpisodeLoggingConfig)

    def __post_init__(self) -> None:
        if self.stepwise_advantage.mode == "per_step":
            warnings.warn("rllm.stepwise_advantage.mode=per_step is deprecated; broadcast is used", DeprecationWarning, stacklevel=3)
            self.stepwise_advantage.mode = "broadcast"
        if (old_home := self.stepwise_advantage.norm_adv_by_std_in_grpo) is not None:
            self.algorithm.norm_adv_by_std_in_grpo = old_home
            self.stepwise_advantage.norm_adv_by_std_in_grpo = None


# ------------------------------------------------------------------------------------------------------------- whole


@dataclass
class Config:
    """The whole configuration of a run."""

    rllm: RLLMConfig = field(default_factory=RLLMConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    sampling: SamplingSection = field(default_factory=SamplingSection)
    rollout_engine: RolloutEngineConfig = field(default_factory=RolloutEngineConfig)
    lightning: LightningConfig = field(default_factory=LightningConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    seed: int = 0  # of everything random
    run_root: str = "runs"  # folder that run directories are made in
    plugins: list[str] = field(default_factory=list)  # the user's own modules, imported first

    def __post_init__(self) -> None:
        check(self, seed=SEEDS)

    @property
    def data_seed(self) -> int:
        return self.seed if self.data.seed is None else self.data.seed

    @classmethod
    def from_config(cls, config: DictConfig | Mapping[str, Any] | Config) -> Config:
        """The typed form of a config. Keys that are not given have their defaults.

        Raises:
            ConfigError: with one line for every unknown key, wrong type, value out of range and unregistered name.
        """
        if isinstance(config, Config):
            return config
        problems: list[str] = []
        return _typed(config_sources.read_python(config, Config, problems), problems)


# -------------------------------------------------------------------------------------------------------------- loading


def load_config(argv: Sequence[str] = (), presets: str | Path | None = None, default: str | None = None) -> DictConfig:
    """The resolved configuration of a command line.

    Args:
        argv: names of presets and `key=value` overrides (also `--key=value`, `--key value`, `--flag`).
        presets: folder of the preset YAML files.
        default: the preset used when `argv` names none.

    Raises:
        ConfigError: with one line for every problem; nothing expensive has happened by then.
    """
    problems: list[str] = []
    tree = config_sources.read_argv(argv, Config, problems, presets, default)
    return as_dict_config(_typed(tree, problems))


def _typed(tree: dict[str, Any], problems: list[str]) -> Config:
    """The config of a tree, with its plugins imported; every problem, those found before included, is in the `ConfigError`."""
    problems += _import_plugins(tree.get("plugins"))
    tree = config_sources.resolve(tree, Config, problems)
    problems += config_checks.check_two_homes(tree)
    config = schema.build(Config, tree, problems)
    problems += config_checks.check_names(config)
    if problems:
        raise ConfigError(problems)
    return config


def _import_plugins(given: Any) -> list[str]:
    problems = []
    try:
        for module in coerce(given, list[str]):
            try:
                load_plugins([module])
            except ValueError as error:
                problems.append(str(error))
    except Mismatch:
        pass  # `build` names it
    return problems
