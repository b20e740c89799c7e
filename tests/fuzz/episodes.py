"""Episodes of any kind: what workflows of all sorts might hand over."""

import math

from hypothesis import strategies as st

from rllm_lightning.types import Episode, ModelOutput, Step, TerminationReason, Trajectory

HUGE = 10**400
TEXTS = st.text(st.characters(), max_size=6)  # of every plane, lone surrogates and control characters included
NUMBERS = st.sampled_from([0.0, 1.0, 0.5, -1.0, 1, True]) | st.floats(-10, 10)
ODD_NUMBERS = st.sampled_from([math.nan, math.inf, -math.inf, 1.7e308, -1.7e308, 5e-324, -0.0, 2**63, HUGE, -HUGE]) | st.floats()
ANY_NUMBERS = NUMBERS | ODD_NUMBERS | st.none()
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=3,
)
TOKENS = st.integers(0, 2**31)
# several rollouts of a task, an id that stands twice, task ids with ':' and '/', parts that are empty
IDS = st.sampled_from(["t:0", "t:1", "t:2", "a:b/c:0", "a:b/c:1", "x", "x:", ":0", ":", "../x:0", "\ud800:0", "é\n:1"]) | TEXTS
NAMES = st.sampled_from(["solver", "judge", "", "default_traj_name", "a/b", "\ud800"]) | TEXTS


def as_floats(values):
    """As estimators write advantages: a number beyond float64 is infinite, none is none."""
    return [v if v is None or isinstance(v, float) or abs(v) < HUGE else math.inf if v > 0 else -math.inf for v in values]


@st.composite
def steps(draw, numbers):
    prompt, response = draw(st.lists(TOKENS, max_size=3)), draw(st.lists(TOKENS, max_size=3))
    count = len(response)
    per_token = st.lists(numbers, min_size=count, max_size=count)
    logprobs = draw(st.just([]) | st.lists(st.floats(-50, 0), min_size=count, max_size=count))
    output = draw(st.none() | st.builds(ModelOutput, text=TEXTS, prompt_ids=st.just(prompt), completion_ids=st.just(response)))
    info = st.fixed_dictionaries(
        {}, optional={"state_key": TEXTS | JSON, "values": per_token | JSON, "teacher_logprobs": per_token | JSON, "more": JSON}
    )
    return Step(
        prompt_ids=prompt,
        response_ids=response,
        logprobs=logprobs,
        chat_completions=draw(st.lists(st.fixed_dictionaries({"role": TEXTS, "content": TEXTS}), max_size=2)),
        model_response=draw(TEXTS),
        model_output=output,
        info=draw(info),
        reward=draw(numbers),
        advantage=draw(st.none() | st.none() | numbers | per_token.map(as_floats)),
    )


@st.composite
def trajectories(draw, numbers):
    info = st.fixed_dictionaries(
        {}, optional={"rewards": st.dictionaries(TEXTS, numbers, max_size=2) | JSON, "greedy_reward": numbers | JSON}
    )
    return Trajectory(
        name=draw(NAMES),
        steps=draw(st.lists(steps(numbers), max_size=3)),
        reward=draw(st.none() | numbers),
        info=draw(info),
        task=draw(JSON),
    )


def episodes(numbers=ANY_NUMBERS):
    """Lists of episodes; `numbers`: of rewards, advantages and whatever else should be one."""
    one = st.builds(
        Episode,
        id=IDS,
        task=JSON,
        termination_reason=st.none() | st.sampled_from(TerminationReason),
        is_correct=st.booleans(),
        trajectories=st.lists(trajectories(numbers), max_size=3),
        metrics=st.dictionaries(TEXTS, ODD_NUMBERS | JSON, max_size=2),
        info=st.dictionaries(TEXTS, JSON, max_size=2),
    )
    return st.lists(one, max_size=5)


def complete_episodes():
    """Lists of episodes that hold whatever an estimator may need."""

    def fill(found):
        for episode in found:
            for trajectory in episode.trajectories:
                trajectory.info = {"rewards": {"a": 1.0, "b": float(len(trajectory.steps))}, "greedy_reward": 0.5}
                for index, step in enumerate(trajectory.steps):
                    count = len(step.response_ids)
                    step.info = {"state_key": ("s", index), "values": [0.5] * count, "teacher_logprobs": [-1.0] * count}
                    step.logprobs, step.reward = [-0.5] * count, step.reward or 1.0
        return found

    return episodes(NUMBERS).map(fill)
