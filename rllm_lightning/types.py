"""What a rollout is made of: `Step` < `Trajectory` < `Episode`, and the `TrajectoryGroup` that advantages are computed over.

One run of a workflow on one task is an `Episode`. It holds one `Trajectory` for each role that took part; a trajectory is the
list of that role's model calls, its `Step`s. Trajectories of one task and role are compared with each other: they form a
`TrajectoryGroup`. Everything here is plain Python (no torch) and round-trips through `to_dict`/`from_dict` as strict JSON.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import uuid
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from functools import cache
from types import UnionType
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import numpy as np

DEFAULT_TRAJ_NAME = "default_traj_name"
NO_ROLE = "all_groups"

R = TypeVar("R", bound="_Record")


class TerminationReason(StrEnum):
    """Why an episode ended."""

    MAX_PROMPT_LENGTH_EXCEEDED = "max_prompt_length_exceeded"
    MAX_RESPONSE_LENGTH_EXCEEDED = "max_response_length_exceeded"
    ENV_DONE = "env_done"
    MAX_TURNS_EXCEEDED = "max_turns_exceeded"
    TIMEOUT = "timeout"
    UNKNOWN = "unknown"
    ERROR = "error"


class TerminationEvent(Exception):
    """Raised inside a workflow (or by a rollout engine on its behalf) to end the episode for `reason`."""

    def __init__(self, reason: TerminationReason = TerminationReason.UNKNOWN):
        self.reason = TerminationReason(reason)
        super().__init__(self.reason.value)


def to_plain(value: Any) -> Any:
    """`value` as strict JSON data: NumPy and tensor values become numbers and full lists, NaN and infinities null, enums
    their value, records their `to_dict`, mapping keys text. Anything else unknown becomes its `repr`."""
    if isinstance(value, Enum):
        return to_plain(value.value)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, np.generic):
        return to_plain(value.item())
    if isinstance(value, np.ndarray):
        return to_plain(value.tolist())
    if isinstance(value, _Record):
        return value.to_dict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(to_plain(key)): to_plain(item) for key, item in value.items()}
    if isinstance(value, Sequence | Set) and not isinstance(value, bytes | bytearray | memoryview):
        items, kinds = list(value), set(map(type, value))
        if kinds <= {int} or (kinds == {float} and all(map(math.isfinite, items))):  # token ids, log-probs: long, and as they should be
            return items
        return [to_plain(item) for item in items]
    if hasattr(value, "detach") and hasattr(value, "tolist"):  # a torch tensor, without importing torch
        return to_plain(value.detach().tolist())
    return repr(value)


class _Record:
    """`to_dict`/`from_dict` for the dataclasses of this module. Unknown keys in `from_dict` are a `ValueError`."""

    def to_dict(self) -> dict[str, Any]:
        return {f.name: to_plain(getattr(self, f.name)) for f in dataclasses.fields(self)}  # type: ignore[arg-type]

    @classmethod
    def from_dict(cls: type[R], data: dict[str, Any]) -> R:
        fields = _fields(cls)  # type: ignore[arg-type]
        if not isinstance(data, Mapping):
            raise ValueError(f"{cls.__name__}.from_dict: expected an object, got {type(data).__name__}")
        if unknown := sorted(data.keys() - fields.keys()):
            raise ValueError(f"{cls.__name__}.from_dict: unknown keys {unknown}; known: {sorted(fields)}")
        values = {}
        for key, value in data.items():
            kind, usual, fits, revive = fields[key]
            if type(value) not in usual and not fits(value):
                raise ValueError(f"{cls.__name__}.{key}: expected {kind}, got {value!r:.80}")
            values[key] = value if revive is None else revive(value)
        return cls(**values)


class _Field(NamedTuple):
    """How the JSON form of a record's field is read."""

    kind: Any  # the declared type
    usual: frozenset[type]  # types whose values fit, whatever they are: logs hold millions of values
    fits: Callable[[Any], bool]
    revive: Callable[[Any], Any] | None  # from the JSON form to the Python form, where they differ


@cache
def _fields(cls: type) -> dict[str, _Field]:
    hints, found = get_type_hints(cls), {}
    for f in dataclasses.fields(cls):
        fits = _check_of(hints[f.name])
        usual = frozenset(type(value) for value in (None, "", 0, 0.0, False) if fits(value))
        found[f.name] = _Field(hints[f.name], usual, fits, f.metadata.get("revive"))
    return found


def _check_of(kind: Any) -> Callable[[Any], bool]:
    """Whether the JSON form of a field is of the declared type; null stands for anything (a NaN, or what nobody set) but a list or
    mapping that must be there."""
    origin = get_origin(kind) or kind
    if origin is UnionType:
        options = [_check_of(option) for option in get_args(kind)]
        return lambda value: any(fits(value) for fits in options)
    if origin is list:
        (item,) = get_args(kind)
        plain, fits_item = {item}, _check_of(item)
        return lambda value: (
            isinstance(value, list | tuple) and (item is Any or set(map(type, value)) <= plain or all(map(fits_item, value)))
        )
    if origin is dict:
        return lambda value: isinstance(value, Mapping)
    if origin is Any:
        return lambda value: True
    if issubclass(origin, _Record):
        return lambda value: value is None or isinstance(value, Mapping | origin)
    if origin in (int, float, bool):
        return lambda value: value is None or isinstance(value, int | float | np.generic)
    return lambda value: value is None or (isinstance(value, str) and issubclass(origin, str))


def _number(value: Any) -> Any:
    """A number, or a list of numbers, that cannot be None: where it is null, a NaN was stored."""
    if isinstance(value, list):
        return value if set(map(type, value)) <= {int, float} else [_number(item) for item in value]
    return math.nan if value is None else value


def _number_or_none(value: Any) -> Any:
    return None if value is None else _number(value)


def _records_of(cls: type[_Record]) -> Callable[[Any], list[Any]]:
    return lambda values: [value if isinstance(value, cls) else cls.from_dict(value) for value in values]


@dataclass
class Action(_Record):
    """Wrapper of whatever an agent decided to do."""

    action: Any = None


@dataclass
class ModelOutput(_Record):
    """Answer of a rollout engine to one request.

    `completion_ids` are the sampled token ids (the end-of-sequence token included where one was sampled) and `logprobs` their
    log-probabilities under the distribution they were sampled from, one a token. `finish_reason` is `"stop"` (an end token was
    sampled) or `"length"` (the limit was reached first).
    """

    text: str | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None
    prompt_ids: list[int] | None = None
    completion_ids: list[int] | None = None
    logprobs: list[float] | None = field(default=None, metadata={"revive": _number_or_none})
    prompt_logprobs: list[float] | None = None
    prompt_length: int = 0
    completion_length: int = 0
    finish_reason: str | None = None
    weight_version: int | None = None


def _model_output(value: Any) -> Any:
    return ModelOutput.from_dict(value) if isinstance(value, dict) else value


@dataclass
class RewardOutput(_Record):
    """What a reward function may return instead of a number: the reward, and whether the answer counts as solved
    (None: solved when the episode's summed reward is above 0)."""

    reward: float = field(metadata={"revive": _number})
    is_correct: bool | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass
class Step(_Record):
    """One model call. Empty `prompt_ids`, `response_ids` and `logprobs` are filled from `model_output`.

    `advantage` is None until computed, then one number for the step or one number for each response token.

    Raises:
        ValueError: `logprobs` is non-empty and its length differs from `response_ids`.
    """

    prompt_ids: list[int] = field(default_factory=list)
    response_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list, metadata={"revive": _number})
    chat_completions: list[dict[str, Any]] = field(default_factory=list)
    observation: Any = None
    thought: str = ""
    action: Any = None
    model_response: str = ""
    model_output: ModelOutput | None = field(default=None, metadata={"revive": _model_output})
    info: dict[str, Any] = field(default_factory=dict)
    reward: float = field(default=0.0, metadata={"revive": _number})
    done: bool = False
    mc_return: float = field(default=0.0, metadata={"revive": _number})
    advantage: list[float] | float | None = field(default=None, metadata={"revive": _number_or_none})
    weight_version: int | None = None

    def __post_init__(self) -> None:
        if (output := self.model_output) is not None:
            for name, given in (("prompt_ids", output.prompt_ids), ("response_ids", output.completion_ids), ("logprobs", output.logprobs)):
                if len(getattr(self, name)) == 0 and given is not None:
                    setattr(self, name, list(given))
            if self.weight_version is None:
                self.weight_version = output.weight_version
        if len(self.logprobs) not in (0, len(self.response_ids)):
            raise ValueError(f"Step: {len(self.logprobs)} logprobs for {len(self.response_ids)} response_ids; give one a token, or none")

    @classmethod
    def from_model_output(cls, model_output: ModelOutput, messages: list[dict[str, Any]] | None = None, action: Any = None) -> Step:
        """The step of one answered request: `messages` plus the answer become `chat_completions`."""
        reply: dict[str, Any] = {"role": "assistant", "content": model_output.content or model_output.text or ""}
        if model_output.reasoning:
            reply["reasoning"] = model_output.reasoning
        return cls(
            chat_completions=[*(messages or []), reply],
            thought=model_output.reasoning or "",
            action=action,
            model_response=model_output.content or model_output.text or "",
            model_output=model_output,
        )


@dataclass
class Trajectory(_Record):
    """The steps of one role in one episode. `reward` is None until somebody sets it."""

    uid: str = field(default_factory=lambda: str(uuid.uuid4()))
    name: str = DEFAULT_TRAJ_NAME
    task: Any = None
    steps: list[Step] = field(default_factory=list, metadata={"revive": _records_of(Step)})
    reward: float | None = None
    info: dict[str, Any] = field(default_factory=dict)

    def is_cumulative(self) -> bool:
        """Whether every step's `chat_completions` extends the one before (true for fewer than two steps)."""
        chats = [step.chat_completions for step in self.steps]
        return all(later[: len(earlier)] == earlier for earlier, later in itertools.pairwise(chats))

    @property
    def num_response_tokens(self) -> int:
        return sum(len(step.response_ids) for step in self.steps)


def _termination_reason(value: Any) -> TerminationReason | None:
    return None if value is None else TerminationReason(value)


def split_episode_id(episode_id: str) -> tuple[str, str]:
    """`"{task_id}:{rollout_idx}"` -> both parts, split at the **last** colon; without a colon the index is `"0"`."""
    head, colon, tail = episode_id.rpartition(":")
    return (head, tail) if colon else (episode_id, "0")


@dataclass
class Episode(_Record):
    """One run of a workflow on one task. `id` is `"{task_id}:{rollout_idx}"`; task ids may hold colons themselves."""

    id: str = ""
    task: Any = None
    termination_reason: TerminationReason | None = field(default=None, metadata={"revive": _termination_reason})
    is_correct: bool = False
    trajectories: list[Trajectory] = field(default_factory=list, metadata={"revive": _records_of(Trajectory)})
    metrics: dict[str, Any] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def task_id(self) -> str:
        return split_episode_id(self.id)[0]

    @property
    def rollout_idx(self) -> str:
        return split_episode_id(self.id)[1]


@dataclass
class TrajectoryGroup(_Record):
    """Trajectories whose rewards are compared. `group_id` is `"{task_id}:{role}"`; `metadata[i]` belongs to `trajectories[i]`."""

    trajectories: list[Trajectory] = field(default_factory=list, metadata={"revive": _records_of(Trajectory)})
    group_id: str = ""
    metadata: list[dict[str, Any]] = field(default_factory=list)

    @property
    def group_role(self) -> str:
        _, colon, tail = self.group_id.rpartition(":")
        return tail if colon and tail else NO_ROLE

    @property
    def task_id(self) -> str:
        head, colon, _ = self.group_id.rpartition(":")
        return head if colon else self.group_id
