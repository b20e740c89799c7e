"""What is done with the package `reasoning_gym`, in a process of its own (`worker.py`), and the way there.

    WORKER.call("draw", ...)         make a data set, draw entries
    WORKER.call("score", ...)        the data set's scorer on one answer
    WORKER.call("level_params", ...) the parameters of a data set at each level of its curriculum

Three reasons for the process. Some data sets draw from sets of text, whose order differs between processes unless the hash
seed is fixed, as it is in the child: all ranks and all reruns see the same tasks. Some scorers evaluate the answer as
arithmetic, and `9**9**9**9` would never return. And some generators print, or reseed the process's random states.
"""

from __future__ import annotations

import datetime
import difflib
import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np

from rllm_lightning.schema import emptying
from rllm_lightning.tasks.worker import Worker, WorkerError
from rllm_lightning.values import Mismatch, coerce

ISO_PARSERS: dict[Any, Callable[[str], Any]] = {datetime.date: datetime.date.fromisoformat, datetime.time: datetime.time.fromisoformat}

WORKER = Worker(__name__)


def draw(dataset: str, params: Mapping[str, Any], seed: int, count: int, exclude: Iterable[str] = ()) -> list[dict[str, Any]]:
    """The first `count` entries of a data set with distinct questions that are none of `exclude`.

    Raises:
        ValueError: no such data set or parameter, a value that does not fit, or too few distinct questions.
    """
    random.seed(seed)  # a few data sets draw from the global states
    np.random.seed(seed)
    found: dict[str, dict[str, Any]] = {}
    excluded = set(exclude)
    repeats = 0
    for entry in _entries(dataset, params, seed, count) if count else ():
        known = entry["question"] in found or entry["question"] in excluded
        repeats = repeats + 1 if known else 0
        if not known:
            found[entry["question"]] = entry
        if len(found) == count or repeats > 100 + 10 * (len(found) + len(excluded)):
            break
    if len(found) < count:
        raise ValueError(
            f"task.train_size, task.val_size: {count} distinct questions are needed, but {dataset!r} has only about {len(found)} "
            f"with these task.params; lower the sizes or widen the parameters"
        )
    return list(found.values())


def _entries(dataset: str, params: Mapping[str, Any], seed: int, size: int) -> Iterable[dict[str, Any]]:
    """Entries without end: one data set of `size` entries after the other. Most data sets seed entry i by seed + i."""
    for start in itertools.count(step=size):
        source = make(dataset, params, seed + start, size)
        for index in range(size):
            try:
                yield source[index]
            except Exception as error:
                raise ValueError(f"task.params: {dataset!r} cannot make an entry with them: {_describe(error)}") from error


_scorers: dict[str, Any] = {}


def score(dataset: str, params: Mapping[str, Any], entry: dict[str, Any], answer: str) -> float:
    """The score that the data set's own scorer gives `answer`."""
    key = f"{dataset} {params!r}"
    if key not in _scorers:
        _scorers[key] = make(dataset, params, seed=0, size=1)
    try:
        return float(_scorers[key].score_answer(answer, entry))
    except Exception as error:
        raise WorkerError(_describe(error)) from error


def level_params(dataset: str, attributes: Sequence[str], num_levels: int | None) -> list[dict[str, Any]]:
    """The parameters that the data set's own curriculum sets at each level, from easy to hard.

    Args:
        attributes: of the curriculum, raised together; one that has no further level stays at its last (none named: all).
        num_levels: how many levels to take from the first on (None: until no attribute has a further one).

    Raises:
        ValueError: no such data set, it has no curriculum, or the curriculum no such attribute.
    """
    from reasoning_gym.coaching.base_curriculum import DefaultCurriculumContext
    from reasoning_gym.factory import CURRICULA

    _classes_of(dataset)
    if dataset not in CURRICULA:
        raise ValueError(
            f"task.curriculum: reasoning_gym has none for {dataset!r}; give the parameters of each level as task.curriculum.levels"
        )
    curriculum, context = CURRICULA[dataset](), DefaultCurriculumContext()
    if unknown := [name for name in attributes if name not in curriculum.attributes]:
        raise ValueError(f"task.curriculum.attributes: {dataset!r} has no attribute {_unknown(unknown[0], curriculum.attributes)}")
    chosen = {name: attribute for name, attribute in curriculum.attributes.items() if not attributes or name in attributes}
    levels = []
    for level in range(num_levels or max(len(attribute.levels) for attribute in chosen.values())):
        params: dict[str, Any] = {}
        for name, attribute in chosen.items():
            curriculum.set_attr_level(name, min(level, len(attribute.levels) - 1))
            value = context.get_attr_value(curriculum, attribute)
            if hasattr(attribute, "field_name"):
                params[attribute.field_name] = value
            else:
                params |= {attribute.lower_field_name: min(value), attribute.upper_field_name: max(value)}
        levels.append(params)
    return levels


def make(dataset: str, params: Mapping[str, Any], seed: int, size: int) -> Any:
    """A data set of the package. Parameters are typed by the data set's own config class.

    Raises:
        ValueError: no such data set or parameter, or a value that does not fit.
    """
    dataset_cls, config_cls = _classes_of(dataset)
    typed = _typed_fields(config_cls, params, "task.params", f"data set {dataset!r}", ours=("seed", "size"))
    try:
        return dataset_cls(config=config_cls(seed=seed, size=size, **typed))
    except (AssertionError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"task.params: {dataset!r} does not take them: {_describe(error)}") from error


def _classes_of(dataset: str) -> tuple[type, type]:
    """The class of a data set and that of its parameters."""
    import reasoning_gym  # takes a second
    from reasoning_gym.factory import DATASETS

    if dataset not in DATASETS:
        raise ValueError(f"task.dataset: reasoning_gym {reasoning_gym.__version__} has no data set {_unknown(dataset, DATASETS)}")
    return DATASETS[dataset]


def _typed_fields(cls: type, given: Any, path: str, owner: str, ours: Sequence[str] = ()) -> dict[str, Any]:
    """`given` as keywords of the dataclass `cls`, except those that are `ours` to set."""
    if not isinstance(given, Mapping):
        raise ValueError(f"{path}: expected a mapping, got {given!r}")
    hints = get_type_hints(cls)
    names = [f.name for f in fields(cls) if f.name not in ours]
    typed = {}
    for name, value in given.items():
        if name in ours:
            raise ValueError(f"{path}.{name}: the {name} is not yours to set here; use data.seed, task.train_size and task.val_size")
        if name not in names:
            raise ValueError(f"{path}.{name}: {owner} has no parameter {_unknown(name, names)}{emptying(path, name, names)}")
        typed[name] = _typed(value, hints[name], f"{path}.{name}")
    return typed


def _typed(value: Any, kind: Any, path: str) -> Any:
    """Plain data as the `kind` that a config class declares; beyond what our own configs know: dates, times, dataclasses."""
    item_kind = next(iter(get_args(kind)), Any)
    if is_dataclass(kind) and isinstance(kind, type):
        return kind(**_typed_fields(kind, value, path, kind.__name__))
    if is_dataclass(item_kind) and isinstance(value, list):
        return [_typed(item, item_kind, f"{path}.{index}") for index, item in enumerate(value)]
    if get_origin(kind) is Sequence:
        kind = list[item_kind]  # type: ignore[valid-type]
    try:
        return ISO_PARSERS[kind](str(value)) if kind in ISO_PARSERS else coerce(value, kind)
    except Mismatch as mismatch:
        raise ValueError(f"{path}: expected {mismatch}, got {value!r}") from mismatch
    except ValueError as error:
        raise ValueError(f"{path}: expected an ISO date or time, got {value!r}") from error


def _unknown(name: str, known: Iterable[str]) -> str:
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]}?" if close else ";"
    return f"{name!r}{hint} there are: {', '.join(known) or 'none'}"


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
