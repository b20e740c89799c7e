"""Functions in a process of their own: time limits, deaths, errors."""

import pytest

from rllm_lightning.tasks import worker as worker_module
from rllm_lightning.tasks.worker import Worker, WorkerError


@pytest.fixture(scope="module")
def worker():
    worker = Worker("tests.tasks.worker_functions")
    yield worker
    worker._end()


def test_a_result_comes_back(worker):
    assert worker.call("add", 2, 3) == 5
    assert worker.call("add", "a", "b", limit_s=5) == "ab"


@pytest.mark.parametrize("function", ["compute_for_ever", "compute_for_ever_in_c"])
def test_what_computes_for_ever_is_ended_and_the_next_call_works(worker, function):
    with pytest.raises(WorkerError, match=rf"{function} took more than 0\.2 s of CPU time"):
        worker.call(function, limit_s=0.2)
    assert worker.call("add", 2, 3) == 5


def test_what_waits_for_ever_is_ended_too(worker, monkeypatch):
    monkeypatch.setattr(worker_module, "WALL_LIMIT_S", 0.2)
    worker.call("add", 1, 1)  # the child is there: its start is not what is timed
    with pytest.raises(WorkerError, match=r"wait_for_ever gave no answer within 0\.3 s"):
        worker.call("wait_for_ever", limit_s=0.1)
    assert worker.call("add", 2, 3) == 5


def test_time_is_counted_for_each_call_alone(worker):
    for _ in range(3):
        assert worker.call("compute", 0.2, limit_s=0.5) >= 0.2


def test_a_mistake_of_the_user_and_any_other_error_are_told_apart(worker):
    with pytest.raises(ValueError, match=r"^not like this$"):
        worker.call("refuse", "not like this")
    with pytest.raises(WorkerError, match="ZeroDivisionError"):
        worker.call("divide", 1, 0)
    assert worker.call("divide", 1, 2) == 0.5


def test_a_death_is_an_error_with_its_exit_code(worker):
    with pytest.raises(WorkerError, match=r"leave ended its process \(exit code 3\)"):
        worker.call("leave", 3)
    assert worker.call("add", 2, 3) == 5
