"""Several sources at once: exact shares, names and rewards of their own."""

import csv
import json
from collections import Counter

import pytest

from experiments import run as run_script
from rllm_lightning.registry import register_task
from rllm_lightning.tasks.mixture import mixture, shares
from rllm_lightning.tasks.task import TaskSet

SPELL = {"dataset": "spell_backward", "params": {"min_word_len": 3, "max_word_len": 5}}
SUM = {"dataset": "chain_sum", "params": {"min_terms": 2, "max_terms": 3}}


@pytest.fixture
def numbers():
    """A source with a fixed number of tasks, as files have: ten to train on, four to validate on, answers are their numbers."""

    @register_task("numbers")
    def numbers(seed: int, *, first: int = 0) -> TaskSet:
        tasks = [{"id": f"n{i}", "question": f"number {i}?", "answer": str(i), "data_source": "numbers"} for i in range(first, first + 14)]
        return TaskSet(tasks[:10], tasks[10:], lambda task, response: float(response == task["answer"] and task["id"] == f"n{response}"))

    return numbers


@pytest.mark.parametrize(
    ("total", "weights", "counts"),
    [
        (10, [1, 1], [5, 5]),
        (10, [2, 1], [7, 3]),  # 6.67 and 3.33
        (10, [1, 1, 1], [4, 3, 3]),  # 3.33 each: one is left, the first gets it
        (7, [0.5, 0.3, 0.2], [4, 2, 1]),  # 3.5, 2.1, 1.4
        (0, [1, 2], [0, 0]),
        (1, [1, 1e6], [0, 1]),
    ],
)
def test_shares_are_exact_up_to_rounding_and_sum_to_the_whole(total, weights, counts):
    assert shares(total, weights) == counts


def test_each_source_has_its_share_and_its_name(numbers):
    task_set = mixture(
        0, mixture=[SPELL | {"weight": 3}, SUM | {"weight": 2}, {"name": "numbers", "weight": 1}], train_size=60, val_size=12
    )
    assert Counter(task["data_source"] for task in task_set.train) == {"spell_backward": 30, "chain_sum": 20, "numbers": 10}
    assert Counter(task["data_source"] for task in task_set.val) == {"spell_backward": 6, "chain_sum": 4, "numbers": 2}


def test_each_task_is_scored_by_its_own_source(numbers):
    task_set = mixture(0, mixture=[SPELL, {"name": "numbers"}], train_size=20, val_size=6)
    for task in [*task_set.train, *task_set.val]:
        outcome = task_set.reward_function(task, task["answer"])
        assert getattr(outcome, "reward", outcome) == 1.0
        wrong = task_set.reward_function(task, "zzzz")
        assert getattr(wrong, "reward", wrong) < 1.0


def test_the_seed_decides_the_tasks_and_their_order(numbers):
    settings = {"mixture": [SPELL, {"name": "numbers", "weight": 0.5}], "train_size": 12, "val_size": 4}
    first, again, other = (mixture(seed, **settings) for seed in (0, 0, 1))
    assert (first.train, first.val) == (again.train, again.val)
    assert first.train != other.train
    sources = [task["data_source"] for task in first.train]
    assert sources != sorted(sources)  # mixed, also where data.shuffle is false
    assert sources != sorted(sources, reverse=True)


def test_validation_covers_even_a_source_of_little_weight():
    task_set = mixture(0, mixture=[SPELL | {"weight": 50}, SUM], train_size=102, val_size=10)
    assert Counter(task["data_source"] for task in task_set.val) == {"spell_backward": 9, "chain_sum": 1}


def test_two_parts_of_one_data_set_can_be_told_apart(numbers):
    parts = [{"name": "numbers", "data_source": "small"}, {"name": "numbers", "first": 100, "data_source": "large"}]
    task_set = mixture(0, mixture=parts, train_size=20, val_size=8)
    assert Counter(task["data_source"] for task in task_set.train) == {"small": 10, "large": 10}
    assert {int(task["answer"]) >= 100 for task in task_set.val if task["data_source"] == "large"} == {True}


def test_no_training_task_asks_what_another_source_validates_on(numbers, caplog):
    # 10..13 validate the first source; the second trains on 10..19 and validates on 20..23
    task_set = mixture(0, mixture=[{"name": "numbers"}, {"name": "numbers", "first": 10}], train_size=20, val_size=8)
    assert not {task["question"] for task in task_set.train} & {task["question"] for task in task_set.val}
    assert len(task_set.train) == 16
    assert "4 training tasks ask what validation tasks ask" in caplog.text


def test_a_mixture_of_mixtures(numbers):
    inner = {"name": "mixture", "mixture": [{"name": "numbers"}, {"name": "numbers", "first": 50}]}
    task_set = mixture(0, mixture=[inner, {"name": "numbers", "first": 100}], train_size=20, val_size=6)
    assert {task_set.reward_function(task, task["answer"]) for task in task_set.train} == {1.0}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], r"task\.mixture: give one source or more"),
        ([{"name": "numbrs"}], r"task\.mixture\.0\.name: unknown task 'numbrs'; did you mean 'numbers'\?"),
        ([{"name": "numbers", "weight": 0}], r"task\.mixture\.0\.weight: must be a number above 0, got 0"),
        ([{"name": "numbers", "weight": "much"}], r"task\.mixture\.0\.weight: must be a number above 0, got 'much'"),
        ([{"name": "numbers", "frist": 3}], r"task\.mixture\.0\.frist: task 'numbers' has no such argument; did you mean first\?"),
        ([{"name": "numbers", "first": "x"}], r"task\.mixture\.0\.first: expected a whole number, got 'x'"),
        ([{"name": "jsonl"}], r"task\.mixture\.0\.train_file: required"),
        ([SPELL | {"train_size": 3}], r"task\.mixture\.0\.train_size: it follows from the weight; set task\.train_size"),
        ([SPELL | {"params": {"max_len": 3}}], r"task\.mixture\.0: task\.params\.max_len: data set 'spell_backward' has no parameter"),
        ([{"name": "numbers"}], r"task\.mixture\.0: it has 10 train tasks, its share of task\.train_size is 20"),
        ([SPELL, {"name": "numbers", "weight": 0.1}], r"leave a source of task\.mixture without a task"),
        (
            [{"dataset": "chain_sum", "curriculum": {}}],
            r"task\.mixture\.0: a source whose training tasks change \(a curriculum\) cannot be mixed",
        ),
    ],
)
def test_a_wrong_source_is_named_by_its_place(numbers, parts, message):
    size = 4 if len(parts) == 2 else 20
    with pytest.raises(ValueError, match=message):
        mixture(0, mixture=parts, train_size=size, val_size=1)


def test_the_preset_runs_two_steps_with_metrics_for_each_data_set(tmp_path, capfd):
    quick = ["task.train_size=24", "task.val_size=6", "warm_start.steps=2", "warm_start.batch_size=4", "rllm.rollout.n=2"]
    quick += ["data.train_batch_size=4", "rllm.trainer.total_batches=2", "rllm.trainer.test_freq=2", "rllm.trainer.logger=[csv]"]
    code = run_script.main(["mixture", *quick, f"run_root={tmp_path}"])
    assert code == 0, capfd.readouterr().err
    (folder,) = (tmp_path / "rllm-lightning").glob("*")
    with open(folder / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["0", "1", "2"]
    for name in ("spell_backward", "chain_sum", "count_bits"):
        assert rows[0][f"val/{name}/pass@1"]
        assert rows[2][f"val/{name}/pass@1"]
    episodes = [json.loads(line) for line in (folder / "episodes" / "val_step_2.jsonl").read_text().splitlines()]
    assert Counter(episode["task"]["data_source"] for episode in episodes) == {"spell_backward": 3, "chain_sum": 2, "count_bits": 1}
