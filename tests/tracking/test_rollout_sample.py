"""Which rollouts a report shows, and how they are read."""

import json
import tracemalloc

import pytest

from rllm_lightning.tracking import rollout_sample
from rllm_lightning.tracking.episode_logger import EpisodeLogger
from rllm_lightning.tracking.rollout_groups import TaskGroups, call_of
from rllm_lightning.tracking.rollout_sample import MAX_FILES, RolloutSample, script_json
from rllm_lightning.types import Step, Trajectory

TEXTS = {"1": "one", "2": " two"}


@pytest.fixture
def logger(tmp_path):
    return EpisodeLogger(tmp_path)


def groups_of(sample, max_characters=10**7):
    sample.refresh()
    return [json.loads(group) for group in sample.choose(max_characters).groups]


def test_the_same_tasks_are_shown_of_every_step_with_all_their_rollouts(logger, make_episode):
    """30 tasks whose rollouts lie apart: 24 of the newest file, 8 of the older one, each of them whole."""
    for step in (1, 2):
        logger.log([make_episode(f"t{t}", k) for k in range(3) for t in range(30)], "train", step)
    groups = groups_of(RolloutSample(logger.folder))
    tasks = {step: {group["task"] for group in groups if group["step"] == step} for step in (1, 2)}
    assert (len(tasks[1]), len(tasks[2])) == (8, 24)
    assert tasks[1] < tasks[2]
    assert all([member["id"] for member in group["members"]] == ["0", "1", "2"] for group in groups)


def test_what_was_read_is_not_read_again(logger, make_episode, monkeypatch):
    """A run grows to 100 steps: each file is read once, as the newest, whatever part of them is kept; one that changes is read again."""
    read = []
    take = rollout_sample._take
    monkeypatch.setattr(rollout_sample, "_take", lambda path, *rest: read.append(path.name) or take(path, *rest))
    sample = RolloutSample(logger.folder)
    for step in range(100):
        logger.log([make_episode()], "train", step)
        sample.refresh()
        assert len(sample.files) <= MAX_FILES
    assert read == [f"train_step_{step}.jsonl" for step in range(100)]
    assert sorted(taken.step for taken in sample.files.values()) == [*range(0, 97, 8), 99]
    logger.log([make_episode(), make_episode(rollout=1)], "train", 96)
    sample.refresh()
    assert read[100:] == ["train_step_96.jsonl"]


def test_lines_of_tasks_that_are_not_shown_are_not_parsed(logger, make_episode):
    """Memory and time go with what is shown: behind the tasks that are, the rest of a file may be anything."""
    path = logger.log([make_episode(f"t{t}") for t in range(40)], "train", 1)
    groups = groups_of(RolloutSample(logger.folder))
    shown = {f"{group['task']}:0" for group in groups}
    lines = sorted(path.read_text().splitlines(), key=lambda line: json.loads(line)["id"] not in shown)
    path.write_text("\n".join([*lines[:24], *(line[:30] for line in lines[24:])]) + "\n")
    assert groups_of(RolloutSample(logger.folder)) == groups


def test_where_there_is_little_room_every_step_keeps_a_group_before_the_newest_has_all(logger, make_episode):
    for step in range(1, 5):
        logger.log([make_episode(f"t{t}") for t in range(10)], "train", step)
    sample = RolloutSample(logger.folder)
    size = len(script_json(groups_of(sample)[0])) + 10
    steps = [group["step"] for group in groups_of(sample, 6 * size)]
    assert steps == [1, 2, 3, 4, 4, 4]
    assert groups_of(sample, size // 2) == []


def test_roles_of_a_task_are_groups_of_their_own_and_failures_a_group_without_a_role(make_episode):
    task = TaskGroups("train", 1, "t", {})
    both = make_episode()
    both.trajectories.append(Trajectory(name="judge", steps=[], reward=0.0))
    failed = make_episode(rollout=1)
    failed.trajectories, failed.info = [], {"error": {"error_message": "boom"}}
    for episode in (both, failed):
        task.add(episode)
    assert {role: group["num"] for role, group in task.by_role.items()} == {"solver": 1, "judge": 1, "": 1}
    assert "boom" in task.by_role[""]["members"][0]["error"]


def test_a_later_call_shows_only_what_is_new_of_its_prompt(make_episode):
    episode = make_episode()
    (first,) = episode.trajectories[0].steps
    chat = [*first.chat_completions, {"role": "user", "content": "wrong, again"}, {"role": "assistant", "content": "3"}]
    episode.trajectories[0].steps.append(Step(response_ids=[5], chat_completions=chat, model_response="3"))
    task = TaskGroups("train", 1, "t", {})
    task.add(episode)
    assert task.by_role["solver"]["prompts"] == ["1+1=?", "wrong, again"]
    assert [call["prompt"] for call in task.by_role["solver"]["members"][0]["calls"]] == [0, 1]


def test_a_call_is_shown_token_by_token_with_the_gap_between_trainer_and_sampler():
    """Trainer -0.5 and -2, sampler -1 and -1: gaps 0.5 and -1."""
    step = Step([9], [1, 2], [-1.0, -1.0], model_response="one two", advantage=[0.25, -0.25], info={"old_logprobs": [-0.5, -2.0]})
    assert call_of(step, TEXTS) == {"tokens": ["one", " two"], "more": 0, "advantage": [0.25, -0.25], "gap": [0.5, -1.0]}
    assert call_of(Step([9], [1, 3], model_response="one?"), TEXTS) == {"text": "one?", "advantage": None}


def test_tokens_do_not_spell_out_what_was_masked(monkeypatch):
    """The ids of a secret's tokens are in the file; its text is masked there, and must be on the page."""
    masked = Step([9], [1, 2], model_response="***")
    assert call_of(masked, TEXTS) == {"text": "***", "advantage": None}
    monkeypatch.setenv("MY_API_KEY", "ne two one")
    assert call_of(Step([9], [1, 2, 1], model_response="x"), {"1": "one", "2": " two "}) == {"text": "x", "advantage": None}


@pytest.mark.parametrize("text", ["</script>", "<!--", "]]>", "&lt;", "\u2028", "\ud800", "é𝄞"])
def test_data_inside_a_script_is_plain_ascii_without_markup(text):
    written = script_json({text: text})
    assert written.isascii()
    assert not set("<>&") & set(written)
    assert json.loads(written) == {text: text}


def test_a_folder_of_50_mb_is_read_in_the_memory_of_what_is_shown(logger, make_episode):
    """5 steps of 500 tasks with 4 rollouts of 5 KB each; shown are 24 and 4 times 8 of the tasks."""
    line = logger.log([make_episode("TASK:7", 3)], "example", 0).read_text()
    assert "TASK:7:3" in line
    padded = line.replace('"info": {}', '"info": {"note": "' + "x" * (5_000 - len(line)) + '"}', 1)
    (logger.folder / "example_step_0.jsonl").unlink()
    for step in range(5):
        with (logger.folder / f"train_step_{step}.jsonl").open("w") as file:
            for task in range(500):
                file.writelines(padded.replace("TASK:7:3", f"t{task}:{rollout}") for rollout in range(4))
    assert sum(path.stat().st_size for path in logger.folder.glob("*.jsonl")) > 45_000_000
    sample = RolloutSample(logger.folder)
    tracemalloc.start()
    try:
        sample.refresh()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [len(taken.tasks) for taken in sample.files.values()] == [8, 8, 8, 8, 24]
    assert peak < 10_000_000
