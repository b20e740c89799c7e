"""What a task set must hold."""

import pytest

from rllm_lightning.tasks.task import TaskSet


def task(task_id, **changes):
    return {"id": task_id, "question": "?", "answer": "!", "data_source": "d"} | changes


def reward(task, response):
    return 0.0


def test_one_training_task_is_enough():
    assert len(TaskSet([task("a")], [], reward).train) == 1


def test_a_chat_may_stand_for_the_question():
    chat = {"id": "a", "messages": [{"role": "user", "content": "?"}], "answer": None, "data_source": "d"}
    assert TaskSet([chat], [], reward).train == [chat]


@pytest.mark.parametrize(
    ("train", "val", "message"),
    [
        ([], [task("a")], "no training tasks"),
        (["?"], [], "training task 0: expected a dict"),
        ([task(7)], [], "training task 0: `id` must be text"),
        ([task("a"), task("b", data_source=None)], [], "training task 1: `data_source` must be text"),
        ([task("a", question=None)], [], "needs a `question`"),
        ([{"id": "a", "question": "?", "data_source": "d"}], [], "`answer` is missing"),
        ([task("a"), task("a")], [], "training task 1: the id 'a' stands twice"),
        ([task("a")], [task("a")], "validation task 0: the id 'a' stands twice"),
    ],
)
def test_what_is_missing_or_double_is_named(train, val, message):
    with pytest.raises(ValueError, match=message):
        TaskSet(train, val, reward)
