"""What cannot run is refused before anything is loaded: names, ranges, keywords, and every problem at once."""

import pytest

from rllm_lightning import registry as registries
from rllm_lightning.config import AlgorithmConfig, Config, ConfigError, load_config

# ------------------------------------------------------------------------------------------------------ typos and names


def test_a_misspelt_key_suggests_the_right_one(problems_of):
    """B49: adv_estimatr=rloo trained with the default."""
    assert problems_of("adv_estimatr=rloo") == ["adv_estimatr: unknown key; did you mean rllm.algorithm.adv_estimator?"]
    assert problems_of("rllm.algorithm.adv_estimatr=rloo") == [
        "rllm.algorithm.adv_estimatr: unknown key; did you mean rllm.algorithm.adv_estimator?"
    ]
    with pytest.raises(ConfigError, match=r"did you mean rllm\.algorithm\.adv_estimator\?"):
        Config.from_config({"rllm": {"algorithm": {"adv_estimatr": "rloo"}}})


def test_a_key_is_looked_for_in_its_own_section(problems_of):
    assert problems_of("training.lr=1e-3") == ["training.lr: unknown key; did you mean training.learning_rate?"]
    (problem,) = problems_of("training.x=1")
    assert problem.startswith("training.x: unknown key; keys here: beta1, beta2, eps, learning_rate, ")
    (problem,) = problems_of("rllm.rollout.nn_train=1")
    assert problem == "rllm.rollout.nn_train: unknown key; keys here: n, n_val"


def test_an_unknown_estimator_comes_with_the_registered_ones(problems_of):
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
def test_every_name_is_checked_under_its_key(argument, key, problems_of):
    (problem,) = problems_of(argument)
    assert problem.startswith(key)
    assert "Registered: " in problem


@pytest.mark.parametrize("source", ["constructor", "from_config", "map", "yaml", "command line", "json"])
def test_a_custom_estimator_keeps_its_name_everywhere(source, preset, typed):
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


def test_a_missing_plugin_is_a_problem_among_the_others(problems_of):
    first, second = problems_of("plugins=nowhere_to_be_found", "seed=x")
    assert first.startswith("plugins: no module 'nowhere_to_be_found' on the Python path")
    assert second == "seed: expected a whole number, got 'x'"


# ---------------------------------------------------------------------------------------------------- all problems at once


def test_all_problems_come_together(preset, problems_of):
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
        "rllm.rollout.n: must be in [1, 65536], got 0",
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
def test_values_out_of_range_are_refused_and_the_bounds_are_not(key, good, bad, problems_of):
    for value in good:
        load_config([f"{key}={value}"])
    for value in bad:
        assert all(problem.startswith(f"{key}: ") for problem in problems_of(f"{key}={value}"))


def test_rejection_sampling_needs_its_switch(problems_of):
    """1.6: rejection_sample.multiplier != 1 without enable is a ValueError."""
    load_config(["rllm.rejection_sample.enable=true", "rllm.rejection_sample.multiplier=2", "rllm.rejection_sample.mode=episode"])
    assert problems_of("rllm.rejection_sample.mode=group") == ["rllm.rejection_sample.mode: group needs rllm.rejection_sample.enable=true"]


# --------------------------------------------------------------------------------------- keywords of estimators and losses


def test_a_misspelt_keyword_of_an_estimator_or_a_loss_is_an_error_at_start(problems_of):
    """1.2: a misspelt `epsilon` vanished in **kwargs."""
    assert problems_of("rllm.algorithm.estimator_kwargs.epsilom=1", "rllm.algorithm.loss_kwargs.clip=1") == [
        "rllm.algorithm.estimator_kwargs.epsilom: no keyword of advantage estimator grpo; keywords there: epsilon, scale",
        "rllm.algorithm.loss_kwargs.clip: no keyword of policy loss ppo; keywords there: bound, clip_low",
    ]


def test_a_keyword_unlike_all_others_may_be_a_presets(problems_of):
    assert problems_of("rllm.algorithm.estimator_kwargs.k=2") == [
        "rllm.algorithm.estimator_kwargs.k: no keyword of advantage estimator grpo; keywords there: epsilon, scale; "
        "if a preset sets it: rllm.algorithm.estimator_kwargs=null before your own keys empties the mapping"
    ]


def test_keywords_are_typed_as_they_are_declared(problems_of):
    assert problems_of("rllm.algorithm.estimator_kwargs.epsilon=small") == [
        "rllm.algorithm.estimator_kwargs.epsilon: expected a number, got 'small'"
    ]
    config = Config.from_config({"rllm": {"algorithm": {"estimator_kwargs": {"epsilon": "1e-3", "scale": 7}}}})
    assert config.rllm.algorithm.estimator_kwargs == {"epsilon": 1e-3, "scale": "7"}


def test_a_keyword_may_belong_to_the_estimator_of_any_role(typed):
    argv = ["rllm.algorithm.estimator_map={judge: pass_at_k}", "rllm.algorithm.estimator_kwargs={k: 2, epsilon: 1e-3}"]
    assert typed(*argv).rllm.algorithm.estimator_kwargs == {"k": 2, "epsilon": 1e-3}
