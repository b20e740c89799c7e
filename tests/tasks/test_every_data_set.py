"""Every data set of the installed reasoning_gym: tasks, answers, scores, curricula."""

import pytest
from reasoning_gym.factory import CURRICULA, DATASETS

from rllm_lightning.tasks.reasoning_gym import WITHOUT_SOLUTION, reasoning_gym
from rllm_lightning.tasks.reasoning_gym_worker import WORKER

NEEDED = {"composite": {"datasets": [{"name": "spell_backward", "weight": 1, "config": {}}]}}

# Where a level of the package's own curriculum is refused by the data set's own checks; `levels` or other attributes help.
BROKEN_LEVELS = {"caesar_cipher", "knight_swap", "modulo_grid", "survo"}


@pytest.mark.long
@pytest.mark.parametrize("dataset", sorted(DATASETS))
def test_its_own_answer_scores_one_as_a_response_of_the_model(dataset):
    """The answer stands in the response as the prompt asks for it, with words around it, and goes through the very scoring of a run."""
    task_set = reasoning_gym(0, dataset=dataset, params=NEEDED.get(dataset), train_size=2, val_size=1, extract="answer_tags")
    assert (len(task_set.train), len(task_set.val)) == (2, 1)
    taught = [task for task in [*task_set.train, *task_set.val] if "solution" in task]
    assert bool(taught) == (dataset not in WITHOUT_SOLUTION), "WITHOUT_SOLUTION must say exactly which have no answer"
    for task in taught:
        outcome = task_set.reward_function(task, f"Let me think ...\n{task['solution']}\nThat is it.")
        assert (outcome.reward, outcome.is_correct, outcome.metadata) == (1.0, True, {})


@pytest.mark.long
@pytest.mark.parametrize("dataset", sorted(CURRICULA))
def test_each_level_of_its_curriculum_makes_tasks(dataset):
    def draw():
        return [len(WORKER.call("draw", dataset, params, 0, 1)) for params in WORKER.call("level_params", dataset, [], 3)]

    if dataset in BROKEN_LEVELS:
        with pytest.raises(ValueError, match=rf"task\.params: '{dataset}' does not take them: AssertionError"):
            draw()
    else:
        assert draw() == [1, 1, 1]


def test_what_has_no_solution_is_listed_with_a_reason():
    assert set(WITHOUT_SOLUTION) < set(DATASETS)
    for dataset in WITHOUT_SOLUTION:
        task_set = reasoning_gym(0, dataset=dataset, train_size=1, val_size=0)
        assert task_set.train[0]["answer"] is None
        assert "solution" not in task_set.train[0]
