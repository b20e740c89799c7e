"""Sections of a config: from plain nested data to nested dataclasses and back, free of any key of ours.

    build(Section, tree, problems)  ->  Section(...)          to_plain_tree(section)  ->  tree

Every field of a dataclass is a key, with its type and its default (all have one); a field whose type is a dataclass is a
section below it. Every problem is collected, so that a user sees all of them at once. `check` is what sections call in
`__post_init__` for ranges and rules between their fields.

A section may be *open*: its class attribute `open_registry` names a `Registry`, and the keyword-only parameters of the entry
chosen by its field `name` become keys of the section, typed by their annotations and collected in the field `args`.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from enum import Enum
from functools import cache, partial
from typing import Any, get_origin

from rllm_lightning.registry import Registry
from rllm_lightning.values import MAX_DEPTH, TOO_DEEP, Mismatch, Quoted, coerce, describe, is_mapping_text, is_null, parse_structure


class Emptied(dict[str, Any]):
    """A mapping that was given as null or `{}`, and what later keys put there: it replaces the mapping it is merged into."""


class EmptiedText(str):
    """The same as text, which its key may also want as text."""


@dataclass(frozen=True)
class Leaf:
    """One key of a section: its type, and a maker of its default (None where a value is required)."""

    kind: Any
    default: Callable[[], Any] | None
    field: str | None  # the dataclass field it fills; None for a key of an open section's entry


# ------------------------------------------------------------------------------------------------------------------- keys


def is_section(kind: Any) -> bool:
    return dataclasses.is_dataclass(kind) and isinstance(kind, type)


def is_mapping(kind: Any) -> bool:
    return (get_origin(kind) or kind) is dict


def open_registry(cls: Any) -> Registry[Any] | None:
    """The registry whose entries an open section chooses from; None for any other section."""
    return getattr(cls, "open_registry", None)


def keys_of(cls: type, name: str | None = None) -> dict[str, Leaf]:
    """The keys of section `cls`; for an open section also those of its entry `name`."""
    leaves: dict[str, Leaf] = {}
    for field in dataclasses.fields(cls):
        key = field.metadata.get("key", field.name)
        if key is not None:
            leaves[key] = Leaf(hints_of(cls)[field.name], partial(default_of, cls, field.name), field.name)
    registry = open_registry(cls)
    if registry is not None and isinstance(name, str) and name in registry:
        for key, (kind, value) in parameters_of(registry.get(name)).items():
            leaves[key] = Leaf(kind, None if value is MISSING else partial(_same, value), None)
    return leaves


def default_of(cls: type, name: str) -> Any:
    """The default of a dataclass field."""
    field = next(field for field in dataclasses.fields(cls) if field.name == name)
    return field.default if field.default_factory is MISSING else field.default_factory()


def parameters_of(entry: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """The keyword-only parameters of a registered function or class: `{name: (type, default or MISSING)}`."""
    target: Any = entry.__init__ if isinstance(entry, type) else entry  # type: ignore[misc]
    return {
        p.name: (hints_of(target).get(p.name, Any), MISSING if p.default is p.empty else p.default)
        for p in inspect.signature(target).parameters.values()
        if p.kind is p.KEYWORD_ONLY
    }


@cache
def hints_of(target: Any) -> dict[str, Any]:
    """The annotations of a class or function; none where they name what is imported for type checkers alone."""
    try:
        return typing.get_type_hints(target)
    except NameError:
        return {}


def _same(value: Any) -> Any:
    return value


def all_keys(cls: type, path: str = "") -> Iterator[str]:
    """Every dotted key below `cls`, sections included; of open sections only what holds for every entry."""
    for key, leaf in keys_of(cls).items():
        yield f"{path}{key}"
        if is_section(leaf.kind):
            yield from all_keys(leaf.kind, f"{path}{key}.")


def kind_at(kind: Any, path: list[str]) -> Any:
    """The declared type of a dotted key below the section `kind`; None where there is none: unknown, or below a mapping."""
    for part in path:
        leaf = keys_of(kind).get(part) if is_section(kind) else None
        if leaf is None:
            return None
        kind = leaf.kind
    return kind


# ------------------------------------------------------------------------------------------------------------------ trees


def unfold(data: Mapping[Any, Any], kind: Any, problems: list[str], path: str = "") -> dict[str, Any]:
    """Plain data as a tree of sections: dotted keys (`optim.lr: 1`) and text (`optim: "{lr: 1}"`) become nested mappings, and
    sections that hold nothing are left out."""
    tree: dict[str, Any] = {}
    for key, value in data.items():
        parts = str(key).split(".")
        if not all(parts):
            problems.append(f"{f'{path}{key}'!r}: not a key; a key is section.name, and an override section.name=value")
            continue
        if len(parts) > MAX_DEPTH:
            problems.append(f"{show(f'{path}{key}')}: not a key; it is {TOO_DEEP}")
            continue
        inner = kind_at(kind, parts)
        if is_section(inner):
            value = {} if is_null(value) else parse_structure(value) if is_mapping_text(value) else value
            value = unfold(value, inner, problems, f"{path}{key}.") if isinstance(value, Mapping) else value
            if value == {}:
                continue
        for part in reversed(parts):
            value = {part: value}
        merge(tree, value)
    return tree


def merge(base: dict[str, Any], update: Mapping[Any, Any], kind: Any = None) -> None:
    """Merge `update` into `base`, mapping by mapping; an empty mapping, which no section is (`unfold`), empties the one below it.
    Below the section `kind`, a new `name` in an open section drops the keys that belonged to the old one."""
    for key, value in update.items():
        old = base.get(key)
        inner = kind_at(kind, [key])
        if is_mapping(inner) or (isinstance(old, dict) and not isinstance(value, Quoted)):
            value = _parse_mapping(value)
        written = Emptied() if key in base and is_null(old) else None if isinstance(old, Quoted) else _parse_mapping(old)
        if not isinstance(value, Mapping):
            adds = isinstance(written, Emptied) and not isinstance(value, Quoted) and isinstance(_parse_mapping(value), dict)
            base[key] = EmptiedText(value) if adds else value
            continue
        if not value or isinstance(value, Emptied):
            old = base[key] = Emptied()
        elif not isinstance(old, dict):
            old = base[key] = written if isinstance(written, dict) else {}
        elif open_registry(inner) is not None:
            name = old.get("name", default_of(inner, "name"))
            if value.get("name", name) != name:
                old.clear()
        merge(old, value, inner)


def _parse_mapping(value: Any) -> Any:
    """The mapping that text writes; anything else as it is."""
    if not is_mapping_text(value):
        return value
    found = parse_structure(value)
    return Emptied(found) if found == {} or (isinstance(value, EmptiedText) and isinstance(found, dict)) else found


def to_plain_tree(section: Any) -> Any:
    """A built dataclass as plain nested data under its keys: what `build` would take to make it again."""
    if is_section(type(section)):
        tree = {key: to_plain_tree(getattr(section, leaf.field)) for key, leaf in keys_of(type(section)).items() if leaf.field}
        return tree | to_plain_tree(section.args) if open_registry(section) is not None else tree
    if isinstance(section, Enum):
        return section.value
    if isinstance(section, Mapping):
        return {key: to_plain_tree(value) for key, value in section.items()}
    if isinstance(section, list | tuple):
        return [to_plain_tree(value) for value in section]
    return section


def differences(left: Any, right: Any, path: str = "") -> dict[str, tuple[Any, Any]]:
    """The dotted keys at which two plain trees (`to_plain_tree`) differ, with both values."""
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        keys = dict.fromkeys([*left, *right])
        below = (differences(left.get(key), right.get(key), f"{path}.{key}" if path else str(key)) for key in keys)
        return {key: values for found in below for key, values in found.items()}
    return {} if left == right else {path: (left, right)}


# ------------------------------------------------------------------------------------------------------------------ build


def build(cls: type, data: Any, problems: list[str], path: str = "", root: type | None = None) -> Any:
    """An instance of the dataclass `cls` from a tree (see `unfold`). What is wrong goes to `problems`, one line each; a value
    that does not fit its type is replaced by the default."""
    if not isinstance(data, Mapping):
        if not is_null(data):
            problems.append(f"{path.rstrip('.')}: expected a section (a mapping), got {show(data)}")
        data = {}
    registry = open_registry(cls)
    name = data.get("name", default_of(cls, "name")) if registry is not None else None
    leaves = keys_of(cls, name)
    if registry is None or (isinstance(name, str) and name in registry):  # an unknown entry's keys cannot be told
        problems += [_unknown_key(str(key), path, leaves, root or cls, name) for key in data if key not in leaves]

    values: dict[str, Any] = {}
    args: dict[str, Any] = {}
    for key, leaf in leaves.items():
        target, slot = (values, leaf.field) if leaf.field else (args, key)
        if is_section(leaf.kind):
            target[slot] = build(leaf.kind, data.get(key), problems, f"{path}{key}.", root or cls)
            continue
        if missing := _missing(data, key, leaf):
            problems += [f"{path}{where}: required, but not given (expected {describe(leaf.kind)})" for where in missing]
        elif key in data:
            try:
                target[slot] = coerce(data[key], leaf.kind)
                continue
            except Mismatch as mismatch:
                problems.append(f"{path}{key}: expected {mismatch}, got {show(data[key])}")
        if leaf.default is not None:
            target[slot] = leaf.default()
    if registry is not None:
        values["args"] = args
    section: Any = object.__new__(cls)
    try:
        section.__init__(**values)
    except ValueError as error:  # the fields are set by then, so that later checks can look at them
        problems += [f"{path}{line}" for line in str(error).split("\n")]
    return section


def _missing(data: Mapping[str, Any], key: str, leaf: Leaf) -> list[str]:
    """Where, at or below `key`, a value is required (it has no default, or stands as `???`) and not given."""
    if key not in data:
        return [key] if leaf.default is None else []
    value = data[key]
    if isinstance(value, Mapping):
        return [f"{key}.{where}" for below in value for where in _missing(value, below, leaf)]
    return [key] if value == "???" else []


def show(value: Any) -> str:
    """A value in a message: short, and on one line."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def no_such_argument(path: str, owner: str, known: Sequence[str]) -> str:
    """What to say of a keyword, the last part of `path`, that a function or class does not take."""
    mapping, _, key = path.rpartition(".")
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ";"
    return f"{path}: {owner} has no such argument{hint} it has: {', '.join(known) or 'none'}{emptying(mapping, key, known)}"


def emptying(mapping: str, key: str, known: Iterable[str]) -> str:
    """The end of a message about a key that the mapping at this dotted key cannot have: a preset may have put it there. Empty where the
    key looks like a misspelt one, and in a list, nothing in which can be given by itself."""
    if difflib.get_close_matches(key, known, n=1) or any(part.isdigit() for part in mapping.split(".")):
        return ""
    return f"; if a preset sets it: {mapping}=null before your own keys empties the mapping"


def typed_keywords(entry: Callable[..., Any], given: Mapping[str, Any], path: str, owner: str) -> dict[str, Any]:
    """`given`, found under the key `path`, as keyword-only arguments of a registered entry that is called `owner` in messages.

    Raises:
        ValueError: one line for each keyword that it does not have, that has another type, or that it needs and was not given.
    """
    takes = parameters_of(entry)
    typed: dict[str, Any] = {}
    problems = [no_such_argument(f"{path}.{key}", owner, sorted(takes)) for key in given if key not in takes]
    for key, (kind, default) in takes.items():
        if key in given:
            try:
                typed[key] = coerce(given[key], kind)
            except Mismatch as mismatch:
                problems.append(f"{path}.{key}: expected {mismatch}, got {show(given[key])}")
        elif default is MISSING:
            problems.append(f"{path}.{key}: required, but not given (expected {describe(kind)})")
    if problems:
        raise ValueError("\n".join(problems))
    return typed


def _unknown_key(key: str, path: str, leaves: Mapping[str, Leaf], root: type, name: Any) -> str:
    """The message for a key that is not there, with the nearest one: here, also by its initials, anywhere, or of the same last part."""
    full = f"{path}{key}"
    elsewhere = [other for other in all_keys(root) if not (path and (other.startswith(path) or path.startswith(f"{other}.")))]
    by_last_part = {other.rpartition(".")[2]: other for other in elsewhere}
    short = [leaf for leaf in leaves if "".join(word[:1] for word in leaf.split("_")) == key]  # lr: learning_rate
    if near := difflib.get_close_matches(key, list(leaves), n=1) or short[:1]:
        hint = f"did you mean {path}{near[0]}?"
    elif near := difflib.get_close_matches(full, elsewhere, n=1, cutoff=0.7):
        hint = f"did you mean {near[0]}?"
    elif near := difflib.get_close_matches(key, list(by_last_part), n=1, cutoff=0.8):
        hint = f"did you mean {by_last_part[near[0]]}?"
    else:
        hint = f"keys here: {', '.join(sorted(leaves))}"
    return f"{full}: unknown key{f' for {name!r}' if name else ''}; {hint}"


# ----------------------------------------------------------------------------------------------------------------- checks


def check(section: Any, *rules: tuple[bool, str], **ranges: str) -> None:
    """What a section demands of its fields, checked together.

    Args:
        rules: (holds, message that begins with the key).
        ranges: field -> interval, such as `n="[1, inf)"` (a bracket includes its bound); None passes.

    Raises:
        ValueError: one line for each rule and range that does not hold.
    """
    problems = [
        f"{name}: must be in {interval}, got {value}"
        for name, interval in ranges.items()
        if (value := getattr(section, name)) is not None and not _inside(value, interval)
    ]
    problems += [message for holds, message in rules if not holds]
    if problems:
        raise ValueError("\n".join(problems))


def _inside(value: float, interval: str) -> bool:
    low, high = (float(bound) for bound in interval[1:-1].split(","))
    above = low <= value if interval[0] == "[" else low < value
    return above and (value <= high if interval[-1] == "]" else value < high)
