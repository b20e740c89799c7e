"""The loss of one minibatch and its gradient, and the metrics of a batch's updates.

    rows -> weights by global counts -> micro-batches -> policy(micro) -> per-token losses x row weights -> backward

Everything that averages (the loss modes, every metric) divides by counts over the whole minibatch, so the result does not
depend on how the rows were shared out to ranks and cut into micro-batches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rllm_lightning.algorithms.aggregation import loss_weights
from rllm_lightning.algorithms.correction import effective_sample_size, rollout_correction_weights
from rllm_lightning.algorithms.kl import drift_metrics, kl_penalty
from rllm_lightning.algorithms.losses import Metrics, aggregate_loss, compute_policy_loss, metric_totals
from rllm_lightning.config import Config
from rllm_lightning.registry import LOSSES
from rllm_lightning.trainer.batch import MicroBatch, Row, pad, response_mask
from rllm_lightning.trainer.policy import Policy, Scores
from rllm_lightning.trainer.ranks import Ranks

Totals = tuple[dict[str, float], dict[str, float], dict[str, float], float]  # sums, maxima, numbers of tokens, loss


class UpdateMetrics:
    """Sums, maxima and counts over the tokens of all updates of a batch, reduced once by `compute`.

    Keys: `actor/loss` (mean of the minibatches' losses), `actor/entropy`, `actor/approx_kl`, `actor/ratio`, `actor/ratio_gap/max`,
    `actor/kl_ref`, `actor/value_loss`, `actor/{loss's own}`, `rollout/correction/...` (sampler against trainer),
    `optim/grad_norm`, `optim/learning_rate`.
    """

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.tokens: dict[str, float] = defaultdict(float)
        self.maxima: dict[str, Tensor] = {}
        self.losses: list[Tensor] = []
        self.grad_norms: list[Tensor] = []
        self.learning_rate = 0.0

    def add(self, prefix: str, metrics: Metrics, mask_BT: Tensor, num_tokens: int) -> None:
        """The metrics of one micro-batch: [B, T] tensors, as `algorithms.losses` describes them."""
        for name, total in metric_totals(metrics, mask_BT).items():
            key = f"{prefix}/{name}"
            if name.endswith("/max"):
                self.maxima[key] = torch.maximum(self.maxima[key], total) if key in self.maxima else total
            else:
                self.sums[key] = self.sums[key] + total if key in self.sums else total
                self.tokens[key] += num_tokens

    def add_grad_norm(self, norm: Tensor) -> None:
        self.grad_norms.append(norm.detach())

    def compute(self, ranks: Ranks | None = None) -> dict[str, float]:
        """The metrics of all ranks' rows as Python floats; empty where nothing was updated. All ranks call this at once."""
        if not self.losses:
            return {}
        sums, maxima, tokens, loss = _totals((ranks or Ranks()).gather(self._as_numbers()))
        result = {key: total / tokens[key] for key, total in sums.items()} | maxima
        if "rollout/correction/weight" in result:
            means = {name: result.pop(f"rollout/correction/{name}") for name in ("weight", "weight_square")}
            result["rollout/correction/ess"] = effective_sample_size(means)
        result["actor/loss"] = loss
        result["optim/grad_norm"] = float(torch.stack(self.grad_norms).mean())
        result["optim/learning_rate"] = self.learning_rate
        return result

    def _as_numbers(self) -> Totals:
        sums = {key: float(total) for key, total in self.sums.items()}
        maxima = {key: float(value) for key, value in self.maxima.items()}
        return sums, maxima, dict(self.tokens), float(torch.stack(self.losses).mean())


def _totals(ranks: Sequence[Totals]) -> Totals:
    """Those of all ranks together; each rank's loss is its share of it."""
    sums: dict[str, float] = defaultdict(float)
    tokens: dict[str, float] = defaultdict(float)
    maxima: dict[str, float] = {}
    for their_sums, their_maxima, their_tokens, _ in ranks:
        for key, value in their_sums.items():
            sums[key] += value
            tokens[key] += their_tokens[key]
        for key, value in their_maxima.items():
            maxima[key] = max(value, maxima.get(key, value))
    return sums, maxima, tokens, sum(loss for *_, loss in ranks)


class MinibatchUpdate:
    """The gradient of one minibatch.

    Args:
        rows: all rows of the minibatch.
        backward: called with each micro-batch's share of the loss, and `sync`: whether it is the last one.
        metrics: where the metrics go.
        ranks: those who share out the rows. Their gradients are averaged, so each is made `world_size` times as large.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        config: Config,
        policy: Policy,
        backward: Callable[..., Any],
        metrics: UpdateMetrics,
        ranks: Ranks | None = None,
    ):
        self.rows = list(rows)
        self.ranks = ranks or Ranks()
        self.config = config
        self.algorithm = config.rllm.algorithm
        self.policy = policy
        self.call_backward = backward
        self.metrics = metrics
        lengths = [len(row.response_ids) for row in self.rows]
        weights = loss_weights(
            lengths,
            [row.sequence for row in self.rows],
            [row.group for row in self.rows],
            self.algorithm.loss_agg_mode,
            self.algorithm.loss_norm_length or config.data.max_response_length,
        )
        self.weights = {id(row): weight for row, weight in zip(self.rows, weights, strict=True)}
        self.joint: dict[int, tuple[Tensor, Tensor, Metrics]] = {}  # of a row: loss [T], its derivative [T], metrics [T]
        self.mean_weight = 1.0 / sum(lengths)  # of the terms that are token means whatever the mode: the value loss

    def backward(self) -> None:
        """Add the gradient of every micro-batch; what stands in `.grad` afterwards is the minibatch's."""
        loss = torch.zeros((), dtype=torch.float64)
        mine = self.ranks.share_rows(self.rows)
        self._compare_all_tokens(mine)
        micro = None
        for micro, last in _marking_the_last(self.policy.micro_batches(mine, self.config.training.micro_batch_tokens)):
            scores = self.policy(micro)
            share = self._loss(micro, scores) if micro.rows else _no_loss(scores)
            self.call_backward(share * self.ranks.world_size, sync=last)
            loss = loss + share.detach().double().cpu()
        if micro is None:  # the other ranks wait for this one's gradient
            self.call_backward(sum((p * 0.0).sum() for p in self.policy.parameters() if p.requires_grad), sync=True)
        self.metrics.losses.append(loss)

    def _compare_all_tokens(self, mine: Sequence[Row]) -> None:
        """Losses of scope `call` see the tokens of the whole minibatch, so they are computed on its log-probs as a pass of their own
        finds them; what stays of them for the micro-batches is each token's loss and its derivative (`self.joint`)."""
        names = [name for name in dict.fromkeys(map(self._loss_name, self.rows)) if LOSSES.get(name).scope == "call"]
        if not names:
            return
        number = {id(row): index for index, row in enumerate(self.rows)}
        found: dict[int, list[float]] = {}
        with torch.no_grad():
            for micro in self.policy.micro_batches(mine, self.config.training.micro_batch_tokens):
                logprobs_BT = self.policy(micro).logprobs.tolist()
                for row, values in zip(micro.rows, logprobs_BT, strict=False):  # an idle pass has no rows
                    found[number[id(row)]] = values[: len(row.response_ids)]
        present = {index: values for part in self.ranks.gather(found) for index, values in part.items()}
        dtype = torch.promote_types(self.policy.model.dtype, torch.float32)
        for name in names:
            rows = [row for row in self.rows if self._loss_name(row) == name]
            logprobs = [present[number[id(row)]] for row in rows]
            old = [row.old_logprobs or own for row, own in zip(rows, logprobs, strict=True)]
            mask_BT = response_mask(rows)
            logprobs_BT, old_BT, advantages_BT = (
                pad(values, mask_BT.shape[1], dtype) for values in (logprobs, old, [row.advantages for row in rows])
            )
            logprobs_BT.requires_grad_()
            loss_BT, metrics = compute_policy_loss(LOSSES.get(name), logprobs_BT, old_BT, advantages_BT, mask_BT, **self._loss_kwargs(name))
            (slope_BT,) = torch.autograd.grad(loss_BT.sum(), logprobs_BT)
            for index, row in enumerate(rows):
                self.joint[id(row)] = (loss_BT[index].detach(), slope_BT[index], {key: value[index] for key, value in metrics.items()})

    def _loss_name(self, row: Row) -> str:
        return self.algorithm.loss_of(row.role)

    def _loss_kwargs(self, name: str) -> dict[str, Any]:
        return self.algorithm.loss_kwargs if name == self.algorithm.loss_of("") else {}

    def _loss(self, micro: MicroBatch, scores: Scores) -> Tensor:
        """This micro-batch's share of the minibatch's loss."""
        algorithm, mask_BT, num_tokens = self.algorithm, micro.mask_BT, micro.num_response_tokens
        old_BT = self._old_logprobs(micro, scores)
        loss_BT = self._policy_loss(micro, scores, old_BT)
        loss_BT = loss_BT * self._correction(micro, old_BT, num_tokens)
        if algorithm.kl_beta > 0:
            kl_BT = kl_penalty(
                scores.logprobs,
                micro.padded([row.ref_logprobs or [] for row in micro.rows], scores.logprobs.dtype),
                algorithm.kl_estimator,
                mask_BT,
            )
            self.metrics.add("actor", {"kl_ref": kl_BT.detach()}, mask_BT, num_tokens)
            if algorithm.kl_in == "loss":
                loss_BT = loss_BT + algorithm.kl_beta * kl_BT
        if algorithm.entropy_coeff != 0:
            loss_BT = loss_BT - algorithm.entropy_coeff * scores.entropies
        self.metrics.add(
            "actor", {"entropy": scores.entropies.detach(), **drift_metrics(scores.logprobs, old_BT, mask_BT)}, mask_BT, num_tokens
        )
        loss = aggregate_loss(loss_BT, mask_BT, torch.tensor([self.weights[id(row)] for row in micro.rows], dtype=torch.float64))
        return loss + self._value_loss(micro, scores, num_tokens) if scores.values is not None else loss

    def _old_logprobs(self, micro: MicroBatch, scores: Scores) -> Tensor:
        """The log-probs before the update: those of the earlier pass, or this pass's own where nothing was updated in between."""
        if all(row.old_logprobs is not None for row in micro.rows):
            return micro.padded([row.old_logprobs or [] for row in micro.rows], scores.logprobs.dtype)
        if self.config.rllm.episode_logging.log_episodes:
            for row, values in zip(micro.rows, scores.logprobs.tolist(), strict=True):
                row.step.info["old_logprobs"] = values[: len(row.response_ids)]
        return scores.logprobs.detach()

    def _policy_loss(self, micro: MicroBatch, scores: Scores, old_BT: Tensor) -> Tensor:
        """Each row's loss is that of its role."""
        advantages_BT = micro.padded([row.advantages for row in micro.rows], scores.logprobs.dtype)
        names = [self._loss_name(row) for row in micro.rows]
        loss_BT = torch.zeros_like(scores.logprobs)
        for name in dict.fromkeys(names):
            chosen = torch.tensor([index for index, other in enumerate(names) if other == name], device=old_BT.device)
            mask = micro.mask_BT[chosen]
            if LOSSES.get(name).scope == "call":
                part, metrics = self._joint_loss([micro.rows[int(i)] for i in chosen], scores.logprobs[chosen])
            else:
                part, metrics = compute_policy_loss(
                    LOSSES.get(name), scores.logprobs[chosen], old_BT[chosen], advantages_BT[chosen], mask, **self._loss_kwargs(name)
                )
            self.metrics.add("actor", metrics, mask, sum(len(micro.rows[int(i)].response_ids) for i in chosen))
            loss_BT = loss_BT.index_copy(0, chosen, part.to(loss_BT.dtype))
        return loss_BT

    def _joint_loss(self, rows: Sequence[Row], logprobs_BT: Tensor) -> tuple[Tensor, Metrics]:
        """What `_compare_all_tokens` found of these rows, as a function of their log-probs with its value and gradient there."""
        width = logprobs_BT.shape[1]

        def stack(values: Sequence[Tensor]) -> Tensor:
            cut = [nn.functional.pad(value[:width], (0, width - len(value[:width]))) for value in values]
            return torch.stack(cut).to(logprobs_BT)

        losses, slopes, metrics = zip(*(self.joint[id(row)] for row in rows), strict=True)
        loss_BT = stack(losses) + stack(slopes) * (logprobs_BT - logprobs_BT.detach())
        return loss_BT, {key: stack([found[key] for found in metrics]) for key in metrics[0]}

    def _correction(self, micro: MicroBatch, old_BT: Tensor, num_tokens: int) -> Tensor:
        """Weights between sampler and trainer [B, T]; 1 where the sampler gave no log-probs or where they are the old ones."""
        correction = self.algorithm.rollout_correction
        if any(row.rollout_logprobs is None for row in micro.rows):
            return torch.ones_like(old_BT)
        rollout_BT = micro.padded([row.rollout_logprobs or [] for row in micro.rows], old_BT.dtype)
        mode = "none" if correction.bypass_mode else correction.mode
        weights_BT, metrics = rollout_correction_weights(old_BT, rollout_BT, micro.mask_BT, mode, correction.level, correction.cap)
        self.metrics.add("rollout/correction", metrics, micro.mask_BT, num_tokens)
        return weights_BT

    def _value_loss(self, micro: MicroBatch, scores: Scores, num_tokens: int) -> Tensor:
        """Squared error of the values against advantage + old value, a mean over the minibatch's tokens."""
        values_BT = scores.values
        assert values_BT is not None, "called where there is a value head"
        old_values = [row.step.info["values"] for row in micro.rows]
        targets = [[a + v for a, v in zip(row.advantages, old, strict=True)] for row, old in zip(micro.rows, old_values, strict=True)]
        error_BT = (values_BT - micro.padded(targets, values_BT.dtype)).square() * micro.mask_BT
        self.metrics.add("actor", {"value_loss": error_BT.detach()}, micro.mask_BT, num_tokens)
        return self.algorithm.value_coeff * self.mean_weight * error_BT.sum()


def _no_loss(scores: Scores) -> Tensor:
    """Zero, with a gradient of zero in every parameter that a loss has one in."""
    loss = (scores.logprobs * 0.0).sum()
    return loss if scores.values is None else loss + (scores.values * 0.0).sum()


def _marking_the_last(micros: Iterable[MicroBatch]) -> Iterator[tuple[MicroBatch, bool]]:
    former: MicroBatch | None = None
    for micro in micros:
        if former is not None:
            yield former, False
        former = micro
    if former is not None:
        yield former, True
