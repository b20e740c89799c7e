"""A sweep's YAML: read and checked as W&B does it, and the command line of a trial."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from rllm_lightning.config import ConfigError, load_config
from rllm_lightning.lab.sweep import engine
from rllm_lightning.values import FLOAT

Values = dict[str, Any]  # parameter -> value

RESERVED = ("run_root", "rllm.trainer.resume")  # what this runner sets itself
ELSEWHERE = ("controller", "scheduler", "metrics")  # keys of W&B's that need one of its other runners


@dataclass(frozen=True)
class Metric:
    """What is optimised."""

    name: str
    goal: Literal["minimize", "maximize"]

    def best(self, values: list[float]) -> float | None:
        return None if not values else max(values) if self.goal == "maximize" else min(values)


@dataclass(frozen=True)
class Sweep:
    """A checked sweep. `content` is the whole YAML."""

    path: Path
    content: dict[str, Any]

    @property
    def method(self) -> str:
        return self.content["method"]

    @property
    def metric(self) -> Metric | None:
        given = self.content.get("metric")
        return Metric(given["name"], given.get("goal", "minimize")) if given else None

    @property
    def stops_early(self) -> bool:
        return "early_terminate" in self.content

    @property
    def run_cap(self) -> int | None:
        return self.content.get("run_cap")

    @property
    def varied(self) -> list[tuple[str, ...]]:
        """The parameters that differ between trials: `("training.learning_rate",)`, or `("training", "learning_rate")` if nested."""
        return [path for path, parameter in _parameters(self.content["parameters"]) if "value" not in parameter]

    @property
    def varied_keys(self) -> list[str]:
        """`varied` as dotted keys, the seed left out."""
        return [key for path in self.varied if (key := ".".join(path)) != "seed"]

    def command_line(self, values: Values, json_file: Path) -> list[str]:
        """The words that W&B's agent would run for these values; `json_file` is where `${args_json_file}` finds them."""
        # the agent's own code, so that a trial here and a trial there cannot differ
        from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

        words = create_sweep_command(list(self.content["command"]) if "command" in self.content else None)
        forms = create_sweep_command_args({"args": {key: {"value": value} for key, value in values.items()}})
        forms |= {"env": ["/usr/bin/env"], "interpreter": ["python"], "args_json_file": [str(json_file)]}
        if "program" in self.content:
            forms["program"] = [self.content["program"]]
        line: list[str] = []
        for word in map(str, words):
            line += forms[macro] if (macro := macro_of(word)) else [word]
        return line


def read_sweep(path: str | Path) -> Sweep:
    """Read and check a sweep's YAML.

    Raises:
        ValueError: it cannot be read or run here; one line for each problem.
    """
    path = Path(path)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        content = json.loads(json.dumps(content))  # the way it takes to W&B's server
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a valid YAML file: {' '.join(str(error).split())}") from error
    except TypeError as error:
        raise ValueError(f"{path}: {error}; put dates in quotes") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a mapping with method and parameters, got {content!r}")
    if problems := list(_problems(content)):
        raise ValueError("\n".join(f"{path}: {problem}" for problem in problems))
    sweep = Sweep(path, content)
    if problems := list(_unknown_keys(sweep)):
        raise ValueError("\n".join(f"{path}: {problem}" for problem in problems))
    return sweep


def swept_keys(folders: Iterable[str | os.PathLike[str]]) -> list[str]:
    """The keys that the sweeps of some folders vary, the seed left out; none where a folder is not a sweep's and lies within none.

    Raises:
        ValueError: the YAML of a sweep cannot be read.
    """
    keys: dict[str, None] = {}
    for folder in folders:
        path = Path(folder).expanduser().resolve()
        home = next((place for place in (path, *path.parents) if (place / "sweep.yaml").is_file() and (place / "trials").is_dir()), None)
        if home is None:
            return []
        try:
            content = yaml.safe_load((home / "sweep.yaml").read_text(encoding="utf-8"))
            keys |= dict.fromkeys(Sweep(path, content).varied_keys)
        except (OSError, UnicodeDecodeError, yaml.YAMLError, TypeError, KeyError) as error:
            raise ValueError(f"{home / 'sweep.yaml'}: not the YAML of a sweep ({' '.join(str(error).split())})") from error
    return list(keys)


def _problems(content: dict[str, Any]) -> Iterator[str]:
    if unknown := [key for key in ELSEWHERE if key in content]:
        yield f"{', '.join(unknown)}: this runner has one metric and the methods grid, random and bayes"
        return
    if missing := [key for key in ("method", "parameters") if key not in content]:
        yield f"{' and '.join(missing)}: required"
        return
    # bounds that are text would be reported by the engine as well, and less clearly
    if found := list(_numbers_as_text(content["parameters"])) or engine.violations(content):
        yield from found
        return
    if content["method"] == "custom":
        yield "method: custom needs a scheduler of W&B's; here there are grid, random and bayes"
    if "metric" not in content and (content["method"] == "bayes" or "early_terminate" in content):
        yield "metric: required by bayes and by early_terminate"
    for path, _ in _parameters(content["parameters"]):
        if (key := ".".join(path)) in RESERVED:
            yield f"parameters.{key}: set by this runner for each trial; leave it out"
    yield from _problems_of_command(content)


def _problems_of_command(content: dict[str, Any]) -> Iterator[str]:
    words = [str(word) for word in content["command"]] if "command" in content else ["${program}", "${args}"]
    if "${program}" in words and "program" not in content:
        yield "program: required by the command (W&B's default command, where none is given)"
    macros = [macro_of(word) for word in words]
    known = ["env", "interpreter", "program", *ARGUMENTS]
    for word, macro in zip(words, macros, strict=True):
        if macro is not None and macro not in known and not macro.startswith("envvar:"):
            yield f"command: no macro {word}; there are: {', '.join(f'${{{name}}}' for name in known)}"
        elif macro is None and "${args" in word:
            yield f"command: in {word!r} the macro is not a word of its own, so W&B leaves it as it is"
    if not any(macro in ARGUMENTS for macro in macros):
        yield "command: passes no values on; add ${args_no_hyphens}"


def _unknown_keys(sweep: Sweep) -> Iterator[str]:
    """Keys of the first trial that no config has, where the command is `experiments/run.py`: they would fail all trials.

    Nothing else that is wrong with that trial counts: another one's values may be right.
    """
    values = engine.next_values(sweep, [])
    if values is None:
        return
    file = Path("values.json")  # not written yet
    line = [json.dumps(values) if word == str(file) else word for word in sweep.command_line(values, file)]
    script = next((word for word in line if Path(word).parts[-2:] == ("experiments", "run.py")), None)
    if script is None or not Path(script).is_file():
        return
    words = [*line[line.index(script) + 1 :], "rllm.algorithm.loss_fn=null"]  # to name one imports torch
    try:
        load_config(words, Path(script).parent / "configs", default="default")
    except ConfigError as error:
        keys = [".".join(path) for path, _ in _parameters(sweep.content["parameters"])]
        for problem in error.problems:
            key, _, what = problem.partition(": ")
            if what.startswith("unknown key"):
                yield f"parameters.{problem}" if any(f"{known}.".startswith(f"{key}.") for known in keys) else problem


ARGUMENTS = (
    "args",
    "args_no_hyphens",
    "args_no_equals",
    "args_no_boolean_flags",
    "args_append_hydra",
    "args_override_hydra",
    "args_json",
    "args_json_file",
)


def macro_of(word: str) -> str | None:
    """`args` of `${args}`; None of any other word."""
    return word[2:-1] if word.startswith("${") and word.endswith("}") else None


def _parameters(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """The parameters with their names; those nested under a `parameters` have several."""
    for key, parameter in tree.items() if isinstance(tree, Mapping) else ():
        if isinstance(parameter, Mapping) and "parameters" in parameter:
            yield from _parameters(parameter["parameters"], (*path, key))
        elif isinstance(parameter, Mapping):
            yield (*path, key), parameter


def _numbers_as_text(tree: Any) -> Iterator[str]:
    """B50: bounds such as `1e-4`, which YAML reads as text."""
    for path, parameter in _parameters(tree):
        for bound in ("min", "max", "mu", "sigma", "q"):
            value = parameter.get(bound)
            if isinstance(value, str) and FLOAT.fullmatch(value):
                yield f"parameters.{'.'.join(path)}.{bound}: YAML reads {value} as text; write {_with_point(value)}"


def _with_point(text: str) -> str:
    mantissa, e, exponent = text.lower().partition("e")
    return f"{mantissa if '.' in mantissa else f'{mantissa}.0'}{e}{exponent if exponent[:1] in '+-' else f'+{exponent}'}"
