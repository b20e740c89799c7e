"""Whatever comes in, a config or a `ConfigError` comes out."""

import json

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rllm_lightning import schema
from rllm_lightning.config import Config, ConfigError, load_config

TEXTS = st.text(max_size=12) | st.sampled_from(
    [
        "1e-6",
        "null",
        "None",
        "???",
        "${seed}",
        "${",
        "{a: 1}",
        "{",
        "[1, 2",
        "(1,)",
        "'x'",
        "007",
        "\\",
        "!!int x",
        "&a [*a]",
        "*a",
        "nan",
        "1__",
    ]
)
DATA = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=4,
)
KEYS = st.sampled_from(
    sorted({*schema.all_keys(Config), "task.size", "rollout_engine.batch", "rllm.workflow.workflow_args.x"} - {"plugins"})
)
OFTEN = settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])


def loads_or_explains(load):
    problems = [""]
    try:
        Config.from_config(load())
    except ConfigError as error:
        problems = error.problems
    assert problems
    assert not any("\n" in problem for problem in problems)


@OFTEN
@given(st.lists(st.tuples(KEYS, TEXTS), min_size=1, max_size=3))
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_any_text_for_a_key_is_a_config_or_a_config_error(pairs):
    loads_or_explains(lambda: load_config([f"{key}={text}" for key, text in pairs]))


@OFTEN
@given(
    st.lists(st.builds("{}{}{}{}".format, st.sampled_from(["", "--", "-"]), KEYS | TEXTS, st.sampled_from(["", "="]), TEXTS), max_size=4)
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_any_command_line_is_a_config_or_a_config_error(argv):
    loads_or_explains(lambda: load_config([word for word in argv if "plugins" not in word]))


@OFTEN
@given(st.dictionaries(KEYS | TEXTS, DATA, max_size=3))
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_any_data_is_a_config_or_a_config_error(data):
    loads_or_explains(lambda: Config.from_config(data))
    loads_or_explains(lambda: load_config([json.dumps(data)]))


@OFTEN
@given(TEXTS | st.dictionaries(KEYS, DATA, max_size=3).map(yaml.safe_dump))
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_any_file_is_a_config_or_a_config_error(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("presets")
    (folder / "it.yaml").write_text(text, encoding="utf-8")
    loads_or_explains(lambda: load_config(["it"], folder))
