"""Tasks and scorers of `reasoning_gym`, behind its process."""

import json
import os
import pickle
import subprocess
import sys

import pytest

from rllm_lightning.config import Config
from rllm_lightning.tasks.reasoning_gym import reasoning_gym
from rllm_lightning.tasks.reasoning_gym_worker import WORKER
from rllm_lightning.tasks.worker import WorkerError

FAST = [
    "spell_backward",
    "chain_sum",
    "countdown",
    "graph_color",
    "propositional_logic",
    "word_ladder",
    "gsm_symbolic",
    "list_functions",
    "mini_sudoku",
    "number_sorting",
    "polynomial_multiplication",
    "isomorphic_strings",
    "pool_matrix",
    "n_queens",
]


@pytest.mark.parametrize("dataset", FAST)
def test_the_solution_scores_one_and_is_correct(dataset):
    task_set = reasoning_gym(0, dataset=dataset, train_size=5, val_size=2, extract="answer_tags")
    taught = [task for task in task_set.train if "solution" in task]
    assert len(taught) >= 4
    for task in taught:
        reward = task_set.reward_function(task, f"thinking ...\n{task['solution']}")
        assert (reward.reward, reward.is_correct) == (1.0, True)
        assert json.loads(json.dumps(task)) == task


def test_a_task_holds_the_question_the_answer_and_where_it_is_from():
    task_set = reasoning_gym(0, train_size=18, val_size=4, instruction="Only the word.")
    task = task_set.train[17]
    assert list(task) == ["id", "question", "answer", "data_source", "solution"]
    assert (task["id"], task["data_source"], task_set.val[3]["id"]) == ("spell_backward:train:17", "spell_backward", "spell_backward:val:3")
    question, instruction = task["question"].split("\n")
    assert question.endswith(task["answer"][::-1])
    assert instruction == "Only the word."
    assert task["solution"] == task["answer"]


def test_partial_credit_is_a_reward_and_not_correct():
    task_set = reasoning_gym(0, dataset="number_sorting", train_size=1, val_size=0)
    (task,) = task_set.train
    assert task_set.reward_function(task, "garbage").reward == 0.0
    words = reasoning_gym(0, dataset="spell_backward", train_size=1, val_size=0)
    (word,) = words.train
    half = word["answer"][: len(word["answer"]) // 2]
    reward = words.reward_function(word, half)
    assert 0.0 < reward.reward < 1.0
    assert reward.is_correct is False


def test_without_partial_credit_only_a_correct_answer_is_rewarded():
    tasks = reasoning_gym(0, dataset="spell_backward", train_size=1, val_size=0, partial_credit=False)
    (task,) = tasks.train
    assert tasks.reward_function(task, task["answer"]).reward == 1.0
    almost = tasks.reward_function(task, task["answer"] + "x")  # the scorer gives .8, or 1 - 1e-16
    assert (almost.reward, almost.is_correct) == (0.0, False)


def test_an_answer_that_is_not_where_it_should_be_scores_zero():
    task_set = reasoning_gym(0, dataset="countdown", train_size=1, val_size=0, extract="answer_tags")
    reward = task_set.reward_function(task_set.train[0], task_set.train[0]["answer"])
    assert (reward.reward, reward.is_correct) == (0.0, False)


def test_no_question_stands_twice():
    # words of 3 letters, of which the list holds a few hundred: a draw of 200 meets some twice
    task_set = reasoning_gym(1, params={"min_word_len": 3, "max_word_len": 3}, train_size=150, val_size=50)
    assert len({task["question"] for task in [*task_set.train, *task_set.val]}) == 200


def test_too_few_distinct_questions_is_an_error_that_counts_them():
    """Bits of a number from 1 to 7: seven questions and no more."""
    settings = {"dataset": "count_bits", "params": {"min_n": 1, "max_n": 7}}
    assert len(reasoning_gym(0, train_size=6, val_size=1, **settings).train) == 6
    with pytest.raises(ValueError, match=r"8 distinct questions are needed, but 'count_bits' has only about 7 with"):
        reasoning_gym(0, train_size=7, val_size=1, **settings)


def test_the_last_of_many_questions_is_waited_for():
    """The last of 40 numbers comes up once in 40 draws."""
    task_set = reasoning_gym(0, dataset="count_bits", params={"min_n": 1, "max_n": 40}, train_size=40, val_size=0)
    assert len(task_set.train) == 40


def test_an_example_that_its_own_scorer_rejects_is_no_solution():
    task_set = reasoning_gym(3, dataset="propositional_logic", train_size=30, val_size=2)
    taught = [task for task in task_set.train if task["answer"] is not None]
    assert len(taught) == 29  # one of these 30 examples does not follow from its premises
    assert {task_set.reward_function(task, task["solution"]).reward for task in taught} == {1.0}


def test_a_data_set_that_draws_from_the_global_random_state_is_reproducible():
    first, again = (reasoning_gym(0, dataset="list_functions", train_size=30, val_size=0) for _ in range(2))
    assert first.train == again.train


def test_the_validation_questions_do_not_depend_on_the_training_size():
    small, large = (reasoning_gym(0, train_size=size, val_size=10) for size in (5, 50))
    assert small.val == large.val
    assert small.train == large.train[:5]


def test_two_seeds_share_next_to_nothing_and_one_seed_everything():
    first, again, other = (reasoning_gym(seed, train_size=50, val_size=5) for seed in (0, 0, 1))
    assert first.train == again.train
    assert len({t["question"] for t in first.train} & {t["question"] for t in other.train}) <= 2


@pytest.mark.parametrize("dataset", ["word_ladder", "isomorphic_strings"])  # drawn from sets of text
def test_processes_with_different_hash_seeds_see_the_same_tasks(dataset):
    """B22: all ranks draw from one set of tasks."""
    code = (
        "from rllm_lightning.tasks.reasoning_gym import reasoning_gym as r; "
        f"print(r(0, dataset={dataset!r}, train_size=10, val_size=0).train)"
    )
    seen = {
        subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1


def test_data_sets_with_parameters_of_every_kind():
    composite = {
        "datasets": [
            {"name": "spell_backward", "weight": 1, "config": {"max_word_len": 5}},
            {"name": "chain_sum", "weight": 2.5, "config": {}},
        ]
    }
    for dataset, params in (
        ("composite", composite),
        ("countdown", {"operators": ["+", "-"], "min_numbers": 3, "max_numbers": "3"}),
        ("word_sorting", {"transformation": "lowercase"}),
        ("fraction_simplification", {"styles": ["plain"]}),
        ("time_intervals", {"min_time": "12:30"}),
        ("rearc", {"board_format_opts": {"alphabet": ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"]}}),
        ("ab", None),
    ):
        task_set = reasoning_gym(0, dataset=dataset, params=params, train_size=2, val_size=1)
        assert task_set.reward_function(task_set.train[1], task_set.train[1]["solution"]).reward == 1.0


# ------------------------------------------------------------------------------------------------------------- wrong input


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"dataset": "spell_backwards"},
            r"task\.dataset: reasoning_gym .* has no data set 'spell_backwards'; did you mean spell_backward\?",
        ),
        (
            {"params": {"max_word_length": 3}},
            r"task\.params\.max_word_length: data set .* has no parameter .*; did you mean max_word_len\?",
        ),
        (
            {"dataset": "chain_sum", "params": {"min_word_len": 3}},
            r"task\.params\.min_word_len: data set 'chain_sum' has no parameter .*; if a preset sets it: task\.params=null before",
        ),
        ({"params": {"max_word_len": "three"}}, r"task\.params\.max_word_len: expected a whole number, got 'three'"),
        ({"params": {"seed": 3}}, r"task\.params\.seed: the seed is not yours to set here; use data\.seed"),
        ({"params": {"min_word_len": 9, "max_word_len": 3}}, r"task\.params: 'spell_backward' does not take them: AssertionError"),
        ({"dataset": "time_intervals", "params": {"min_time": "noon"}}, r"task\.params\.min_time: expected an ISO date or time"),
        ({"dataset": "composite", "params": {"datasets": [{"nam": "ab"}]}}, r"task\.params\.datasets\.0\.nam: .* did you mean name\?"),
        ({"dataset": "composite"}, r"task\.params: 'composite' does not take them: .*at least one dataset"),
        ({"train_size": 0}, r"task\.train_size must be at least 1"),
        ({"val_size": -1}, r"task\.val_size at least 0"),
        ({"dataset": "mini_sudoku", "extract": "last_line"}, r"task\.extract: last_line cannot carry the answer"),
    ],
)
def test_a_mistake_is_named_by_its_key(settings, message):
    with pytest.raises(ValueError, match=message):
        reasoning_gym(0, **{"train_size": 2, "val_size": 0} | settings)


def test_its_keys_are_known_to_the_config():
    config = Config.from_config({"task": {"dataset": "countdown", "params": {"max_numbers": 4}, "train_size": "20"}})
    assert (config.task.args["params"], config.task.args["train_size"]) == ({"max_numbers": 4}, 20)
    with pytest.raises(ValueError, match=r"task\.trainsize: unknown key.*did you mean task\.train_size"):
        Config.from_config({"task": {"trainsize": 3}})


# ------------------------------------------------------------------------------------------------- answers that break a scorer


def test_an_answer_that_would_never_be_scored_counts_as_wrong():
    """Some scorers evaluate the answer; a power tower would stop the training for good."""
    task_set = reasoning_gym(0, dataset="countdown", train_size=1, val_size=0)
    (task,) = task_set.train
    reward = task_set.reward_function(task, "9**9**9**9")
    assert (reward.reward, reward.is_correct) == (0.0, False)
    assert reward.metadata == {"scorer_error": "score took more than 5 s of CPU time"}
    assert task_set.reward_function(task, task["solution"]).reward == 1.0  # by a new process


def test_an_answer_that_the_scorer_fails_on_counts_as_wrong_and_says_so():
    task_set = reasoning_gym(0, dataset="prime_factorization", train_size=1, val_size=0)
    reward = task_set.reward_function(task_set.train[0], "no idea")
    assert (reward.reward, reward.is_correct) == (0.0, False)
    assert reward.metadata["scorer_error"].startswith("ValueError: invalid literal for int()")


def test_a_task_of_another_set_is_refused():
    task_set = reasoning_gym(0, train_size=1, val_size=0)
    with pytest.raises(ValueError, match="task 'x' is none of this task set of 'spell_backward'"):
        task_set.reward_function({"id": "x"}, "")


def test_the_reward_function_can_be_sent_to_another_process():
    task_set = reasoning_gym(0, train_size=1, val_size=0)
    reward_function = pickle.loads(pickle.dumps(task_set.reward_function))
    assert reward_function(task_set.train[0], task_set.train[0]["answer"]).reward == 1.0


def test_a_dead_child_is_replaced():
    reasoning_gym(0, train_size=1, val_size=0)
    WORKER._child.process.kill()
    with pytest.raises(WorkerError, match=r"draw ended its process \(exit code -9\)"):
        WORKER.call("draw", "ab", {}, 0, 1)
    assert len(WORKER.call("draw", "ab", {}, 0, 1)) == 1


def test_the_package_is_loaded_in_the_child_alone():
    code = (
        "import sys; from rllm_lightning.tasks.reasoning_gym import reasoning_gym as r; r(0, train_size=1, val_size=0); "
        "assert not {'torch', 'reasoning_gym', 'sympy'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
