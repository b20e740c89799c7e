"""The configuration: the same value from every source, every problem at once, and every switch does something."""

import dataclasses
import json
import warnings
from typing import Any, Literal

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rllm_lightning import registry as registries
from rllm_lightning import schema
from rllm_lightning.config import (
    AlgorithmConfig,
    CompactFilteringConfig,
    Config,
    ConfigError,
    RejectionSamplingConfig,
    TransformConfig,
    load_config,
    rLLMAdvantageEstimator,
)
from rllm_lightning.registry import PolicyLoss, Registry
from rllm_lightning.types import TerminationReason

# ------------------------------------------------------------------------------------------------------ small registries


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


def typed(*argv, **kwargs) -> Config:
    return Config.from_config(load_config(argv, **kwargs))


def problems_of(*argv, **kwargs):
    with pytest.raises(ConfigError) as error:
        load_config(argv, **kwargs)
    return error.value.problems


@pytest.fixture
def preset(tmp_path):
    """preset(name, text) writes a YAML file and returns the folder."""

    def write(name, text):
        (tmp_path / f"{name}.yaml").write_text(text)
        return tmp_path

    return write


# --------------------------------------------------------------------------------------- one value, whatever the source

SWEPT = {
    "rllm.trainer.resume": None,
    "data.shuffle": False,
    "training.learning_rate": 1e-6,
    "wandb.tags": ["a", "b"],
    "rllm.trainer.experiment_name": "007",
    "wandb.notes": "12:30",
    "rllm.rollout.n": 4.0,
}
FORMS = {
    "${args}": [f"--{key}={value}" for key, value in SWEPT.items()],
    "${args_no_hyphens}": [f"{key}={value}" for key, value in SWEPT.items()],
    "${args_no_equals}": [part for key, value in SWEPT.items() for part in (f"--{key}", str(value))],
    "${args_json}": [json.dumps(SWEPT)],
    "in JSON, nested": [
        '{"rllm": {"trainer": {"resume": null, "experiment_name": "007"}, "rollout": {"n": 4.0}}}',
        *[f"{key}={value}" for key, value in SWEPT.items() if not key.startswith("rllm")],
    ],
}


@pytest.mark.parametrize("form", FORMS)
def test_what_a_sweep_issues_is_what_the_run_gets(form):
    """B40: None, False, 1e-6, lists, 007, 12:30 and 4.0 through the hyphen and no-hyphen macros."""
    config = typed(*FORMS[form])
    assert config.rllm.trainer.resume is None
    assert config.data.shuffle is False
    assert config.training.learning_rate == 1e-6
    assert config.wandb.tags == ["a", "b"]
    assert config.rllm.trainer.experiment_name == "007"
    assert config.wandb.notes == "12:30"
    assert (config.rllm.rollout.n, type(config.rllm.rollout.n)) == (4, int)


def test_a_flag_alone_is_true():
    """B40: W&B's ${args_no_boolean_flags} gives `--flag`."""
    config = typed("--rllm.trainer.val_only", "--data.train_batch_size", "4", "--wandb.log_model")
    assert (config.rllm.trainer.val_only, config.data.train_batch_size, config.wandb.log_model) == (True, 4, True)


def test_a_negative_number_may_follow_its_key():
    assert typed("--rllm.trainer.total_batches", "-1", "--rllm.trainer.save_freq=-2").rllm.trainer.save_freq == -2


# key, what is written, what it means
WRITTEN = [
    ("training.learning_rate", "1e-6", 1e-6),
    ("training.learning_rate", "5e-1", 0.5),
    ("rllm.workflow.timeout", "5e5", 500000.0),
    ("rllm.trainer.experiment_name", "on", "on"),
    ("rllm.trainer.experiment_name", "007", "007"),
    ("rllm.trainer.experiment_name", "1e-6", "1e-6"),
    ("wandb.notes", "12:30", "12:30"),
    ("wandb.notes", "None", None),
    ("wandb.notes", "null", None),
    ("data.shuffle", "off", False),
    ("data.val_batch_size", "4.0", 4),
    ("lightning.devices", "0 1", [0, 1]),
    ("lightning.devices", "auto", "auto"),
    ("wandb.tags", "[007, on]", ["007", "on"]),
    ("task.sizes", "0 1", [0, 1]),
    ("task.tag", "007", "007"),
    ("task.level", "1e-6", 1e-6),
    ("rollout_engine.batch", "8.0", 8),
    ("rllm.algorithm.estimator_kwargs.epsilon", "1e-6", 1e-6),
    ("rllm.algorithm.estimator_kwargs.scale", "007", "007"),
    ("rllm.algorithm.loss_kwargs.clip_low", "1e-6", 1e-6),
]


@pytest.mark.parametrize(("key", "text", "expected"), WRITTEN)
@pytest.mark.parametrize("source", ["file", "dotted file", "command line", "hyphens", "JSON", "dict", "DictConfig"])
def test_a_value_means_the_same_from_every_source(key, text, expected, source, preset):
    """B50: numbers and text via file, command line, sweep and dict."""
    section, _, last = key.rpartition(".")
    nested: Any = text
    for part in reversed(key.split(".")):
        nested = {part: nested}
    if source == "file":
        lines = [f"{'  ' * depth}{part}:" for depth, part in enumerate(section.split("."))]
        folder = preset("it", "\n".join([*lines, f"{'  ' * len(lines)}{last}: {text}"]))
        config = typed("it", presets=folder)
    elif source == "dotted file":
        config = typed("it", presets=preset("it", f"{key}: {text}"))
    elif source == "dict":
        config = Config.from_config(nested)
    elif source == "DictConfig":
        config = Config.from_config(OmegaConf.create(nested))
    else:
        config = typed({"command line": f"{key}={text}", "hyphens": f"--{key}={text}", "JSON": json.dumps({key: text})}[source])
    value = OmegaConf.select(OmegaConf.create(schema.to_plain_tree(config)), key)
    assert value == expected
    assert OmegaConf.is_list(value) or type(value) is type(expected)


@pytest.mark.parametrize("text", ["abc", "[1]", "", "true", "nan"])
def test_text_that_is_no_number_is_an_error_of_its_key_from_every_source(text, preset):
    """B50: lr=abc errors naming its key."""
    wanted = [f"training.learning_rate: expected a number, got {text!r}"]
    assert problems_of(f"training.learning_rate={text}") == wanted
    assert problems_of("it", presets=preset("it", f"training: {{learning_rate: '{text}'}}")) == wanted
    with pytest.raises(ConfigError) as error:
        Config.from_config({"training": {"learning_rate": text}})
    assert error.value.problems == wanted


def test_untyped_values_are_guessed_from_text_and_kept_from_python(preset):
    args = "{a: 007, b: 1e-6, c: on, d: None, e: '3', f: [1, x]}"
    expected = {"a": "007", "b": 1e-6, "c": "on", "d": None, "e": "3", "f": [1, "x"]}
    config = load_config([f"rllm.workflow.workflow_args={args}"])
    assert config.rllm.workflow.workflow_args == expected
    assert typed("it", presets=preset("it", f"rllm.workflow.workflow_args: {args}")).rllm.workflow.workflow_args == expected
    assert Config.from_config(config).rllm.workflow.workflow_args == expected  # "3" in quotes is still text
    assert Config.from_config(
        {"rllm": {"workflow": {"workflow_args": {"template": "{question}", "n": 3, "f": len}}}}
    ).rllm.workflow.workflow_args == {
        "template": "{question}",
        "n": 3,
        "f": len,
    }


def test_text_with_backslashes_and_quotes_survives_the_agents_way_of_writing_it():
    for value in ([r"\d+", "a\nb"], ["it's", 'say "hi"', "{x}", "🙂\\"]):
        assert typed(f"--wandb.tags={value}").wandb.tags == value
        assert typed(f"--wandb.tags={json.dumps(value)}").wandb.tags == value


# ----------------------------------------------------------------------------------------------------- nested parameters


@pytest.mark.parametrize(
    "argument",
    [
        "training.learning_rate=0.1",
        "--training.learning_rate=0.1",
        "--training={'learning_rate': 0.1}",
        'training={"learning_rate": 0.1}',
        "training={learning_rate: 0.1}",
        '{"training": {"learning_rate": 0.1}}',
        '{"training.learning_rate": 0.1}',
    ],
)
def test_a_nested_parameter_merges_into_its_section(argument, preset):
    """B41: lr .1 over {lr: 1e-5, wd: .01} gives lr .1, wd .01, dotted and nested."""
    folder = preset("base", "training:\n  learning_rate: 1e-5\n  weight_decay: 0.01\n")
    config = load_config(["base", argument], folder)
    assert (config.training.learning_rate, config.training.weight_decay) == (0.1, 0.01)


def test_the_order_of_overrides_does_not_decide_what_a_new_task_keeps(preset):
    folder = preset("base", "task: {name: reasoning_gym, size: 3}")
    for argv in (["task.name=jsonl", "task.file=a"], ["task.file=a", "task.name=jsonl"]):
        assert typed("base", *argv, presets=folder).task.args == {"file": "a", "limit": None}


def test_presets_merge_in_order_and_overrides_come_last(preset):
    preset("one", "seed: 1\ntraining: {beta1: 0.1, beta2: 0.2}\n")
    folder = preset("two", "training:\n  beta2: 0.3\n  eps: 1e-4\nmodel:\n")
    config = typed("one", "two", "training.eps=1e-3", presets=folder)
    assert (config.seed, config.training.beta1, config.training.beta2, config.training.eps) == (1, 0.1, 0.3, 1e-3)
    assert typed("two", "one", presets=folder).training.beta2 == 0.2


def test_overrides_may_stand_before_the_preset(preset):
    assert typed("seed=3", "one", presets=preset("one", "seed: 1")).seed == 3


def test_the_default_preset_is_used_only_where_none_is_named(preset):
    preset("one", "seed: 1")
    folder = preset("two", "data.seed: 2")
    assert typed(presets=folder, default="one").seed == 1
    assert typed("two", presets=folder, default="one").seed == 0


def test_a_preset_may_be_a_path(preset):
    assert typed(str(preset("one", "seed: 1") / "one.yaml")).seed == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1", "bad: not a valid YAML file: "),
        ("seed: 1\nseed: 2", "the key 'seed' stands twice"),
        ("[1, 2]", "bad: expected a mapping of keys, got ['1', '2']"),
        ("just text", "bad: expected a mapping of keys, got 'just text'"),
    ],
)
def test_a_preset_that_is_no_mapping_is_named_with_the_reason(text, words, preset):
    (problem,) = problems_of("bad", presets=preset("bad", text))
    assert words in problem


def test_an_unknown_preset_comes_with_the_known_ones(preset):
    folder = preset("smoke", "")
    assert problems_of("smok", presets=folder) == [
        "smok: no such preset; did you mean smoke? Presets: smoke (an override is written key=value)"
    ]
    assert "cannot be read" in problems_of(str(folder / "none.yaml"))[0]


# ------------------------------------------------------------------------------------------------- every switch does something


def leaves(cls=Config, path=""):
    """The dotted key of every leaf; of open sections only what holds for every entry."""
    for key, leaf in schema.keys_of(cls).items():
        if schema.is_section(leaf.kind):
            yield from leaves(leaf.kind, f"{path}{key}.")
        else:
            yield f"{path}{key}"


LEAVES = sorted(
    [*leaves(), "task.size", "task.level", "task.sizes", "task.tag", "task.more", "rollout_engine.batch", "rollout_engine.kind"]
)
# Values that are neither true, 3 nor "other", and what has to be said with them.
FLIPS = {
    "rllm.algorithm.adv_estimator": "rloo",
    "rllm.algorithm.estimator_map": "{solver: rloo}",
    "rllm.algorithm.loss_fn_map": "{solver: cispo}",
    "rllm.algorithm.estimator_kwargs": "{epsilon: 1e-3}",
    "rllm.algorithm.loss_kwargs": "{clip_low: 0.1}",
    "rllm.algorithm.loss_fn": "cispo",
    "rllm.algorithm.loss_agg_mode": "token-sum",
    "rllm.algorithm.kl_estimator": "k1",
    "rllm.algorithm.kl_in": "reward",
    "rllm.algorithm.rollout_correction.mode": "tis",
    "rllm.algorithm.rollout_correction.level": "sequence",
    "rllm.algorithm.lr_schedule": "cosine",
    "rllm.algorithm.warmup_steps_ratio": "0.5",
    "rllm.stepwise_advantage.norm_adv_by_std_in_grpo": "false",
    "rllm.rejection_sample.mode": "group",
    "rllm.workflow.name": "multi_turn",
    "rllm.workflow.workflow_args": "{x: 1}",
    "rllm.workflow.gamma": "0.5",
    "rllm.trainer.logger": "[csv]",
    "task.name": "jsonl",
    "task.sizes": "0 1",
    "task.more": "{x: 1}",
    "model.dtype": "bfloat16",
    "training.optimizer": "sgd",
    "training.beta1": "0.5",
    "training.beta2": "0.5",
    "sampling.train.top_p": "0.5",
    "sampling.val.top_p": "0.5",
    "rollout_engine.name": "remote",
    "rollout_engine.kind": "slow",
    "wandb.mode": "offline",
    "wandb.resume": "allow",
}
TOGETHER = {
    "rllm.rejection_sample.mode": ["rllm.rejection_sample.enable=true"],
    "rllm.rejection_sample.multiplier": ["rllm.rejection_sample.enable=true"],
    "task.name": ["task.file=x"],
}
# Deprecated: warns, and means broadcast. Imports a module: tested with plugins.
UNCHANGING = {"rllm.stepwise_advantage.mode", "plugins"}


def flipped(key, default):
    if key in FLIPS:
        return FLIPS[key]
    if isinstance(default, bool):
        return str(not default)
    number = isinstance(default, int | float) or key.endswith(("size", "seed", "length"))
    return "3" if number else "other"


@pytest.mark.parametrize("key", sorted(set(LEAVES) - UNCHANGING))
def test_every_switch_changes_the_resolved_config(key):
    """B48: flip every leaf in turn; each flip changes the resolved config object, and nothing but its leaf."""
    together = TOGETHER.get(key, [])
    before = load_config([] if key == "task.name" else together)
    after = load_config([f"{key}={flipped(key, OmegaConf.select(before, key))}", *together])
    assert Config.from_config(after) != Config.from_config(before)
    if key == "rllm.stepwise_advantage.norm_adv_by_std_in_grpo":  # an old home: the value moves to the new one
        key = "rllm.algorithm.norm_adv_by_std_in_grpo"
    if not key.endswith(".name"):
        OmegaConf.set_struct(after, False)
        OmegaConf.update(after, key, OmegaConf.select(before, key), merge=False)
        assert after == before


def test_norm_by_std_is_read_from_the_algorithm():
    """B48: rllm.algorithm.norm_adv_by_std_in_grpo=false was read from another section with a default."""
    assert typed("rllm.algorithm.norm_adv_by_std_in_grpo=false").rllm.algorithm.norm_adv_by_std_in_grpo is False
    config = {"rllm": {"algorithm": {"norm_adv_by_std_in_grpo": False}}}
    assert AlgorithmConfig.from_config(config).norm_adv_by_std_in_grpo is False


def test_the_sampling_of_validation_stands_on_its_own():
    """B48: validation settings are those under sampling.val, nothing is inherited."""
    config = typed("sampling.train.temperature=0.5", "sampling.train.top_k=3")
    assert (config.sampling.val.temperature, config.sampling.val.top_k) == (1.0, 0)


def test_the_data_seed_is_the_seed_unless_it_is_given():
    assert (typed("seed=3").data_seed, typed("seed=3", "data.seed=0").data_seed) == (3, 0)


# ------------------------------------------------------------------------------------------------------ typos and names


def test_a_misspelt_key_suggests_the_right_one():
    """B49: adv_estimatr=rloo trained with the default."""
    assert problems_of("adv_estimatr=rloo") == ["adv_estimatr: unknown key; did you mean rllm.algorithm.adv_estimator?"]
    assert problems_of("rllm.algorithm.adv_estimatr=rloo") == [
        "rllm.algorithm.adv_estimatr: unknown key; did you mean rllm.algorithm.adv_estimator?"
    ]
    with pytest.raises(ConfigError, match=r"did you mean rllm\.algorithm\.adv_estimator\?"):
        Config.from_config({"rllm": {"algorithm": {"adv_estimatr": "rloo"}}})


def test_an_unknown_estimator_comes_with_the_registered_ones():
    """B49: adv_estimator=grpoo became "other"."""
    assert problems_of("rllm.algorithm.adv_estimator=grpoo") == [
        "rllm.algorithm.adv_estimator: unknown advantage estimator 'grpoo'; did you mean 'grpo'? "
        "Registered: grpo, my_adv, pass_at_k, reinforce, rloo (your own: name its module in `plugins`)"
    ]


@pytest.mark.parametrize(
    ("argument", "key"),
    [
        ("rllm.algorithm.estimator_map={solver: rlo}", "rllm.algorithm.estimator_map.solver: unknown advantage estimator 'rlo'"),
        ("rllm.algorithm.estimator_map={solver: [rloo, pppo]}", "rllm.algorithm.estimator_map.solver: unknown policy loss 'pppo'"),
        ("rllm.algorithm.loss_fn=pppo", "rllm.algorithm.loss_fn: unknown policy loss 'pppo'"),
        ("rllm.algorithm.loss_fn_map={solver: pppo}", "rllm.algorithm.loss_fn_map.solver: unknown policy loss 'pppo'"),
        ("rllm.workflow.name=single", "rllm.workflow.name: unknown workflow 'single'"),
        ("task.name=jsonk", "task.name: unknown task 'jsonk'"),
        ("rollout_engine.name=vllm", "rollout_engine.name: unknown rollout engine 'vllm'"),
        ("rllm.trainer.logger=[csv, tensorboard]", "rllm.trainer.logger: unknown tracker 'tensorboard'"),
    ],
)
def test_every_name_is_checked_under_its_key(argument, key):
    (problem,) = problems_of(argument)
    assert problem.startswith(key)
    assert "Registered: " in problem


@pytest.mark.parametrize("source", ["constructor", "from_config", "map", "yaml", "command line", "json"])
def test_a_custom_estimator_keeps_its_name_everywhere(source, preset):
    """B49: the names of custom estimators were lost to "other"."""
    configs = {
        "constructor": lambda: AlgorithmConfig(estimator="my_adv"),
        "from_config": lambda: AlgorithmConfig.from_config({"rllm": {"algorithm": {"adv_estimator": "my_adv"}}}),
        "map": lambda: AlgorithmConfig(estimator_map={"": "my_adv"}),
        "yaml": lambda: typed("it", presets=preset("it", "rllm.algorithm.adv_estimator: my_adv")).rllm.algorithm,
        "command line": lambda: typed("rllm.algorithm.adv_estimator=my_adv").rllm.algorithm,
        "json": lambda: typed('{"rllm.algorithm.adv_estimator": "my_adv"}').rllm.algorithm,
    }
    assert configs[source]().estimator_of("") == "my_adv"


def test_a_custom_estimator_from_a_plugin_runs_from_the_command_line(tmp_path, monkeypatch):
    """B49: a registered my_adv runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(registries.ESTIMATORS._entries, "from_plugin", None)
    del registries.ESTIMATORS._entries["from_plugin"]
    source = "from rllm_lightning.registry import ESTIMATORS, TASKS\nESTIMATORS.add('from_plugin', print)\n"
    source += "@TASKS.register('plugged')\ndef plugged(seed, *, depth: int = 2): ...\n"
    (tmp_path / "my_plugin.py").write_text(source)
    monkeypatch.delitem(registries.TASKS._entries, "plugged", raising=False)
    config = load_config(["plugins=[my_plugin]", "rllm.algorithm.adv_estimator=from_plugin", "task.name=plugged", "seed=${task.depth}"])
    assert (config.plugins, config.rllm.algorithm.adv_estimator, config.task.depth, config.seed) == (["my_plugin"], "from_plugin", 2, 2)
    registries.TASKS._entries.pop("plugged")


def test_a_missing_plugin_is_a_problem_among_the_others():
    first, second = problems_of("plugins=nowhere_to_be_found", "seed=x")
    assert first.startswith("plugins: no module 'nowhere_to_be_found' on the Python path")
    assert second == "seed: expected a whole number, got 'x'"


# ---------------------------------------------------------------------------------------------------- all problems at once


def test_all_problems_come_together(preset):
    folder = preset("base", "training: {learning_rate: fast}\nmodle: {name: x}\n")
    assert problems_of(
        "base",
        "nowhere",
        "seed",
        "=3",
        "{bad",
        "data.train_batch_size=0",
        "rllm.rollout.n=0",
        "rllm.rollout.n_val=x",
        "rllm.algorithm.adv_estimator=rlo",
        "rllm.algorithm.kl_beta=-1",
        "rllm.algorithm.kl_in=los",
        "rllm.rejection_sample.multiplier=2",
        "task.siz=3",
        "seed=${nothing}",
        "wandb.id=???",
        presets=folder,
    ) == [
        "'{bad': begins like a JSON object, but is none (Expecting property name enclosed in double quotes: line 1 column 2 (char 1))",
        "nowhere: no such preset. Presets: base (an override is written key=value)",
        "seed: no such preset. Presets: base (an override is written key=value)",
        "'': not a key; a key is section.name, and an override section.name=value",
        "seed: cannot resolve '${nothing}': Interpolation key 'nothing' not found",
        "modle: unknown key; did you mean model?",
        "rllm.algorithm.kl_in: expected one of loss, reward (did you mean loss?), got 'los'",
        "rllm.algorithm.kl_beta: must be in [0, inf), got -1.0",
        "rllm.rejection_sample.multiplier: 2.0 needs rllm.rejection_sample.enable=true",
        "rllm.rollout.n_val: expected a whole number, got 'x'",
        "rllm.rollout.n: must be in [1, inf), got 0",
        "task.siz: unknown key for 'reasoning_gym'; did you mean task.size?",
        "data.train_batch_size: must be in [1, inf), got 0",
        "training.learning_rate: expected a number, got 'fast'",
        "wandb.id: required, but not given (expected text or null)",
        "rllm.algorithm.adv_estimator: unknown advantage estimator 'rlo'; did you mean 'rloo'? "
        "Registered: grpo, my_adv, pass_at_k, reinforce, rloo (your own: name its module in `plugins`)",
    ]


def test_the_error_is_a_value_error_of_one_line_a_problem():
    with pytest.raises(ValueError) as error:
        Config.from_config({"seed": "x", "run_rot": 1})
    assert isinstance(error.value, ConfigError)
    assert str(error.value) == "run_rot: unknown key; did you mean run_root?\nseed: expected a whole number, got 'x'"


RANGES = [
    ("rllm.algorithm.warmup_steps_ratio", ["0", "1"], ["-0.1", "1.1"]),
    ("rllm.algorithm.loss_norm_length", ["1", "null"], ["0"]),
    ("rllm.algorithm.kl_beta", ["0"], ["-1", "inf"]),
    ("rllm.algorithm.rollout_correction.cap", ["0.1"], ["0", "-1"]),
    ("rllm.rejection_sample.min_partial_solve_tasks", ["1"], ["0"]),
    ("rllm.rejection_sample.min_trajs_per_group", ["1"], ["0"]),
    ("rllm.rejection_sample.multiplier", ["1"], ["0.5", "2"]),
    ("rllm.workflow.n_parallel_tasks", ["1"], ["0"]),
    ("rllm.workflow.retry_limit", ["1"], ["0"]),
    ("rllm.workflow.timeout", ["0.1", "inf"], ["0", "-1"]),
    ("rllm.workflow.gamma", ["0", "1"], ["-0.1", "1.1"]),
    ("rllm.rollout.n", ["1"], ["0"]),
    ("rllm.rollout.n_val", ["1"], ["0"]),
    ("data.train_batch_size", ["1"], ["0", "-1"]),
    ("data.val_batch_size", ["1", "null"], ["0"]),
    ("data.max_prompt_length", ["1"], ["0"]),
    ("data.max_response_length", ["1"], ["0"]),
    ("data.seed", ["0", "null"], ["-1", "4294967296"]),
    ("seed", ["0", "4294967295"], ["-1", "4294967296"]),
    ("model.lora_rank", ["0"], ["-1"]),
    ("model.name", ["x"], ["", " "]),
    ("training.learning_rate", ["0"], ["-1", "inf"]),
    ("training.beta1", ["0"], ["1", "-0.1"]),
    ("training.beta2", ["0"], ["1", "-0.1"]),
    ("training.eps", ["0"], ["-1"]),
    ("training.weight_decay", ["0"], ["-1"]),
    ("training.num_minibatches", ["1"], ["0"]),
    ("training.num_epochs_per_batch", ["1"], ["0"]),
    ("training.micro_batch_tokens", ["1"], ["0"]),
    ("warm_start.steps", ["0"], ["-1"]),
    ("warm_start.batch_size", ["1"], ["0"]),
    ("warm_start.learning_rate", ["0"], ["-1"]),
    ("sampling.train.temperature", ["0.1"], ["0", "-1"]),
    ("sampling.val.temperature", ["0"], ["-1"]),
    ("sampling.train.top_p", ["0.1", "1"], ["0", "1.1"]),
    ("sampling.val.top_p", ["0.1", "1"], ["0", "1.1"]),
]


@pytest.mark.parametrize(("key", "good", "bad"), RANGES)
def test_values_out_of_range_are_refused_and_the_bounds_are_not(key, good, bad):
    for value in good:
        load_config([f"{key}={value}"])
    for value in bad:
        assert all(problem.startswith(f"{key}: ") for problem in problems_of(f"{key}={value}"))


def test_rejection_sampling_needs_its_switch():
    """1.6: rejection_sample.multiplier != 1 without enable is a ValueError."""
    load_config(["rllm.rejection_sample.enable=true", "rllm.rejection_sample.multiplier=2", "rllm.rejection_sample.mode=episode"])
    assert problems_of("rllm.rejection_sample.mode=group") == ["rllm.rejection_sample.mode: group needs rllm.rejection_sample.enable=true"]


# --------------------------------------------------------------------------------------- keywords of estimators and losses


def test_a_misspelt_keyword_of_an_estimator_or_a_loss_is_an_error_at_start():
    """1.2: a misspelt `epsilon` vanished in **kwargs."""
    assert problems_of("rllm.algorithm.estimator_kwargs.epsilom=1", "rllm.algorithm.loss_kwargs.clip=1") == [
        "rllm.algorithm.estimator_kwargs.epsilom: no keyword of advantage estimator grpo; keywords there: epsilon, scale",
        "rllm.algorithm.loss_kwargs.clip: no keyword of policy loss ppo; keywords there: bound, clip_low",
    ]


def test_keywords_are_typed_as_they_are_declared():
    assert problems_of("rllm.algorithm.estimator_kwargs.epsilon=small") == [
        "rllm.algorithm.estimator_kwargs.epsilon: expected a number, got 'small'"
    ]
    config = Config.from_config({"rllm": {"algorithm": {"estimator_kwargs": {"epsilon": "1e-3", "scale": 7}}}})
    assert config.rllm.algorithm.estimator_kwargs == {"epsilon": 1e-3, "scale": "7"}


def test_a_keyword_may_belong_to_the_estimator_of_any_role():
    argv = ["rllm.algorithm.estimator_map={judge: pass_at_k}", "rllm.algorithm.estimator_kwargs={k: 2, epsilon: 1e-3}"]
    assert typed(*argv).rllm.algorithm.estimator_kwargs == {"k": 2, "epsilon": 1e-3}


# ------------------------------------------------------------------------------------------ references and required values


@pytest.mark.parametrize(
    ("argv", "key", "value"),
    [
        (["seed=${rllm.rollout.n}"], "seed", 8),  # a default
        (["seed=${rllm.rollout.n}", "rllm.rollout.n=4.0"], "seed", 4),  # typed before it is seen
        (["rllm.trainer.experiment_name=${task.name}-${seed}"], "rllm.trainer.experiment_name", "reasoning_gym-0"),
        (["data.seed=${.train_batch_size}"], "data.seed", 32),
        (["wandb.tags=[${task.name}, x]"], "wandb.tags", ["reasoning_gym", "x"]),
        (["task.size=${task.sizes.0}"], "task.size", 1),
        (["rllm.workflow.workflow_args.n=${rllm.rollout.n}"], "rllm.workflow.workflow_args", {"n": 8}),
        (["data.seed=${seed}", "seed=${rllm.rollout.n}"], "data.seed", 8),  # over two steps
        (["wandb.notes=\\${seed}"], "wandb.notes", "${seed}"),  # escaped
        (["rllm.algorithm.rollout_correction=${more}", '{"more": 1}'], None, None),
        (["training=${warm_start}"], None, None),  # a whole section, whose keys are others
        (["sampling.val=${sampling.train}", "sampling.train.top_p=0.5"], "sampling.val.top_p", 0.5),
    ],
)
def test_references_are_filled_in_with_typed_values(argv, key, value):
    if key is None:
        assert problems_of(*argv)
    else:
        found = OmegaConf.select(load_config(argv), key)
        assert found == value


def test_references_in_presets_see_the_overrides(preset):
    folder = preset("base", "rllm.trainer.experiment_name: ${rllm.algorithm.adv_estimator}-s${seed}\nwandb:\n  tags: ['${seed}']\n")
    config = load_config(["base", "seed=3", "rllm.algorithm.adv_estimator=rloo"], folder)
    assert (config.rllm.trainer.experiment_name, config.wandb.tags) == ("rloo-s3", ["3"])


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("${nothing}", "Interpolation key 'nothing' not found"),
        ("${seed}", "Recursive interpolation detected"),
        ("${", "no viable alternative"),
        ("${oc.env:RLLM_NOT_SET}", "Environment variable 'RLLM_NOT_SET' not found"),
        ("${magic:1}", "Unsupported interpolation type magic"),
    ],
)
def test_a_reference_that_leads_nowhere_is_an_error_of_its_key(value, reason):
    problem, *_ = problems_of(f"seed={value}", "data.seed=${rllm.rollout.n}")
    assert problem.startswith(f"seed: cannot resolve {value!r}: ")
    assert reason in problem


def test_the_references_of_a_dict_config_are_resolved():
    config = OmegaConf.create({"seed": "${data.train_batch_size}", "rllm": {"algorithm": {"kl_beta": "${training.beta1}"}}})
    assert Config.from_config(config).seed == 32
    assert AlgorithmConfig.from_config(config).kl_beta == 0.9


def test_a_required_value_must_be_given(preset):
    folder = preset("base", "task:\n  name: jsonl\n  file: ???\nrllm.workflow.workflow_args:\n  tool: ???\n")
    assert problems_of("base", presets=folder) == [
        "rllm.workflow.workflow_args.tool: required, but not given (expected a mapping)",
        "task.file: required, but not given (expected text)",
    ]
    assert typed("base", "task.file=a", "rllm.workflow.workflow_args.tool=b", presets=folder).task.args["file"] == "a"


# ----------------------------------------------------------------------------------------------------------- and back again

ARGV = [
    "rllm.algorithm.adv_estimator=my_adv",
    "rllm.algorithm.estimator_map={judge: [rloo, cispo], solver: grpo}",
    "rllm.algorithm.estimator_kwargs.epsilon=1e-8",
    "rllm.workflow.workflow_args={text: '3', quoted: 'on', deep: {a: [1, null, 1e-6]}, braces: '{question}'}",
    "rllm.workflow.timeout=inf",
    "rllm.stepwise_advantage.norm_adv_by_std_in_grpo=false",
    "rllm.trainer.experiment_name=007",
    "wandb.notes=\\${seed} costs 5 $ {x}: # 'quoted'",
    "wandb.tags=['12:30', 'null', 'a b', '']",
    "task.tag=yes",
    "lightning.devices=[0, 1]",
]


def test_the_resolved_config_holds_every_key_and_refuses_others():
    config = load_config([])
    assert [key for key in LEAVES if OmegaConf.select(config, key, default=...) is ...] == []
    with pytest.raises(OmegaConfBaseException):
        _ = config.rllm.rolout


def test_a_resolved_config_loads_as_itself():
    """4.3: config.yaml; loading it gives the same run."""
    config = load_config(ARGV)
    first = Config.from_config(config)
    assert first.wandb.notes == "${seed} costs 5 $ {x}: # 'quoted'"
    assert first.rllm.workflow.workflow_args["text"] == "3"
    assert Config.from_config(first) is first
    assert load_config([json.dumps(schema.to_plain_tree(typed()))]) == load_config([])
    assert Config.from_config(OmegaConf.to_container(config)) == first


@pytest.mark.parametrize("write", [OmegaConf.to_yaml, lambda config: yaml.safe_dump(OmegaConf.to_container(config, resolve=False))])
def test_a_written_config_reads_back_as_the_same(write, preset):
    config = load_config(ARGV)
    text = write(config)
    assert load_config(["config"], preset("config", text)) == config
    assert Config.from_config(load_config(["config"], preset("config", text))) == Config.from_config(config)
    assert Config.from_config(OmegaConf.create(text)) == Config.from_config(config)


# ------------------------------------------------------------------------------------------------------ configuration types


def test_the_estimator_enum_takes_any_name_for_other():
    assert rLLMAdvantageEstimator("anything") is rLLMAdvantageEstimator.OTHER
    assert [rLLMAdvantageEstimator(name).name for name in ("grpo", "reinforce", "reinforce_plus_plus_baseline", "rloo", "other")] == [
        "GRPO",
        "REINFORCE",
        "REINFORCE_PLUS_PLUS_BASELINE",
        "RLOO",
        "OTHER",
    ]
    assert rLLMAdvantageEstimator.GRPO == "grpo"


def test_an_algorithm_built_in_python_has_the_defaults_of_the_api():
    algorithm = AlgorithmConfig()
    expected = {
        "use_rllm": False,
        "estimator": rLLMAdvantageEstimator.GRPO,
        "estimator_map": {},
        "loss_fn_map": {},
        "stepwise_advantage_mode": "broadcast",
        "norm_adv_by_std_in_grpo": True,
        "use_precomputed_advantage": False,
        "loss_fn": None,
        "lr_schedule": "constant",
        "warmup_steps": -1,
        "warmup_steps_ratio": 0.0,
    }
    assert {name: getattr(algorithm, name) for name in expected} == expected


@pytest.mark.parametrize("given", ["rloo", rLLMAdvantageEstimator.RLOO])
def test_a_built_in_estimator_is_its_enum_member_however_it_is_given(given):
    assert AlgorithmConfig(estimator=given).estimator is rLLMAdvantageEstimator.RLOO
    assert AlgorithmConfig.from_config({"rllm": {"algorithm": {"adv_estimator": given}}}).estimator is rLLMAdvantageEstimator.RLOO


def test_an_estimator_map_holds_estimators_or_pairs_with_a_loss():
    expected = {"solver": rLLMAdvantageEstimator.RLOO, "judge": ("my_adv", "cispo")}
    assert AlgorithmConfig(estimator_map={"solver": "rloo", "judge": ("my_adv", "cispo")}).estimator_map == expected
    config = typed("rllm.algorithm.estimator_map={'solver': 'rloo', 'judge': ['my_adv', 'cispo']}")
    assert config.rllm.algorithm.estimator_map == expected
    algorithm = config.rllm.algorithm
    assert [algorithm.estimator_of(role) for role in ("solver", "judge", "none")] == ["rloo", "my_adv", "grpo"]
    assert [algorithm.loss_of(role) for role in ("solver", "judge", "none")] == ["importance_sampling", "cispo", "ppo"]


@pytest.mark.parametrize("entry", ["3", "[rloo]", "[rloo, ppo, x]", "[rloo, 3]", "{a: b}", "null"])
def test_an_estimator_map_refuses_anything_else(entry):
    (problem,) = problems_of(f"rllm.algorithm.estimator_map={{solver: {entry}}}")
    assert problem.startswith("rllm.algorithm.estimator_map.solver: expected an estimator or [estimator, loss_fn], got ")


@pytest.mark.parametrize(
    ("settings", "role", "loss"),
    [
        ({}, "solver", "ppo"),
        ({"estimator": "rloo"}, "solver", "importance_sampling"),
        ({"estimator": "my_adv"}, "solver", "importance_sampling"),
        ({"loss_fn": "cispo"}, "solver", "cispo"),
        ({"loss_fn": "cispo", "loss_fn_map": {"solver": "ppo"}}, "solver", "ppo"),
        ({"loss_fn_map": {"grpo": "cispo"}}, "solver", "cispo"),
        ({"loss_fn": "ppo", "loss_fn_map": {"grpo": "cispo"}}, "solver", "ppo"),
        ({"loss_fn": "cispo", "estimator_map": {"solver": ("rloo", "ppo")}}, "solver", "ppo"),
    ],
)
def test_the_loss_of_a_role_is_the_most_specific_one(settings, role, loss):
    """3.3: loss_fn null picks ppo for grpo and importance_sampling for every other estimator."""
    assert AlgorithmConfig(**settings).loss_of(role) == loss


def test_per_step_warns_and_becomes_broadcast():
    with pytest.warns(DeprecationWarning, match="per_step"):
        assert AlgorithmConfig(stepwise_advantage_mode="per_step").stepwise_advantage_mode == "broadcast"
    with pytest.warns(DeprecationWarning, match="per_step"):
        config = typed("rllm.stepwise_advantage.mode=per_step")
    assert config.rllm.stepwise_advantage.mode == "broadcast"
    with pytest.warns(DeprecationWarning, match="per_step"):
        algorithm = AlgorithmConfig.from_config({"rllm": {"stepwise_advantage": {"mode": "per_step"}}})
    assert algorithm.stepwise_advantage_mode == "broadcast"


def test_no_warning_without_a_reason():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_config(ARGV)


def test_the_old_home_of_norm_by_std_is_honoured():
    old = "rllm.stepwise_advantage.norm_adv_by_std_in_grpo"
    new = "rllm.algorithm.norm_adv_by_std_in_grpo"
    config = load_config([f"{old}=false"])
    assert config.rllm.algorithm.norm_adv_by_std_in_grpo is False
    assert config.rllm.stepwise_advantage.norm_adv_by_std_in_grpo is None  # one home, also in config.yaml
    assert typed(f"{old}=false", f"{new}=off").rllm.algorithm.norm_adv_by_std_in_grpo is False
    wanted = [f"{new}=true and {old}=false differ; give one"]
    assert problems_of(f"{old}=false", f"{new}=true") == wanted
    with pytest.raises(ConfigError, match="differ; give one"):
        AlgorithmConfig.from_config(
            {"rllm": {"algorithm": {"norm_adv_by_std_in_grpo": True}, "stepwise_advantage": {"norm_adv_by_std_in_grpo": False}}}
        )


def test_an_algorithm_is_read_from_its_one_place_in_a_full_config():
    config = load_config(["rllm.algorithm.adv_estimator=rloo", "rllm.algorithm.kl_beta=0.1"])
    assert AlgorithmConfig.from_config(config) == Config.from_config(config).rllm.algorithm
    foreign = {"algorithm": {"adv_estimator": "grpo"}, "actor": {"lr": 1}, "rllm": {"algorithm": {"adv_estimator": "rloo"}, "agent": {}}}
    assert AlgorithmConfig.from_config(foreign).estimator is rLLMAdvantageEstimator.RLOO
    assert AlgorithmConfig.from_config({}) == AlgorithmConfig()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"rllm": {"algorithm": {"adv_estimatr": "rloo"}}}, "did you mean rllm.algorithm.adv_estimator"),
        ({"rllm": {"algorithm": {"adv_estimator": "grpoo"}}}, "did you mean 'grpo'"),
        ({"rllm": {"algorithm": {"kl_beta": "x"}}}, "rllm.algorithm.kl_beta: expected a number"),
        ({"rllm": 3}, "rllm: expected a section"),
        ({"rllm": {"algorithm": 3}}, "rllm.algorithm: expected a section"),
        (3, "config: expected a DictConfig or a dict, got 3"),
    ],
)
def test_a_wrong_algorithm_is_a_config_error(config, words):
    with pytest.raises(ConfigError, match=words):
        AlgorithmConfig.from_config(config)


@pytest.mark.parametrize("reason", TerminationReason)
def test_compact_filtering_masks_the_reasons_that_are_switched_on(reason):
    every = {f"mask_{other.value}": True for other in TerminationReason}
    assert CompactFilteringConfig(enable=True, **{f"mask_{reason.value}": True}).should_mask(reason)
    assert not CompactFilteringConfig(enable=True, **{**every, f"mask_{reason.value}": False}).should_mask(reason)
    assert not CompactFilteringConfig(enable=False, **every).should_mask(reason)


def test_no_reason_counts_as_unknown():
    assert CompactFilteringConfig(enable=True, mask_unknown=True).should_mask(None)
    assert not CompactFilteringConfig(enable=True, mask_error=True).should_mask(None)


def test_the_other_configuration_types_have_the_defaults_of_the_api():
    assert dataclasses.asdict(TransformConfig()) == {
        "impute_missing_names": True,
        "default_traj_name": "default_traj_name",
        "drop_unnamed_traj": False,
        "broadcast": True,
    }
    assert dataclasses.asdict(RejectionSamplingConfig()) == {
        "mode": "none",
        "min_partial_solve_tasks": 1,
        "min_trajs_per_group": 2,
        "filter_uniform_groups": False,
    }
    assert not any(dataclasses.asdict(CompactFilteringConfig()).values())


# ------------------------------------------------------------------------------------------------------------- any input

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
