"""The exact oracle: expectation and covariance of an estimator's policy gradient, by listing every group instead of sampling.

For a batch of P prompts with n samples each, an estimator's gradient is, in the block of logits of each prompt,

    g = 1/n · sum_i  A_i · score(y_i)          (for advantages per token: sum_t A_it · score of token t)

and the objective is the sum over the prompts. `gradient_moments` gets E[g] and Cov[g] in three moves:

    classes      sequences the estimator cannot tell apart are merged (by reward where it sees rewards only)
    batches      every multiset of n classes with its multinomial probability (every ordered tuple where order matters),
                 for an estimator that looks at the whole batch every combination of them over the prompts
    moments      advantages of each batch -> weighted sums; the spread of scores inside a class is added in closed form

Where there are more batches than `max_batches`, that many are drawn instead, and the standard error is stated. Estimators of known
expectation on the same draws are then control variates: the sampling noise that they share drops out.

Shapes: P prompts, n samples a group, K classes, B batches, D logits of one prompt, Y sequences.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rllm_lightning.lab.objectives import Objective
from rllm_lightning.lab.policy import Prompt

# groups of a batch, each a prompt and the sequences drawn for it -> for each group n advantages, numbers or arrays [T]
Group = tuple[Prompt, np.ndarray]
AdvantageFunction = Callable[[list[Group]], list[Any]]


@dataclass(frozen=True)
class GradientMoments:
    """Moments of the gradient estimate of one batch, the prompts' blocks one after the other (D: all blocks together).

    `error_DD` is the covariance of the sampling error of `mean_D`: zero where `exact`, that is where all `num_batches` batches were
    listed.
    """

    mean_D: np.ndarray
    error_DD: np.ndarray
    covariance_DD: np.ndarray
    num_batches: int
    exact: bool

    @property
    def error_D(self) -> np.ndarray:
        """Standard error of each entry of `mean_D`."""
        return np.sqrt(np.diag(self.error_DD))


def from_rewards(function: Callable[..., Any], **kwargs: Any) -> AdvantageFunction:
    """A bare `(rewards, **kwargs) -> (advantages, returns)` estimator as an `AdvantageFunction`."""

    def advantages(groups: list[Group]) -> list[Any]:
        return list(function([prompt.rewards_Y[index_n] for prompt, index_n in groups], **kwargs)[0])

    return advantages


def gradient_moments(
    advantages: AdvantageFunction,
    prompts: Sequence[Prompt],
    n: int,
    *,
    scope: str = "group",
    by_reward: bool = True,
    ordered: bool = False,
    max_batches: int = 10_000,
    seed: int = 0,
) -> GradientMoments:
    """Expectation and covariance of the gradient estimate.

    Args:
        advantages: the estimator.
        prompts: the prompts of a batch, each with one group of `n` samples.
        scope: `"role-batch"` calls the estimator batch by batch; `"group"` and `"trajectory"` let each prompt stand alone
            and pass all its groups in one call.
        by_reward: merge sequences of equal reward (only right for an estimator that sees nothing but rewards).
        ordered: list tuples instead of multisets, for an estimator to which the order within a group matters.
        max_batches: the most batches to list (a prompt, or all prompts together for `"role-batch"`); beyond it they are drawn.
        seed: of the drawn batches.

    Raises:
        ValueError: `max_batches` is below 8, too few for an error estimate.
    """
    if max_batches < 8:
        raise ValueError(f"max_batches: must be at least 8, got {max_batches}")
    rng = np.random.default_rng(seed)
    together = [list(prompts)] if scope == "role-batch" else [[prompt] for prompt in prompts]
    parts = []
    for batch_prompts in together:
        classes = [_Classes.of(prompt, by_reward) for prompt in batch_prompts]
        drawn, weights_B, exact = _batches([c.probs_K for c in classes], n, ordered, max_batches, rng)
        groups = [
            [(p, c.members_K[index_Bn[b]]) for p, c, index_Bn in zip(batch_prompts, classes, drawn, strict=True)]
            for b in range(len(weights_B))
        ]
        if scope == "role-batch":
            results = [advantages(batch) for batch in groups]
        else:
            results = [[result] for result in advantages([batch[0] for batch in groups])]
        parts.append(_moments(classes, drawn, weights_B, results, exact))
    return _concatenate(parts)


def objective_gradient(objective: Objective, prompts: Sequence[Prompt]) -> np.ndarray:
    """Exact gradient of the sum of `objective` over the prompts, blocks as in `GradientMoments.mean_D`."""
    return np.concatenate([objective.gradient(prompt) for prompt in prompts])


@dataclass(frozen=True)
class _Classes:
    """Sequences of one prompt, merged. `spread_KDD` is the covariance of the score within a class."""

    members_K: np.ndarray  # one sequence of each class
    probs_K: np.ndarray
    rewards_K: np.ndarray
    scores_KD: np.ndarray  # mean score
    spread_KDD: np.ndarray
    token_scores: list[np.ndarray]  # of the members, [T, D] each

    @classmethod
    def of(cls, prompt: Prompt, by_reward: bool) -> _Classes:
        policy = prompt.policy
        keys_Y = prompt.rewards_Y if by_reward else np.arange(len(policy.sequences))
        _, members_K, class_Y = np.unique(keys_Y, return_index=True, return_inverse=True)
        onto_KY = (class_Y[None, :] == np.arange(len(members_K))[:, None]) * policy.probs_Y
        probs_K = onto_KY.sum(axis=1)
        onto_KY = onto_KY / probs_K[:, None]
        scores_KD = onto_KY @ policy.scores_YD
        centred_KYD = policy.scores_YD[None] - scores_KD[:, None]
        spread_KDD = np.einsum("ky,kyd,kye->kde", onto_KY, centred_KYD, centred_KYD)
        return cls(members_K, probs_K, prompt.rewards_Y[members_K], scores_KD, spread_KDD, [policy.token_scores[y] for y in members_K])


def _batches(
    probs: list[np.ndarray], n: int, ordered: bool, max_batches: int, rng: np.random.Generator
) -> tuple[list[np.ndarray], np.ndarray, bool]:
    """The batches: for each prompt the classes drawn, [B, n], and the batches' weights [B]; and whether that is all there are."""
    count = math.prod(len(p) ** n if ordered else math.comb(n + len(p) - 1, n) for p in probs)
    if count > max_batches:
        drawn = [rng.choice(len(p), size=(max_batches, n), p=p / p.sum()) for p in probs]
        return drawn, np.full(max_batches, 1 / max_batches), False
    listed = [_all_groups(p, n, ordered) for p in probs]
    index_PB = np.indices([len(weights_G) for _, weights_G in listed]).reshape(len(probs), -1)
    drawn = [classes_Gn[index_B] for (classes_Gn, _), index_B in zip(listed, index_PB, strict=True)]
    weights_B = np.prod([weights_G[index_B] for (_, weights_G), index_B in zip(listed, index_PB, strict=True)], axis=0)
    return drawn, weights_B, True


def _all_groups(probs_K: np.ndarray, n: int, ordered: bool) -> tuple[np.ndarray, np.ndarray]:
    """Every group of `n` classes, [G, n], with its probability [G]."""
    kinds = range(len(probs_K))
    if ordered:
        classes_Gn = np.array(list(itertools.product(kinds, repeat=n)))
        return classes_Gn, probs_K[classes_Gn].prod(axis=1)
    classes_Gn = np.array(list(itertools.combinations_with_replacement(kinds, n)))
    counts_GK = (classes_Gn[:, :, None] == np.array(kinds)).sum(axis=1)
    orders_G = [math.factorial(n) // math.prod(map(math.factorial, counts_K)) for counts_K in counts_GK.tolist()]
    return classes_Gn, np.array(orders_G, dtype=np.float64) * probs_K[classes_Gn].prod(axis=1)


def _moments(
    classes: list[_Classes], drawn: list[np.ndarray], weights_B: np.ndarray, results: list[list[Any]], exact: bool
) -> GradientMoments:
    blocks, spreads = [], []
    for position, (c, classes_Bn) in enumerate(zip(classes, drawn, strict=True)):
        advantages_B = [result[position] for result in results]
        n = classes_Bn.shape[1]
        if np.ndim(advantages_B[0][0]) == 0:
            advantages_Bn = np.array(advantages_B, dtype=np.float64)
            blocks.append(np.einsum("bn,bnd->bd", advantages_Bn, c.scores_KD[classes_Bn]) / n)
            squares_K = np.bincount(classes_Bn.ravel(), (weights_B[:, None] * advantages_Bn**2).ravel(), len(c.probs_K))
            spreads.append(np.einsum("k,kde->de", squares_K, c.spread_KDD) / n**2)
        else:  # one advantage a token: the sequences are their own classes, without spread
            per_sequence = [
                [np.asarray(a_T) @ c.token_scores[k] for a_T, k in zip(advantages_n, classes_n, strict=True)]
                for advantages_n, classes_n in zip(advantages_B, classes_Bn, strict=True)
            ]
            blocks.append(np.sum(per_sequence, axis=1) / n)
            spreads.append(np.zeros_like(c.spread_KDD[0]))
    gradients_BD = np.concatenate(blocks, axis=1)
    mean_D = weights_B @ gradients_BD
    centred_BD = gradients_BD - mean_D
    covariance_DD = (centred_BD * weights_B[:, None]).T @ centred_BD + _block_diagonal(spreads)
    if exact:
        return GradientMoments(mean_D, np.zeros_like(covariance_DD), covariance_DD, len(weights_B), exact)
    return GradientMoments(*_controlled(gradients_BD, classes, drawn), covariance_DD, len(weights_B), exact)


def _controlled(gradients_BD: np.ndarray, classes: list[_Classes], drawn: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Mean over drawn batches, and the covariance of its error, with three estimators of known expectation as control variates:
    REINFORCE, RLOO, and the mean score (a constant baseline)."""
    controls, expected = [], []
    for c, classes_Bn in zip(classes, drawn, strict=True):
        r_Bn, n = c.rewards_K[classes_Bn], classes_Bn.shape[1]
        rloo_Bn = (r_Bn - r_Bn.mean(axis=1, keepdims=True)) * n / max(n - 1, 1)
        controls.append(np.einsum("cbn,bnd->cbd", [r_Bn, rloo_Bn, np.ones_like(r_Bn)], c.scores_KD[classes_Bn]) / n)
        gradient_D = (c.probs_K * c.rewards_K) @ c.scores_KD
        expected.append([gradient_D, gradient_D * (n > 1), 0 * gradient_D])
    control_CBD = np.concatenate(controls, axis=2) - np.concatenate(expected, axis=1)[:, None]
    count = len(gradients_BD)
    mean_D, residual_BD = np.empty(gradients_BD.shape[1]), np.empty_like(gradients_BD)
    for d in range(len(mean_D)):  # the constant of the regression on the controls is the mean where they are as expected
        regressors = np.column_stack([np.ones(count), control_CBD[:, :, d].T])
        coefficients, *_ = np.linalg.lstsq(regressors, gradients_BD[:, d])
        mean_D[d], residual_BD[:, d] = coefficients[0], gradients_BD[:, d] - regressors @ coefficients
    return mean_D, residual_BD.T @ residual_BD / (count - 4) / count


def _concatenate(parts: list[GradientMoments]) -> GradientMoments:
    return GradientMoments(
        np.concatenate([part.mean_D for part in parts]),
        _block_diagonal([part.error_DD for part in parts]),
        _block_diagonal([part.covariance_DD for part in parts]),
        sum(part.num_batches for part in parts),
        all(part.exact for part in parts),
    )


def _block_diagonal(blocks: list[np.ndarray]) -> np.ndarray:
    total = sum(len(block) for block in blocks)
    result_DD = np.zeros((total, total))
    start = 0
    for block in blocks:
        result_DD[start : start + len(block), start : start + len(block)] = block
        start += len(block)
    return result_DD


@dataclass(frozen=True)
class Fit:
    """How an estimator's gradient relates to the exact gradient of an objective.

    `bias` is |E[g] - G| relative to |G|; `scale` the factor s for which s·G is nearest to E[g], `scale_error` its standard error
    (0 where exact); `cosine` that of the angle between E[g] and G; `variance` the trace of Cov[g]; `signal_to_noise` |E[g]| over
    the root of `variance` (None without noise). `cosine` is None where E[g] is 0.
    """

    bias: float
    scale: float
    scale_error: float
    cosine: float | None
    variance: float
    signal_to_noise: float | None


def fit(moments: GradientMoments, gradient_D: np.ndarray, block: slice = slice(None)) -> Fit:
    """Compare `moments` with the exact `gradient_D`, in all prompts' blocks or in one."""
    mean_D, gradient_D = moments.mean_D[block], gradient_D[block]
    size, norm = float(np.linalg.norm(mean_D)), float(np.linalg.norm(gradient_D))
    variance = float(np.trace(moments.covariance_DD[block, block]))
    return Fit(
        bias=float(np.linalg.norm(mean_D - gradient_D)) / norm,
        scale=float(mean_D @ gradient_D) / norm**2,
        scale_error=math.sqrt(max(float(gradient_D @ moments.error_DD[block, block] @ gradient_D), 0.0)) / norm**2,
        cosine=float(mean_D @ gradient_D) / (size * norm) if size > 1e-12 * norm else None,
        variance=variance,
        signal_to_noise=size / math.sqrt(variance) if variance > 0 else None,
    )
