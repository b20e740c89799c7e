"""Scorers by name: what they reward, what they refuse, and what becomes of a scorer that fails."""

import asyncio
import json
import pickle

import pytest

from rllm_lightning.registry import register_scorer
from rllm_lightning.tasks import math_scorer
from rllm_lightning.tasks.jsonl import jsonl
from rllm_lightning.tasks.scorers import make_reward
from rllm_lightning.workflows.reward import score


def task(answer):
    return {"id": "t", "question": "?", "answer": answer, "data_source": "d"}


def reward_of(reward_function, answer, response):
    """As a workflow scores."""
    return asyncio.run(score(reward_function, task(answer), response))


@pytest.mark.parametrize(
    ("scorer", "args", "extract", "answer", "right", "wrong"),
    [
        ("exact", {}, "last_line", "New York", "Hm.\nnew york", "new york\nno"),
        ("numeric", {"tolerance": "0.1"}, "response", 42, "about 43", "about 60"),
        ("choice", {}, "response", "(B)", "I think the answer is B.", "the answer is C"),
        ("choice", {"letters": "XY"}, "answer_tags", "X", "<answer>x</answer>", "x"),
        ("regex", {"pattern": r"<answer>.*</answer>"}, "response", "", "so <answer>1</answer>", "so 1"),
        ("regex", {"pattern": r"#### (?P<answer>\d+)"}, "response", "72", "1 #### 71 no #### 72", "#### 72 no #### 71"),
        ("math", {}, "response", "\\frac{1}{2}", "It is $0.5$.", "It is $0.6$."),
        ("math", {}, "response", "x^2 + 2x + 1", "$(x+1)^2$", "$(x+2)^2$"),
        ("math", {}, "response", "72", "It is 72.", "It is 27."),
        ("math", {}, "answer_tags", "\\{1, 2\\}", "<answer>\\{2, 1\\}</answer>", "<answer>2</answer>"),
        ("math", {}, "last_line", "\\{1, 2\\}", "1\n$\\{2, 1\\}$", "$\\{2, 1\\}$\n$\\{2\\}$"),
    ],
)
def test_a_right_answer_gets_one_and_a_wrong_one_zero(scorer, args, extract, answer, right, wrong):
    reward_function = make_reward(scorer, args, extract)
    assert [reward_of(reward_function, answer, response).reward for response in (right, wrong)] == [1.0, 0.0]
    again = pickle.loads(pickle.dumps(reward_function))  # as for a process of its own
    assert reward_of(again, answer, right).reward == 1.0


@pytest.mark.parametrize("scorer", ["exact", "numeric", "math"])
def test_no_answer_where_it_should_be_gets_zero(scorer):
    assert reward_of(make_reward(scorer, {}, "answer_tags"), "42", "42").reward == 0.0


@pytest.mark.parametrize(
    ("scorer", "args", "message"),
    [
        ("numerc", {}, r"task\.scorer: unknown scorer 'numerc'; did you mean 'numeric'\?"),
        ("exact", {"strict": True}, r"task\.scorer_args\.strict: scorer 'exact' has no such argument; it has: none"),
        ("numeric", {"tolerence": 1}, r"task\.scorer_args\.tolerence: scorer 'numeric' .*did you mean tolerance\?"),
        ("numeric", {"tolerance": "abc"}, r"task\.scorer_args\.tolerance: expected a number, got 'abc'"),
        ("numeric", {"tolerance": -1}, r"task\.scorer_args\.tolerance: must not be negative, got -1"),
        ("choice", {"letters": "abc"}, r"task\.scorer_args\.letters: must be capital letters"),
        ("regex", {}, r"task\.scorer_args\.pattern: required, but not given \(expected text\)"),
        ("regex", {"pattern": "("}, r"task\.scorer_args\.pattern: '\(' is no regular expression"),
        ("math", {"time_limit_s": 0}, r"task\.scorer_args\.time_limit_s: must be above 0 seconds"),
        ("python", {"function": "my_scorer"}, r"task\.scorer_args\.function: 'my_scorer' is no path of a function"),
        ("python", {"function": "no_such_module:f"}, r"task\.scorer_args\.function: importing 'no_such_module' failed: ModuleNotFound"),
        ("python", {"function": "nowhere.py:f"}, r"task\.scorer_args\.function: importing 'nowhere\.py' failed: FileNotFoundError"),
        ("python", {"function": "json:dumpz"}, r"task\.scorer_args\.function: there is no function 'dumpz' in json"),
        ("python", {"function": "json:loads"}, r"task\.scorer_args\.function: json:loads must take \(task, answer\)"),
        ("composite", {"parts": []}, r"task\.scorer_args\.parts: give one or more"),
        ("composite", {"parts": [{"scorer": "exat"}]}, r"task\.scorer_args\.parts\.0\.scorer: unknown scorer 'exat'"),
        ("composite", {"parts": [{}]}, r"task\.scorer_args\.parts\.0\.scorer: must be given"),
        ("composite", {"parts": [{"scorer": "composite"}]}, r"task\.scorer_args\.parts\.0\.scorer: must be given, and not composite"),
        (
            "composite",
            {"parts": [{"scorer": "exact", "wieght": 2}]},
            r"task\.scorer_args\.parts\.0\.wieght: unknown key; did you mean .*weight",
        ),
        (
            "composite",
            {"parts": [{"scorer": "exact"}, {"scorer": "numeric", "args": {"tolerance": -1}}]},
            r"task\.scorer_args\.parts\.1\.args\.tolerance: must not be negative",
        ),
        ("composite", {"parts": [{"scorer": "exact"}, {"scorer": "exact"}]}, r"task\.scorer_args\.parts: two are called 'exact'"),
    ],
)
def test_a_wrong_scorer_is_refused_by_its_key(scorer, args, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        make_reward(scorer, args, "response")


def test_a_scorer_of_ones_own_can_be_registered():
    @register_scorer("length")
    def length(extract, *, at_most: int = 3):
        return lambda task, response: float(len(response) <= at_most)

    assert reward_of(make_reward("length", {"at_most": "5"}, "response"), "", "12345").reward == 1.0


def test_a_scorer_of_ones_own_that_fails_is_told_before_training_with_its_line(tmp_path):
    @register_scorer("first_letter")
    def first_letter(extract):
        return lambda task, response: float(response[0] == task["answer"][0])

    file = tmp_path / "numbers.jsonl"
    file.write_text(json.dumps({"question": "?", "answer": 12}))
    with pytest.raises(ValueError) as error:
        jsonl(0, train_file=str(file), scorer="first_letter")
    assert str(error.value).startswith(f"task.train_file: {file}:1: task.scorer: it raised TypeError: 'int' object is not subscriptable")
    assert "test_scorers.py:" in str(error.value)


def test_an_answer_that_the_scorer_cannot_judge_by_is_found_before_training(tmp_path):
    for scorer, answer, message in (
        ("numeric", "none", "task.scorer cannot judge by the answer 'none'"),
        ("choice", "Paris", "task.scorer cannot judge by the answer 'Paris'"),
        ("math", "$$", "task.scorer=math does not find the answer"),
    ):
        file = tmp_path / f"{scorer}.jsonl"
        file.write_text(json.dumps({"question": "?", "answer": answer}))
        with pytest.raises(ValueError) as error:
            jsonl(0, train_file=str(file), scorer=scorer)
        assert str(error.value).startswith(f"task.train_file: {file}:1: {message}")


# -------------------------------------------------------------------------------------------------------------------- math


def test_mathematics_that_never_ends_counts_as_wrong_and_says_so():
    """The worker is killed, and another goes on."""
    reward_function = make_reward("math", {"time_limit_s": 1.0}, "response")
    outcome = reward_of(reward_function, "7", HANGING)
    assert (outcome.reward, outcome.is_correct) == (0.0, False)
    assert outcome.metadata == {"scorer_error": "is_equal took more than 1 s of CPU time"}
    assert reward_of(reward_function, "7", "$7$").reward == 1.0


HANGING = "$9999999!$"


def test_an_answer_without_mathematics_is_recorded():
    outcome = reward_of(make_reward("math", {}, "response"), "$$", "7")
    assert outcome.reward == 0.0
    assert "there is no mathematics in the answer" in outcome.metadata["scorer_error"]


def test_without_math_verify_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(math_scorer, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"^task\.scorer: math needs the package math-verify: pip install 'rllm-lightning\[math\]'"):
        make_reward("math", {}, "response")


# ------------------------------------------------------------------------------------------------------------------ python

FUNCTIONS = """
from rllm_lightning import RewardOutput

def length(task, answer):
    return len(answer) / 10

async def later(task, answer):
    return RewardOutput(0.5, is_correct=answer == task["answer"], metadata={"seen": answer})

def broken(task, answer):
    return 1 / 0

async def broken_later(task, answer):
    return 1 / 0

def nothing(task, answer):
    pass

def not_a_number(task, answer):
    return float("nan")
"""


@pytest.fixture(params=["module", "file"])
def functions(request, tmp_path, monkeypatch):
    """The path of a function, in a module of the working directory or in a file elsewhere."""
    name = f"my_scorers_{request.param}"
    (tmp_path / f"{name}.py").write_text(FUNCTIONS)
    if request.param == "module":
        monkeypatch.chdir(tmp_path)
        return lambda function: f"{name}:{function}"
    return lambda function: f"{tmp_path / name}.py:{function}"


def test_a_function_scores_and_may_be_async(functions):
    assert reward_of(make_reward("python", {"function": functions("length")}, "answer_tags"), "", "<answer> ab </answer>").reward == 0.2
    outcome = reward_of(make_reward("python", {"function": functions("later")}, "response"), "x", "x")
    assert (outcome.reward, outcome.is_correct, outcome.metadata) == (0.5, True, {"seen": "x"})


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("broken", r"raised ZeroDivisionError: division by zero \(.*\.py:11\)"),
        ("broken_later", r"raised ZeroDivisionError: division by zero \(.*\.py:14\)"),
        ("nothing", "returned None; expected a finite number"),
        ("not_a_number", "returned nan; expected a finite number"),
    ],
)
def test_a_function_that_fails_is_named(functions, function, message):
    """B05: a failed scorer is an error, never a silent zero."""
    path = functions(function)
    with pytest.raises(ValueError, match=rf"task 't': the scorer .*:{function} {message}"):
        reward_of(make_reward("python", {"function": path}, "response"), "", "x")


@pytest.mark.parametrize("function", ["broken", "nothing"])
def test_a_function_that_fails_is_found_before_training(functions, function, tmp_path):
    (tmp_path / "t.jsonl").write_text(json.dumps({"question": "?", "answer": "a"}))
    with pytest.raises(ValueError, match=rf"t\.jsonl:1: .*the scorer .*:{function} r"):
        jsonl(0, train_file=str(tmp_path / "t.jsonl"), scorer="python", scorer_args={"function": functions(function)})


# --------------------------------------------------------------------------------------------------------------- composite

PARTS = [
    {"name": "correct", "scorer": "numeric", "extract": "last_number"},
    {"name": "format", "scorer": "regex", "weight": 0.25, "args": {"pattern": "^<answer>"}},
]


@pytest.mark.parametrize(
    ("response", "reward", "is_correct", "rewards"),
    [
        ("<answer>7</answer>", 1.25, True, {"correct": 1.0, "format": 1.0}),  # 1 · 1 + 1/4 · 1
        ("7", 1.0, True, {"correct": 1.0, "format": 0.0}),
        ("<answer>8</answer>", 0.25, False, {"correct": 0.0, "format": 1.0}),
    ],
)
def test_a_composite_is_the_weighted_sum_and_keeps_its_parts(response, reward, is_correct, rewards):
    outcome = reward_of(make_reward("composite", {"parts": PARTS}, "response"), "7", response)
    assert (outcome.reward, outcome.is_correct, outcome.metadata) == (reward, is_correct, {"rewards": rewards})


def test_a_part_that_fails_says_why_beside_the_rewards():
    parts = [{"scorer": "exact"}, {"scorer": "math"}]
    outcome = reward_of(make_reward("composite", {"parts": parts}, "response"), "$$", "7")
    assert outcome.metadata["rewards"] == {"exact": 0.0, "math": 0.0}
    assert "no mathematics" in outcome.metadata["scorer_error"]


def test_solutions_are_written_for_the_first_part_of_a_composite(tmp_path):
    (tmp_path / "t.jsonl").write_text(json.dumps({"question": "?", "answer": "a"}))
    parts = [{"scorer": "exact", "extract": "answer_tags"}, PARTS[1]]
    (only,) = jsonl(0, train_file=str(tmp_path / "t.jsonl"), scorer="composite", scorer_args={"parts": parts}).train
    assert only["solution"] == "<answer>a</answer>"
