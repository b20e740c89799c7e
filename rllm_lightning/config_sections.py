"""The sections of the configuration beside `rllm`: task, data, model, training, sampling, engine, Lightning and W&B."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from rllm_lightning.registry import ENGINES, TASKS, Registry
from rllm_lightning.schema import check, show

Dtype = Literal["float32", "bfloat16", "float16", "float64"]
DTYPES: tuple[str, ...] = get_args(Dtype)
SEEDS = "[0, 4294967295]"  # what every library's generator takes
MAX_PROCESSES = 65536  # of a node, and nodes: beyond, a number is a slip, and Lightning would make a list of that length

WANDB_ID_RULE = "expected at most 128 of the characters A-Z a-z 0-9 _ . = + @ -, the first a letter, a digit or _"


def is_wandb_id(text: str) -> bool:
    """Whether a W&B run may have this id. W&B itself would take slashes, and write where they lead."""
    return re.fullmatch(r"\w[\w.=+@-]{0,127}", text, re.ASCII) is not None


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
        sizes = dict.fromkeys(("train_batch_size", "val_batch_size", "max_prompt_length", "max_response_length"), "[1, inf)")
        check(self, seed=SEEDS, **sizes)


@dataclass
class ModelConfig:
    name: str = "builtin:tiny"  # a Hugging Face hub name, a local folder, builtin:tiny, or smollm2
    dtype: Dtype = "float32"  # of the trained weights
    attn_implementation: Literal["eager", "sdpa"] | None = None  # of the forward pass (null: what the model itself prefers)
    lora_rank: int = 0  # > 0: train a LoRA adapter of this rank, over frozen weights, which are the reference policy (package peft)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)  # variables of the chat template, such as enable_thinking
    trust_remote_code: bool = False  # run Python code that comes with the model
    gradient_checkpointing: bool = False  # recompute activations in the backward pass to save memory
    compile: bool = False  # torch.compile the training forward pass

    def __post_init__(self) -> None:
        check(self, (bool(self.name.strip()), "name: must not be empty"), lora_rank="[0, inf)")


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
    tree: bool = True  # compute shared prompts once, and models like Llama on a CPU by layers of ours; false: padded rows, its own code
    micro_batch_tokens: int = 8192  # tokens in one forward pass at the most, padding included, per rank

    def __post_init__(self) -> None:
        check(
            self,
            learning_rate="[0, inf)",
            beta1="[0, 1)",
            beta2="[0, 1)",
            eps="[0, inf)",
            weight_decay="[0, inf)",
            num_minibatches="[1, inf)",
            num_epochs_per_batch="[1, inf)",
            micro_batch_tokens="[1, inf)",
        )


@dataclass
class WarmStartConfig:
    """Supervised steps on the task's own solutions before reinforcement learning (`warm_start.steps=0`: none)."""

    steps: int = 0  # optimizer steps
    batch_size: int = 64  # solutions a step
    learning_rate: float = 3e-3  # peak; linear warm-up over a tenth of the steps, then cosine to a tenth
    wrong_solutions: float = 0.0  # share of examples that show another task's solution: demonstrations of mixed quality

    def __post_init__(self) -> None:
        check(self, steps="[0, inf)", batch_size="[1, inf)", learning_rate="[0, inf)", wrong_solutions="[0, 1]")


@dataclass
class SamplingConfig:
    """How tokens are drawn. The defaults are neutral: exactly the model's distribution."""

    temperature: float = 1.0  # logits are divided by it, in sampling and in training; 0 is greedy (validation only)
    top_p: float = 1.0  # keep the smallest set of tokens with this probability (1: all)
    top_k: int = 0  # keep the k most likely tokens (<= 0: all)

    def __post_init__(self) -> None:
        check(self, temperature="[0, inf)", top_p="(0, 1]")


@dataclass
class SamplingSection:
    train: SamplingConfig = field(default_factory=SamplingConfig)
    val: SamplingConfig = field(default_factory=SamplingConfig)

    def __post_init__(self) -> None:
        check(self, (self.train.temperature > 0, f"train.temperature: must be above 0 to train, got {self.train.temperature}"))


@dataclass
class LightningConfig:
    accelerator: str = "auto"
    devices: int | str | list[int] = "auto"  # number of processes a node, or a list of device indices
    num_nodes: int = 1
    strategy: str = "auto"  # auto (ddp where there are several processes), fsdp2 (shard the model), or one of Lightning's names of ddp
    precision: str = "auto"  # of the update's matrix products: auto (bf16-mixed where the hardware is made for it), or one of Lightning's

    def __post_init__(self) -> None:
        few = not isinstance(self.devices, int) or self.devices <= MAX_PROCESSES
        check(self, (few, f"devices: must be at most {MAX_PROCESSES}, got {self.devices}"), num_nodes=f"[1, {MAX_PROCESSES}]")


@dataclass
class WandbConfig:
    mode: Literal["online", "offline", "disabled"] | None = None  # null: online when logged in, else offline
    entity: str | None = None
    group: str | None = None  # null: the sweep, else the estimator
    job_type: str | None = None
    tags: list[str] = field(default_factory=list)
    notes: str | None = None
    id: str | None = None  # run id, to continue a run; part of a folder's name
    resume: Literal["allow", "never", "must", "auto"] | None = None  # what W&B does where a run of this id exists
    log_model: bool = False  # upload the final model as an artifact

    def __post_init__(self) -> None:
        check(
            self,
            (self.id is None or is_wandb_id(self.id), f"id: {WANDB_ID_RULE}, got {show(self.id)}"),
            (all(0 < len(tag) <= 64 for tag in self.tags), "tags: W&B takes tags of 1 to 64 characters"),
        )
