"""Reading a sweep's YAML: what is refused, and with which words; the command line of a trial."""

import pytest
import yaml

from rllm_lightning.lab.sweep import definition, engine
from rllm_lightning.lab.sweep.definition import Metric, read_sweep
from tests.sweeps.helpers import ROOT

GOOD = {"method": "grid", "parameters": {"seed": {"values": [0, 1]}}, "command": ["python", "run.py", "${args}"]}


@pytest.fixture
def write(tmp_path):
    def write(content):
        path = tmp_path / "x.yaml"
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        return path

    return write


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("a: [", "not a valid YAML file"),
        ("- 1", "expected a mapping with method and parameters, got [1]"),
        ("", "expected a mapping with method and parameters, got None"),
        ("method: grid\nparameters: {a: {values: [2026-01-01]}}", "put dates in quotes"),
        ({"parameters": GOOD["parameters"]}, "method: required"),
        ({"method": "grid"}, "parameters: required"),
        (GOOD | {"method": "gird"}, "method: 'gird' is not one of"),
        (GOOD | {"method": "custom"}, "grid, random and bayes"),
        (GOOD | {"parameters": {}}, "parameters: {} should be non-empty"),
        (GOOD | {"parameters": {"seed": 3}}, "seed"),
        (GOOD | {"parameters": {"seed": {"valeus": [1]}}}, "parameters.seed: {'valeus': [1]} is not valid"),
        (GOOD | {"parameters": {"lr": {"min": 2.0, "max": 1.0}}}, "min 2.0 is not less than max 1.0"),
        (GOOD | {"method": "bayes"}, "metric: required by bayes and by early_terminate"),
        (GOOD | {"early_terminate": {"type": "hyperband", "min_iter": 3}}, "metric: required by bayes and by early_terminate"),
        (GOOD | {"parameters": {"run_root": {"value": "x"}}}, "parameters.run_root: set by this runner for each trial; leave it out"),
        (GOOD | {"parameters": {"rllm": {"parameters": {"trainer": {"parameters": {"resume": {"value": "x"}}}}}}}, "rllm.trainer.resume"),
        (GOOD | {"scheduler": {"engine": "optuna"}}, "scheduler: this runner has one metric and the methods grid, random and bayes"),
        (GOOD | {"command": ["python", "run.py"]}, "command: passes no values on; add ${args_no_hyphens}"),
        (GOOD | {"command": ["python", "--x=${args}", "${args}"]}, "the macro is not a word of its own"),
        (GOOD | {"command": ["python", "${arsg}", "${args}"]}, "command: no macro ${arsg}"),
        (GOOD | {"command": ["${program}", "${args}"]}, "program: required"),
        ({key: GOOD[key] for key in ("method", "parameters")}, "program: required"),
    ],
)
def test_what_cannot_run_is_refused(content, words, write):
    with pytest.raises(ValueError) as error:
        read_sweep(write(content))
    assert words in str(error.value)
    assert "x.yaml: " in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"none\.yaml: cannot be read"):
        read_sweep(tmp_path / "none.yaml")


@pytest.mark.parametrize(("text", "better"), [("1e-4", "1.0e-4"), ("5e5", "5.0e+5"), ("2.5e3", "2.5e+3"), ("1E-4", "1.0e-4")])
def test_a_bound_that_yaml_reads_as_text_is_explained(text, better, write):
    """B50: PyYAML takes 1e-4 for text."""
    path = write(f"method: random\nparameters: {{lr: {{min: {text}, max: 1.0e+9}}}}\nprogram: run.py")
    with pytest.raises(ValueError) as error:
        read_sweep(path)
    assert str(error.value) == f"{path}: parameters.lr.min: YAML reads {text} as text; write {better}"
    assert isinstance(yaml.safe_load(better), float)


def test_all_problems_come_together(write):
    with pytest.raises(ValueError) as error:
        read_sweep(write(GOOD | {"method": "bayes", "command": ["python"], "parameters": {"run_root": {"values": [1, 2]}}}))
    assert len(str(error.value).splitlines()) == 3


def test_a_missing_engine_says_how_to_get_it(write, monkeypatch):
    def nothing(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(engine.importlib, "import_module", nothing)
    with pytest.raises(ValueError, match=r"pip install 'rllm-lightning\[sweep\]', then pip install --no-deps sweeps"):
        read_sweep(write(GOOD))


# ------------------------------------------------------------------------------------------------------------- command line


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["python", "run.py", "${args}"], ["python", "run.py", "--lr=0.1", "--name=a b"]),
        (["python", "run.py", "${args_no_hyphens}", "x=1"], ["python", "run.py", "lr=0.1", "name=a b", "x=1"]),
        (["python", "run.py", "${args_no_equals}"], ["python", "run.py", "--lr", "0.1", "--name", "a b"]),
        (["python", "run.py", "${args_json}"], ["python", "run.py", '{"lr": 0.1, "name": "a b"}']),
        (["python", "run.py", "${args_json_file}"], ["python", "run.py", "FOLDER/values.json"]),
        (None, ["/usr/bin/env", "python", "train.py", "--lr=0.1", "--name=a b"]),
        (["${interpreter}", "${program}", 7, "${args}"], ["python", "train.py", "7", "--lr=0.1", "--name=a b"]),
        (["python", "${envvar:SCRIPT}", "--to=${envvar:SCRIPT}", "${args}"], ["python", "it.py", "--to=it.py", "--lr=0.1", "--name=a b"]),
        (["python", "b=${div:8,${n}}", "${args}"], ["python", "b=${div:8,${n}}", "--lr=0.1", "--name=a b"]),
    ],
)
def test_the_command_line_is_the_agents(command, words, write, tmp_path, monkeypatch):
    monkeypatch.setenv("SCRIPT", "it.py")
    content = GOOD | {"program": "train.py", "command": command}
    sweep = read_sweep(write({key: value for key, value in content.items() if value is not None}))
    line = sweep.command_line({"lr": 0.1, "name": "a b"}, tmp_path / "values.json")
    assert line == [word.replace("FOLDER", str(tmp_path)) for word in words]


def test_a_command_line_leaves_the_sweep_as_it_is(write, tmp_path, monkeypatch):
    """W&B's code fills environment variables into the list that it is given."""
    monkeypatch.setenv("SCRIPT", "first.py")
    sweep = read_sweep(write(GOOD | {"command": ["python", "${envvar:SCRIPT}", "${args}"]}))
    sweep.command_line({}, tmp_path)
    monkeypatch.setenv("SCRIPT", "second.py")
    assert sweep.command_line({}, tmp_path)[1] == "second.py"


# ----------------------------------------------------------------------------------------------------------------- the rest


def test_the_goal_is_to_minimize_unless_it_is_given(write):
    assert read_sweep(write(GOOD | {"metric": {"name": "loss"}})).metric == Metric("loss", "minimize")
    assert read_sweep(write(GOOD)).metric is None


@pytest.mark.parametrize(("goal", "best"), [("maximize", 3.0), ("minimize", -1.0)])
def test_the_best_of_a_metric_goes_by_its_goal(goal, best):
    assert Metric("x", goal).best([1.0, 3.0, -1.0]) == best
    assert Metric("x", goal).best([]) is None


def test_what_varies_is_known_nested_parameters_included(write):
    parameters = {"a.b": {"values": [1, 2]}, "c": {"value": 3}, "d": {"parameters": {"e": {"values": [4]}, "f": {"value": 5}}}}
    assert read_sweep(write(GOOD | {"parameters": parameters})).varied == [("a.b",), ("d", "e")]


# ------------------------------------------------------------------------------------------------------- keys of run.py's config

RUN = ["python", str(ROOT / "experiments" / "run.py"), "mini"]
LR = {"training.learning_rat": {"min": 0.1, "max": 0.2}}


@pytest.mark.parametrize("form", ["${args}", "${args_no_hyphens}", "${args_json}", "${args_json_file}"])
@pytest.mark.parametrize("parameters", [LR, {"training": {"parameters": {"learning_rat": {"value": 0.1}}}}])
def test_a_parameter_that_is_no_key_is_named_with_the_close_one(write, form, parameters):
    path = write({"method": "random", "parameters": parameters | GOOD["parameters"], "command": [*RUN, form]})
    with pytest.raises(ValueError) as error:
        read_sweep(path)
    assert str(error.value) == f"{path}: parameters.training.learning_rat: unknown key; did you mean training.learning_rate?"


def test_an_unknown_section_and_a_key_of_the_command_are_named_too(write):
    parameters = {"rllm.rolout.n": {"values": [2, 4]}}
    path = write({"method": "grid", "parameters": parameters, "command": [*RUN, "data.train_batch_siz=2", "${args}"]})
    with pytest.raises(ValueError) as error:
        read_sweep(path)
    assert {line.removeprefix(f"{path}: ").partition(";")[0] for line in str(error.value).splitlines()} == {
        "parameters.rllm.rolout: unknown key",
        "data.train_batch_siz: unknown key",
    }


@pytest.mark.parametrize(
    "parameters",
    [
        {"training.learning_rate": {"values": [-1, 0.1]}},  # the first trial fails, the second does not
        {"rllm.algorithm.adv_estimator": {"value": "unheard_of"}, "rllm.algorithm.estimator_kwargs.margin": {"values": [0, 1]}},
        {"task.name": {"value": "unheard_of"}, "task.size": {"values": [1, 2]}, "plugins": {"value": ["no_such_module"]}},
    ],
)
def test_what_is_wrong_with_values_is_left_to_the_trials(write, parameters):
    read_sweep(write({"method": "grid", "parameters": parameters, "command": [*RUN, "${args}"]}))


def test_keys_of_another_program_are_not_looked_at(write):
    assert read_sweep(write(GOOD | {"parameters": LR, "method": "random"})).varied_keys == ["training.learning_rat"]


def test_macros_are_whole_words():
    assert [definition.macro_of(word) for word in ("${args}", "x${args}", "${a", "a}", "$args")] == ["args", None, None, None, None]


def test_nested_parameters_reach_the_engine(write):
    """Given to it unvalidated: what validates a sweep there drops nested parameters."""
    parameters = {"optim": {"parameters": {"lr": {"values": [0.1, 0.2]}}}, "seed": {"value": 1}}
    sweep = read_sweep(write(GOOD | {"parameters": parameters}))
    assert engine.next_values(sweep, []) == {"optim": {"lr": 0.1}, "seed": 1}
