"""The configuration with everything that is registered: its defaults run, and no knob is dead. Its parts: tests/config/."""

import dataclasses
import re
from pathlib import Path

import pytest

from rllm_lightning import schema
from rllm_lightning.config import Config, load_config, rLLMAdvantageEstimator
from rllm_lightning.registry import ENGINES, ESTIMATORS, TASKS

ROOT = Path(__file__).parent.parent
READERS = [
    path.read_text(encoding="utf-8")
    for folder in ("rllm_lightning", "experiments")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not re.match(r"config(_\w+)?\.py$", path.name)
]


def fields_of(cls, path=""):
    """(dotted path, name) of every field below a section."""
    for field in dataclasses.fields(cls):
        kind = schema.hints_of(cls)[field.name]
        if schema.is_section(kind):
            yield from fields_of(kind, f"{path}{field.name}.")
        else:
            yield f"{path}{field.name}", field.name


def test_the_defaults_are_a_config_that_can_run():
    config = Config.from_config(load_config([]))
    assert config.task.name in TASKS
    assert config.rollout_engine.name in ENGINES
    assert config.rllm.algorithm.estimator_of("") == "grpo"


def test_the_enum_has_a_member_for_each_built_in_estimator():
    members = {member.value for member in rLLMAdvantageEstimator if member is not rLLMAdvantageEstimator.OTHER}
    ours = {name for name, entry in ESTIMATORS.items() if entry.function.__module__.startswith("rllm_lightning.")}
    assert members == ours


# Read inside the configuration: by should_mask and loss_of, an old home, modules to import; and rLLM's mode, of which one is left.
READ_AT_HOME = re.compile(
    r"rllm\.(compact_filtering|stepwise_advantage)\.|rllm\.algorithm\.(loss_fn_map|stepwise_advantage_mode)$|plugins$"
)


@pytest.mark.parametrize(("path", "name"), [found for found in fields_of(Config) if not READ_AT_HOME.match(found[0])])
def test_somebody_reads_every_field(path, name):
    """A field that nothing reads is a switch that does nothing."""
    assert any(re.search(rf"\.{name}\b", source) for source in READERS), f"nothing reads {path}"
