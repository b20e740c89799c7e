"""The KL divergence to a reference policy, estimated at the sampled tokens.

    KL(π ‖ π_ref) = E over tokens sampled from π of  log π - log π_ref

As a term of the loss its gradient counts; in the reward (`kl_in: reward`) only its value, so detach it there.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rllm_lightning.algorithms.losses import MAX_LOG_RATIO, clean


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
