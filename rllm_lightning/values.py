"""One value of a config: from the text or the Python object that a user gave to the type that its key declares.

    YAML file, command line  ->  parse_yaml: every scalar stays text  ->  coerce(text, declared type)
    Python, sweeps           ->                                           coerce(object, declared type)

Text is kept as it was written until its type is known, so that `007` and `12:30` stay text for a text field while `1e-6` is
a float for a number, in the same way from every source. Where no type is declared (`Any`), `guess` decides.
"""

from __future__ import annotations

import ast
import difflib
import json
import math
import os
import re
import types
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import yaml

NULL_WORDS = {"null", "Null", "NULL", "None", "~", ""}
TRUE_WORDS = {"true", "yes", "on"}
FALSE_WORDS = {"false", "no", "off"}
INT = re.compile(r"[-+]?(0|[1-9][0-9_]*)")
FLOAT = re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?\.?(inf|Inf|INF)")


MAX_DEPTH = 20  # levels of lists and mappings in one value; whoever walks them does so recursively
MAX_ITEMS = 1_000_000  # of one value, each anchor counted as often as it is used
TOO_DEEP = f"nested more than {MAX_DEPTH} levels deep"


class Quoted(str):
    """Text that stood in quotes: text where no type is declared, whatever it looks like, and never null."""


class PythonText(Quoted):
    """Text that came as a Python string: as if in quotes, but where null is allowed its words are null."""


class Mismatch(ValueError):
    """A value that does not fit its type; the message says what was expected."""


def as_path(text: str) -> Path:
    """The path that a user wrote, `~` filled in; whether there is anything is another question.

    Raises:
        ValueError: nothing can be called so (too long, a NUL, no such user), or this user may not look there.
    """
    try:
        path = Path(text).expanduser()
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{text if len(text) <= 80 else text[:77] + '...'!r} is no usable path ({reason})") from error
    return path


# ------------------------------------------------------------------------------------------------------------------- text


class _TextLoader(yaml.SafeLoader):
    """YAML whose scalars all stay text, whatever their tag; quoted ones are `Quoted`. A key given twice is an error."""

    def fetch_flow_collection_start(self, token: Any) -> None:
        if self.flow_level > MAX_DEPTH:  # here already: reading on takes time that grows with the square of the depth
            raise ValueError(TOO_DEEP)
        super().fetch_flow_collection_start(token)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        if twice := next((key for key in keys if keys.count(key) > 1), None):
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep=deep)


def _scalar(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> str:
    text = str(loader.construct_scalar(node))
    return Quoted(text) if node.style in ("'", '"', "|", ">") else text


_TextLoader.yaml_implicit_resolvers = {"<": [("tag:yaml.org,2002:merge", re.compile("<<$"))]}
for _tag in ("str", "int", "float", "bool", "null", "timestamp"):
    _TextLoader.add_constructor(f"tag:yaml.org,2002:{_tag}", _scalar)


def parse_yaml(text: str) -> Any:
    """YAML (and so JSON) with every scalar kept as text.

    Raises:
        ValueError: it is not valid YAML; the message is one line.
    """
    try:
        content = yaml.load(text, Loader=_TextLoader)
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise ValueError(" ".join(str(error).split())) from error
    check_structure(content)
    return content


def check_structure(value: Any) -> None:
    """Whether plain data can be walked: mappings, lists and scalars, not too deep, and finite.

    Raises:
        ValueError: it is nested too deep, holds itself, unfolds into too many items (anchors of anchors), or holds a set or bytes.
    """
    measured: dict[int, tuple[int, int] | None] = {}  # levels and items of the parts; anchors make one part stand in many places

    def measure(part: Any, depth: int) -> tuple[int, int]:
        if isinstance(part, set | bytes):
            raise ValueError(f"a {type(part).__name__} is none of null, true, false, a number, text, a list and a mapping")
        if not isinstance(part, dict | list | tuple):
            return 0, 1
        if id(part) not in measured:
            if depth >= MAX_DEPTH:
                raise ValueError(TOO_DEEP)
            measured[id(part)] = None  # until it is known
            inner = [measure(item, depth + 1) for item in (part.values() if isinstance(part, dict) else part)]
            measured[id(part)] = (1 + max((levels for levels, _ in inner), default=0), 1 + sum(items for _, items in inner))
        if (known := measured[id(part)]) is None:
            raise ValueError("it holds itself")
        levels, items = known
        if depth + levels > MAX_DEPTH:
            raise ValueError(TOO_DEEP)
        if items > MAX_ITEMS:
            raise ValueError(f"its anchors unfold into more than {MAX_ITEMS} items")
        return levels, items

    measure(value, 0)


def parse_structure(text: str) -> Any:
    """The list or mapping that `text` writes as JSON, as YAML or as a Python literal; `text` itself if it writes none."""
    text = text.strip()
    if "\\" in text or text.startswith("("):  # to YAML, 'a\nb' holds a backslash, "\ud83d\ude00" two halves, and (1, 2) is text
        for read in (json.loads, ast.literal_eval):
            try:
                check_structure(structure := read(text))
                return map_text(structure, Quoted)
            except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
                continue
    try:
        return parse_yaml(text)
    except ValueError:
        return text


def map_text(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of nested mappings and lists with `change` applied to every text in them."""
    if isinstance(value, Mapping):
        return {key: map_text(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [map_text(item, change) for item in value]
    return change(value) if isinstance(value, str) else value


def is_null(value: Any) -> bool:
    """Whether a value means null where null is allowed."""
    return value is None or (isinstance(value, str) and not isinstance(value, Quoted) and value.strip() in NULL_WORDS)


def is_mapping_text(value: Any) -> bool:
    return isinstance(value, str) and value.lstrip().startswith("{")


def guess(value: Any) -> Any:
    """The value of untyped text: null, boolean, int, float, list, mapping or text. `007`, `12:30` and `on` stay text."""
    if isinstance(value, Mapping):
        return {str(key): guess(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [guess(item) for item in value]
    if isinstance(value, Quoted):
        return str(value)
    if not isinstance(value, str):
        return _python_number(value)
    text = value.strip()
    if text in NULL_WORDS:
        return None
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if INT.fullmatch(text) or (FLOAT.fullmatch(text) and not re.match(r"[-+]?0[0-9]", text)):
        number = _parse_number(text)
        return value if number is None else number
    if text[:1] in ("[", "{"):
        structure = parse_structure(text)
        return value if isinstance(structure, str) else guess(structure)
    return value


def _parse_number(text: str) -> int | float | None:
    """The number that `text` writes; None if it writes none (or an int of thousands of digits)."""
    try:
        if re.fullmatch(r"[-+]?[0-9][0-9_]*", text):
            return int(text)
        return float(text.replace(".i", "i").replace(".I", "I")) if FLOAT.fullmatch(text) else None  # YAML's .inf
    except ValueError:
        return None


def _python_number(value: Any) -> Any:
    """NumPy scalars, which W&B's optimiser hands out, as Python's own; anything else as it is."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value


# ------------------------------------------------------------------------------------------------------------------ types


def coerce(value: Any, kind: Any) -> Any:
    """`value` as `kind`: bool, int, float, str, an enum, `Literal`, list, tuple, dict, unions of these, or `Any`.

    Raises:
        Mismatch: it does not fit.
    """
    origin = get_origin(kind)
    if kind is Any:
        return guess(value)
    if origin in (Union, types.UnionType):
        return _to_union(value, get_args(kind))
    if origin is Literal:
        return _to_option(value, get_args(kind))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(_to_option(value, tuple(member.value for member in kind)))
    if (origin or kind) is dict:
        return _to_dict(value, get_args(kind))
    if (origin or kind) in (list, tuple):
        return _to_sequence(value, origin or kind, get_args(kind))
    if kind not in _CONVERTERS:
        raise Mismatch(f"a value of type {describe(kind)}, which a config cannot give")
    return _CONVERTERS[kind](value)


def _to_union(value: Any, kinds: tuple[Any, ...]) -> Any:
    if type(None) in kinds and (is_null(value) or (isinstance(value, PythonText) and value in NULL_WORDS)):
        return None
    for kind in sorted(kinds, key=lambda kind: kind is str):  # text fits every str: it is tried last
        try:
            return coerce(value, kind)
        except Mismatch:
            continue
    raise Mismatch(" or ".join(describe(kind) for kind in kinds))


def _to_option(value: Any, options: tuple[Any, ...]) -> Any:
    for option in options:
        try:
            if coerce(value, type(option)) == option:
                return option
        except Mismatch:
            continue
    texts = [str(option) for option in options]
    near = difflib.get_close_matches(str(value), texts, n=1)
    raise Mismatch(f"one of {', '.join(texts)}" + (f" (did you mean {near[0]}?)" if near else ""))


def _to_dict(value: Any, kinds: tuple[Any, ...]) -> dict[str, Any]:
    if is_null(value):
        return {}
    if is_mapping_text(value):
        value = parse_structure(value)
    if not isinstance(value, Mapping):
        raise Mismatch("a mapping")
    return {str(key): coerce(item, kinds[1] if kinds else Any) for key, item in value.items()}


def _to_sequence(value: Any, origin: type, kinds: tuple[Any, ...]) -> Any:
    """Lists and tuples; text is `[a, b]`, `(a, b)`, or parts between commas or blanks."""
    if is_null(value):
        value = []
    if isinstance(value, str):
        value = parse_structure(value) if value.strip()[:1] in ("[", "(") else [part for part in re.split(r"[,\s]+", value) if part]
    if not isinstance(value, list | tuple):
        raise Mismatch("a list")
    if origin is list or not kinds or kinds[-1] is Ellipsis:
        return origin(coerce(item, kinds[0] if kinds else Any) for item in value)
    if len(value) != len(kinds):
        raise Mismatch(f"a list of {len(kinds)}")
    return tuple(coerce(item, kind) for item, kind in zip(value, kinds, strict=True))


def _to_none(value: Any) -> None:
    if not is_null(value):
        raise Mismatch("null")


def _to_bool(value: Any) -> bool:
    value = _python_number(value)
    if isinstance(value, bool):
        return value
    word = value.strip().lower() if isinstance(value, str) else ""
    if word not in TRUE_WORDS | FALSE_WORDS:
        raise Mismatch("true or false")
    return word in TRUE_WORDS


def _to_int(value: Any) -> int:
    number = _to_number(value)
    if number is None or number != number or number in (math.inf, -math.inf) or number != int(number):
        raise Mismatch("a whole number")
    return int(number)


def _to_float(value: Any) -> float:
    number = _to_number(value)
    try:
        if number is not None and number == number:
            return float(number)
    except OverflowError:  # an int beyond the largest float
        pass
    raise Mismatch("a number")


def _to_number(value: Any) -> int | float | None:
    value = _parse_number(value.strip()) if isinstance(value, str) else _python_number(value)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _to_str(value: Any) -> str:
    value = value.value if isinstance(value, Enum) else _python_number(value)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise Mismatch("text")
    if value != "" and is_null(value):
        raise Mismatch("text, not null (in quotes it would be text)")
    return str(value)


_CONVERTERS: dict[Any, Any] = {bool: _to_bool, int: _to_int, float: _to_float, str: _to_str, type(None): _to_none}

_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "null",
    list: "a list",
    tuple: "a list",
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
