"""Policy losses in which tokens see each other: the tokens of a row (gspo, gmpo), or all tokens of a call (kl_cov, clip_cov).

`row` losses are exact for any split of a minibatch, since a row (one response) is never split. `call` losses compare the tokens
they are given together; the trainer calls them once with the whole minibatch, after a pass that finds its log-probs, so that they
too do not depend on how it is split into micro-batches or over ranks. Everything is deterministic.

How a loss is written, and the notation: see `losses`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rllm_lightning.algorithms.losses import Metrics, bounded_exp, clipped_objective
from rllm_lightning.registry import register_policy_loss

# -------------------------------------------------------------------------------------------------------------- one row


def sequence_ratio(log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """exp of the mean of `log_ratio_BT` over each row's tokens, at every token; the gradient of a token's copy is by its own log-ratio.

    Summed over a row with one advantage A, both ways to differentiate agree: n copies of s·A, each with gradient s·A/n by every
    log-ratio, or each with gradient s·A by its own. The second also serves advantages that differ from token to token, and is the
    GSPO-token of the paper.
    """
    num_tokens_B1 = mask_BT.sum(dim=-1, keepdim=True).clamp_min(1)
    mean_B1 = torch.where(mask_BT, log_ratio_BT, 0.0).sum(dim=-1, keepdim=True) / num_tokens_B1
    return bounded_exp(mean_B1.detach() + (log_ratio_BT - log_ratio_BT.detach()))


@register_policy_loss(
    "gspo",
    formula="ppo on the row's ratio s = exp(mean logρ): -min(sA, clip(s, 1-clip_low, 1+clip_high)·A)",
    source="arXiv:2507.18071",
    scope="row",
)
def gspo(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> tuple[Tensor, Metrics]:
    """Group sequence policy optimisation: the ratio, and so the clip, is that of the whole response, length-normalised.

    The paper's objective is `loss_agg_mode: seq-mean-token-mean`, and its clip range (the default) is small because the ratio is
    a geometric mean.

    Metrics: `clip_frac` share of tokens in rows without gradient.
    """
    ratio_BT = sequence_ratio(logprobs_BT - old_logprobs_BT, mask_BT)
    objective_BT, clipped_BT = clipped_objective(ratio_BT, advantages_BT, clip_low, clip_high)
    return -objective_BT, {"clip_frac": clipped_BT}


@register_policy_loss(
    "gmpo",
    formula="-exp(mean of logρ, clipped per token to at most clip_high (A > 0) or at least -clip_low (A < 0))·A",
    source="arXiv:2507.20673",
    scope="row",
)
def gmpo(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> tuple[Tensor, Metrics]:
    """Geometric-mean policy optimisation: (Π_t min(ρA, clip(ρ, e^-clip_low, e^clip_high)·A))^(1/n), the sign of A taken out.

    The clip bounds are log-ratios. A clipped token counts in its row's ratio, but has no gradient. As for gspo, the paper's
    objective is `loss_agg_mode: seq-mean-token-mean`.

    Metrics: `clip_frac` share of tokens that were clipped.
    """
    log_ratio_BT = logprobs_BT - old_logprobs_BT
    held_BT = torch.where(advantages_BT > 0, log_ratio_BT.clamp(max=clip_high), log_ratio_BT.clamp(min=-clip_low))
    return -sequence_ratio(held_BT, mask_BT) * advantages_BT, {"clip_frac": held_BT != log_ratio_BT}


# ---------------------------------------------------------------------------------------------------- all tokens of a call


def covariance(logprobs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """(logπ - mean logπ)·(A - mean A), means over the call's tokens, without gradient. High values are what lowers the entropy."""
    num_tokens = mask_BT.sum().clamp_min(1)

    def centred(values_BT: Tensor) -> Tensor:
        values_BT = torch.where(mask_BT, values_BT.detach(), 0.0)
        return values_BT - values_BT.sum() / num_tokens

    return centred(logprobs_BT) * centred(advantages_BT)


def _share_of(mask_BT: Tensor, fraction: float) -> Tensor:
    """`fraction` of the call's tokens, rounded down, at least one; stays on the device."""
    return (mask_BT.sum().double() * fraction).floor().clamp_min(1).long()


@register_policy_loss("kl_cov", formula="-ρA, + coef·|logρ| for the tokens of highest covariance", source="arXiv:2505.22617", scope="call")
def kl_cov(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    fraction: float = 0.002,
    coef: float = 1.0,
) -> tuple[Tensor, Metrics]:
    """KL-Cov: the share `fraction` of tokens (at least one a call) whose `covariance` is highest is pulled to the old policy.

    The pull is |logρ|, as in the authors' code; it and its gradient are 0 at ρ = 1, which rounding seldom leaves at exactly 1: a |logρ|
    below the root of the dtype's precision counts as 0, or a token that did not move would be pulled with full force in the
    direction of a rounding error. The paper takes `fraction` 2e-3 for a model of 7B parameters and 2e-4 for 32B. Ties
    go to the earlier token.

    Metrics: `kl_frac` share of tokens that were pulled.
    """
    log_ratio_BT = logprobs_BT - old_logprobs_BT
    cov_N = torch.where(mask_BT, covariance(logprobs_BT, advantages_BT, mask_BT), -torch.inf).flatten()
    highest_first_N = cov_N.argsort(descending=True, stable=True)
    first_N = torch.arange(cov_N.numel(), device=cov_N.device) < _share_of(mask_BT, fraction)
    picked_BT = torch.zeros_like(first_N).scatter(0, highest_first_N, first_N).view_as(mask_BT) & mask_BT
    loss_BT = -bounded_exp(log_ratio_BT) * advantages_BT
    moved_BT = log_ratio_BT.abs() > torch.finfo(log_ratio_BT.dtype).eps ** 0.5
    return torch.where(picked_BT & moved_BT, loss_BT + coef * log_ratio_BT.abs(), loss_BT), {"kl_frac": picked_BT}


@register_policy_loss(
    "clip_cov", formula="ppo, without the gradient of some tokens of high covariance", source="arXiv:2505.22617", scope="call"
)
def clip_cov(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    fraction: float = 0.0002,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> tuple[Tensor, Metrics]:
    """Clip-Cov: of the tokens whose `covariance` is between `cov_low` and `cov_high`, some lose their loss and gradient.

    So many as `fraction` of all tokens (at least one a call, if there is one). Tokens that ppo clips are left out. The paper draws
    them uniformly; here they are taken at even distances, in row-major order, so that the loss is a function of its inputs.

    Metrics: `clip_frac` as for ppo, `cov_frac` share of tokens that were dropped.
    """
    objective_BT, clipped_BT = clipped_objective(bounded_exp(logprobs_BT - old_logprobs_BT), advantages_BT, clip_low, clip_high)
    cov_BT = covariance(logprobs_BT, advantages_BT, mask_BT)
    candidates_BT = mask_BT & ~clipped_BT & (cov_BT > cov_low) & (cov_BT < cov_high)
    rank_BT = candidates_BT.flatten().cumsum(0).view_as(mask_BT)
    num_candidates = candidates_BT.sum().clamp_min(1)
    num_picked = _share_of(mask_BT, fraction)
    # the j-th of n candidates is picked where j·k/n passes a whole number: k of them, evenly spread; all of them if k >= n
    picked_BT = candidates_BT & (rank_BT * num_picked // num_candidates > (rank_BT - 1) * num_picked // num_candidates)
    return torch.where(picked_BT, 0.0, -objective_BT), {"clip_frac": clipped_BT, "cov_frac": picked_BT}
