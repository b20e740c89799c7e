"""From text and plain data to typed dataclasses: the machinery under `config.py`, free of any key of ours.

`build(cls, data)` makes an instance of a (nested) dataclass out of a plain mapping. Every leaf is converted to the type its
field declares, in one way for YAML, command line, sweeps and Python values, and every problem is collected, so that a user
sees all of them at once. The rules: text is kept as it was written until its type is known (`007` stays text for a text
field, `1e-6` is a float for a number), `4.0` is an int for an int field, `null`/`None` is None where None is allowed.

A dataclass may be *open*: its class attribute `open_registry` names a `Registry`, and the keyword-only parameters of the entry
chosen by its field `name` become keys of the section, typed by their annotations and collected in the field `args`.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from enum import Enum
from functools import cache, partial
from typing import Any, Literal, Union, get_args, get_origin

import yaml

NULLS = {"null", "Null", "NULL", "None", "~", ""}
TRUE = {"true", "yes", "on"}
FALSE = {"false", "no", "off"}
INT = re.compile(r"[-+]?(0|[1-9][0-9_]*)$")
FLOAT = re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?$|[-+]?\.?(inf|Inf|INF)$|\.?(nan|NaN|NAN)$")


class Quoted(str):
    """Text that stood in quotes: never a number, a boolean or null."""


class _TextLoader(yaml.SafeLoader):
    """YAML whose scalars all stay text; quoted ones are `Quoted`. A key given twice is an error."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = getattr(key_node, "value", None)
            if isinstance(key, str) and key != "<<":
                if key in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands twice", key_node.start_mark)
                seen.add(key)
        return super().construct_mapping(node, deep=deep)


def _scalar(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> str:
    return Quoted(node.value) if node.style in ("'", '"', "|", ">") else str(node.value)


_TextLoader.yaml_implicit_resolvers = {}
_TextLoader.add_constructor("tag:yaml.org,2002:str", _scalar)


def parse_yaml(text: str) -> Any:
    """YAML (and so JSON, and Python literals of lists and dicts) with every scalar kept as text."""
    return yaml.load(text, Loader=_TextLoader)


def guess(value: Any) -> Any:
    """The value of untyped text: null, boolean, int, float or text. `007`, `12:30` and `on` stay text."""
    if isinstance(value, Mapping):
        return {str(key): guess(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [guess(item) for item in value]
    if not isinstance(value, str) or isinstance(value, Quoted):
        return str(value) if isinstance(value, Quoted) else value
    text = value.strip()
    if text in NULLS:
        return None
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if INT.match(text):
        return int(text.replace("_", ""))
    if FLOAT.match(text) and not re.match(r"[-+]?0[0-9]", text):
        return float(text.lstrip().replace("_", "").replace(".inf", "inf").replace(".nan", "nan"))
    if text[:1] in "[{":
        return guess(_structure(text, value))
    return value


def _structure(text: str, default: Any) -> Any:
    try:
        return parse_yaml(text)
    except yaml.YAMLError:
        return default


class Mismatch(Exception):
    """A value that does not fit its type; carries what was expected."""


def coerce(value: Any, kind: Any) -> Any:
    """`value` as `kind`.

    Raises:
        Mismatch: it does not fit.
    """
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _coerce_union(value, get_args(kind))
    if origin is Literal:
        return _coerce_literal(value, get_args(kind))
    if kind is Any:
        return guess(value)
    if kind in (list, tuple, dict) or origin in (list, tuple, dict):
        return _coerce_collection(value, origin or kind, get_args(kind))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _coerce_literal(value, tuple(member.value for member in kind), kind)
    converter = {bool: _to_bool, int: _to_int, float: _to_float, str: _to_str, type(None): _to_none}.get(kind)
    if converter is None:
        raise TypeError(f"a config field cannot have the type {kind!r}")
    return converter(value)


def _coerce_union(value: Any, options: tuple[Any, ...]) -> Any:
    if type(None) in options and (value is None or (isinstance(value, str) and not isinstance(value, Quoted) and value.strip() in NULLS)):
        return None
    # text fits every str, so str comes last; an enum member is preferred to its text
    for option in sorted((o for o in options if o is not type(None)), key=lambda o: o is str):
        try:
            return coerce(value, option)
        except Mismatch:
            continue
    raise Mismatch(" or ".join(describe(option) for option in options))


def _coerce_literal(value: Any, options: tuple[Any, ...], kind: type[Enum] | None = None) -> Any:
    if isinstance(value, Enum):
        value = value.value
    for option in options:
        if value == option and isinstance(value, bool) == isinstance(option, bool):
            return kind(option) if kind else option
    for option in options:
        if isinstance(value, str) and not isinstance(option, str):
            try:
                if coerce(value, type(option)) == option:
                    return option
            except Mismatch:
                continue
    close = difflib.get_close_matches(str(value), [str(option) for option in options], n=1)
    raise Mismatch("one of " + ", ".join(str(option) for option in options) + (f" (did you mean {close[0]}?)" if close else ""))


def _coerce_collection(value: Any, origin: type, args: tuple[Any, ...]) -> Any:
    if origin is dict:
        value = _structure(value, value) if isinstance(value, str) else value
        if not isinstance(value, Mapping):
            raise Mismatch("a mapping")
        item_kind = args[1] if args else Any
        return {str(key): coerce(item, item_kind) for key, item in value.items()}
    if isinstance(value, str):
        text = value.strip()
        value = _structure(text, text) if text[:1] in ("[", "(") else [part for part in re.split(r"[,\s]+", text) if part]
    if not isinstance(value, list | tuple):
        raise Mismatch("a list")
    item_kind = args[0] if args else Any
    return origin(coerce(item, item_kind) for item in value)


def _to_none(value: Any) -> None:
    if value is not None:
        raise Mismatch("null")


def _to_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    word = value.strip().lower() if isinstance(value, str) else ""
    if word not in TRUE | FALSE:
        raise Mismatch("true or false")
    return word in TRUE


def _to_int(value: Any) -> int:
    number = _number(value, "a whole number")
    if number != int(number):
        raise Mismatch("a whole number")
    return int(number)


def _to_float(value: Any) -> float:
    return float(_number(value, "a number", finite=False))


def _number(value: Any, expected: str, finite: bool = True) -> float | int:
    if isinstance(value, str):
        text = value.strip()
        value = int(text) if re.fullmatch(r"[-+]?[0-9]+", text) else float(text) if FLOAT.match(text) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a NumPy scalar, as W&B's optimiser hands out
            return _number(value.item(), expected, finite)
        raise Mismatch(expected)
    if math.isnan(value) or (finite and math.isinf(value)):
        raise Mismatch(expected)
    return value


def _to_str(value: Any) -> str:
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, str):
        if not isinstance(value, Quoted) and value in ("null", "None", "~"):
            raise Mismatch("text (not null)")
        return str(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Mismatch("text")
    return str(value)


_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "null",
    list: "a list",
    dict: "a mapping",
}


def describe(kind: Any) -> str:
    """A type in words, for messages."""
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(option) for option in get_args(kind))
    if origin is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    return _WORDS.get(origin or kind, getattr(kind, "__name__", str(kind)))


# ---------------------------------------------------------------------------------------------------------------- sections


@dataclass(frozen=True)
class Leaf:
    """One key of a section: its type, and a maker of its default (None where a value is required)."""

    kind: Any
    default: Callable[[], Any] | None
    field: str | None  # the dataclass field it fills; None for a key of an open section


def _same(value: Any) -> Any:
    return value


@cache
def _hints(target: Any) -> dict[str, Any]:
    return typing.get_type_hints(target)


def keys_of(cls: type, name: str | None = None) -> dict[str, Leaf]:
    """The keys of section `cls`; for an open section also those of its entry `name`."""
    leaves: dict[str, Leaf] = {}
    for f in dataclasses.fields(cls):
        key = f.metadata.get("key", f.name)
        if key is None:
            continue
        default: Callable[[], Any] | None = None
        if f.default_factory is not MISSING:
            default = f.default_factory
        elif f.default is not MISSING:
            default = partial(_same, f.default)
        leaves[key] = Leaf(_hints(cls)[f.name], default, f.name)
    registry = getattr(cls, "open_registry", None)
    if registry is not None and name in registry:
        for key, (kind, value) in parameters_of(registry.get(name)).items():
            leaves[key] = Leaf(kind, None if value is MISSING else partial(_same, value), None)
    return leaves


def parameters_of(entry: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """The keyword-only parameters of a registered function or class: `{name: (type, default or MISSING)}`."""
    target: Any = entry.__init__ if isinstance(entry, type) else entry  # type: ignore[misc]
    hints = _hints(target)
    return {
        p.name: (hints.get(p.name, Any), MISSING if p.default is p.empty else p.default)
        for p in inspect.signature(target).parameters.values()
        if p.kind is p.KEYWORD_ONLY
    }


def is_section(kind: Any) -> bool:
    return dataclasses.is_dataclass(kind) and isinstance(kind, type)


def is_mapping(kind: Any) -> bool:
    return (get_origin(kind) or kind) is dict


def all_keys(cls: type, path: str = "") -> list[str]:
    """Every dotted key below `cls`, sections included."""
    found = []
    for key, leaf in keys_of(cls).items():
        found.append(f"{path}{key}")
        if is_section(leaf.kind):
            found += all_keys(leaf.kind, f"{path}{key}.")
    return found


def kind_at(cls: type, path: list[str]) -> Any:
    """The declared type of a dotted key, `Any` below a mapping or in an open section, None where there is no such key."""
    kind: Any = cls
    for part in path:
        if not is_section(kind):
            return Any if kind is Any or is_mapping(kind) else None
        leaf = keys_of(kind).get(part)
        if leaf is None:
            return Any if hasattr(kind, "open_registry") else None
        kind = leaf.kind
    return kind


def build(cls: type, data: Any, problems: list[str], path: str = "", root: type | None = None) -> Any:
    """An instance of the dataclass `cls` from plain `data`; what is wrong goes to `problems`, one line each, and its default is used."""
    root = root or cls
    if data is None:
        data = {}
    if isinstance(data, str):
        data = _structure(data, data)
    if not isinstance(data, Mapping):
        problems.append(f"{path.rstrip('.')}: expected a section (a mapping), got {data!r}")
        data = {}
    name = data.get("name") if hasattr(cls, "open_registry") else None
    if hasattr(cls, "open_registry") and name is None:
        name = next(f.default for f in dataclasses.fields(cls) if f.name == "name")
    leaves = keys_of(cls, name if isinstance(name, str) else None)
    values: dict[str, Any] = {}
    args: dict[str, Any] = {}
    known_name = getattr(cls, "open_registry", None) is None or name in cls.open_registry  # type: ignore[attr-defined]
    for key in data:
        if key not in leaves and known_name:
            problems.append(_unknown_key(str(key), path, leaves, root, name))
    for key, leaf in leaves.items():
        target = values if leaf.field else args
        slot = leaf.field or key
        if is_section(leaf.kind):
            target[slot] = build(leaf.kind, data.get(key), problems, f"{path}{key}.", root)
        elif key in data:
            try:
                target[slot] = coerce(data[key], leaf.kind)
            except Mismatch as mismatch:
                problems.append(f"{path}{key}: expected {mismatch}, got {_show(data[key])}")
                if leaf.default is not None:
                    target[slot] = leaf.default()
        elif leaf.default is not None:
            target[slot] = leaf.default()
        else:
            problems.append(f"{path}{key}: required, but not given (expected {describe(leaf.kind)})")
    if hasattr(cls, "open_registry"):
        values["args"] = args
    try:
        return cls(**values)
    except ValueError as error:
        problems.extend(str(error).split("\n"))
    except TypeError:  # a required field is missing, and is in `problems` already
        pass
    return None


def _show(value: Any) -> str:
    return f"{str(value)!r}" if isinstance(value, str) else f"{value!r}"


def _unknown_key(key: str, path: str, leaves: Mapping[str, Leaf], root: type, name: Any) -> str:
    full = f"{path}{key}"
    here = difflib.get_close_matches(key, list(leaves), n=1, cutoff=0.6)
    suggestion = f"{path}{here[0]}" if here else ""
    if not suggestion:
        everywhere = all_keys(root)
        by_last = {k.rpartition(".")[2]: k for k in everywhere}
        near = difflib.get_close_matches(full, everywhere, n=1, cutoff=0.7)
        last = difflib.get_close_matches(key, list(by_last), n=1, cutoff=0.7)
        suggestion = near[0] if near else by_last[last[0]] if last else ""
    where = f" for {name!r}" if name else ""
    if suggestion:
        return f"{full}: unknown key{where}; did you mean {suggestion}?"
    return f"{full}: unknown key{where}; keys here: {', '.join(sorted(leaves)) or 'none'}"


def to_plain_tree(section: Any) -> Any:
    """A built dataclass as plain nested data under its keys: what `build` would take to make it again."""
    if is_section(type(section)):
        tree = {}
        for key, leaf in keys_of(type(section), getattr(section, "name", None)).items():
            value = getattr(section, leaf.field) if leaf.field else section.args[key]
            tree[key] = to_plain_tree(value)
        return tree
    if isinstance(section, Enum):
        return section.value
    if isinstance(section, Mapping):
        return {key: to_plain_tree(value) for key, value in section.items()}
    if isinstance(section, list | tuple):
        return [to_plain_tree(value) for value in section]
    return section
