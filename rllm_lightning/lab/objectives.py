"""What an estimator may claim to climb, with exact value and gradient on an enumerated prompt.

An objective is a function of the probabilities of the sequences. It is given by its value and by its slope, the partial
derivative by each probability (up to a constant, which drops out because probabilities sum to 1); the chain rule does the rest:

    gradient_D = sum_y  pi(y) · slope_Y[y] · score_YD[y]

To add one: write its value and slope, and name it in `IN_WORDS` and `parse_objective`. The tests differentiate every value numerically.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rllm_lightning.lab.policy import Prompt


@dataclass(frozen=True)
class Objective:
    """`name` in words; `value(prompt)`, and `slope(prompt)` of shape [Y].

    `shared` where an estimator splits the result of a group among its n samples: the gradient is then the sum over the samples
    of advantage times score, and their mean, which every other estimator means, is n times smaller.
    """

    name: str
    value: Callable[[Prompt], float]
    slope: Callable[[Prompt], np.ndarray]
    shared: bool = False

    def gradient(self, prompt: Prompt) -> np.ndarray:
        """Exact gradient by the prompt's logits, shape [D]."""
        return (prompt.policy.probs_Y * self.slope(prompt)) @ prompt.policy.scores_YD


def mean_reward() -> Objective:
    """Expected reward of one sample."""
    return Objective("mean reward", lambda prompt: prompt.mean_reward, lambda prompt: prompt.rewards_Y)


def max_of(k: int) -> Objective:
    """Expected reward of the best of k samples; with rewards 0 and 1 that is pass@k, 1 - (1-p)^k.

    With F the distribution function of the reward, the value is `sum_v v · (F(v)^k - F(v-)^k)` over the distinct rewards v,
    and the slope at y is `k · E[max(r_y, best of k-1 others)]`.

    Raises:
        ValueError: k is not a whole number of at least 1.
    """
    if not isinstance(k, int) or k < 1:
        raise ValueError(f"pass@k: k must be a whole number of at least 1, got {k!r}")

    def best_of(count: int, prompt: Prompt) -> tuple[np.ndarray, np.ndarray]:
        """Distinct rewards and the distribution of the best of `count` samples over them."""
        levels, index_Y = np.unique(prompt.rewards_Y, return_inverse=True)
        cumulative = np.cumsum(np.bincount(index_Y, weights=prompt.policy.probs_Y))
        return levels, np.diff(cumulative**count, prepend=0.0)

    def value(prompt: Prompt) -> float:
        levels, probs = best_of(k, prompt)
        return float(levels @ probs)

    def slope(prompt: Prompt) -> np.ndarray:
        if k == 1:
            return prompt.rewards_Y
        levels, probs = best_of(k - 1, prompt)
        return k * np.maximum(prompt.rewards_Y[:, None], levels[None, :]) @ probs

    return Objective(f"pass@{k}", value, slope, shared=True)


def log_likelihood(order: int) -> Objective:
    """Log-likelihood of a right answer, its series cut after `order` terms: `-sum_(j=1..order) (1-p)^j / j`.

    Order 1 is the mean reward (up to a constant), order infinity is log p. Source: maximum-likelihood reinforcement learning.

    Raises (when evaluated):
        ValueError: a reward is neither 0 nor 1.
    """

    def pass_rate(prompt: Prompt) -> float:
        if not np.isin(prompt.rewards_Y, (0.0, 1.0)).all():
            raise ValueError(f"{prompt.name}: the likelihood of a right answer needs rewards 0 and 1, got {prompt.rewards_Y.tolist()}")
        return prompt.mean_reward

    def value(prompt: Prompt) -> float:
        fail = 1 - pass_rate(prompt)
        return -sum(fail**j / j for j in range(1, order + 1))

    def slope(prompt: Prompt) -> np.ndarray:
        p = pass_rate(prompt)
        return prompt.rewards_Y * (1 - (1 - p) ** order) / p

    return Objective(f"log-likelihood to order {order}", value, slope)


def closeness_to_teacher() -> Objective:
    """Minus the KL divergence from the policy to the prompt's teacher, over whole sequences.

    Raises (when evaluated):
        ValueError: the prompt has no teacher.
    """

    def log_ratio(prompt: Prompt) -> np.ndarray:
        if prompt.teacher is None:
            raise ValueError(f"{prompt.name}: no teacher to be close to")
        return np.log(prompt.teacher.probs_Y) - np.log(prompt.policy.probs_Y)

    return Objective("closeness to the teacher (-KL)", lambda p: float(p.policy.probs_Y @ log_ratio(p)), log_ratio)


IN_WORDS = {
    "mean_reward": "the mean reward",
    "pass_at_k": "pass@k",
    "pass_at_n": "pass@n",
    "log_likelihood": "the log-likelihood of a right answer, to order n-1",
    "teacher": "closeness to the teacher",
}


def parse_objective(text: str, n: int, k: int) -> Objective:
    """The objective called `text`, for groups of `n`; `k` is the estimator's own k where it has one.

    Raises:
        ValueError: no such objective; the message lists them.
    """
    makers: dict[str, Callable[[], Objective]] = {
        "mean_reward": mean_reward,
        "pass_at_k": lambda: max_of(k),
        "pass_at_n": lambda: max_of(n),
        "log_likelihood": lambda: log_likelihood(max(n - 1, 1)),
        "teacher": closeness_to_teacher,
    }
    if text not in makers:
        raise ValueError(f"objective: unknown {text!r}; known: {', '.join(makers)}")
    return makers[text]()
