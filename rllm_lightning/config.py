"""The configuration: one dataclass a section, each knob declared once, and `load_config(argv)`.

    presets (YAML files)  ->  key=value overrides  ->  interpolations  ->  typed by the dataclasses below  ->  DictConfig

`load_config` returns an OmegaConf `DictConfig` holding every key; `Config.from_config` turns one (or a plain dict) into the
typed dataclasses that the library reads. To add a knob: add a field here, with one comment line giving unit and scope. Checks
of one value's range or across fields stand in `__post_init__`; names (estimators, tasks, ...) are checked against their registries.
"""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rllm_lightning import schema
from rllm_lightning.registry import ENGINES, ESTIMATORS, LOSSES, TASKS, TRACKERS, WORKFLOWS, Registry, load_plugins
from rllm_lightning.types import DEFAULT_TRAJ_NAME, TerminationReason


class ConfigError(ValueError):
    """A configuration that cannot run. `problems` holds one line for each thing that is wrong."""

    def __init__(self, problems: Sequence[str]):
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))


class rLLMAdvantageEstimator(StrEnum):
    """The built-in advantage estimators. Any other name is `OTHER`; configs keep the name itself beside this enum."""

    GRPO = "grpo"
    REINFORCE = "reinforce"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    RLOO = "rloo"
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


def _require(checks: Iterable[tuple[bool, str]]) -> None:
    """Raise one `ValueError` with a line for every check that fails."""
    if failed := [message for holds, message in checks if not holds]:
        raise ValueError("\n".join(failed))


# ------------------------------------------------------------------------------------------------------------ rllm.*


@dataclass
class RolloutCorrectionConfig:
    """Importance weights between the sampler's and the trainer's log-probs."""

    mode: Literal["none", "tis", "mask"] = "none"  # none; tis: weight truncated at cap; mask: weight, 0 where it exceeds cap
    level: Literal["token", "sequence"] = "token"  # ratio of each token, or of the whole response
    cap: float = 2.0  # largest weight (> 0)
    bypass_mode: bool = False  # take the sampler's log-probs as the old ones instead of recomputing them

    def __post_init__(self) -> None:
        _require([(self.cap > 0, f"rllm.algorithm.rollout_correction.cap: must be above 0, got {self.cap}")])


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
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = -1  # optimizer steps; below 0: use warmup_steps_ratio
    warmup_steps_ratio: float = 0.0  # share of all optimizer steps, in [0, 1]

    def __post_init__(self) -> None:
        self.estimator = _as_estimator(self.estimator)
        self.estimator_map = {role: _as_map_entry(role, entry) for role, entry in self.estimator_map.items()}
        if self.stepwise_advantage_mode == "per_step":
            warnings.warn("stepwise_advantage mode 'per_step' is deprecated; 'broadcast' is used", DeprecationWarning, stacklevel=2)
            self.stepwise_advantage_mode = "broadcast"
        at = "rllm.algorithm."
        _require(
            [
                (0 <= self.warmup_steps_ratio <= 1, f"{at}warmup_steps_ratio: must be in [0, 1], got {self.warmup_steps_ratio}"),
                (self.kl_beta >= 0, f"{at}kl_beta: must not be negative, got {self.kl_beta}"),
                ((self.loss_norm_length or 1) > 0, f"{at}loss_norm_length: must be above 0, got {self.loss_norm_length}"),
            ]
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
        tree = _plain(config).get("rllm") or {}
        problems: list[str] = []
        own = {key: tree[key] for key in ("algorithm", "stepwise_advantage") if key in tree}
        rllm = schema.build(RLLMConfig, own, problems, "rllm.", Config)
        problems += _two_homes_of_norm(rllm, tree) if rllm else []
        if problems:
            raise ConfigError(problems)
        return rllm.algorithm


def _as_map_entry(role: str, entry: Any) -> EstimatorName | tuple[EstimatorName, str]:
    if isinstance(entry, str):
        return _as_estimator(entry)
    if isinstance(entry, list | tuple) and len(entry) == 2 and all(isinstance(part, str) for part in entry):
        return (_as_estimator(entry[0]), entry[1])
    raise ValueError(f"rllm.algorithm.estimator_map.{role}: expected an estimator or [estimator, loss_fn], got {entry!r}")


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
        at = "rllm.rejection_sample."
        _require(
            [
                (self.min_partial_solve_tasks >= 1, f"{at}min_partial_solve_tasks: must be at least 1, got {self.min_partial_solve_tasks}"),
                (self.min_trajs_per_group >= 1, f"{at}min_trajs_per_group: must be at least 1, got {self.min_trajs_per_group}"),
            ]
        )


@dataclass
class RejectionSampleSection(RejectionSamplingConfig):
    """`rllm.rejection_sample`: the filter and how many more tasks are drawn for it."""

    enable: bool = False  # false: mode is none
    multiplier: float = 1.0  # tasks drawn a batch, as a multiple of data.train_batch_size

    def __post_init__(self) -> None:
        super().__post_init__()
        at = "rllm.rejection_sample."
        _require(
            [
                (self.multiplier == 1 or self.enable, f"{at}multiplier: {self.multiplier} needs {at}enable=true"),
                (self.multiplier >= 1, f"{at}multiplier: must be at least 1, got {self.multiplier}"),
                (self.mode == "none" or self.enable, f"{at}mode: {self.mode} needs {at}enable=true"),
            ]
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
        at = "rllm.workflow."
        _require(
            [
                (self.n_parallel_tasks >= 1, f"{at}n_parallel_tasks: must be at least 1, got {self.n_parallel_tasks}"),
                (self.retry_limit >= 1, f"{at}retry_limit: must be at least 1, got {self.retry_limit}"),
                (self.timeout > 0, f"{at}timeout: must be above 0 seconds, got {self.timeout}"),
                (0 <= self.gamma <= 1, f"{at}gamma: must be in [0, 1], got {self.gamma}"),
            ]
        )


@dataclass
class RolloutConfig:
    n: int = 8  # rollouts of a task in training
    n_val: int = 1  # rollouts of a task in validation

    def __post_init__(self) -> None:
        _require(
            [
                (self.n >= 1, f"rllm.rollout.n: must be at least 1, got {self.n}"),
                (self.n_val >= 1, f"rllm.rollout.n_val: must be at least 1, got {self.n_val}"),
            ]
        )


@dataclass
class TrainerConfig:
    total_epochs: int = 1  # passes over the training tasks (ignored where total_batches > 0)
    total_batches: int = -1  # > 0: stop after exactly so many batches, cycling over epochs
    logger: list[str] = field(default_factory=lambda: ["console", "csv", "wandb"])  # registered trackers
    project_name: str = "rllm-lightning"
    experiment_name: str = "default"
    test_freq: int = 10  # batches between validations (<= 0: only before and after training)
    save_freq: int = -1  # batches between checkpoints (<= 0: only at the end)
    keep_checkpoints: int = 2  # newest step checkpoints that stay (<= 0: all)
    val_before_train: bool = True
    val_only: bool = False  # validate and stop
    resume: str | None = None  # a checkpoint file, or a run directory (its last.ckpt)


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
        if self.algorithm is None or self.stepwise_advantage is None:
            return  # a section that failed; its problems are known
        if self.stepwise_advantage.mode == "per_step":
            warnings.warn("rllm.stepwise_advantage.mode=per_step is deprecated; broadcast is used", DeprecationWarning, stacklevel=2)
            self.stepwise_advantage.mode = "broadcast"
        if (old_home := self.stepwise_advantage.norm_adv_by_std_in_grpo) is not None:
            self.algorithm.norm_adv_by_std_in_grpo = old_home


# ---------------------------------------------------------------------------------------------------------- beside rllm


@dataclass
class TaskConfig:
    """`task.name` chooses a registered task; its keyword-only parameters are the other keys."""

    name: str = "reasoning_gym"
    args: dict[str, Any] = field(default_factory=dict, metadata={"key": None})
    open_registry: ClassVar[Registry[Any]] = TASKS


@dataclass
class RolloutEngineConfig:
    """`rollout_engine.name` chooses a registered engine; its keyword-only parameters are the other keys."""

    name: str = "hf"
    args: dict[str, Any] = field(default_factory=dict, metadata={"key": None})
    open_registry: ClassVar[Registry[Any]] = ENGINES


@dataclass
class DataConfig:
    train_batch_size: int = 32  # tasks a batch, global
    val_batch_size: int | None = None  # tasks whose rollouts run together in validation, global (null: all)
    max_prompt_length: int = 1024  # tokens; a longer prompt ends its episode, it is never cut
    max_response_length: int = 1024  # tokens sampled at the most, per response
    seed: int | None = None  # of task generation and shuffling (null: seed)
    shuffle: bool = True  # new order of the training tasks each epoch

    def __post_init__(self) -> None:
        for name in ("train_batch_size", "val_batch_size", "max_prompt_length", "max_response_length"):
            value = getattr(self, name)
            _require([(value is None or value >= 1, f"data.{name}: must be at least 1, got {value}")])


@dataclass
class ModelConfig:
    name: str = "builtin:tiny"  # a Hugging Face hub name, a local folder, builtin:tiny, or smollm2
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of the trained weights
    lora_rank: int = 0  # > 0: train a LoRA adapter of this rank (package peft)
    trust_remote_code: bool = False  # run Python code that comes with the model
    gradient_checkpointing: bool = False  # recompute activations in the backward pass to save memory
    compile: bool = False  # torch.compile the training forward pass

    def __post_init__(self) -> None:
        _require(
            [
                (bool(self.name.strip()), "model.name: must not be empty"),
                (self.lora_rank >= 0, f"model.lora_rank: must not be negative, got {self.lora_rank}"),
            ]
        )


@dataclass
class TrainingConfig:
    optimizer: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = 1e-6
    beta1: float = 0.9  # adamw
    beta2: float = 0.999  # adamw
    eps: float = 1e-8  # adamw
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0  # global norm to clip to (<= 0: no clipping)
    num_minibatches: int = 1  # optimizer steps a batch and epoch; groups are split between them
    num_epochs_per_batch: int = 1  # passes over each batch
    micro_batch_tokens: int = 8192  # tokens in one forward pass at the most, padding included, per rank

    def __post_init__(self) -> None:
        at = "training."
        _require(
            [
                (self.learning_rate >= 0, f"{at}learning_rate: must not be negative, got {self.learning_rate}"),
                (0 <= self.beta1 < 1, f"{at}beta1: must be in [0, 1), got {self.beta1}"),
                (0 <= self.beta2 < 1, f"{at}beta2: must be in [0, 1), got {self.beta2}"),
                (self.eps >= 0, f"{at}eps: must not be negative, got {self.eps}"),
                (self.weight_decay >= 0, f"{at}weight_decay: must not be negative, got {self.weight_decay}"),
                (self.num_minibatches >= 1, f"{at}num_minibatches: must be at least 1, got {self.num_minibatches}"),
                (self.num_epochs_per_batch >= 1, f"{at}num_epochs_per_batch: must be at least 1, got {self.num_epochs_per_batch}"),
                (self.micro_batch_tokens >= 1, f"{at}micro_batch_tokens: must be at least 1, got {self.micro_batch_tokens}"),
            ]
        )


@dataclass
class WarmStartConfig:
    """Supervised steps on the task's own solutions before reinforcement learning (`warm_start.steps=0`: none)."""

    steps: int = 0  # optimizer steps
    batch_size: int = 64  # solutions a step
    learning_rate: float = 3e-3  # peak; linear warm-up over a tenth of the steps, then cosine to a tenth

    def __post_init__(self) -> None:
        _require(
            [
                (self.steps >= 0, f"warm_start.steps: must not be negative, got {self.steps}"),
                (self.batch_size >= 1, f"warm_start.batch_size: must be at least 1, got {self.batch_size}"),
                (self.learning_rate >= 0, f"warm_start.learning_rate: must not be negative, got {self.learning_rate}"),
            ]
        )


@dataclass
class SamplingConfig:
    """How tokens are drawn. The defaults are neutral: exactly the model's distribution."""

    temperature: float = 1.0  # logits are divided by it, in sampling and in training; 0 is greedy (validation only)
    top_p: float = 1.0  # keep the smallest set of tokens with this probability (1: all)
    top_k: int = 0  # keep the k most likely tokens (<= 0: all)


@dataclass
class SamplingSection:
    train: SamplingConfig = field(default_factory=SamplingConfig)
    val: SamplingConfig = field(default_factory=SamplingConfig)

    def __post_init__(self) -> None:
        checks = [(self.train.temperature > 0, f"sampling.train.temperature: must be above 0 to train, got {self.train.temperature}")]
        for part, sampling in (("train", self.train), ("val", self.val)):
            checks += [
                (sampling.temperature >= 0, f"sampling.{part}.temperature: must not be negative, got {sampling.temperature}"),
                (0 < sampling.top_p <= 1, f"sampling.{part}.top_p: must be in (0, 1], got {sampling.top_p}"),
            ]
        _require(checks)


@dataclass
class LightningConfig:
    accelerator: str = "auto"
    devices: int | str | list[int] = "auto"  # number of processes a node, or a list of device indices
    num_nodes: int = 1
    strategy: str = "auto"
    precision: str = "32-true"


@dataclass
class WandbConfig:
    mode: Literal["online", "offline", "disabled"] | None = None  # null: online when logged in, else offline
    entity: str | None = None
    group: str | None = None  # null: the sweep, else the estimator
    job_type: str | None = None
    tags: list[str] = field(default_factory=list)
    notes: str | None = None
    id: str | None = None  # run id, to continue a run
    resume: str | None = None  # W&B's own modes: allow, must, never
    log_model: bool = False  # upload the final model as an artifact


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
        return _typed(_plain(config))


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
    names, overrides = parse_argv(argv)
    problems: list[str] = []
    tree: dict[str, Any] = {}
    for name in names or ([default] if default else []):
        try:
            merge(tree, _normal(read_preset(name, presets)))
        except ConfigError as error:
            problems += error.problems
    for key, value in overrides:
        try:
            merge(tree, _nest(key, value))
        except ConfigError as error:
            problems += error.problems
    config = _typed(tree, problems)
    return as_dict_config(config)


def as_dict_config(config: Config) -> DictConfig:
    """The DictConfig of a typed config: every key, plain values, unknown keys refused."""
    tree = OmegaConf.create(schema.to_plain_tree(config))
    OmegaConf.set_struct(tree, True)
    return tree


def parse_argv(argv: Sequence[str]) -> tuple[list[str], list[tuple[str, Any]]]:
    """Split a command line into preset names and `(key, text)` overrides.

    Understands what W&B's command macros produce: `--k=v`, `k=v`, `--k v`, `--flag`, and one JSON object.
    """
    names: list[str] = []
    overrides: list[tuple[str, Any]] = []
    tokens = list(argv)
    while tokens:
        token = tokens.pop(0)
        if token.startswith("{"):
            try:
                overrides += list(json.loads(token).items())
            except (json.JSONDecodeError, AttributeError) as error:
                raise ConfigError([f"{token[:60]!r}: looks like JSON, but is not an object ({error})"]) from error
            continue
        key, equals, value = token.removeprefix("--").partition("=")
        if equals:
            overrides.append((key, value))
        elif not token.startswith("-"):
            names.append(token)
        elif tokens and not tokens[0].startswith("--"):
            overrides.append((key, tokens.pop(0)))
        else:
            overrides.append((key, "true"))
    return names, overrides


def read_preset(name: str, folder: str | Path | None) -> dict[str, Any]:
    """The raw content of a preset: `name` in `folder`, or a path to a YAML file."""
    known = {path.stem: path for path in sorted(Path(folder).glob("*.yaml"))} if folder else {}
    path = known.get(name) or Path(name)
    if name not in known and path.suffix not in (".yaml", ".yml"):
        raise ConfigError([f"{name}: no such preset; presets: {', '.join(known) or 'none'} (an override is written key=value)"])
    try:
        content = schema.parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{name}: cannot read the file: {error}"]) from error
    except yaml.YAMLError as error:
        raise ConfigError([f"{name}: not valid YAML: {' '.join(str(error).split())}"]) from error
    if not isinstance(content, dict | None):
        raise ConfigError([f"{name}: expected a mapping of keys, got {type(content).__name__}"])
    return content or {}


def merge(base: dict[str, Any], update: Mapping[str, Any], kind: Any = Config) -> dict[str, Any]:
    """Merge `update` into `base`, section by section. A new `name` in an open section (`task`, `rollout_engine`) drops the
    keys that belonged to the old one."""
    for key, value in update.items():
        old = base.get(key)
        leaf = schema.keys_of(kind).get(key) if schema.is_section(kind) else None
        inner = leaf.kind if leaf else None
        if isinstance(value, Mapping) and isinstance(old, dict):
            if hasattr(inner, "open_registry") and value.get("name", old.get("name")) != old.get("name"):
                old.clear()
            merge(old, value, inner)
        else:
            base[key] = merge({}, value, inner) if isinstance(value, Mapping) else value
    return base


def _normal(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys (`optim.lr: 1`) unfolded into nested sections."""
    result: dict[str, Any] = {}
    for key, value in tree.items():
        merge(result, _nest(str(key), _normal(value) if isinstance(value, Mapping) else value), None)
    return result


def _nest(key: str, value: Any) -> dict[str, Any]:
    """`a.b.c`, value -> {a: {b: {c: value}}}; text of a mapping is parsed where a section or a mapping belongs."""
    parts = key.split(".")
    if not all(parts):
        raise ConfigError([f"{key or '(empty)'}: not a key; write section.key=value"])
    kind = schema.kind_at(Config, parts)
    if isinstance(value, str) and value.lstrip().startswith("{") and (schema.is_section(kind) or kind is Any or schema.is_mapping(kind)):
        try:
            parsed = schema.parse_yaml(value)
        except yaml.YAMLError as error:
            raise ConfigError([f"{key}: not a valid mapping: {' '.join(str(error).split())}"]) from error
        value = _normal(parsed) if isinstance(parsed, dict) else value
    for part in reversed(parts):
        value = {part: value}
    return value


def _plain(config: DictConfig | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(config, DictConfig):
        return OmegaConf.to_container(config, resolve=False)  # type: ignore[return-value]
    return dict(config)


def _typed(tree: dict[str, Any], problems: Sequence[str] = ()) -> Config:
    problems = list(problems)
    tree = _resolve(tree, problems)
    try:
        load_plugins(schema.coerce(tree.get("plugins") or [], list[str]))
    except ValueError as error:
        problems.append(str(error))
    except schema.Mismatch:
        pass  # `build` names it
    config = schema.build(Config, tree, problems)
    if config is not None:
        problems += check_names(config, tree)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return config


def _resolve(tree: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """Fill in `${...}` and name `???` that were left; defaults can be referred to."""
    unresolved = list(_leaves(tree))
    if not any(isinstance(value, str) and ("${" in value or value == "???") for _, value in unresolved):
        return tree
    whole = OmegaConf.create(merge(schema.to_plain_tree(Config()), _strings(tree)))
    for path, value in unresolved:
        if not isinstance(value, str):
            continue
        if value == "???":
            problems.append(f"{'.'.join(path)}: required, but not given")
        elif "${" in value:
            try:
                resolved = OmegaConf.select(whole, ".".join(path), throw_on_missing=True, throw_on_resolution_failure=True)
            except (OmegaConfBaseException, ValueError) as error:
                problems.append(f"{'.'.join(path)}: cannot resolve {value!r}: {str(error).splitlines()[0]}")
                continue
            node = tree
            for part in path[:-1]:
                node = node[part]
            node[path[-1]] = OmegaConf.to_container(resolved) if OmegaConf.is_config(resolved) else resolved
    return tree


def _strings(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _strings(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_strings(item) for item in value]
    return str(value) if isinstance(value, str) else value


def _leaves(tree: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterable[tuple[tuple[str, ...], Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


# -------------------------------------------------------------------------------------------------------- checks of names


def check_names(config: Config, tree: Mapping[str, Any]) -> list[str]:
    """Problems with names that registries know, with the keywords of what they name, and across sections."""
    algorithm, problems = config.rllm.algorithm, []
    for registry, name in (
        (WORKFLOWS, config.rllm.workflow.name),
        (TASKS, config.task.name),
        (ENGINES, config.rollout_engine.name),
        *((TRACKERS, tracker) for tracker in config.rllm.trainer.logger),
    ):
        if name not in registry:
            problems.append(registry.unknown(name))

    roles = [("rllm.algorithm.adv_estimator", None), *((f"rllm.algorithm.estimator_map.{role}", role) for role in algorithm.estimator_map)]
    for key, role in roles:
        name = algorithm.estimator_of(role) if role else estimator_name(algorithm.estimator)
        if name not in ESTIMATORS:
            problems.append(ESTIMATORS.unknown(name).replace(ESTIMATORS.key, key, 1))
    estimator = estimator_name(algorithm.estimator)
    problems += _check_kwargs("rllm.algorithm.estimator_kwargs", algorithm.estimator_kwargs, ESTIMATORS, estimator)

    losses = {algorithm.loss_of(role) for _, role in roles if role} | {algorithm.loss_of("")} | set(algorithm.loss_fn_map.values())
    chosen = algorithm.loss_fn is not None or algorithm.loss_fn_map or any(isinstance(e, tuple) for e in algorithm.estimator_map.values())
    if chosen or algorithm.loss_kwargs:  # the losses import torch: look only where the user named something
        problems += [LOSSES.unknown(name) for name in sorted(losses) if name not in LOSSES]
        problems += _check_kwargs("rllm.algorithm.loss_kwargs", algorithm.loss_kwargs, LOSSES, algorithm.loss_of(""))

    problems += _two_homes_of_norm(config.rllm, tree.get("rllm") or {})
    return problems


def _two_homes_of_norm(rllm: RLLMConfig, tree: Mapping[str, Any]) -> list[str]:
    """`norm_adv_by_std_in_grpo` may be given in its old home, but not with another value than in its own."""
    key, old = "norm_adv_by_std_in_grpo", rllm.stepwise_advantage.norm_adv_by_std_in_grpo
    given = (tree.get("algorithm") or {}).get(key)
    if given is None or old is None or schema.coerce(given, bool) == old:
        return []
    return [f"rllm.algorithm.{key}={given} and rllm.stepwise_advantage.{key}={old} differ; give one"]


def _check_kwargs(key: str, given: Mapping[str, Any], registry: Registry[Any], name: str) -> list[str]:
    if not given or name not in registry:
        return []
    entry = registry.get(name)
    declared = sorted(entry.kwargs if hasattr(entry, "kwargs") else _declared(entry))
    return [
        f"{key}.{unknown}: {registry.kind} {name!r} has no keyword {unknown!r}; it has: {', '.join(declared) or 'none'}"
        for unknown in given
        if unknown not in declared
    ]


def _declared(entry: Any) -> list[str]:
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in inspect.signature(entry).parameters.values() if p.kind in kinds and p.default is not p.empty]
