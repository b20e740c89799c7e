"""Policy losses, one number a token; how they are called, and how their tokens are added up.

    logprobs, old_logprobs, advantages, mask (all [B, T])
      -> compute_policy_loss(LOSSES.get(name), ...)   cleans the inputs, calls the loss  -> loss_BT, metrics
      -> aggregate_loss(loss_BT, mask_BT, weights_B)  one number, to call `backward` on
      -> metric_totals(metrics, mask_BT)              sums and maxima, to be combined over micro-batches and ranks

To add a loss, write a function of four tensors and decorate it (here, or in a module of your own named in `plugins`):

    @register_policy_loss("x", formula="...", source="...")
    def x(logprobs_BT, old_logprobs_BT, advantages_BT, mask_BT, *, knob: float = 1.0): ...

It gets tensors of one float dtype (float32 or float64) and one device, with zeros at masked positions, and returns the loss of
each token, to be **minimised**, or `(loss, metrics)`. What it returns at masked positions is ignored. Its keyword-only parameters
are what `rllm.algorithm.loss_kwargs` may hold. It never averages over tokens: the denominator is a matter of the whole minibatch.

A metric is a [B, T] tensor without gradient; it is averaged over the tokens of the minibatch, unless its name ends in `/max`.

Losses in which the tokens of a row or of a call see each other are in `joint_losses`, the KL to a reference and the drift from
the old policy in `kl`, the weights between sampler and trainer in `correction`, the weights `weights_B` in `aggregation`.

Notation: B rows, T response positions, π the policy, A advantage, ρ = π/π_old, sg() stops the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rllm_lightning.registry import PolicyLoss, register_policy_loss

Metrics = dict[str, Tensor]

# exp(20) = 5e8 is far beyond any sane ratio and far below overflow in float32
MAX_LOG_RATIO = 20.0


# ---------------------------------------------------------------------------------------------------- calling and adding up


def clean(values_BT: Tensor, mask_BT: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`values_BT` with 0 where `mask_BT` is 0, in `dtype` (default: float32, or float64 if it is that already).

    Selected, not multiplied: NaN and infinities in padding reach neither the value nor the gradient.
    """
    dtype = dtype or torch.promote_types(values_BT.dtype, torch.float32)
    return torch.where(mask_BT.bool(), values_BT.to(dtype), 0.0)


def compute_policy_loss(
    loss: PolicyLoss,
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor | None,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    **kwargs: Any,
) -> tuple[Tensor, Metrics]:
    """The loss of every token, and its metrics.

    Args:
        loss: the registry's entry.
        logprobs_BT: log-probabilities of the sampled tokens under the policy that is trained, with gradient.
        old_logprobs_BT: the same under the policy before the update. None where the loss does not need them, or where nothing
            was updated yet: the detached `logprobs_BT` stand in, so that the ratio is exactly 1.
        advantages_BT: one a token.
        mask_BT: 1 (or true) for the tokens that are trained on. Padding may hold anything, NaN too.
        kwargs: keywords of the loss.

    Returns:
        loss [B, T] and metrics (name -> [B, T], see above), 0 at masked positions. Everything is computed in float32, or in
        float64 if `logprobs_BT` are, whatever the precision of the inputs.

    Raises:
        ValueError: the loss returned a tensor of another shape.
    """
    shape, mask_BT = logprobs_BT.shape, mask_BT.bool()
    logprobs_BT = clean(logprobs_BT, mask_BT)
    dtype = logprobs_BT.dtype
    old_logprobs_BT = (logprobs_BT if old_logprobs_BT is None else clean(old_logprobs_BT, mask_BT, dtype)).detach()
    advantages_BT = clean(advantages_BT, mask_BT, dtype).detach()
    assert shape == mask_BT.shape == old_logprobs_BT.shape == advantages_BT.shape, "all inputs of a loss are [B, T]"

    result = loss.function(logprobs_BT, old_logprobs_BT, advantages_BT, mask_BT, **kwargs)
    loss_BT, metrics = result if isinstance(result, tuple) else (result, {})
    for what, value_BT in {"loss": loss_BT, **metrics}.items():
        if getattr(value_BT, "shape", None) != shape:
            raise ValueError(
                f"policy loss {loss.function.__name__!r}: {what} must be one number a token, of shape {tuple(shape)}, "
                f"got {tuple(value_BT.shape) if isinstance(value_BT, Tensor) else value_BT!r}"
            )
    return clean(loss_BT, mask_BT), {name: clean(value_BT.detach(), mask_BT) for name, value_BT in metrics.items()}


def aggregate_loss(loss_BT: Tensor, mask_BT: Tensor, weights_B: Tensor | np.ndarray) -> Tensor:
    """Σ_b weights_b · Σ_t mask_bt · loss_bt, a scalar.

    `weights_B` are this call's rows of `aggregation.loss_weights` over the whole minibatch: the results of all micro-batches and
    ranks are to be added, not averaged. Without any token it is 0.0 with zero gradient.
    """
    loss_BT = clean(loss_BT, mask_BT)
    weights_B = torch.as_tensor(weights_B, dtype=loss_BT.dtype, device=loss_BT.device)
    return (weights_B * loss_BT.sum(dim=-1)).sum()


def metric_totals(metrics: Mapping[str, Tensor], mask_BT: Tensor) -> Metrics:
    """Each metric over the tokens of this call, a scalar tensor: its sum, to be divided by the minibatch's number of tokens
    once all micro-batches and ranks are added; for a name ending in `/max` its maximum (-inf without tokens)."""
    mask_BT = mask_BT.bool()
    totals: Metrics = {}
    for name, value_BT in metrics.items():
        if name.endswith("/max"):
            held_BT = torch.where(mask_BT, value_BT, -torch.inf)
            totals[name] = torch.cat([held_BT.flatten(), held_BT.new_full((1,), -torch.inf)]).amax()  # amax needs an element
        else:
            totals[name] = clean(value_BT, mask_BT, torch.float64).sum()
    return totals


# ------------------------------------------------------------------------------------------------------------ shared pieces


def bounded_exp(values: Tensor) -> Tensor:
    """exp, for log-ratios: beyond ±20 the value is that of ±20, and so is the size of the gradient.

    A plain clamp would stop the gradient there, just where the policy has to be pulled back; here its direction stays.
    """
    held = values.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.exp(held + (values - values.detach()))


def clipped_objective(ratio_BT: Tensor, advantages_BT: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """min(ρA, clip(ρ, 1 - clip_low, 1 + clip_high)·A), to be maximised; and where the clipped branch won (no gradient there)."""
    free_BT = ratio_BT * advantages_BT
    clipped_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high) * advantages_BT
    return torch.minimum(free_BT, clipped_BT), clipped_BT < free_BT


# ------------------------------------------------------------------------------------------------------- losses of one token


@register_policy_loss("reinforce", formula="-A·logπ", source="Williams 1992", needs_old_logprobs=False)
def reinforce(logprobs_BT: Tensor, old_logprobs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """-A·logπ. Right only for tokens that were sampled from the policy as it is now."""
    return -advantages_BT * logprobs_BT


@register_policy_loss("cross_entropy", formula="-w·logπ, w = 1: the advantage is not used", source="supervised", needs_old_logprobs=False)
def cross_entropy(
    logprobs_BT: Tensor, old_logprobs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, *, weight: float | Tensor = 1.0
) -> Tensor:
    """-w·logπ; `weight` is one number, or a tensor that broadcasts to [B, T]."""
    return -weight * logprobs_BT


@register_policy_loss("importance_sampling", formula="-ρ·A", source="Tinker's importance_sampling")
def importance_sampling(logprobs_BT: Tensor, old_logprobs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """-ρ·A with a differentiable ratio, so with the gradient -ρ·A·∇logπ: in expectation that of the policy as it is now, but for
    the prefixes, which stay those of the old one. Nothing bounds it."""
    return -bounded_exp(logprobs_BT - old_logprobs_BT) * advantages_BT


@register_policy_loss(
    "ppo", formula="-min(ρA, clip(ρ, 1-clip_low, 1+clip_high)·A), for A < 0 at most -dual_clip·A", source="arXiv:1707.06347"
)
def ppo(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> tuple[Tensor, Metrics]:
    """PPO's clipped surrogate (Schulman et al. 2017); other values below and above as in DAPO (arXiv:2503.14476).

    `dual_clip` c > 1 (Ye et al., arXiv:1912.09729) bounds the loss of tokens with A < 0 by -c·A: without it a token whose
    probability grew a lot has an unbounded loss and gradient.

    Metrics: `clip_frac` share of tokens without gradient because of clip_low or clip_high, `dual_clip_frac` because of dual_clip.

    Raises:
        ValueError: `dual_clip` is not above 1.
    """
    ratio_BT = bounded_exp(logprobs_BT - old_logprobs_BT)
    objective_BT, clipped_BT = clipped_objective(ratio_BT, advantages_BT, clip_low, clip_high)
    metrics = {"clip_frac": clipped_BT}
    if dual_clip is not None:
        if dual_clip <= 1:
            raise ValueError(f"rllm.algorithm.loss_kwargs.dual_clip: must be above 1, got {dual_clip}")
        floor_BT = dual_clip * advantages_BT
        bounded_BT = (advantages_BT < 0) & (objective_BT < floor_BT)
        objective_BT = torch.where(bounded_BT, floor_BT, objective_BT)
        metrics["dual_clip_frac"] = bounded_BT
    return -objective_BT, metrics


@register_policy_loss("cispo", formula="-sg(clip(ρ, ratio_low, ratio_high))·A·logπ", source="MiniMax-M1, arXiv:2506.13585")
def cispo(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    ratio_low: float = 0.0,
    ratio_high: float = 4.0,
) -> tuple[Tensor, Metrics]:
    """REINFORCE with a truncated importance weight: every token keeps a gradient, however far its ratio went.

    The bounds are those of the ratio itself. Libraries differ: MiniMax-M1 writes them 1-ε and 1+ε and sets no lower one, ScaleRL
    uses 4 to 8 above and nothing below (as here), TRL's `epsilon_high` is the upper bound itself, verl and Tinker clip to
    1 ± .2 by default.

    Metrics: `clip_frac` share of tokens whose weight was cut.
    """
    ratio_BT = bounded_exp((logprobs_BT - old_logprobs_BT).detach())
    weight_BT = ratio_BT.clamp(ratio_low, ratio_high)
    return -weight_BT * advantages_BT * logprobs_BT, {"clip_frac": weight_BT != ratio_BT}


@register_policy_loss("dro", formula="-(A·logπ - ½·beta·(logπ - logπ_old)²)", source="arXiv:2405.19107, Tinker's dro")
def dro(logprobs_BT: Tensor, old_logprobs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, *, beta: float = 0.05) -> Tensor:
    """Direct reward optimisation: REINFORCE with a quadratic pull to the old policy. Response tokens only, like every loss here."""
    return -(advantages_BT * logprobs_BT - 0.5 * beta * (logprobs_BT - old_logprobs_BT).square())


@register_policy_loss("sapo", formula="-(4/τ)·σ(τ(ρ-1))·A, τ = tau_pos for A > 0, else tau_neg", source="arXiv:2511.20347")
def sapo(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> Tensor:
    """Soft adaptive policy optimisation: a sigmoid gate in place of PPO's clip.

    The factor 4/τ makes the gradient at ρ = 1 that of REINFORCE (σ'(0) = 1/4); away from 1 it fades, faster for larger τ.
    """
    ratio_BT = bounded_exp(logprobs_BT - old_logprobs_BT)
    tau_BT = torch.full_like(ratio_BT, tau_neg).masked_fill(advantages_BT > 0, tau_pos)
    return -4 / tau_BT * torch.sigmoid(tau_BT * (ratio_BT - 1)) * advantages_BT


@register_policy_loss("dppo", formula="-M·ρ·A, M = 0 where ρ moved away by a divergence above delta, else 1", source="arXiv:2602.04879")
def dppo(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    divergence: Literal["tv", "kl"] = "tv",
    delta: float = 0.2,
) -> tuple[Tensor, Metrics]:
    """Divergence proximal policy optimisation: PPO whose trust region is the probability that moved, not the ratio.

    A token has no gradient where its update leads away from the old policy (A > 0 and ρ > 1, or A < 0 and ρ < 1) and the
    divergence is above `delta` already. The divergence is that of the two-way choice "this token or another one", with
    probabilities p (old) and q (now): `tv` |q - p|, `kl` p·log(p/q) + (1-p)·log((1-p)/(1-q)). Usual deltas: .15 to .2 for tv,
    .05 for kl. The paper measures from the sampler's log-probabilities (`rollout_correction.bypass_mode=true`).

    Metrics: `clip_frac` share of tokens without gradient.

    Raises:
        ValueError: unknown `divergence`.
    """
    if divergence not in ("tv", "kl"):
        raise ValueError(f"rllm.algorithm.loss_kwargs.divergence: expected tv or kl, got {divergence!r}")
    ratio_BT = bounded_exp(logprobs_BT - old_logprobs_BT)
    now_BT, old_BT = logprobs_BT.detach(), old_logprobs_BT
    if divergence == "tv":
        moved_BT = (now_BT.exp() - old_BT.exp()).abs()
    else:
        tiny = torch.finfo(now_BT.dtype).tiny  # a probability of exactly 1 leaves 0 for the other tokens
        rest_now_BT, rest_old_BT = (-torch.expm1(now_BT)).clamp_min(tiny), (-torch.expm1(old_BT)).clamp_min(tiny)
        moved_BT = old_BT.exp() * (old_BT - now_BT) + rest_old_BT * (rest_old_BT.log() - rest_now_BT.log())
    blocked_BT = (moved_BT > delta) & (advantages_BT * (now_BT - old_BT) > 0)
    return torch.where(blocked_BT, ratio_BT.detach(), ratio_BT) * -advantages_BT, {"clip_frac": blocked_BT}
