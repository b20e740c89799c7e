"""The catalogue of estimators that give one number a step, or one a response token.

    nested lists (group, trajectory, step[, token]) --flat, with the sizes of each level--> formula --> nested again

A legend of the axes: G groups, N trajectories, S steps, M tokens, each all in one row; `sizes_G` counts the trajectories of a
group, `steps_N` the steps of a trajectory, `tokens_S` the response tokens of a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from rllm_lightning.algorithms.estimator import register_rllm_adv_estimator
from rllm_lightning.algorithms.presets import Pair, knobs_of
from rllm_lightning.algorithms.ragged import Array, Ragged, nest
from rllm_lightning.algorithms.rl_algo import KNOBS, normalise


@register_rllm_adv_estimator(
    "turn_level",
    formula="reward-to-go R_k = sum_j>=k gamma^(j-k) r_j of each step, normalised over the steps k of its group",
    scope="group",
    per="step",
    source="Zeng et al. 2025, Turn-Level Credit Assignment, arXiv:2505.11821",
    kwargs=("episilon", *KNOBS),
)
def turn_level(
    rewards: Sequence[Any], step_rewards: Sequence[Any], gamma: float = 1.0, norm_adv_by_std_in_grpo: bool = True, **kwargs: Any
) -> Pair:
    """Discounted reward-to-go of each step, compared with those of the same turn in the other trajectories of the group.

    Args:
        step_rewards: for each group and trajectory, [steps].
        gamma: discount from one step to the next, in [0, 1].
        kwargs: knobs of `rl_algo.normalise`. A turn that one trajectory alone reached is its `singleton` (`drop`: 0).

    Returns:
        Advantages and returns (the same), shaped like `step_rewards`.
    """
    to_go_S, steps_N, sizes_G = _rewards_to_go(step_rewards, gamma)
    group_S = np.repeat(np.repeat(np.arange(len(sizes_G)), sizes_G), steps_N)
    turn_S = np.arange(len(to_go_S)) - np.repeat(np.cumsum(steps_N) - steps_N, steps_N)
    same_S = group_S * (turn_S.max(initial=0) + 1) + turn_S
    knobs = knobs_of({}, norm_adv_by_std_in_grpo, kwargs)
    return _as_pair(_normalised_among(same_S, to_go_S, **knobs), steps_N, sizes_G)


@register_rllm_adv_estimator(
    "gigpo",
    formula="GRPO of the trajectory's reward + omega * GRPO of the reward-to-go among the group's steps in the same state",
    scope="group",
    per="step",
    source="Feng et al. 2025, Group-in-Group Policy Optimization, arXiv:2505.10978",
)
def gigpo(
    rewards: Sequence[Any],
    step_rewards: Sequence[Any],
    state_keys: Sequence[Any],
    omega: float = 1.0,
    gamma: float = 0.95,
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = 1e-6,
) -> Pair:
    """Advantages on two levels: of the whole trajectory among its group, and of each step among all steps of the group that were
    taken in the same state.

    Args:
        step_rewards: for each group and trajectory, [steps].
        state_keys: for each group and trajectory, one hashable a step; equal for equal states.
        omega: weight of the step level.
        gamma: discount from one step to the next, in [0, 1].

    Returns:
        Advantages and returns (the same), shaped like `step_rewards`. A state met once adds 0.
    """
    scale: Any = "std" if norm_adv_by_std_in_grpo else "none"
    to_go_S, steps_N, sizes_G = _rewards_to_go(step_rewards, gamma)
    ids: dict[Any, int] = {}
    state_S = np.array(
        [
            ids.setdefault((group, key), len(ids))
            for group, of_group in enumerate(state_keys)
            for of_trajectory in of_group
            for key in of_trajectory
        ],
        dtype=np.int64,
    )
    of_step_S = _normalised_among(state_S, to_go_S, scale=scale, epsilon=epsilon, singleton="zero")
    of_trajectory_N = normalise(Ragged.of(rewards), scale=scale, epsilon=epsilon)
    with np.errstate(over="ignore"):
        return _as_pair(np.repeat(of_trajectory_N, steps_N) + omega * of_step_S, steps_N, sizes_G)


@register_rllm_adv_estimator(
    "gae",
    formula="A_t = sum_j (gamma * lam)^j delta_(t+j), delta_t = r_t + gamma * V_(t+1) - V_t",
    scope="trajectory",
    per="token",
    source="Schulman et al. 2015, High-Dimensional Continuous Control Using Generalized Advantage Estimation, arXiv:1506.02438",
)
def gae(
    rewards: Sequence[Any], values: Sequence[Any], gamma: float = 1.0, lam: float = 0.95, level: Literal["token", "turn"] = "token"
) -> Pair:
    """Generalised advantage estimation over a trajectory, whose reward comes with its last token; the value after that is 0.

    Args:
        values: the critic's value before each response token; for each group, trajectory and step, [tokens].
        gamma: discount from one t to the next. lam: weight of longer returns. Both in [0, 1].
        level: what one t is: a `token`, or a `turn`, that is a step with its tokens; its value is that of its first token, its
            tokens share its advantage.

    Returns:
        Advantages, and returns (advantage + value, what a critic is trained on), shaped like `values`.
    """
    if level not in ("token", "turn"):
        raise ValueError(f"rllm.algorithm.estimator_kwargs.level: {level!r} is none of token, turn")
    values_M, tokens_S, steps_N, sizes_G = _flat_tokens(values)
    if level == "token":
        values_T, tokens_T = values_M, np.ones(len(values_M), np.int64)
        length_N = _sums(tokens_S, steps_N)
    else:
        tokens_T = tokens_S[tokens_S > 0]
        values_T = values_M[np.cumsum(tokens_T) - tokens_T]
        length_N = _sums((tokens_S > 0).astype(np.int64), steps_N)
    ends_N = (np.cumsum(length_N) - 1)[length_N > 0]
    with np.errstate(over="ignore"):
        delta_T = gamma * np.append(values_T[1:], 0.0) - values_T
        delta_T[ends_N] = Ragged.of(rewards).flat_N[length_N > 0] - values_T[ends_N]
        advantages_T = _discounted_to_go(delta_T, length_N, gamma * lam)
        returns_T = advantages_T + values_T
    advantages, returns = (_nest_tokens(np.repeat(x_T, tokens_T), tokens_S, steps_N, sizes_G) for x_T in (advantages_T, returns_T))
    return advantages, returns


@register_rllm_adv_estimator(
    "distill",
    formula="A_t = sum_j gamma^j (log-prob of the teacher - of the student) at token t+j",
    scope="trajectory",
    per="token",
    source="on-policy distillation: Agarwal et al. 2023, arXiv:2306.13649; Lu & Thinking Machines Lab 2025",
    objective="teacher",
)
def distill(rewards: Sequence[Any], logprobs: Sequence[Any], teacher_logprobs: Sequence[Any], gamma: float = 0.0) -> Pair:
    """How much more likely the teacher finds each token than the student: its expectation is minus their KL divergence.

    Args:
        rewards: not used.
        logprobs, teacher_logprobs: for each group, trajectory and step, [tokens].
        gamma: discount of what the later tokens of the trajectory gain, in [0, 1] (0: each token stands for itself).

    Returns:
        Advantages and returns (the same), shaped like `logprobs`.
    """
    student_M, tokens_S, steps_N, sizes_G = _flat_tokens(logprobs)
    with np.errstate(over="ignore"):
        advantages_M = _discounted_to_go(_flat_tokens(teacher_logprobs)[0] - student_M, _sums(tokens_S, steps_N), gamma)
    advantages = _nest_tokens(advantages_M, tokens_S, steps_N, sizes_G)
    return advantages, advantages


# ---------------------------------------------------------------------------------------------------------- helpers


def _rewards_to_go(step_rewards: Sequence[Any], gamma: float) -> tuple[Array, Array, Array]:
    """Discounted rewards-to-go, flat [S], with the sizes of the levels above."""
    rewards = Ragged.of(list(itertools.chain.from_iterable(step_rewards)))
    with np.errstate(over="ignore"):
        to_go_S = _discounted_to_go(rewards.flat_N, rewards.sizes_G, gamma)
    largest = np.finfo(np.float64).max
    return np.clip(to_go_S, -largest, largest), rewards.sizes_G, _lengths(step_rewards)


def _discounted_to_go(x: Array, lengths: Array, discount: float) -> Array:
    """sum_j discount^j x_(t+j) within consecutive sequences of the given lengths; all of them step back from their end at once."""
    order = np.argsort(-lengths, kind="stable")
    ends, lengths = np.cumsum(lengths)[order], lengths[order]
    result, running = np.empty_like(x), np.zeros(len(lengths))
    for back in range(1, lengths.max(initial=0) + 1):
        at = ends[: np.searchsorted(-lengths, -back, side="right")] - back
        running = x[at] + discount * running[: len(at)]
        result[at] = running
    return result


def _normalised_among(same_S: Array, values_S: Array, **knobs: Any) -> Array:
    """`normalise` among the values with the same number in `same_S`."""
    order = np.argsort(same_S, kind="stable")
    _, counts = np.unique(same_S, return_counts=True)
    result_S = np.empty_like(values_S)
    result_S[order] = normalise(Ragged(values_S[order], counts), **knobs)
    return result_S


def _flat_tokens(nested: Sequence[Any]) -> tuple[Array, Array, Array, Array]:
    """[M] numbers of all tokens, and the sizes of the levels: tokens_S, steps_N, sizes_G."""
    of_trajectories = list(itertools.chain.from_iterable(nested))
    tokens = Ragged.of(list(itertools.chain.from_iterable(of_trajectories)))
    return tokens.flat_N, tokens.sizes_G, _lengths(of_trajectories), _lengths(nested)


def _nest_tokens(values_M: Array, tokens_S: Array, steps_N: Array, sizes_G: Array) -> list[Any]:
    return nest(nest(nest(values_M, tokens_S), steps_N), sizes_G)


def _as_pair(values_S: Array, steps_N: Array, sizes_G: Array) -> Pair:
    advantages = nest(nest(values_S, steps_N), sizes_G)
    return advantages, advantages


def _lengths(items: Sequence[Any]) -> Array:
    return np.fromiter(map(len, items), dtype=np.int64, count=len(items))


def _sums(values: Array, sizes: Array) -> Array:
    """Sums of consecutive pieces of the given sizes (0 allowed)."""
    return np.diff(np.append(0, np.cumsum(values))[np.append(0, np.cumsum(sizes))])
