"""What an estimator may need beyond one reward a trajectory, and how it is gathered from the trajectories of a role.

An estimator asks by naming a parameter; the caller gathers what it names. Nested lists are in the order group, trajectory, step:

    lengths            [g] int array      response tokens of each trajectory
    reward_components  {name: [g] array}  each component of the reward, from Trajectory.info["rewards"]
    greedy_rewards     [g] array          reward of the greedy answer to the task, from Trajectory.info["greedy_reward"]
    step_rewards       [g][i] array       reward of each step
    state_keys         [g][i] list        what state each step acted in, hashable, from Step.info["state_key"]
    values             [g][i][s] array    the critic's value before each response token, from Step.info["values"]
    logprobs           [g][i][s] array    of the response tokens under the sampler
    teacher_logprobs   [g][i][s] array    of the response tokens under the teacher, from Step.info["teacher_logprobs"]
    state              dict               plain data that the estimator keeps from batch to batch, one dict a role

To add a need: a function below, and its name in `GATHER`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np

from rllm_lightning.algorithms.ragged import Array
from rllm_lightning.types import Step, Trajectory, TrajectoryGroup

# The needs that only a workflow can meet, and how; the trainer looks after all others.
FROM_WORKFLOW = {
    "reward_components": 'trajectory.info["rewards"], a dict of name -> number (a reward function: RewardOutput.metadata["rewards"])',
    "state_keys": 'step.info["state_key"], anything hashable that is equal for equal states',
    "teacher_logprobs": 'step.info["teacher_logprobs"], one number for each response token',
}

Groups = Sequence[TrajectoryGroup]


class Missing(Exception):
    """Something that an estimator needs is not there: what, of which trajectory, and how to supply it."""


def gather(need: str, groups: Groups, role: str, estimator: str, estimator_state: dict[str, Any] | None) -> Any:
    """Gather one need from the groups of a role.

    Raises:
        ValueError: something is missing; the message names estimator, role, what is missing, and how to supply it.
    """
    try:
        if need == "state":
            return _state(estimator_state, role)
        return GATHER[need](groups)
    except Missing as error:
        raise ValueError(f"estimator {estimator!r}, role {role!r}: needs {need!r}, but {error}") from None


def as_float(value: Any) -> float:
    """What somebody else gave for a number: NaN where it is none, infinite where it is too large."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError):
        return math.nan


def rewards_of(group: TrajectoryGroup) -> Array:
    """[n] float64 rewards of a group.

    Raises:
        ValueError: a reward is None, NaN or infinite; the message names group, trajectory and role.
    """
    rewards = np.array([as_float(t.reward) for t in group.trajectories], dtype=np.float64)
    if not np.isfinite(rewards).all():
        trajectory = group.trajectories[int(np.flatnonzero(~np.isfinite(rewards))[0])]
        raise ValueError(
            f"group {group.group_id!r}, trajectory {trajectory.uid} (role {group.group_role!r}): its reward is {trajectory.reward!r:.80}; "
            "the reward function must give a finite number"
        )
    return rewards


def _state(estimator_state: dict[str, Any] | None, role: str) -> dict[str, Any]:
    if estimator_state is None:
        raise Missing("no estimator_state was passed; pass one dict to every call, and keep it in the checkpoint")
    return estimator_state.setdefault(role, {})


# -------------------------------------------------------------------------------------------------- of a trajectory


def _lengths(groups: Groups) -> list[Array]:
    lengths = [np.array([t.num_response_tokens for t in group.trajectories]) for group in groups]
    if not any(of_group.any() for of_group in lengths):
        raise Missing("no step has response tokens; the rollout engine must fill ModelOutput.completion_ids (Step.response_ids)")
    return lengths


def _reward_components(groups: Groups) -> dict[str, list[Array]]:
    names: tuple[str, ...] | None = None
    for trajectory in _trajectories(groups):
        given = _info(trajectory, "rewards", "a dict of name -> number, set by the workflow")
        own = tuple(sorted(given)) if isinstance(given, dict) else ()
        names = own if names is None else names
        if not own or own != names:
            raise Missing(f"{_name(trajectory)}: info['rewards'] holds {list(own)}, others hold {list(names)}; give the same names to all")
    return {
        name: [_numbers([t.info["rewards"][name] for t in group.trajectories], f"info['rewards'][{name!r}]") for group in groups]
        for name in names or ()
    }


def _greedy_rewards(groups: Groups) -> list[Array]:
    how = "the reward of a greedy rollout of the same task, set by the workflow"
    return [_numbers([_info(t, "greedy_reward", how) for t in group.trajectories], "info['greedy_reward']") for group in groups]


# ---------------------------------------------------------------------------------------------------------- of steps


def _step_rewards(groups: Groups) -> list[list[Array]]:
    """Step rewards that are all 0 beside a trajectory reward that is not were never set."""
    for trajectory in _trajectories(groups):
        if trajectory.reward and not any(step.reward for step in trajectory.steps):
            raise Missing(f"{_name(trajectory)} has the reward {trajectory.reward} and steps without one; set Step.reward in the workflow")
    return [[_numbers([step.reward for step in t.steps], "Step.reward") for t in group.trajectories] for group in groups]


def _state_keys(groups: Groups) -> list[list[list[Hashable]]]:
    how = "anything hashable that is equal for equal states, set by the workflow"

    def of_step(step: Step, trajectory: Trajectory) -> Hashable:
        key = _info(step, "state_key", how, trajectory)
        try:
            hash(key)
        except TypeError:
            raise Missing(f"a step of {_name(trajectory)} has info['state_key'] = {key!r:.80}: {how}") from None
        return key

    return [[[of_step(step, t) for step in t.steps] for t in group.trajectories] for group in groups]


def _logprobs(groups: Groups) -> list[list[list[Array]]]:
    def of_step(step: Step, trajectory: Trajectory) -> list[float]:
        if len(step.logprobs) != len(step.response_ids):
            raise Missing(f"a step of {_name(trajectory)} has none; the rollout engine must fill ModelOutput.logprobs")
        return step.logprobs

    return _per_token(groups, of_step, "Step.logprobs")


def _info_per_token(key: str, how: str) -> Callable[[Groups], list[list[list[Array]]]]:
    def of_step(step: Step, trajectory: Trajectory) -> list[float]:
        values = _info(step, key, how, trajectory)
        if not hasattr(values, "__len__") or isinstance(values, str | bytes | Mapping | Set):
            raise Missing(f"a step of {_name(trajectory)} has info[{key!r}] = {values!r:.80}: {how}")
        if len(values) != len(step.response_ids):
            raise Missing(f"a step of {_name(trajectory)} has {len(values)} for {len(step.response_ids)} response tokens; give one a token")
        return values

    return lambda groups: _per_token(groups, of_step, f"info[{key!r}]")


def _per_token(groups: Groups, of_step: Callable[[Step, Trajectory], Sequence[float]], what: str) -> list[list[list[Array]]]:
    return [[[_numbers(of_step(step, t), what) for step in t.steps] for t in group.trajectories] for group in groups]


def _trajectories(groups: Groups) -> Iterator[Trajectory]:
    return (trajectory for group in groups for trajectory in group.trajectories)


def _name(trajectory: Trajectory) -> str:
    return f"trajectory {trajectory.uid}"


def _info(holder: Trajectory | Step, key: str, how: str, trajectory: Trajectory | None = None) -> Any:
    if key not in holder.info:
        of = _name(trajectory or holder)  # type: ignore[arg-type]
        raise Missing(f"{'a step of ' if trajectory else ''}{of} has no info[{key!r}]: {how}")
    return holder.info[key]


def _numbers(values: Sequence[Any], what: str) -> Array:
    array = np.array([as_float(value) for value in values], dtype=np.float64)
    if not np.isfinite(array).all():
        raise Missing(f"{what} is {values[int(np.flatnonzero(~np.isfinite(array))[0])]!r:.80} somewhere; give finite numbers")
    return array


GATHER: dict[str, Callable[[Groups], Any]] = {
    "lengths": _lengths,
    "reward_components": _reward_components,
    "greedy_rewards": _greedy_rewards,
    "step_rewards": _step_rewards,
    "state_keys": _state_keys,
    "values": _info_per_token("values", "the critic's value before each response token"),
    "logprobs": _logprobs,
    "teacher_logprobs": _info_per_token("teacher_logprobs", "the teacher's log-prob of each response token"),
}
NEEDS = (*GATHER, "state")
