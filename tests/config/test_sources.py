"""One value, whatever the source it comes from; merging, references, and the way back."""

import json
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from rllm_lightning import schema
from rllm_lightning.config import AlgorithmConfig, Config, ConfigError, load_config

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
def test_what_a_sweep_issues_is_what_the_run_gets(form, typed):
    """B40: None, False, 1e-6, lists, 007, 12:30 and 4.0 through the hyphen and no-hyphen macros."""
    config = typed(*FORMS[form])
    assert config.rllm.trainer.resume is None
    assert config.data.shuffle is False
    assert config.training.learning_rate == 1e-6
    assert config.wandb.tags == ["a", "b"]
    assert config.rllm.trainer.experiment_name == "007"
    assert config.wandb.notes == "12:30"
    assert (config.rllm.rollout.n, type(config.rllm.rollout.n)) == (4, int)


def test_a_flag_alone_is_true(typed):
    """B40: W&B's ${args_no_boolean_flags} gives `--flag`."""
    config = typed("--rllm.trainer.val_only", "--data.train_batch_size", "4", "--wandb.log_model")
    assert (config.rllm.trainer.val_only, config.data.train_batch_size, config.wandb.log_model) == (True, 4, True)


def test_a_negative_number_may_follow_its_key(typed):
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
def test_a_value_means_the_same_from_every_source(key, text, expected, source, preset, typed):
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
def test_text_that_is_no_number_is_an_error_of_its_key_from_every_source(text, preset, problems_of):
    """B50: lr=abc errors naming its key."""
    wanted = [f"training.learning_rate: expected a number, got {text!r}"]
    assert problems_of(f"training.learning_rate={text}") == wanted
    assert problems_of("it", presets=preset("it", f"training: {{learning_rate: '{text}'}}")) == wanted
    with pytest.raises(ConfigError) as error:
        Config.from_config({"training": {"learning_rate": text}})
    assert error.value.problems == wanted


def test_untyped_values_are_guessed_from_text_and_kept_from_python(preset, typed):
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


def test_text_with_backslashes_and_quotes_survives_the_agents_way_of_writing_it(typed):
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


def test_the_order_of_overrides_does_not_decide_what_a_new_task_keeps(preset, typed):
    folder = preset("base", "task: {name: reasoning_gym, size: 3}")
    for argv in (["task.name=jsonl", "task.file=a"], ["task.file=a", "task.name=jsonl"]):
        assert typed("base", *argv, presets=folder).task.args == {"file": "a", "limit": None}


def test_presets_merge_in_order_and_overrides_come_last(preset, typed):
    preset("one", "seed: 1\ntraining: {beta1: 0.1, beta2: 0.2}\n")
    folder = preset("two", "training:\n  beta2: 0.3\n  eps: 1e-4\nmodel:\n")
    config = typed("one", "two", "training.eps=1e-3", presets=folder)
    assert (config.seed, config.training.beta1, config.training.beta2, config.training.eps) == (1, 0.1, 0.3, 1e-3)
    assert typed("two", "one", presets=folder).training.beta2 == 0.2


def test_overrides_may_stand_before_the_preset(preset, typed):
    assert typed("seed=3", "one", presets=preset("one", "seed: 1")).seed == 3


def test_the_default_preset_is_used_only_where_none_is_named(preset, typed):
    preset("one", "seed: 1")
    folder = preset("two", "data.seed: 2")
    assert typed(presets=folder, default="one").seed == 1
    assert typed("two", presets=folder, default="one").seed == 0


def test_a_preset_may_be_a_path(preset, typed):
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
def test_a_preset_that_is_no_mapping_is_named_with_the_reason(text, words, preset, problems_of):
    (problem,) = problems_of("bad", presets=preset("bad", text))
    assert words in problem


def test_an_unknown_preset_comes_with_the_known_ones(preset, problems_of):
    folder = preset("smoke", "")
    assert problems_of("smok", presets=folder) == [
        "smok: no such preset; did you mean smoke? Presets: smoke (an override is written key=value)"
    ]
    assert "cannot be read" in problems_of(str(folder / "none.yaml"))[0]


@pytest.mark.parametrize(
    ("argv", "more"),
    [
        (["task.more=null", "task.more.c=3"], {"c": 3}),
        (["task.more={}", "task.more.c=3"], {"c": 3}),
        (["task.more=null", "task.more={c: 3}", "task.more.d=4"], {"c": 3, "d": 4}),
        (["task.more.c=3", "task.more={}", "task.more.d=4"], {"d": 4}),
        (['{"task": {"more": {}}}', "--task.more.c", "3"], {"c": 3}),
        (["task={more: {}}", "task.more.c=${seed}"], {"c": 0}),
        (["task.more.b=null", "task.more.b.d=4"], {"a": 1, "b": {"d": 4}}),
        (["task.more={}"], {}),
        (["task.more.c=3", "task.more=null"], None),
        (["task.more.c=3", "task=null"], {"a": 1, "b": {"x": 2}, "c": 3}),  # a section is never emptied
        (["task.more={c: 3}"], {"a": 1, "b": {"x": 2}, "c": 3}),
    ],
)
def test_null_and_braces_empty_a_mapping_of_the_preset_before_later_keys(argv, more, preset, typed):
    folder = preset("base", "task.more: {a: 1, b: {x: 2}}")
    assert typed("base", *argv, presets=folder).task.args["more"] == more


def test_a_later_preset_empties_a_mapping_too(preset, typed):
    preset("base", "task.more: {a: 1}")
    folder = preset("other", "task: {more: {}, size: 3}")
    assert typed("base", "other", "task.more.b=2", presets=folder).task.args["more"] == {"b": 2}


def test_text_in_braces_stays_text_after_null(typed):
    config = typed("wandb.notes=null", "wandb.notes={x}", "task.tag={}", "task.tag={question: 1}")
    assert (config.wandb.notes, config.task.args["tag"]) == ("{x}", "{question: 1}")
    assert type(config.wandb.notes) is str


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
def test_references_are_filled_in_with_typed_values(argv, key, value, problems_of):
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
def test_a_reference_that_leads_nowhere_is_an_error_of_its_key(value, reason, problems_of):
    problem, *_ = problems_of(f"seed={value}", "data.seed=${rllm.rollout.n}")
    assert problem.startswith(f"seed: cannot resolve {value!r}: ")
    assert reason in problem


def test_the_references_of_a_dict_config_are_resolved():
    config = OmegaConf.create({"seed": "${data.train_batch_size}", "rllm": {"algorithm": {"kl_beta": "${training.beta1}"}}})
    assert Config.from_config(config).seed == 32
    assert AlgorithmConfig.from_config(config).kl_beta == 0.9


def test_a_required_value_must_be_given(preset, typed, problems_of):
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
    "wandb.tags=['12:30', 'null', 'a b', '~']",
    "task.tag=yes",
    "lightning.devices=[0, 1]",
]


def test_a_resolved_config_loads_as_itself(typed):
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
