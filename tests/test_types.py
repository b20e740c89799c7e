"""The records of a rollout: fields, ids, and the way through strict JSON and back."""

import dataclasses
import json
import math
from enum import IntEnum

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from rllm_lightning.types import (
    Action,
    Episode,
    ModelOutput,
    RewardOutput,
    Step,
    TerminationEvent,
    TerminationReason,
    Trajectory,
    TrajectoryGroup,
    split_episode_id,
    to_plain,
)


def as_json(record):
    """The record after a way through strict JSON (NaN and infinities are refused)."""
    return type(record).from_dict(json.loads(json.dumps(record.to_dict(), allow_nan=False)))


# ------------------------------------------------------------------------------------------------------------------ fields


@pytest.mark.parametrize(
    ("cls", "defaults"),
    [
        (
            Step,
            {
                "prompt_ids": [],
                "response_ids": [],
                "logprobs": [],
                "chat_completions": [],
                "observation": None,
                "thought": "",
                "action": None,
                "model_response": "",
                "model_output": None,
                "info": {},
                "reward": 0.0,
                "done": False,
                "mc_return": 0.0,
                "advantage": None,
                "weight_version": None,
            },
        ),
        (Trajectory, {"uid": ..., "name": "default_traj_name", "task": None, "steps": [], "reward": None, "info": {}}),
        (
            Episode,
            {"id": "", "task": None, "termination_reason": None, "is_correct": False, "trajectories": [], "metrics": {}, "info": {}},
        ),
        (TrajectoryGroup, {"trajectories": [], "group_id": "", "metadata": []}),
        (
            ModelOutput,
            {
                "text": None,
                "content": None,
                "reasoning": None,
                "tool_calls": None,
                "prompt_ids": None,
                "completion_ids": None,
                "logprobs": None,
                "prompt_logprobs": None,
                "prompt_length": 0,
                "completion_length": 0,
                "finish_reason": None,
                "weight_version": None,
            },
        ),
        (Action, {"action": None}),
    ],
)
def test_the_fields_and_their_defaults_are_those_of_the_api(cls, defaults):
    record = cls()
    assert [field.name for field in dataclasses.fields(cls)] == list(defaults)
    assert {name: getattr(record, name) for name in defaults if defaults[name] is not ...} == {
        name: value for name, value in defaults.items() if value is not ...
    }


def test_two_records_share_no_default():
    first, second = Step(), Step()
    first.prompt_ids.append(1)
    assert second.prompt_ids == []
    assert Trajectory().uid != Trajectory().uid
    assert len(Trajectory().uid) == 36  # a uuid4 as text


def test_the_termination_reasons_are_the_seven_of_the_api():
    assert [reason.value for reason in TerminationReason] == [
        "max_prompt_length_exceeded",
        "max_response_length_exceeded",
        "env_done",
        "max_turns_exceeded",
        "timeout",
        "unknown",
        "error",
    ]


def test_a_termination_event_carries_its_reason():
    assert TerminationEvent(TerminationReason.TIMEOUT).reason is TerminationReason.TIMEOUT
    assert TerminationEvent("env_done").reason is TerminationReason.ENV_DONE
    assert TerminationEvent().reason is TerminationReason.UNKNOWN
    with pytest.raises(ValueError, match="tired"):
        TerminationEvent("tired")


# -------------------------------------------------------------------------------------------------------------------- step

OUTPUT = ModelOutput(
    text="<b>hi", content="hi", reasoning="b", prompt_ids=[1, 2], completion_ids=[3, 4], logprobs=[-1.0, -2.0], weight_version=5
)


def test_empty_ids_and_logprobs_are_filled_from_the_model_output():
    step = Step(model_output=OUTPUT)
    assert (step.prompt_ids, step.response_ids, step.logprobs, step.weight_version) == ([1, 2], [3, 4], [-1.0, -2.0], 5)
    assert step.prompt_ids is not OUTPUT.prompt_ids


def test_given_ids_stand_beside_a_model_output():
    step = Step(prompt_ids=[9], response_ids=[8, 7], logprobs=[-3.0, -4.0], weight_version=0, model_output=OUTPUT)
    assert (step.prompt_ids, step.response_ids, step.logprobs, step.weight_version) == ([9], [8, 7], [-3.0, -4.0], 0)


def test_ids_may_be_arrays():
    step = Step(prompt_ids=np.array([9, 9]), response_ids=np.array([8]), logprobs=np.array([-1.0]), model_output=OUTPUT)
    assert step.to_dict()["prompt_ids"] == [9, 9]


@pytest.mark.parametrize(("ids", "logprobs"), [([1, 2], [-1.0]), ([], [-1.0]), ([1], [-1.0, -1.0])])
def test_logprobs_of_another_length_than_the_response_are_refused(ids, logprobs):
    with pytest.raises(ValueError, match=rf"{len(logprobs)} logprobs for {len(ids)} response_ids"):
        Step(response_ids=ids, logprobs=logprobs)


def test_logprobs_of_the_model_output_must_fit_given_ids():
    with pytest.raises(ValueError, match="2 logprobs for 1 response_ids"):
        Step(response_ids=[7], model_output=OUTPUT)


def test_a_step_without_logprobs_is_fine():
    assert Step(response_ids=[1, 2]).logprobs == []


def test_a_step_from_a_model_output_ends_the_chat_with_the_answer():
    messages = [{"role": "user", "content": "?"}]
    step = Step.from_model_output(OUTPUT, messages, action=Action("go"))
    assert step.chat_completions == [*messages, {"role": "assistant", "content": "hi", "reasoning": "b"}]
    assert (step.thought, step.model_response, step.action, step.response_ids) == ("b", "hi", Action("go"), [3, 4])
    assert messages == [{"role": "user", "content": "?"}]
    bare = Step.from_model_output(ModelOutput(text="raw"))
    assert bare.chat_completions == [{"role": "assistant", "content": "raw"}]
    assert (bare.model_response, bare.action, bare.thought) == ("raw", None, "")


# -------------------------------------------------------------------------------------------------------------- trajectory


def chat(*contents):
    return Step(chat_completions=[{"role": "user", "content": content} for content in contents])


@pytest.mark.parametrize(
    ("steps", "cumulative"),
    [
        ([], True),
        ([chat("a")], True),
        ([chat("a"), chat("a", "b"), chat("a", "b", "c")], True),
        ([chat("a"), chat("b", "a")], False),  # not a prefix
        ([chat("a", "b"), chat("a")], False),  # shorter
        ([chat("a"), chat("a", "b"), chat("a", "x", "c")], False),  # the last one does not extend the second
    ],
)
def test_a_trajectory_is_cumulative_if_every_chat_extends_the_one_before(steps, cumulative):
    assert Trajectory(steps=steps).is_cumulative() is cumulative


def test_response_tokens_are_counted_over_all_steps():
    assert Trajectory(steps=[Step(response_ids=[1, 2]), Step(), Step(response_ids=[3])]).num_response_tokens == 3


# --------------------------------------------------------------------------------------------------------------------- ids


@pytest.mark.parametrize(
    ("episode_id", "task_id", "rollout_idx"),
    [
        ("7:2", "7", "2"),
        ("gsm8k:12:0", "gsm8k:12", "0"),
        ("gsm8k:13:0", "gsm8k:13", "0"),
        ("plain", "plain", "0"),
        ("", "", "0"),
        ("a:b:c:10", "a:b:c", "10"),
    ],
)
def test_an_episode_id_is_split_at_its_last_colon(episode_id, task_id, rollout_idx):
    """B07: rLLM split at the first colon, so that gsm8k:12 and gsm8k:13 became one task; without a colon it raised."""
    assert split_episode_id(episode_id) == (task_id, rollout_idx)
    episode = Episode(id=episode_id)
    assert (episode.task_id, episode.rollout_idx) == (task_id, rollout_idx)


def test_the_properties_follow_a_changed_id():
    episode = Episode(id="a:1")
    episode.id = "b:2"
    assert (episode.task_id, episode.rollout_idx) == ("b", "2")
    group = TrajectoryGroup(group_id="a:solver")
    group.group_id = "b:judge"
    assert (group.task_id, group.group_role) == ("b", "judge")


@pytest.mark.parametrize(
    ("group_id", "task_id", "role"),
    [
        ("7:solver", "7", "solver"),
        ("gsm8k:12:solver", "gsm8k:12", "solver"),
        ("7", "7", "all_groups"),
        ("7:", "7", "all_groups"),
        ("", "", "all_groups"),
    ],
)
def test_a_group_id_is_task_and_role(group_id, task_id, role):
    group = TrajectoryGroup(group_id=group_id)
    assert (group.task_id, group.group_role) == (task_id, role)


@given(st.text(), st.integers(0, 99))
def test_any_task_id_comes_back_from_an_episode_id(task_id, index):
    assert split_episode_id(f"{task_id}:{index}") == (task_id, str(index))


# -------------------------------------------------------------------------------------------------------------------- JSON


class Level(IntEnum):
    HIGH = 3


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.float32(0.5), 0.5),
        (np.int64(7), 7),
        (np.bool_(True), True),
        (np.str_("x"), "x"),
        (np.array([1.5, math.nan]), [1.5, None]),
        (np.zeros((2, 1)), [[0.0], [0.0]]),
        (np.array(3), 3),
        (torch.tensor(2.5), 2.5),
        (torch.tensor([1.0, 2.0], requires_grad=True), [1.0, 2.0]),
        (torch.tensor([1.5], dtype=torch.bfloat16), [1.5]),
        (math.inf, None),
        (-math.inf, None),
        (math.nan, None),
        (TerminationReason.ERROR, "error"),
        (Level.HIGH, 3),
        ((1, (2, 3)), [1, [2, 3]]),
        (range(3), [0, 1, 2]),
        ({"a"}, ["a"]),
        ({1: "int", None: "none", (2, 3): "pair"}, {"1": "int", "None": "none", "[2, 3]": "pair"}),
        (Action(np.int8(1)), {"action": 1}),
        (OmegaConf.create({"a": [1, {"b": None}]}), {"a": [1, {"b": None}]}),
        (b"x", "b'x'"),
        (1 + 2j, "(1+2j)"),
        (Level, repr(Level)),
    ],
)
def test_every_value_becomes_plain_json_data(value, plain):
    """B53: NumPy scalars were refused or became text, long arrays lost their middle."""
    assert to_plain(value) == plain
    assert type(to_plain(value)) is type(plain)
    json.dumps(to_plain(value), allow_nan=False)


def test_numbers_stay_numbers_and_long_arrays_stay_whole_after_a_reload():
    """B53: float32 .5, int64, bool_, a 2,000-element array, a tensor: number, int, true, full lists; equal after reload."""
    info = {"a": np.float32(0.5), "b": np.int64(3), "c": np.bool_(True), "d": np.arange(2000), "e": torch.arange(3)}
    step = as_json(Step(info=info, reward=np.float32(0.5)))
    assert step.info == {"a": 0.5, "b": 3, "c": True, "d": list(range(2000)), "e": [0, 1, 2]}
    assert isinstance(step.info["c"], bool)
    assert step.reward == 0.5
    assert as_json(step) == step


def test_a_whole_episode_round_trips_through_json():
    step = Step.from_model_output(OUTPUT, [{"role": "user", "content": "?"}], action={"tool": "x"})
    step.advantage, step.reward, step.done = [0.5, -0.5], 1.0, True
    episode = Episode(
        id="gsm8k:12:3",
        task={"id": "gsm8k:12", "question": "?", "answer": 4},
        termination_reason=TerminationReason.ENV_DONE,
        is_correct=True,
        trajectories=[Trajectory(name="solver", steps=[step], reward=1.0, info={"k": [1]}), Trajectory()],
        metrics={"solver_acc": 1.0},
        info={"error": None},
    )
    assert as_json(episode) == episode
    group = TrajectoryGroup(trajectories=episode.trajectories, group_id="gsm8k:12:solver", metadata=[{"rollout_idx": "3"}])
    assert as_json(group) == group


def test_an_episode_without_a_termination_reason_round_trips():
    assert as_json(Episode(id="a:0")).termination_reason is None


@pytest.mark.parametrize("reason", TerminationReason)
def test_a_termination_reason_comes_back_as_the_enum(reason):
    assert as_json(Episode(termination_reason=reason)).termination_reason is reason


def test_nan_rewards_are_stored_as_null():
    trajectory = Trajectory(reward=math.nan, steps=[Step(reward=math.nan, mc_return=math.inf)])
    stored = trajectory.to_dict()
    assert stored["reward"] is None
    assert (stored["steps"][0]["reward"], stored["steps"][0]["mc_return"]) == (None, None)
    revived = as_json(trajectory)
    assert revived.reward is None  # for a trajectory None is a value: no reward yet
    assert math.isnan(revived.steps[0].reward)
    assert math.isnan(revived.steps[0].mc_return)
    assert math.isnan(as_json(RewardOutput(math.nan)).reward)


def test_nan_per_token_comes_back_as_nan():
    step = as_json(Step(response_ids=[1, 2], logprobs=[-math.inf, -1.0], advantage=[math.nan, 2.0]))
    assert math.isnan(step.logprobs[0])
    assert math.isnan(step.advantage[0])
    assert (step.logprobs[1], step.advantage[1]) == (-1.0, 2.0)
    output = as_json(ModelOutput(logprobs=[math.nan], prompt_logprobs=[None, -1.0]))
    assert math.isnan(output.logprobs[0])
    assert output.prompt_logprobs == [None, -1.0]  # the first token of a prompt has none


def test_a_zero_reward_is_a_reward():
    """B05: an `or` took 0.0 for missing."""
    assert as_json(Trajectory(reward=0.0)).reward == 0.0


@pytest.mark.parametrize("cls", [Action, Episode, ModelOutput, Step, Trajectory, TrajectoryGroup])
def test_an_unknown_key_is_refused_with_the_known_ones(cls):
    with pytest.raises(ValueError, match=rf"{cls.__name__}.from_dict: unknown keys \['rewrad'\]; known: "):
        cls.from_dict({"rewrad": 1})


def test_an_unknown_termination_reason_is_refused():
    with pytest.raises(ValueError, match="tired"):
        Episode.from_dict({"termination_reason": "tired"})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
NUMBER = st.floats(allow_nan=False, allow_infinity=False)
STEPS = st.lists(st.integers(0, 9), max_size=4).flatmap(
    lambda ids: st.builds(
        Step,
        prompt_ids=st.lists(st.integers(0, 9), max_size=3),
        response_ids=st.just(ids),
        logprobs=st.just([-0.5] * len(ids)),
        chat_completions=st.lists(st.dictionaries(st.text(), JSON, max_size=2), max_size=2),
        observation=JSON,
        thought=st.text(),
        action=JSON,
        info=st.dictionaries(st.text(), JSON, max_size=2),
        reward=NUMBER,
        done=st.booleans(),
        advantage=st.none() | NUMBER | st.just([0.25] * len(ids)),
        weight_version=st.none() | st.integers(0, 9),
    )
)
EPISODES = st.builds(
    Episode,
    id=st.text(),
    task=JSON,
    termination_reason=st.none() | st.sampled_from(TerminationReason),
    is_correct=st.booleans(),
    trajectories=st.lists(st.builds(Trajectory, task=JSON, steps=st.lists(STEPS, max_size=2), reward=st.none() | NUMBER), max_size=2),
    metrics=st.dictionaries(st.text(), NUMBER, max_size=2),
    info=st.dictionaries(st.text(), JSON, max_size=2),
)


@given(EPISODES)
def test_every_episode_of_json_data_equals_itself_after_json(episode):
    assert as_json(episode) == episode


@given(JSON | st.lists(st.floats()) | st.dictionaries(st.integers() | st.none() | st.text(), st.floats()))
def test_plain_data_is_strict_json_and_plain_already(value):
    plain = to_plain(value)
    json.dumps(plain, allow_nan=False)
    assert to_plain(plain) == plain


@pytest.mark.parametrize(
    ("record", "data", "words"),
    [
        (Episode, {"id": 3}, "Episode.id"),
        (Episode, {"trajectories": {"a": 1}}, "Episode.trajectories"),
        (Episode, {"trajectories": [3]}, "Episode.trajectories"),
        (Episode, {"metrics": None}, "Episode.metrics"),
        (Episode, [], "expected an object"),
        (Trajectory, {"reward": "much"}, "Trajectory.reward"),
        (Step, {"response_ids": ["a"]}, "Step.response_ids"),
        (Step, {"response_ids": None}, "Step.response_ids"),
        (Step, {"chat_completions": ["hello"]}, "Step.chat_completions"),
        (Step, {"advantage": ["a"]}, "Step.advantage"),
    ],
)
def test_a_field_of_another_type_is_refused_by_name(record, data, words):
    with pytest.raises(ValueError, match=words):
        record.from_dict(data)


def test_null_stands_for_a_number_or_text_that_nobody_set():
    assert Step.from_dict({"thought": None, "advantage": [None, 1.0]}).thought is None
    assert Trajectory.from_dict({"reward": None}).reward is None
