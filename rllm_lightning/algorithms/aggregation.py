"""How the loss of many tokens becomes one number (`rllm.algorithm.loss_agg_mode`).

Every mode is a weighted sum over rows, `loss = Σ_b weight_b · Σ_t mask_bt · loss_bt`, and differs only in the weights. They are
computed here once, from the token counts of **all** rows of a minibatch (all ranks, all micro-batches), so that any split of the
rows adds up to the same loss and the same gradient. `losses.aggregate_loss` takes the sum.

A row is one padded response. Rows of one trajectory share a sequence id and count as one sequence; sequences of one task share a
prompt id. What has no token left (padding rows, responses that were masked out) counts nowhere.

To add a mode: add a line to `_ROW_WEIGHTS`, and its name to `AlgorithmConfig.loss_agg_mode`.

Shapes: B rows of the whole minibatch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class _Counts:
    """Tokens of each row, of the row's sequence and of its prompt (all [B] and at least 1), and the totals."""

    row: NDArray[np.float64]
    sequence: NDArray[np.float64]
    prompt: NDArray[np.float64]
    num_tokens: float
    num_sequences: int
    num_prompts: int
    norm_length: float


_ROW_WEIGHTS: dict[str, Callable[[_Counts], Any]] = {
    "token-mean": lambda n: 1 / n.num_tokens,
    "token-sum": lambda n: 1.0,
    "seq-mean-token-sum": lambda n: 1 / n.num_sequences,
    "seq-mean-token-mean": lambda n: 1 / (n.num_sequences * n.sequence),
    "seq-mean-token-sum-norm": lambda n: 1 / (n.num_sequences * n.norm_length),
    "prompt-mean": lambda n: 1 / (n.num_prompts * n.prompt),
}
AGGREGATION_MODES = tuple(_ROW_WEIGHTS)


def loss_weights(
    num_tokens_B: ArrayLike,
    sequence_ids_B: Sequence[Any] | NDArray[Any],
    prompt_ids_B: Sequence[Any] | NDArray[Any],
    mode: str,
    norm_length: float | None = None,
) -> NDArray[np.float64]:
    """The weight of each row's summed token loss.

    With N tokens, S sequences and P prompts that have tokens, and n_s (n_p) tokens in the row's sequence (prompt):

    ======================== ============= =====================================================================
    token-mean               1 / N         every token weighs the same (DAPO)
    token-sum                1             the loss grows with the batch (Tinker)
    seq-mean-token-sum       1 / S         mean over sequences of their summed loss
    seq-mean-token-mean      1 / (S · n_s) every sequence weighs the same (GRPO, GSPO)
    seq-mean-token-sum-norm  1 / (S · L)   L = `norm_length`, a constant: no length bias (Dr. GRPO, arXiv:2503.20783)
    prompt-mean              1 / (P · n_p) every prompt weighs the same (ScaleRL, arXiv:2510.13786)
    ======================== ============= =====================================================================

    Args:
        num_tokens_B: response tokens that are trained on, after all masking.
        sequence_ids_B: one value a row, equal for the rows of one trajectory.
        prompt_ids_B: one value a row, equal for the rows of one prompt.
        mode: a key of the table.
        norm_length: tokens; needed by `seq-mean-token-sum-norm` only.

    Returns:
        float64 [B]. Rows without tokens have weight 0; without any token in the minibatch, so have all.

    Raises:
        ValueError: unknown mode, or no positive `norm_length` where one is needed.
    """
    if mode not in _ROW_WEIGHTS:
        raise ValueError(f"rllm.algorithm.loss_agg_mode: unknown mode {mode!r}; known: {', '.join(AGGREGATION_MODES)}")
    if mode == "seq-mean-token-sum-norm" and (norm_length is None or norm_length <= 0):
        raise ValueError(f"rllm.algorithm.loss_norm_length: {mode} needs a length above 0, got {norm_length}")
    tokens_B = np.asarray(num_tokens_B, dtype=np.float64)
    assert tokens_B.shape == (len(sequence_ids_B),) == (len(prompt_ids_B),), "one count and two ids a row"
    assert (tokens_B >= 0).all(), "token counts cannot be negative"

    weights_B = np.zeros_like(tokens_B)
    live = tokens_B > 0
    if live.any():
        row = tokens_B[live]
        sequence, num_sequences = _tokens_by(np.asarray(sequence_ids_B)[live], row)
        prompt, num_prompts = _tokens_by(np.asarray(prompt_ids_B)[live], row)
        counts = _Counts(row, sequence, prompt, row.sum(), num_sequences, num_prompts, norm_length or 1.0)
        weights_B[live] = _ROW_WEIGHTS[mode](counts)
    return weights_B


def _tokens_by(ids: NDArray[Any], tokens: NDArray[np.float64]) -> tuple[NDArray[np.float64], int]:
    """For each row the tokens of all rows with its id; and how many ids there are."""
    unique, index = np.unique(ids, return_inverse=True)
    totals = np.zeros(len(unique))
    np.add.at(totals, index, tokens)
    return totals[index], len(unique)
