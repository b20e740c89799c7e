"""When a curriculum goes to its next level, and what its levels are."""

import pytest

from rllm_lightning.tasks.curriculum import Curriculum
from rllm_lightning.tasks.reasoning_gym import reasoning_gym
from rllm_lightning.tasks.task import AdaptiveTasks, TaskSet


def tasks(level, count=4):
    return [{"id": f"{level}:{i}", "question": f"{level} {i}?", "answer": "", "data_source": "d"} for i in range(count)]


@pytest.fixture
def curriculum():
    return Curriculum([tasks(level) for level in range(3)], threshold=0.5, window=3)


def test_the_level_rises_when_the_window_is_full_and_its_mean_reaches_the_threshold(curriculum):
    assert curriculum.observe({"0:0": 0.0, "0:1": 1.0}) == {"curriculum/level": 0.0, "curriculum/pass_rate": 0.5}
    assert curriculum.level == 0  # at the threshold, but two of three
    curriculum.observe({"0:2": 0.25})
    assert curriculum.level == 0  # (0 + 1 + .25) / 3 = .417
    metrics = curriculum.observe({"0:3": 0.25})  # the first has left the window: (1 + .25 + .25) / 3
    assert metrics == {"curriculum/level": 0.0, "curriculum/pass_rate": 0.5}  # of the batch that was observed
    assert curriculum.level == 1
    assert [curriculum[i]["id"] for i in range(len(curriculum))] == ["1:0", "1:1", "1:2", "1:3"]


def test_a_new_level_begins_with_an_empty_window(curriculum):
    curriculum.observe({f"0:{i}": 1.0 for i in range(3)})
    assert curriculum.observe({"0:3": 1.0}) == {"curriculum/level": 1.0}  # of the level before: it does not count
    curriculum.observe({"1:0": 1.0, "1:1": 1.0})
    assert curriculum.level == 1


def test_the_last_level_stays(curriculum):
    for level in (0, 1, 2, 2):
        curriculum.observe({f"{level}:{i}": 1.0 for i in range(3)})
    assert curriculum.level == 2


def test_a_low_pass_rate_never_raises_the_level(curriculum):
    for _ in range(20):
        curriculum.observe({f"0:{i}": 0.4 for i in range(4)})
    assert curriculum.level == 0


def test_its_state_comes_back(curriculum):
    curriculum.observe({f"0:{i}": 1.0 for i in range(3)})
    curriculum.observe({"1:0": 1.0})
    other = Curriculum([tasks(level) for level in range(3)], threshold=0.5, window=3)
    other.load_state_dict(curriculum.state_dict())
    assert other.state_dict() == curriculum.state_dict()
    for each in (curriculum, other):
        each.observe({"1:1": 0.0, "1:2": 0.5})  # (1 + 0 + .5) / 3 = .5
        assert each.level == 2


def test_it_is_a_data_set_that_adapts(curriculum):
    assert isinstance(curriculum, AdaptiveTasks)
    assert not isinstance(tasks(0), AdaptiveTasks)
    assert len(TaskSet(curriculum, [], lambda task, response: 0.0).train) == 4


@pytest.mark.parametrize("levels", [[tasks(0, 3), tasks(1, 4)], [tasks(0), tasks(0)]])
def test_unequal_levels_and_ids_that_stand_twice_are_refused(levels):
    with pytest.raises(ValueError, match="equally many tasks in each level, with different ids"):
        Curriculum(levels, threshold=0.5, window=3)


# ----------------------------------------------------------------------------------------------------------- reasoning_gym


def test_the_data_sets_own_curriculum_gives_the_levels():
    task_set = reasoning_gym(0, dataset="chain_sum", curriculum={"attributes": ["num_terms"], "num_levels": 3}, train_size=20, val_size=6)
    curriculum = task_set.train
    terms = [[1 + task["question"].count(" + ") + task["question"].count(" - ") for task in level] for level in curriculum.levels]
    assert [max(counts) for counts in terms] == [2, 3, 4]  # levels 2, 3, 4 of the package, easier ones included
    for task in [*task_set.val, *(task for level in curriculum.levels for task in level)]:
        assert task_set.reward_function(task, task["solution"]).reward == 1.0


def test_levels_of_ones_own_and_validation_over_all_of_them():
    levels = [{"min_word_len": length, "max_word_len": length} for length in (4, 6, 8)]
    task_set = reasoning_gym(0, curriculum={"levels": levels}, train_size=10, val_size=7)
    assert [{len(task["answer"]) for task in level} for level in task_set.train.levels] == [{4}, {6}, {8}]
    assert [len(task["answer"]) for task in task_set.val] == [4, 4, 4, 6, 6, 8, 8]  # 7 over 3 levels
    assert [task["level"] for task in task_set.val] == [0, 0, 0, 1, 1, 2, 2]


def test_no_level_trains_on_what_is_validated():
    # numbers up to 30 at each level: without care they would meet
    levels = [{"min_n": 1, "max_n": 30}] * 2
    task_set = reasoning_gym(0, dataset="count_bits", curriculum={"levels": levels}, train_size=24, val_size=6)
    held_out = {task["question"] for task in task_set.val}
    assert len(held_out) == 6
    for level in task_set.train.levels:
        questions = {task["question"] for task in level}
        assert len(questions) == 24
        assert not questions & held_out


def test_validation_stays_when_the_level_rises():
    task_set = reasoning_gym(0, dataset="chain_sum", curriculum={"num_levels": 2, "threshold": 0, "window": 1}, train_size=4, val_size=2)
    before, first = list(task_set.val), task_set.train[0]
    task_set.train.observe({first["id"]: 0.0})
    assert task_set.train[0] != first
    assert task_set.val == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"curriculum": {"treshold": 0.5}}, r"task\.curriculum\.treshold: unknown key; did you mean task\.curriculum\.threshold\?"),
        ({"curriculum": {"threshold": 2}}, r"task\.curriculum\.threshold: must be in \[0, 1\], got 2"),
        ({"curriculum": {"window": 0}}, r"task\.curriculum\.window: must be in \[1, inf\), got 0"),
        ({"curriculum": {"num_levels": 1}}, r"task\.curriculum\.num_levels: must be in \[2, inf\)"),
        ({"curriculum": {"levels": [{}]}}, r"task\.curriculum\.levels: one level is no curriculum"),
        ({"curriculum": {"levels": [{}, {}], "num_levels": 2}}, r"task\.curriculum\.levels: not together with attributes or num_levels"),
        (
            {"curriculum": {"attributes": ["word_length"]}},
            r"task\.curriculum\.attributes: .* 'word_length'; did you mean word_len",
        ),
        ({"curriculum": {}, "params": {"min_word_len": 3}}, r"task\.params\.min_word_len: the curriculum sets it"),
        (
            {"curriculum": {}, "dataset": "composite"},
            r"task\.curriculum: .* none for 'composite'; give .* task\.curriculum\.levels",
        ),
        ({"curriculum": {"levels": [{}, {"max_len": 3}]}}, r"task\.params\.max_len: data set 'spell_backward' has no parameter"),
    ],
)
def test_a_wrong_curriculum_is_named_by_its_key(settings, message):
    with pytest.raises(ValueError, match=message):
        reasoning_gym(0, **{"train_size": 2, "val_size": 2} | settings)
