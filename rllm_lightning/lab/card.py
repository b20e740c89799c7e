"""An estimator's property card: what it is, what it does, whether it is biased or noisy, and when it blows up.

    name -> Subject -> probes (canonical groups, invariances, odd one out, cost)   \\
                    -> exact  (gradients on three prompts, implied weights)         ->  Card -> warnings in plain words
                                                                                             -> card_text, card_json, card_html

Everything on a card is computed when it is made, in seconds and without a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rllm_lightning.lab import probes
from rllm_lightning.lab.exact import MAX_BATCHES, SIZES, ExactGradients, GradientRow, WeightCurve
from rllm_lightning.lab.subject import Subject


@dataclass(frozen=True)
class Card:
    """Everything about one estimator.

    `declared_scope` is what it was registered with, `measured_scope` what was seen (None: it fails too soon to say).
    `input_left_alone`: whether the arrays of rewards stay as they are. `state`: what it keeps from batch to batch, as it was
    examined. `seconds_per_million`: time of its own call for a million trajectories.
    """

    name: str
    kwargs: dict[str, Any]
    formula: str
    source: str
    per: str
    needs: list[str]
    keywords: list[str]
    objective: str
    declared_scope: str
    measured_scope: str | None
    state: dict[str, Any]
    behaviours: list[probes.Behaviour]
    checks: dict[str, probes.Check]
    input_left_alone: bool | None
    odd_one_out: list[probes.OddOneOut]
    gradients: list[GradientRow]
    weights: list[WeightCurve]
    seconds_per_million: float | None

    def row(self, rewards: str, n: int, prompt: str) -> GradientRow:
        return next(row for row in self.gradients if (row.rewards, row.n, row.prompt) == (rewards, n, prompt))

    def behaviour(self, name: str) -> probes.Behaviour:
        return next(behaviour for behaviour in self.behaviours if behaviour.name == name)


def make_card(name: str, kwargs: Mapping[str, Any] | None = None, max_batches: int = MAX_BATCHES) -> Card:
    """Examine an estimator. A broken one has a card too: it says what fails.

    Args:
        name: a registered name.
        kwargs: its keywords, as in `rllm.algorithm.estimator_kwargs`.
        max_batches: how many batches are listed before they are drawn instead, at least 64; more take longer and are more exact.

    Raises:
        ValueError: the name is not registered, a keyword is unknown or lacking, or `max_batches` is below 64.
    """
    if max_batches < 64:
        raise ValueError(f"max_batches: must be at least 64, got {max_batches}")
    subject = Subject(name, **(kwargs or {}))
    entry = subject.entry
    checks = {check: probes.check(subject, check) for check in probes.CHECKS}
    measured_scope = probes.measured_scope(checks)
    exact = ExactGradients(subject, checks, measured_scope or entry.scope, max_batches)
    return Card(
        name=name,
        kwargs=subject.kwargs,
        formula=entry.formula,
        source=entry.source,
        per=entry.per,
        needs=list(entry.needs),
        keywords=list(entry.kwargs),
        objective=entry.objective,
        declared_scope=entry.scope,
        measured_scope=measured_scope,
        state=subject.state,
        behaviours=probes.behaviours(subject),
        checks=checks,
        input_left_alone=probes.leaves_input_alone(subject),
        odd_one_out=probes.odd_one_out(subject),
        gradients=[row for kind in ("binary", "graded") for n in SIZES for row in exact.rows(kind, n)],
        weights=[exact.weight_curve(n) for n in SIZES],
        seconds_per_million=probes.seconds_per_million(subject),
    )


def label(card: Card) -> str:
    """The estimator's name with the keywords that were given."""
    given = ", ".join(f"{key}={value}" for key, value in card.kwargs.items())
    return f"{card.name} ({given})" if given else card.name
