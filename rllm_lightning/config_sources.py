"""Where a configuration comes from: presets and the command line, merged in order, and the references in it.

    names of presets  ->  read_preset  ->  unfold  \\
                                                    merge  ->  resolve `${...}`  ->  schema.build
    key=value ...     ->  parse_argv   ->  unfold  /

Functions here know the dataclass of the whole config only as an argument, and append what is wrong to `problems`.
"""

from __future__ import annotations

import copy
import difflib
import json
import os
import re
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rllm_lightning import schema
from rllm_lightning.values import PythonText, check_structure, map_text, parse_yaml

# ----------------------------------------------------------------------------------------------------- presets and argv


def read_argv(argv: Sequence[str], root: type, problems: list[str], presets: str | Path | None, default: str | None) -> dict[str, Any]:
    """The tree of a command line: its presets (or the one named `default`) in order, then its overrides."""
    names, overrides = parse_argv(argv, problems)
    tree: dict[str, Any] = {}
    for name in names or ([default] if default else []):
        schema.merge(tree, schema.unfold(read_preset(name, presets, problems), root, problems), root)
    given: dict[str, Any] = {}  # the overrides belong together: in which order task.name and task.size stand must not matter
    for key, value in overrides:
        schema.merge(given, schema.unfold({key: value}, root, problems))
    schema.merge(tree, given, root)
    return tree


def parse_argv(argv: Sequence[str], problems: list[str]) -> tuple[list[str], list[tuple[str, Any]]]:
    """Split a command line into preset names and `(key, text)` overrides.

    Understands what W&B's command macros produce: `--k=v`, `k=v`, `--k v`, `--flag`, `+k=v`, `++k=v`, one JSON object, and the
    name of a JSON file.
    """
    names: list[str] = []
    overrides: list[tuple[str, Any]] = []
    tokens = list(argv)
    while tokens:
        token = tokens.pop(0)
        key, equals, value = token.removeprefix("--").lstrip("+").partition("=")
        if token.startswith("{") or (token.endswith(".json") and not equals):
            overrides += _read_json(token, problems).items()
        elif equals:
            overrides.append((key, value))
        elif not token.startswith("-"):
            names.append(token)
        elif tokens and not tokens[0].startswith("--"):
            overrides.append((key, tokens.pop(0)))
        else:
            overrides.append((key, "true"))
    return names, overrides


def _read_json(token: str, problems: list[str]) -> dict[str, Any]:
    """The keys of a JSON object: `token` is one, or names a file that holds one."""
    try:
        content = json.loads(token if token.startswith("{") else Path(token).read_text(encoding="utf-8"))
        check_structure(content)
    except OSError as error:
        problems.append(f"{token}: cannot be read: {error}")
        return {}
    except (ValueError, RecursionError) as error:
        what = f"{schema.show(token)}: begins like a JSON object, but is none" if token.startswith("{") else f"{token}: not JSON"
        problems.append(f"{what} ({error})")
        return {}
    if not isinstance(content, dict):
        problems.append(f"{token}: expected a JSON object of keys, got {schema.show(content)}")
        return {}
    return content


def read_preset(name: str, folder: str | Path | None, problems: list[str]) -> dict[str, Any]:
    """The raw content of a preset: `name` in `folder`, or a path to a YAML file."""
    known = {path.stem: path for path in sorted(Path(folder).glob("*.yaml"))} if folder else {}
    if name not in known and not name.endswith((".yaml", ".yml")):
        near = difflib.get_close_matches(name, list(known), n=1)
        hint = f"; did you mean {near[0]}?" if near else "."
        problems.append(f"{name}: no such preset{hint} Presets: {', '.join(known) or 'none'} (an override is written key=value)")
        return {}
    try:
        content = parse_yaml(known.get(name, Path(name)).read_text(encoding="utf-8"))
    except OSError as error:
        problems.append(f"{name}: cannot be read: {error}")
        return {}
    except ValueError as error:  # not YAML, not UTF-8, or no path at all
        problems.append(f"{name}: not a valid YAML file: {error}")
        return {}
    if content is not None and not isinstance(content, dict):
        problems.append(f"{name}: expected a mapping of keys, got {schema.show(content)}")
        return {}
    return content or {}


# ------------------------------------------------------------------------------------------------------ Python's objects


def read_python(config: Any, root: type, problems: list[str]) -> dict[str, Any]:
    """The tree of a `DictConfig` or a mapping."""
    data = OmegaConf.to_container(config, resolve=False) if isinstance(config, DictConfig) else config
    if not isinstance(data, Mapping):
        problems.append(f"config: expected a DictConfig or a dict, got {schema.show(config)}")
        return {}
    try:
        check_structure(data)
    except ValueError as error:
        problems.append(f"config: {error}")
        return {}
    return schema.unfold(map_text(data, PythonText), root, problems)


def as_dict_config(config: Any) -> DictConfig:
    """The `DictConfig` of a typed config: every key, plain values, unknown keys refused."""
    tree = OmegaConf.create(map_text(schema.to_plain_tree(config), _escape))
    OmegaConf.set_struct(tree, True)
    return tree


def _escape(text: str) -> str:
    """Text that OmegaConf reads as `text`, even where it holds `${`."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


# ------------------------------------------------------------------------------------------------------------ references


def _divide(number: Any, by: Any) -> int:
    """`${div:512,${rllm.rollout.n}}`: a whole number that follows from another key."""
    if not isinstance(number, int) or not isinstance(by, int) or by == 0 or number % by:
        raise ValueError(f"{number} divided by {by} is no whole number")
    return number // by


if not OmegaConf.has_resolver("div"):
    OmegaConf.register_resolver("div", _divide)


# The environment variables whose values stand in a config of this process under keys of the user's own: of a task, a rollout
# engine, a workflow. What is written down must not hold them (`tracking/secrets.py`): only the user knows which are secrets.
from_environment: set[str] = set()
_VARIABLE = re.compile(r"oc\.env\s*:\s*(\$\{|[^\s,{}]+)")


def resolve(tree: dict[str, Any], root: type, problems: list[str]) -> dict[str, Any]:
    """A copy of `tree` with every `${...}` filled in. References see typed values, defaults included."""
    references = [(path, value) for path, value in _leaves(tree) if _refers(value)]
    if not references:
        return tree
    tree = copy.deepcopy(tree)
    for path, _ in references:
        del _parent_of(path, tree)[path[-1]]
    known = map_text(tree, str)
    schema.merge(known, map_text(schema.to_plain_tree(schema.build(root, tree, [])), _escape))
    whole = OmegaConf.create(map_text(known, str), flags={"allow_objects": True})
    valid = []
    for path, value in references:
        with _reported(path, value, problems):
            _parent_of(path, whole)[path[-1]] = map_text(value, str)
            valid.append((path, value))
    for path, value in valid:
        with _reported(path, value, problems):
            found = _parent_of(path, whole)[path[-1]]
            found = OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found
            _parent_of(path, tree)[path[-1]] = found
            kind = schema.kind_at(root, list(path))
            if kind is None or kind is Any or schema.is_mapping(kind):
                from_environment.update(_variables(value, found))
    return tree


def _variables(reference: Any, found: Any) -> set[str]:
    """The environment variables that a reference takes; where their names are references, all whose values stand in what was found."""
    names = set(_VARIABLE.findall(str(reference)))
    if "${" in names:
        names |= {name for name, value in os.environ.items() if value and value in str(found)}
    return {name.strip("'\"") for name in names}


@contextmanager
def _reported(path: tuple[str, ...], value: Any, problems: list[str]) -> Iterator[None]:
    try:
        yield
    except (OmegaConfBaseException, ValueError, RecursionError) as error:
        problems.append(f"{'.'.join(path)}: cannot resolve {schema.show(value)}: {str(error).splitlines()[0]}")


def _leaves(tree: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


def _refers(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_refers(item) for item in value.values())
    if isinstance(value, list | tuple):
        return any(_refers(item) for item in value)
    return isinstance(value, str) and "${" in value


def _parent_of(path: tuple[str, ...], tree: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """The mapping that holds the last part of `path`; what is missing or no mapping on the way there becomes one."""
    for part in path[:-1]:
        if not isinstance(tree.get(part), MutableMapping):
            tree[part] = {}
        tree = tree[part]
    return tree
