"""Rollout correction: weights for tokens that were sampled from another distribution than the trainer's (`rollout_correction`).

The sampler's log-probabilities differ from the trainer's for the same weights of the model: other kernels, lower precision, a
truncated distribution (top-p), weights that are some updates old. Each token's policy loss is multiplied by

    w = π_train_old / π_rollout      per token, or the product over the row

which is constant (no gradient), and which `old_logprobs` = the trainer's own leaves uncorrected otherwise. With `bypass_mode` the
sampler's log-probabilities are the old ones: then the loss's own ratio holds this factor already, and no weight is needed.

Shapes: B rows (responses), T response positions.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rllm_lightning.algorithms.kl import kl_penalty
from rllm_lightning.algorithms.losses import Metrics, bounded_exp, clean


@torch.no_grad()
def rollout_correction_weights(
    train_logprobs_BT: Tensor, rollout_logprobs_BT: Tensor, mask_BT: Tensor, mode: str, level: str, cap: float
) -> tuple[Tensor, Metrics]:
    """The weight of every token, and how far sampler and trainer are apart.

    Args:
        train_logprobs_BT: of the sampled tokens under the trainer's model before the update.
        rollout_logprobs_BT: the same as the sampler reported them.
        mask_BT: 1 (or true) for response tokens; padding may hold anything.
        mode: `none` (weights are 1), `tis` (w, at most `cap`; Espeholt et al., arXiv:1802.01561), `mask` (w, 0 where it exceeds `cap`).
        level: `token`, or `sequence`: the ratio of the whole row, a product that strays fast with its length.
        cap: largest weight.

    Returns:
        weights [B, T], 0 at masked positions, in float32 or better; and metrics as in `losses`:
        `kl_k1`, `kl_k2`, `kl_k3` estimates of KL(rollout ‖ train); `gap/max` largest |log-probability difference|; `clip_frac` share
        of tokens whose weight was cut or set to 0; `weight`, `weight_square` for `effective_sample_size`. In mode `none` the last
        three say what `tis` would do.

    Raises:
        ValueError: unknown mode or level.
    """
    if mode not in ("none", "tis", "mask") or level not in ("token", "sequence"):
        raise ValueError(f"rllm.algorithm.rollout_correction: unknown mode {mode!r} (none, tis, mask) or level {level!r} (token, sequence)")
    train_BT = clean(train_logprobs_BT, mask_BT)
    rollout_BT = clean(rollout_logprobs_BT, mask_BT, train_BT.dtype)
    log_ratio_BT = train_BT - rollout_BT
    metrics = {f"kl_{k}": kl_penalty(rollout_BT, train_BT, k) for k in ("k1", "k2", "k3")}
    metrics["gap/max"] = log_ratio_BT.abs()

    if level == "sequence":
        log_ratio_BT = log_ratio_BT.sum(dim=-1, keepdim=True).expand_as(log_ratio_BT)
    ratio_BT = bounded_exp(log_ratio_BT)
    beyond_BT = ratio_BT > cap
    weights_BT = clean(torch.where(beyond_BT, 0.0 if mode == "mask" else cap, ratio_BT), mask_BT)
    metrics |= {"clip_frac": clean(beyond_BT, mask_BT), "weight": weights_BT, "weight_square": weights_BT.square()}
    return (clean(torch.ones_like(weights_BT), mask_BT) if mode == "none" else weights_BT), metrics


def effective_sample_size(means: Mapping[str, float]) -> float:
    """Kish's (Σw)² / (N·Σw²), in [0, 1]: the share of the tokens that an unweighted batch of the same precision would have.

    `means` holds the minibatch means of `weight` and `weight_square`. Without any weight it is 0.
    """
    return means["weight"] ** 2 / means["weight_square"] if means["weight_square"] > 0 else 0.0
