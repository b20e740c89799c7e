import json

import numpy as np
import pytest
import torch

from rllm_lightning.tracking.episode_logger import EpisodeLogger, iterate_episodes, read_episodes, read_token_texts
from rllm_lightning.types import Episode, Step, TerminationReason, Trajectory


@pytest.fixture
def logger(tmp_path):
    return EpisodeLogger(tmp_path / "episodes")


def test_episodes_lie_one_a_line_in_the_file_of_their_mode_and_step(logger, make_episode):
    path = logger.log([make_episode(rollout=k) for k in range(3)], "val", 0)
    assert path.name == "val_step_0.jsonl"
    assert [json.loads(line)["id"] for line in path.read_text().splitlines()] == ["sum:1:0", "sum:1:1", "sum:1:2"]


def test_episodes_come_back_equal(logger, make_episode):
    """B54: failed and over-long episodes are in the file too, so no denominator loses them."""
    failed = Episode(id="sum:2:0", termination_reason=TerminationReason.ERROR, info={"error": {"error_message": "boom"}})
    long = make_episode(rollout=1, reward=0.0)
    long.termination_reason = TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED
    episodes = [make_episode(), long, failed]
    assert read_episodes(logger.log(episodes, "train", 3)) == episodes


def test_values_of_numpy_and_torch_are_full_numbers(logger):
    """B53: float32 .5, int64, bool_, a 2,000-element array, a tensor."""
    info = {"f": np.float32(0.5), "i": np.int64(3), "b": np.bool_(True), "array": np.arange(2000), "tensor": torch.tensor([[1.5, 2.0]])}
    path = logger.log([Episode(id="a:0", info=info)], "train", 1)
    expected = {"f": 0.5, "i": 3, "b": True, "array": list(range(2000)), "tensor": [[1.5, 2.0]]}
    assert json.loads(path.read_text())["info"] == expected
    assert type(json.loads(path.read_text())["info"]["b"]) is bool
    assert read_episodes(path)[0].info == expected


def test_lines_are_strict_json(logger):
    nan = float("nan")
    step = Step(response_ids=[1], logprobs=[-float("inf")], reward=nan)
    path = logger.log([Episode(id="a:0", metrics={"x": nan}, trajectories=[Trajectory(steps=[step], reward=nan)])], "train", 1)

    def refuse(constant):
        raise AssertionError(constant)

    assert json.loads(path.read_text(), parse_constant=refuse)["metrics"] == {"x": None}


@pytest.mark.parametrize("text", ["é", "実", "𝄞", "a\u2028b\x85c\nd", "\ud800", "\x00", "\ufffe"])
def test_text_of_every_plane_comes_back_and_keeps_to_its_line(logger, make_episode, text):
    path = logger.log([make_episode(response=text), make_episode(rollout=1)], "train", 1)
    assert len(path.read_bytes().splitlines()) == 2
    assert read_episodes(path)[0].trajectories[0].steps[0].model_response == text


def test_a_corrupt_line_is_named(logger, make_episode):
    path = logger.log([make_episode(), make_episode(rollout=1)], "train", 1)
    for broken in ("{", '{"id": NaN}', '{"nonsense": 1}', "[]", "3"):
        path.write_text(path.read_text().splitlines()[0] + "\n" + broken + "\n")
        with pytest.raises(ValueError, match=r"train_step_1\.jsonl, line 2: not an episode"):
            read_episodes(path)


def test_logging_a_step_again_replaces_its_file(logger, make_episode):
    logger.log([make_episode(), make_episode(rollout=1)], "train", 1)
    assert len(read_episodes(logger.log([make_episode()], "train", 1))) == 1
    assert [path.name for path in logger.folder.iterdir()] == ["train_step_1.jsonl"]


@pytest.mark.parametrize("mode", ["../x", "a_b", "", "a/b"])
def test_the_mode_is_one_word(logger, mode):
    with pytest.raises(ValueError, match="mode"):
        logger.log([], mode, 1)


def test_no_secret_reaches_the_file_while_the_tasks_own_words_stay(logger, make_episode, monkeypatch):
    monkeypatch.setenv("SERVICE_TOKEN", 'quoted "secret"')
    episode = make_episode(prompt='say quoted "secret" to https://me:pw@host')
    episode.task = {"secret": "the word to guess", "n_tokens": 3}
    text = logger.log([episode], "train", 1).read_text()
    assert "quoted" not in text
    assert "me:pw" not in text
    assert json.loads(text)["task"] == {"secret": "the word to guess", "n_tokens": 3}


def test_the_text_of_every_sampled_token_lies_beside_the_episodes(tmp_path, make_episode):
    """Each is asked for once, also by a logger that goes on in the same folder; without a tokenizer there is no such file."""
    asked = []

    def texts(ids):
        asked.append(list(ids))
        return [f"<{i}>" for i in ids]

    episode = make_episode()
    EpisodeLogger(tmp_path, texts).log([episode], "train", 1)
    episode.trajectories[0].steps[0].response_ids, episode.trajectories[0].steps[0].logprobs = [3, 5, 4], []
    EpisodeLogger(tmp_path, texts).log([episode, episode], "train", 2)
    assert asked == [[3], [4, 5]]
    assert read_token_texts(tmp_path) == {"3": "<3>", "4": "<4>", "5": "<5>"}
    EpisodeLogger(tmp_path / "other", lambda ids: None).log([episode], "train", 1)
    assert read_token_texts(tmp_path / "other") == {}


def test_only_the_episodes_that_are_wanted_are_parsed(logger, make_episode):
    path = logger.log([make_episode(f'a"\\{k}') for k in range(3)], "train", 1)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0][:40], lines[1], lines[2][:40]]) + "\n")
    assert [episode.id for episode in iterate_episodes(path, lambda episode_id: episode_id == 'a"\\1:0')] == ['a"\\1:0']
