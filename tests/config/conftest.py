"""Small registries, whose keys are known here, so that no model or data set is imported; and short ways to load a config."""

import dataclasses
from typing import Any, Literal

import pytest

from rllm_lightning import registry as registries
from rllm_lightning.config import Config, ConfigError, load_config
from rllm_lightning.registry import PolicyLoss, Registry


def puzzles(
    seed: int, *, size: int = 10, level: float = 0.5, sizes: list[int] = (1,), tag: str = "x", more: dict[str, Any] | None = None
): ...


def stories(seed: int, *, file: str, limit: int | None = None): ...


class Sampler:
    def __init__(self, setup, *, batch: int = 4, kind: Literal["fast", "slow"] = "fast"): ...


class Remote:
    def __init__(self, setup, *, url: str = "here"): ...


@dataclasses.dataclass
class Estimator:
    function: Any
    kwargs: tuple[str, ...]


def normalised(rewards, epsilon: float = 1e-6, scale: str = "std"): ...


def passing(rewards, k: int = 1): ...


def clipped(logprobs, *, clip_low: float = 0.2, bound=None): ...


ENTRIES: dict[str, dict[str, Any]] = {
    "ESTIMATORS": {name: Estimator(normalised, ("epsilon", "scale")) for name in ("grpo", "rloo", "reinforce", "my_adv")}
    | {"pass_at_k": Estimator(passing, ("k",))},
    "LOSSES": {name: PolicyLoss(clipped, "", "", True, "token") for name in ("ppo", "importance_sampling", "cispo")},
    "TASKS": {"reasoning_gym": puzzles, "jsonl": stories},
    "WORKFLOWS": {"single_turn": print, "multi_turn": repr},
    "ENGINES": {"hf": Sampler, "remote": Remote},
    "TRACKERS": {"console": print, "csv": print, "wandb": print},
}


@pytest.fixture(autouse=True, scope="module")
def few_entries():
    """Entries whose keys are known here, so that no model or data set is imported."""
    with pytest.MonkeyPatch.context() as patch:
        for name, entries in ENTRIES.items():
            found: Registry[Any] = getattr(registries, name)
            patch.setattr(found, "_entries", entries)
            patch.setattr(found, "_home", [])
        yield


@pytest.fixture(scope="session")
def typed():
    """typed(*argv, presets=None, default=None) -> Config."""
    return lambda *argv, **kwargs: Config.from_config(load_config(argv, **kwargs))


@pytest.fixture(scope="session")
def problems_of():
    """problems_of(*argv, presets=None) -> the lines of the ConfigError that this command line ends in."""

    def problems(*argv, **kwargs):
        with pytest.raises(ConfigError) as error:
            load_config(argv, **kwargs)
        return error.value.problems

    return problems


@pytest.fixture
def preset(tmp_path):
    """preset(name, text) writes a YAML file and returns the folder."""

    def write(name, text):
        (tmp_path / f"{name}.yaml").write_text(text)
        return tmp_path

    return write
