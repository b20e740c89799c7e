"""What a data set must be, and which task is which."""

import pytest

from rllm_lightning.config import ConfigError
from rllm_lightning.trainer.data import check_dataset, task_id_of


def test_ids_that_are_one_as_text_are_refused():
    """B07: the number 1 and the text "1" would be one group."""
    with pytest.raises(ConfigError, match="tasks 0 and 1 have the same id '1'"):
        check_dataset([{"id": 1, "question": "a"}, {"id": "1", "question": "b"}], "train_dataset")


def test_without_an_id_a_task_is_known_by_all_it_holds():
    """B07: equal questions with different answers are two tasks; equal ones are one, whatever the order of their keys."""
    first, second = {"question": "?", "answer": "a"}, {"question": "?", "answer": "b"}
    assert task_id_of(first) != task_id_of(second)
    assert task_id_of(first) == task_id_of({"answer": "a", "question": "?"})
