"""Tasks from files: reading, checking, splitting, scoring."""

import json
import logging

import pytest

from rllm_lightning.config import Config
from rllm_lightning.registry import TASKS
from rllm_lightning.tasks.jsonl import jsonl


@pytest.fixture
def write(tmp_path):
    def write_rows(name, rows):
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    return write_rows


def qa(question, answer, **more):
    return {"question": question, "answer": answer, **more}


def test_a_row_becomes_a_task_with_an_id_a_source_and_a_solution(write):
    task_set = jsonl(0, train_file=write("sums.jsonl", [qa("1+1?", "2"), "", qa("1+2?", 3)]), instruction="Be brief.")
    assert task_set.train == [
        {"id": "sums:train:1", "question": "1+1?\nBe brief.", "answer": "2", "data_source": "sums", "solution": "2"},
        {"id": "sums:train:3", "question": "1+2?\nBe brief.", "answer": 3, "data_source": "sums", "solution": "3"},
    ]
    assert task_set.val == []


def test_a_row_may_bring_more(write):
    row = qa("1+1?", "2", id="x", data_source="other", solution="It is\n2", messages=[{"role": "user", "content": "m"}], level=3, line=9)
    (task,) = jsonl(0, train_file=write("t.jsonl", [row]), extract="last_line").train
    assert task == row | {"id": "other:train:x"}


def test_equal_questions_with_different_answers_stay_different_tasks(write):
    """B07: two rows with equal prompts but different answers are two groups."""
    task_set = jsonl(0, train_file=write("t.jsonl", [qa("pick one", "a"), qa("pick one", "b")]))
    first, second = task_set.train
    assert first["id"] != second["id"]
    assert [task_set.reward_function(task, "a") for task in (first, second)] == [1.0, 0.0]


def test_exact_rewards_are_one_and_zero(write):
    task_set = jsonl(0, train_file=write("t.jsonl", [qa("capital?", "New York"), qa("true?", True)]))
    city, truth = task_set.train
    assert [task_set.reward_function(city, response) for response in (" new york", "York", "")] == [1.0, 0.0, 0.0]
    assert task_set.reward_function(truth, "True") == 1.0


def test_numeric_rewards_look_at_the_last_number(write):
    task_set = jsonl(
        0, train_file=write("t.jsonl", [qa("?", "6 * 7 = 42 #### 42"), qa("?!", 0.5)]), scorer="numeric", scorer_args={"tolerance": 0.01}
    )
    whole, half = task_set.train
    assert [task_set.reward_function(whole, response) for response in ("so 42.", "42 or 43", "none")] == [1.0, 0.0, 0.0]
    assert [task_set.reward_function(half, response) for response in ("1/2", "0.509", "0.511")] == [1.0, 1.0, 0.0]


def test_tags_are_taught_and_needed(write):
    task_set = jsonl(0, train_file=write("t.jsonl", [qa("?", "2")]), extract="answer_tags")
    (task,) = task_set.train
    assert task["solution"] == "<answer>2</answer>"
    assert [task_set.reward_function(task, response) for response in (task["solution"], "2")] == [1.0, 0.0]


# ----------------------------------------------------------------------------------------------------------------- splitting


def test_a_validation_file_takes_its_questions_out_of_training(write, caplog):
    train = write("train.jsonl", [qa("a?", "1"), qa("b?", "2"), qa("b ?", "2"), qa("c?", "3")])
    with caplog.at_level(logging.WARNING):
        task_set = jsonl(0, train_file=train, val_file=write("val.jsonl", [qa(" b?", "2")]))
    assert [task["question"] for task in task_set.train] == ["a?", "b ?", "c?"]
    assert [task["id"] for task in task_set.val] == ["train:val:1"]
    assert "1 rows (the first in line 2) ask what the validation file asks" in caplog.text


def test_a_fraction_draws_whole_questions_and_the_seed_decides_which(write):
    # 10 questions, each twice with different answers: a fraction of .3 is 3 questions, so 6 rows
    file = write("t.jsonl", [qa(f"q{i}", f"{i}{k}") for i in range(10) for k in range(2)])
    first, again, other = (jsonl(seed, train_file=file, val_fraction=0.3) for seed in (0, 0, 1))
    assert (len(first.train), len(first.val)) == (14, 6)
    assert not {task["question"] for task in first.train} & {task["question"] for task in first.val}
    assert first.val == again.val
    assert first.val != other.val


def test_a_small_fraction_still_gives_one_question(write):
    task_set = jsonl(0, train_file=write("t.jsonl", [qa("a", "1"), qa("b", "2")]), val_fraction=0.01)
    assert (len(task_set.train), len(task_set.val)) == (1, 1)


def test_nothing_left_to_train_on_is_an_error(write):
    file = write("t.jsonl", [qa("a", "1")])
    with pytest.raises(ValueError, match=r"task\.train_file: .*t\.jsonl: no row is left to train on"):
        jsonl(0, train_file=file, val_file=file)
    with pytest.raises(ValueError, match="no row is left to train on"):
        jsonl(0, train_file=file, val_fraction=0.5)


# ------------------------------------------------------------------------------------------------------------- wrong input


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("{", "Expecting property name"),
        ('{"question": "q", "answer": NaN}', "NaN is not JSON"),
        ("[1, 2]", "expected an object with `question` and `answer`, got [1, 2]"),
        ({"answer": "a"}, "`question` is missing or null; there are the columns answer (other names: task.columns)"),
        (qa(" ", "a"), "`question` must be text, got ' '"),
        (qa("q", None), "`answer` is missing or null"),
        (qa("q", ["a"]), "`answer` must be text or a finite number, got ['a']"),
        (qa("q", ""), "`answer` must be text or a finite number, got ''"),
        (qa("q", "a", solution=3), "`solution` has the wrong type: 3"),
        (qa("q", "a", solution="b"), "the solution does not hold the answer"),
        (qa("q", "a", id=1), "the id 1 stands in line 1 already"),
    ],
)
def test_a_malformed_row_is_named_by_file_and_line(write, row, problem):
    file = write("t.jsonl", [qa("fine", "a", id=1), row])
    with pytest.raises(ValueError) as error:
        jsonl(0, train_file=file)
    assert str(error.value).startswith(f"task.train_file: {file}:2: {problem}")


def test_all_malformed_rows_come_together_but_not_without_end(write):
    file = write("t.jsonl", ["{"] * 8)
    with pytest.raises(ValueError) as error:
        jsonl(0, train_file=file)
    lines = str(error.value).split("\n")
    assert [line.split(": ")[1] for line in lines[:5]] == [f"{file}:{i}" for i in (1, 2, 3, 4, 5)]
    assert lines[5:] == ["... and 3 more"]


def test_an_answer_without_a_number_cannot_be_scored_as_one(write):
    with pytest.raises(ValueError, match=r":1: task\.scorer cannot judge by the answer 'none'"):
        jsonl(0, train_file=write("t.jsonl", [qa("q", "none")]), scorer="numeric")


def test_a_missing_or_empty_file_is_named_with_its_key(write, tmp_path):
    file = write("t.jsonl", [qa("a", "1")])
    with pytest.raises(ValueError, match=r"task\.train_file: cannot read .*nowhere\.jsonl"):
        jsonl(0, train_file=str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(ValueError, match=r"task\.val_file: .*empty\.jsonl has no rows"):
        jsonl(0, train_file=file, val_file=write("empty.jsonl", ["", " "]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"val_fraction": 1.0}, r"task\.val_fraction: must be in \[0, 1\), got 1.0"),
        ({"val_fraction": 0.1, "val_file": "x"}, r"task\.val_file, task\.val_fraction: give one"),
        ({"scorer": "numeric", "scorer_args": {"tolerance": -1.0}}, r"task\.scorer_args\.tolerance: must not be negative"),
    ],
)
def test_settings_out_of_range_are_refused(write, settings, message):
    with pytest.raises(ValueError, match=message):
        jsonl(0, train_file=write("t.jsonl", [qa("a", "1")]), **settings)


def test_its_keys_are_known_to_the_config(write):
    tree = {"task": {"name": "jsonl", "train_file": "x.jsonl", "scorer": "numeric", "val_fraction": "0.1"}}
    config = Config.from_config(tree)
    assert TASKS.get("jsonl") is jsonl
    assert config.task.args["val_fraction"] == 0.1
    with pytest.raises(ValueError, match=r"task\.train_file: required"):
        Config.from_config({"task": {"name": "jsonl"}})
