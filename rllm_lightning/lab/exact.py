"""The exact numbers of a card: a subject's gradient on three prompts, and the weight it implies for every pass rate.

    Subject + what the probes found (scope, order, rewards only)  ->  oracle, in the cheapest way that is right  ->  rows and curves

The prompts are solved 1, 4 and 7 times in 8 (`PROMPTS`); their rewards are 0 and 1 ("binary") or four grades ("graded"). A batch
holds one group of each. What is too much to list is drawn, and says so with a standard error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from rllm_lightning.algorithms.advantage import calculate_rloo_advantages
from rllm_lightning.lab.objectives import mean_reward, parse_objective
from rllm_lightning.lab.oracle import GradientMoments, fit, from_rewards, gradient_moments, objective_gradient
from rllm_lightning.lab.policy import Prompt, binary_prompt, graded_prompt
from rllm_lightning.lab.probes import Check
from rllm_lightning.lab.subject import EstimatorFailure, Subject

SIZES = (2, 4, 8)
PROMPTS = {"hard": 1 / 8, "medium": 1 / 2, "easy": 7 / 8}
KINDS: dict[str, Callable[[float], Prompt]] = {"binary": binary_prompt, "graded": graded_prompt}
PASS_RATES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98)
COMPANION = 0.5  # pass rate of the other prompt of the batch, where a prompt's weight depends on one
MAX_BATCHES = 2_000  # to list; beyond, so many are drawn


@dataclass(frozen=True)
class GradientRow:
    """The gradient of groups of `n`, in the logits of one prompt or of `all`.

    `bias`, `scale`, `cosine` compare it with the gradient of the estimator's objective as in `oracle.Fit` (bias after the factor n
    of a shared objective, see `Objective.shared`), `mean_reward_cosine` with that of the mean reward. `signal_over_rloo` is
    `signal_to_noise` over RLOO's. Where `exact` is False batches were drawn, and `scale_error` is the standard error of `scale`.
    What cannot be computed is None, and `problem` says why.
    """

    rewards: str
    n: int
    prompt: str
    bias: float | None = None
    scale: float | None = None
    scale_error: float | None = None
    cosine: float | None = None
    mean_reward_cosine: float | None = None
    variance: float | None = None
    signal_to_noise: float | None = None
    signal_over_rloo: float | None = None
    exact: bool = True
    num_batches: int = 0
    problem: str | None = None


@dataclass(frozen=True)
class WeightCurve:
    """The factor on the gradient of the mean reward that a binary prompt gets in groups of `n`, at each of `PASS_RATES`; None where
    the estimator fails. `error` is the largest standard error (0 where `exact`)."""

    n: int
    weights: list[float | None]
    exact: bool
    error: float


class ExactGradients:
    """The oracle for one subject. `checks` and `scope` are what the probes found; at most `max_batches` are listed (or drawn) for
    the rows of a size, and an eighth of that for each weight."""

    def __init__(self, subject: Subject, checks: dict[str, Check], scope: str, max_batches: int = MAX_BATCHES):
        self.subject = subject
        self.scope = scope
        self.max_batches = max_batches
        self.ordered = checks["order"].verdict != "yes"
        self.by_reward = checks["rewards_only"].verdict == "yes" and not subject.entry.needs and subject.entry.per == "trajectory"

    def rows(self, kind: str, n: int) -> list[GradientRow]:
        """One row a prompt, and one for all of them together."""
        prompts = [KINDS[kind](p) for p in PROMPTS.values()]
        try:
            moments = self._moments(prompts, n, self.max_batches)
        except EstimatorFailure as failure:
            return [GradientRow(kind, n, name, problem=str(failure)) for name in (*PROMPTS, "all")]
        mean_reward_D, rloo = objective_gradient(mean_reward(), prompts), _rloo_signal(kind, n)
        objective_D, factor, problem = None, 1, None
        try:
            objective = parse_objective(self.subject.entry.objective, n, self.subject.keyword("k", 1))
            objective_D, factor = objective_gradient(objective, prompts), n if objective.shared else 1
        except ValueError as error:
            problem = f"the objective is not defined here: {error}"

        def row(name: str, block: slice) -> GradientRow:
            found = fit(moments, mean_reward_D, block)
            numbers = {"mean_reward_cosine": found.cosine, "variance": found.variance, "signal_to_noise": found.signal_to_noise}
            if found.signal_to_noise is not None:
                numbers["signal_over_rloo"] = found.signal_to_noise / rloo[name]
            if objective_D is not None:
                aimed = fit(moments, objective_D, block)
                bias = np.linalg.norm(factor * moments.mean_D[block] - objective_D[block]) / np.linalg.norm(objective_D[block])
                numbers |= {"bias": float(bias), "scale": aimed.scale, "scale_error": aimed.scale_error, "cosine": aimed.cosine}
            return GradientRow(kind, n, name, **numbers, exact=moments.exact, num_batches=moments.num_batches, problem=problem)

        return [row(name, block) for name, block in _blocks(prompts).items()]

    def weight_curve(self, n: int) -> WeightCurve:
        weights: list[float | None] = []
        exact, error = True, 0.0
        for p in PASS_RATES:
            prompts = [binary_prompt(p)] + [binary_prompt(COMPANION)] * (self.scope == "role-batch")
            try:
                moments = self._moments(prompts, n, self.max_batches // 8)
            except EstimatorFailure:
                weights.append(None)
                continue
            gradient_D = objective_gradient(mean_reward(), prompts)
            found = fit(moments, gradient_D, slice(0, len(gradient_D) // len(prompts)))
            weights.append(found.scale)
            exact, error = exact and moments.exact, max(error, found.scale_error)
        return WeightCurve(n, weights, exact, error)

    def _moments(self, prompts: Sequence[Prompt], n: int, max_batches: int) -> GradientMoments:
        with np.errstate(invalid="ignore"):  # advantages that are not finite
            moments = gradient_moments(
                self.subject.on_prompts,
                prompts,
                n,
                scope=self.scope,
                by_reward=self.by_reward,
                ordered=self.ordered,
                max_batches=max_batches,
            )
        if not np.isfinite(moments.mean_D).all():
            raise EstimatorFailure(f"some groups of {n} get advantages that are not finite")
        return moments


def _blocks(prompts: Sequence[Prompt]) -> dict[str, slice]:
    width = prompts[0].policy.logits_SV.size
    return {**{name: slice(i * width, (i + 1) * width) for i, name in enumerate(PROMPTS)}, "all": slice(None)}


@cache
def _rloo_signal(kind: str, n: int) -> dict[str, float]:
    """RLOO's signal-to-noise in each block: the yardstick of an unbiased estimator that uses the group."""
    prompts = [KINDS[kind](p) for p in PROMPTS.values()]
    moments = gradient_moments(from_rewards(calculate_rloo_advantages), prompts, n)
    gradient_D = objective_gradient(mean_reward(), prompts)
    return {name: fit(moments, gradient_D, block).signal_to_noise or 0.0 for name, block in _blocks(prompts).items()}
