"""The exact gradient of a policy loss on an enumerable policy (torch, float64).

Data come from a `behaviour` policy, each sequence y weighted by its exact probability mu(y) instead of being drawn:

    direction_D = - d/dlogits  sum_y  mu(y) · sum_t  loss(logpi_yt, logmu_yt, A_y)

At ratio 1 (`behaviour` is the policy itself) every loss that claims to be a policy gradient must give the exact gradient of
`sum_y pi(y)·A_y`; off-policy it must give what its own formula says, which `importance_gradient` writes down in NumPy.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch

from rllm_lightning.algorithms.losses import aggregate_loss, compute_policy_loss
from rllm_lightning.lab.policy import TabularPolicy
from rllm_lightning.registry import PolicyLoss


def loss_direction(
    loss: PolicyLoss,
    policy: TabularPolicy,
    advantages_Y: np.ndarray,
    behaviour: TabularPolicy | None = None,
    *,
    reduction: Literal["sum", "mean"] = "sum",
    sequence_weights_Y: np.ndarray | None = None,
    **kwargs: Any,
) -> np.ndarray:
    """The direction in which gradient descent on `loss` moves the flattened logits, in expectation, shape [D].

    Args:
        loss: an entry of `registry.LOSSES`.
        policy: the policy that is trained.
        advantages_Y: the advantage of each sequence, the same for all its tokens.
        behaviour: the policy that the data and the old log-probabilities come from (default: `policy`).
        reduction: sum or mean over the tokens of a sequence.
        sequence_weights_Y: a further factor on the loss of each sequence, such as an importance weight.
        kwargs: keywords of the loss.
    """
    lengths_Y = torch.tensor([len(y) for y in policy.sequences])
    mask_YT = torch.arange(policy.max_length) < lengths_Y[:, None]
    logits_SV = torch.tensor(policy.logits_SV, requires_grad=True)
    # None: the loss takes the policy's own, so that the ratio is exactly 1 and not 1 up to rounding
    old_logprobs_YT = None if behaviour is None else _token_logprobs(behaviour, torch.from_numpy(behaviour.logits_SV))
    weights_Y = (behaviour or policy).probs_Y * (1.0 if sequence_weights_Y is None else sequence_weights_Y)
    if reduction == "mean":
        weights_Y = weights_Y / lengths_Y.numpy()

    advantages_YT = torch.from_numpy(np.asarray(advantages_Y, dtype=np.float64))[:, None].expand(mask_YT.shape)
    loss_YT, _ = compute_policy_loss(loss, _token_logprobs(policy, logits_SV), old_logprobs_YT, advantages_YT, mask_YT, **kwargs)
    aggregate_loss(loss_YT, mask_YT, weights_Y).backward()
    assert logits_SV.grad is not None
    return -logits_SV.grad.numpy().ravel()


def importance_gradient(policy: TabularPolicy, advantages_Y: np.ndarray, behaviour: TabularPolicy) -> np.ndarray:
    """`sum_y mu(y) · A_y · sum_t rho_yt · score_yt`, shape [D]: data of `behaviour`, a weight rho = pi/mu for each token.

    For sequences of one token this is the exact gradient of `sum_y pi(y)·A_y`; for longer ones a weight for each token ignores
    how the prefix was reached, and it is not.
    """
    total_D = np.zeros(policy.logits_SV.size)
    for y, mu, advantage, score_TD in zip(policy.sequences, behaviour.probs_Y, advantages_Y, policy.token_scores, strict=True):
        ratio_T = np.exp(policy.token_logprobs(y) - behaviour.token_logprobs(y))
        total_D += mu * advantage * (ratio_T @ score_TD)
    return total_D


def _token_logprobs(policy: TabularPolicy, logits_SV: torch.Tensor) -> torch.Tensor:
    """Log-probability of each token of each sequence, [Y, T], zero after its end, with gradient to `logits_SV`."""
    logprobs_SV = torch.log_softmax(logits_SV, dim=-1)
    row = {prefix: index for index, prefix in enumerate(policy.prefixes)}
    padded = [
        torch.stack(
            [*(logprobs_SV[row[y[:t]], token] for t, token in enumerate(y)), *[logits_SV.new_zeros(())] * (policy.max_length - len(y))]
        )
        for y in policy.sequences
    ]
    return torch.stack(padded)
