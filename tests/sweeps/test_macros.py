"""What W&B's agent makes of a sweep's values, macro by macro, and what our command line makes of that.

The words of a command line are written by the agent's own code, so that the table follows W&B.
"""

import pytest
import yaml
from wandb.sdk.launch.sweeps.utils import create_sweep_command_args

from rllm_lightning.config import Config, ConfigError, load_config
from rllm_lightning.tracking.sweep_values import SWEEP_VALUES, check_swept_values

MACROS = [
    "args",
    "args_no_hyphens",
    "args_no_equals",
    "args_json",
    "args_json_file",
    "args_append_hydra",
    "args_override_hydra",
    "args_no_boolean_flags",
]


@pytest.fixture
def words(tmp_path):
    """words(macro, values): what stands in the command line for `${macro}`."""

    def expand(macro, values):
        forms = create_sweep_command_args({"args": {key: {"value": value} for key, value in values.items()}})
        if macro == "args_json_file":
            path = tmp_path / "config-abc.json"
            path.write_text(forms["args_json"][0])
            return [str(path)]
        return forms[macro]

    return expand


@pytest.fixture
def typed(words):
    return lambda macro, values, *more: Config.from_config(load_config([*words(macro, values), *more]))


def find(config, key):
    """The value of a dotted key; what lies below an untyped mapping or an open section as well."""
    for part in key.split("."):
        if isinstance(config, dict):
            config = config[part]
        else:
            config = getattr(config, part) if hasattr(config, part) else config.args[part]
    return config


# key, what the sweep issues, what the run uses
VALUES = [
    ("wandb.notes", None, None),
    ("data.shuffle", True, True),
    ("training.learning_rate", 1e-6, 1e-6),
    ("training.learning_rate", "1e-6", 1e-6),  # as PyYAML reads it in a sweep's file
    ("training.learning_rate", 3, 3.0),
    ("rllm.workflow.timeout", 5e5, 500000.0),
    ("wandb.tags", ["a", "b"], ["a", "b"]),
    ("wandb.tags", ["it's", 'say "hi"', "a, b", "007"], ["it's", 'say "hi"', "a, b", "007"]),
    ("rllm.trainer.experiment_name", "007", "007"),
    ("rllm.trainer.experiment_name", "12:30", "12:30"),
    ("rllm.trainer.experiment_name", "on", "on"),
    ("rllm.trainer.experiment_name", "1e-6", "1e-6"),
    ("wandb.notes", "several words, an = and a 'quote'", "several words, an = and a 'quote'"),
    ("rllm.rollout.n", 4.0, 4),
    ("rllm.trainer.test_freq", -1, -1),
    ("lightning.devices", [0, 1], [0, 1]),
    ("rllm.algorithm.loss_kwargs", {"clip_low": 0.1}, {"clip_low": 0.1}),
    ("rllm.algorithm.loss_kwargs.clip_low", 0.1, 0.1),
    ("rllm.algorithm.estimator_kwargs", {}, {}),
    ("rllm.workflow.workflow_args", {"a": None, "b": [True, 1.5, "x y"]}, {"a": None, "b": [True, 1.5, "x y"]}),
    ("task.params", {"min_word_len": 3, "max_word_len": 4}, {"min_word_len": 3, "max_word_len": 4}),
]


@pytest.mark.parametrize("macro", MACROS)
@pytest.mark.parametrize(("key", "issued", "used"), VALUES, ids=[f"{key}={issued!r}" for key, issued, _ in VALUES])
def test_a_run_uses_the_value_that_the_sweep_issued(macro, key, issued, used, typed):
    """B40, B50: None, booleans, numbers, lists, mappings and text through every macro, with the type that the key declares."""
    config = typed(macro, {"rllm.algorithm.loss_fn": "ppo", key: issued, "seed": 3}, "task.dataset=spell_backward")
    value = find(config, key)
    assert value == used
    assert type(value) is type(used)
    assert config.seed == 3


@pytest.mark.parametrize("macro", [macro for macro in MACROS if macro != "args_no_boolean_flags"])
def test_false_arrives(macro, typed):
    """B40: over a default of true."""
    assert typed(macro, {"data.shuffle": False}).data.shuffle is False


def test_the_macro_that_drops_false_is_found_out(words, tmp_path, monkeypatch):
    """B40: ${args_no_boolean_flags} leaves False out, so the run would use the default: it refuses instead."""
    swept = {"data.shuffle": False, "rllm.trainer.val_only": False}
    path = tmp_path / "values.yaml"
    path.write_text(yaml.safe_dump({key: {"value": value} for key, value in swept.items()}))
    monkeypatch.setenv(SWEEP_VALUES, str(path))
    assert words("args_no_boolean_flags", swept) == []
    with pytest.raises(ConfigError) as error:
        check_swept_values(Config.from_config(load_config([])))
    assert error.value.problems[0].startswith("data.shuffle: the sweep says False, this run uses True")
    assert not any("val_only" in problem for problem in error.value.problems)  # false by default: nothing is lost


@pytest.mark.parametrize("macro", MACROS)
@pytest.mark.parametrize(
    "swept",
    [
        {"training.learning_rate": 0.1},
        {"training": {"learning_rate": 0.1}},
        {"training": {"learning_rate": 0.1}, "rllm": {"rollout": {"n": 2}, "algorithm": {"adv_estimator": "rloo"}}},
    ],
    ids=["dotted", "nested", "nested twice"],
)
def test_nested_parameters_merge_into_their_section(macro, swept, words, tmp_path, monkeypatch):
    """B41: lr .1 over {lr: 1e-5, weight decay: .01} leaves the weight decay, and what W&B shows is what is used."""
    (tmp_path / "base.yaml").write_text("training: {learning_rate: 1e-5, weight_decay: 0.01}")
    path = tmp_path / "values.yaml"
    path.write_text(yaml.safe_dump({key: {"value": value} for key, value in swept.items()}))
    monkeypatch.setenv(SWEEP_VALUES, str(path))
    config = Config.from_config(load_config([str(tmp_path / "base.yaml"), *words(macro, swept)]))
    assert (config.training.learning_rate, config.training.weight_decay) == (0.1, 0.01)
    if "rllm" in swept:
        assert (config.rllm.rollout.n, config.rllm.algorithm.estimator_of("")) == (2, "rloo")
    check_swept_values(config)


@pytest.mark.parametrize("macro", MACROS)
def test_a_value_of_the_wrong_type_is_an_error_of_its_key(macro, words):
    """B50: lr=abc through every macro."""
    with pytest.raises(ConfigError) as error:
        load_config(words(macro, {"training.learning_rate": "abc"}))
    assert error.value.problems == ["training.learning_rate: expected a number, got 'abc'"]


@pytest.mark.parametrize("content", ["[1]", "{", None])
def test_a_json_file_that_holds_no_object_is_named(content, tmp_path):
    path = tmp_path / "config-abc.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError) as error:
        load_config([str(path)])
    (problem,) = error.value.problems
    assert problem.startswith(f"{path}: ")


def test_a_file_of_tasks_is_no_file_of_values():
    config = load_config(["task.name=jsonl", "--task.train_file", "tasks.json"])
    assert config.task.train_file == "tasks.json"


# -------------------------------------------------------------------------------------------------- values that follow others


def test_a_batch_size_may_follow_from_the_group_size():
    """512 rollouts a batch: 512 / 16 = 32 prompts."""
    config = load_config(["data.train_batch_size=${div:512,${rllm.rollout.n}}", "rllm.rollout.n=16"])
    assert config.data.train_batch_size == 32


@pytest.mark.parametrize("n", ["3", "0.5"])
def test_a_division_with_a_remainder_is_refused(n):
    with pytest.raises(ConfigError) as error:
        load_config(["data.train_batch_size=${div:512," + n + "}"])
    (problem,) = error.value.problems
    assert problem.startswith("data.train_batch_size: cannot resolve")
    assert "is no whole number" in problem
