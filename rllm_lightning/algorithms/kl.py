"""KL divergences estimated at the sampled tokens: to a reference policy, and between the policy before and after updates.

    KL(π ‖ π_ref) = E over tokens sampled from π of  log π - log π_ref

As a term of the loss the gradient of an estimate counts; in the reward (`kl_in: reward`) only its value, so detach it there.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rllm_lightning.algorithms.losses import MAX_LOG_RATIO, Metrics, bounded_exp, clean


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, estimator: str, mask: Tensor | None = None) -> Tensor:
    """An estimate of KL(π ‖ π_ref) at each token (Schulman 2020, http://joschu.net/blog/kl-approx.html), with d = log π_ref - log π:

    ==== ============= ===================== ==============================================================================
         value         gradient by log π
    ==== ============= ===================== ==============================================================================
    k1   -d            1                     unbiased, may be negative. As a loss it teaches nothing: E[∇log π] = 0
    k2   ½d²           -d                    biased value; as a loss, on-policy, the exact gradient of the KL
    k3   e^d - d - 1   1 - e^d               unbiased, never negative, little variance; as a loss the gradient of KL(π_ref ‖ π)
    ==== ============= ===================== ==============================================================================

    Above d = 20 k3 goes on along its tangent: it stays finite, and the gradient keeps its direction and size (a clamp would stop it).

    Args:
        logprobs: of the sampled tokens under the policy; any shape. Computed in float32 or better.
        ref_logprobs: the same under the reference; gets no gradient.
        estimator: k1, k2 or k3.
        mask: where given, the result is 0 where it is 0, and nothing there reaches the gradient.

    Raises:
        ValueError: unknown estimator.
    """
    mask = torch.ones_like(logprobs, dtype=torch.bool) if mask is None else mask
    logprobs = clean(logprobs, mask)
    d = clean(ref_logprobs, mask, logprobs.dtype).detach() - logprobs
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return 0.5 * d.square()
    if estimator == "k3":
        beyond = torch.relu(d - MAX_LOG_RATIO)
        return torch.expm1(d - beyond) - d + math.exp(MAX_LOG_RATIO) * beyond
    raise ValueError(f"rllm.algorithm.kl_estimator: unknown estimator {estimator!r}; known: k1, k2, k3")


@torch.no_grad()
def drift_metrics(logprobs_BT: Tensor, old_logprobs_BT: Tensor, mask_BT: Tensor) -> Metrics:
    """How far the policy went from the old one, as metrics of `losses`, whatever the loss.

    `approx_kl` k3 estimate of KL(old ‖ now), 0 before any update; `ratio` π/π_old, 1 then; `ratio_gap/max` largest |ratio - 1|.
    """
    now_BT = clean(logprobs_BT, mask_BT)
    old_BT = clean(old_logprobs_BT, mask_BT, now_BT.dtype)
    ratio_BT = clean(bounded_exp(now_BT - old_BT), mask_BT)
    gap_BT = clean(ratio_BT - 1, mask_BT).abs()
    return {"approx_kl": kl_penalty(old_BT, now_BT, "k3"), "ratio": ratio_BT, "ratio_gap/max": gap_BT}
