"""A registered estimator under examination: called as the trainer calls it, on trajectories made for the purpose.

    bare rewards, or sequences of an enumerated prompt -> trajectories that hold whatever an estimator may need
        -> needs gathered, keywords chosen (as in `algorithms.assign`) -> the estimator -> checked shapes

What a trajectory holds: the reward; one step (one step a token for an estimator of steps) with tokens and log-probs; the exact
critic's values; the teacher's log-probs; the greedy answer's reward; the reward in two components (one for long answers, one for
short ones); the prefix as the state's key; the reward again on the last step. An estimator that keeps a state finds it as
`SETTLING` earlier batches with half of the answers right have left it.
"""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from rllm_lightning.algorithms.estimator import Estimator, needs_values
from rllm_lightning.algorithms.needs import gather
from rllm_lightning.config import AlgorithmConfig
from rllm_lightning.lab.oracle import Group
from rllm_lightning.lab.policy import Prompt
from rllm_lightning.registry import ESTIMATORS
from rllm_lightning.types import Step, Trajectory, TrajectoryGroup

ROLE = "card"
SETTLING = 100
# for each trajectory of a group its advantages, [1] or [T]; None for a group that is not trained on
Rows = list[np.ndarray] | None


class EstimatorFailure(Exception):
    """The estimator raised, or returned something that is not advantages; the message says which, in one line."""


class Subject:
    """An estimator and its keywords.

    Args:
        name: a registered name.
        kwargs: what would stand in `rllm.algorithm.estimator_kwargs`; `norm_adv_by_std_in_grpo` may be among them.

    Raises:
        ValueError: the name is not registered, or a keyword is unknown or lacking.
    """

    def __init__(self, name: str, **kwargs: Any):
        self.name = name
        self.entry: Estimator = ESTIMATORS.get(name)
        self.kwargs = dict(kwargs)
        norm_by_std = kwargs.pop("norm_adv_by_std_in_grpo", True)
        if unknown := sorted(set(kwargs) - set(self.entry.kwargs)):
            raise ValueError(f"{name}: no keyword {', '.join(map(repr, unknown))}; it has: {', '.join(self.entry.kwargs) or 'none'}")
        if lacking := sorted(set(self.entry.required) - set(kwargs)):
            raise ValueError(f"{name}: {needs_values(lacking)}")
        self.config = AlgorithmConfig(estimator=name, estimator_kwargs=kwargs, norm_adv_by_std_in_grpo=norm_by_std)
        self.stepwise = self.entry.per == "step" or bool({"step_rewards", "state_keys"} & set(self.entry.needs))
        self._accepted: set[str] = set()
        self._trajectories: dict[Prompt, list[Trajectory]] = {}
        self._state: dict[str, Any] = {}
        if "state" in self.entry.needs:
            self._settle()

    def _settle(self) -> None:
        batch = _as_groups([[bare_trajectory(r, self.stepwise) for r in (0.0, 1.0, 0.0, 1.0)]])
        try:
            for _ in range(SETTLING):
                self._call(batch, self._state)
        except EstimatorFailure:
            self._state = {}  # it will fail again where that is reported

    @property
    def state(self) -> dict[str, Any]:
        """The state that it is examined with; empty for an estimator that keeps none."""
        return copy.deepcopy(self._state.get(ROLE, {}))

    def keyword(self, name: str, default: Any) -> Any:
        """The value of a keyword: as given, else the function's own default, else `default`."""
        parameter = inspect.signature(self.entry.function).parameters.get(name)
        own = default if parameter is None or parameter.default is parameter.empty else parameter.default
        return self.kwargs.get(name, own)

    def on_groups(self, trajectories: Sequence[Sequence[Trajectory]]) -> list[Rows]:
        """The advantages of a batch, one list of trajectories a group.

        Raises:
            EstimatorFailure: see there. Values that are not finite are returned as they are.
        """
        return self._call(_as_groups(trajectories), copy.deepcopy(self._state))

    def on_rewards(self, rewards: Sequence[Sequence[float]], scale: float = 1.0, offset: float = 0.0) -> list[Rows]:
        """The advantages of a batch of bare rewards, all of them (the critic's and the greedy answer's too) times `scale` plus `offset`."""
        return self.on_groups([[bare_trajectory(r, self.stepwise, scale, offset) for r in group] for group in rewards])

    def on_prompts(self, groups: list[Group]) -> list[Any]:
        """The advantages of groups of enumerated sequences: an `oracle.AdvantageFunction`. A group that is dropped has zeros."""
        batch = []
        for prompt, index_n in groups:
            if prompt not in self._trajectories:
                self._trajectories[prompt] = [enumerated_trajectory(prompt, y, self.stepwise) for y in range(len(prompt.rewards_Y))]
            known = self._trajectories[prompt]
            batch.append([known[y] for y in index_n])
        results = self.on_groups(batch)
        if self.entry.per == "trajectory":
            return [np.zeros(len(of)) if rows is None else np.concatenate(rows) for rows, of in zip(results, batch, strict=True)]
        return [[np.zeros(t.num_response_tokens) for t in of] if rows is None else rows for rows, of in zip(results, batch, strict=True)]

    def leaves_input_alone(self, trajectories: Sequence[Sequence[Trajectory]]) -> bool:
        """Whether the arrays of rewards stay as they were and are not handed out as advantages themselves.

        Raises:
            EstimatorFailure: see there.
        """
        groups = _as_groups(trajectories)
        rewards, before = _rewards(groups), _rewards(groups)
        advantages = self._run(groups, rewards, copy.deepcopy(self._state))
        shared = any(isinstance(a, np.ndarray) and np.shares_memory(a, r) for a, r in zip(advantages, rewards, strict=True))
        return not shared and all(np.array_equal(r, b, equal_nan=True) for r, b in zip(rewards, before, strict=True))

    def seconds(self, trajectories: Sequence[Sequence[Trajectory]]) -> float:
        """How long the estimator's own call takes on a batch; what it needs is gathered before.

        Raises:
            EstimatorFailure: see there.
        """
        groups = _as_groups(trajectories)
        rewards, keywords = _rewards(groups), self._keywords(groups, copy.deepcopy(self._state))
        start = time.perf_counter()
        self._run(groups, rewards, {}, keywords)
        return time.perf_counter() - start

    def _call(self, groups: list[TrajectoryGroup], state: dict[str, Any]) -> list[Rows]:
        advantages = self._run(groups, _rewards(groups), state)
        return [self._rows(group, of_group) for group, of_group in zip(groups, advantages, strict=True)]

    def _run(
        self, groups: list[TrajectoryGroup], rewards: list[np.ndarray], state: dict[str, Any], keywords: dict[str, Any] | None = None
    ) -> Any:
        """What the estimator returns as advantages, one entry a group."""
        keywords = self._keywords(groups, state) if keywords is None else keywords
        try:
            with np.errstate(all="ignore"):  # what comes of it is on the card
                result = self.entry(rewards, **keywords)
        except Exception as error:  # a user's function may raise anything; the card reports it
            raise EstimatorFailure(f"raises {type(error).__name__}: {error}") from error
        if not isinstance(result, tuple) or len(result) != 2:
            raise EstimatorFailure(f"returns {type(result).__name__}, not a pair (advantages, returns)")
        _expect_length(result[0], len(groups), "groups")
        return result[0]

    def _keywords(self, groups: list[TrajectoryGroup], state: dict[str, Any]) -> dict[str, Any]:
        """The keywords that the trainer would call the estimator with."""
        offered = {"norm_adv_by_std_in_grpo": self.config.norm_adv_by_std_in_grpo, "algorithm_config": self.config, "traj_groups": groups}
        offered |= {need: gather(need, groups, ROLE, self.name, state) for need in self.entry.needs}
        offered |= self.config.estimator_kwargs
        self._accepted = self._accepted or set(self.entry.accepted(offered))  # asking costs as much as a call
        return {key: offered[key] for key in self._accepted}

    def _rows(self, group: TrajectoryGroup, advantages: Any) -> Rows:
        if advantages is None:
            return None
        num = len(group.trajectories)
        if self.entry.per == "trajectory":
            return list(_numbers(advantages, num, "a group").reshape(num, 1))
        _expect_length(advantages, num, "trajectories")
        rows = []
        for trajectory, of_trajectory in zip(group.trajectories, advantages, strict=True):
            if self.entry.per == "step":
                rows.append(_numbers(of_trajectory, len(trajectory.steps), "a trajectory's steps"))
            else:
                _expect_length(of_trajectory, len(trajectory.steps), "steps")
                per_step = zip(trajectory.steps, of_trajectory, strict=True)
                rows.append(np.concatenate([_numbers(values, len(step.response_ids), "a step's tokens") for step, values in per_step]))
        return rows


def bare_trajectory(reward: float, stepwise: bool, scale: float = 1.0, offset: float = 0.0) -> Trajectory:
    """Two tokens with a reward of `scale · reward + offset`, beside a critic and a greedy answer at one half (scaled alike)."""
    reward, half = scale * reward + offset, scale * 0.5 + offset
    return _trajectory(
        tokens=(1, 0),
        logprobs=[-0.7, -0.7],
        teacher_logprobs=[-0.5, -0.5],
        values=[half, half],
        reward=reward,
        components={"first": reward, "second": 0.0},
        greedy_reward=half,
        stepwise=stepwise,
    )


def enumerated_trajectory(prompt: Prompt, y: int, stepwise: bool) -> Trajectory:
    """Sequence `y` of a prompt, with exact values, log-probs and greedy reward."""
    tokens, reward = prompt.policy.sequences[y], float(prompt.rewards_Y[y])
    teacher = prompt.teacher or prompt.policy
    return _trajectory(
        tokens=tokens,
        logprobs=prompt.policy.token_logprobs(tokens).tolist(),
        teacher_logprobs=teacher.token_logprobs(tokens).tolist(),
        values=[prompt.value(tokens[:t]) for t in range(len(tokens))],
        reward=reward,
        components={"first": reward if len(tokens) > 2 else 0.0, "second": 0.0 if len(tokens) > 2 else reward},
        greedy_reward=float(prompt.rewards_Y[prompt.policy.greedy]),
        stepwise=stepwise,
    )


def _trajectory(
    *,
    tokens: tuple[int, ...],
    logprobs: list[float],
    teacher_logprobs: list[float],
    values: list[float],
    reward: float,
    components: dict[str, float],
    greedy_reward: float,
    stepwise: bool,
) -> Trajectory:
    cuts = [slice(t, t + 1) for t in range(len(tokens))] if stepwise else [slice(None)]
    steps = [
        Step(
            prompt_ids=[0],
            response_ids=list(tokens[cut]),
            logprobs=logprobs[cut],
            reward=reward if cut is cuts[-1] else 0.0,
            done=cut is cuts[-1],
            info={"values": values[cut], "teacher_logprobs": teacher_logprobs[cut], "state_key": str(tokens[: cut.start or 0])},
        )
        for cut in cuts
    ]
    return Trajectory(name=ROLE, steps=steps, reward=reward, info={"rewards": components, "greedy_reward": greedy_reward})


def _rewards(groups: Sequence[TrajectoryGroup]) -> list[np.ndarray]:
    return [np.array([t.reward for t in group.trajectories], dtype=np.float64) for group in groups]


def _as_groups(trajectories: Sequence[Sequence[Trajectory]]) -> list[TrajectoryGroup]:
    return [TrajectoryGroup(list(group), f"{index}:{ROLE}") for index, group in enumerate(trajectories)]


def _expect_length(values: Any, expected: int, what: str) -> None:
    if not hasattr(values, "__len__") or len(values) != expected:
        found = f"{len(values)} advantages" if hasattr(values, "__len__") else type(values).__name__
        raise EstimatorFailure(f"returns {found} for {expected} {what}")


def _numbers(values: Any, expected: int, what: str) -> np.ndarray:
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise EstimatorFailure(f"returns something else than numbers for {what}: {error}") from error
    if array.shape != (expected,):
        raise EstimatorFailure(f"returns advantages of shape {array.shape} for {what}, expected ({expected},)")
    return array
