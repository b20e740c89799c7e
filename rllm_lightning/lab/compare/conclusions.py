"""What may be concluded, pair by pair, in plain words.

Told apart where Holm's p value is at most `ALPHA`; about equal where they surely differ by less than would matter (alone: where the whole
interval lies within ± that difference; after Holm's correction, too); otherwise undecided, with the number of seeds that would decide.
Below `MIN_SEEDS` nothing is concluded.
"""

from __future__ import annotations

import math
from typing import Literal

from rllm_lightning.lab.compare.caveats import MIN_SEEDS, confounds
from rllm_lightning.lab.compare.results import Comparison, PairResult
from rllm_lightning.lab.compare.statistics import ALPHA, MAX_SEEDS, POWER, Interval
from rllm_lightning.lab.compare.words import interval, number, p_text
from rllm_lightning.lab.words import listed

Verdict = Literal["too few seeds", "told apart", "about equal", "undecided"]
MAX_SENTENCES = 3  # pairs that are each told of; above it a sentence sums up


def verdict_of(pair: PairResult) -> Verdict:
    """What the numbers of a pair allow to say."""
    if min(pair.num_seeds) < MIN_SEEDS:
        return "too few seeds"
    if pair.p_holm <= ALPHA:
        return "told apart"
    if pair.p_equal <= ALPHA:
        return "about equal"
    return "undecided"


def conclusions_of(comparison: Comparison) -> list[str]:
    """A sentence for each pair, those told apart first; with many pairs, a sentence on all of them before."""
    if len(comparison.groups) == 1:
        return ["There is one group only: nothing to compare it with."]
    if not comparison.pairs:
        return [f"Fewer than two groups have a value of {comparison.metric_name}: nothing to compare."]
    order: list[Verdict] = ["told apart", "about equal", "undecided", "too few seeds"]
    verdicts = {id(pair): verdict_of(pair) for pair in comparison.pairs}
    pairs = sorted(comparison.pairs, key=lambda pair: order.index(verdicts[id(pair)]))
    sentences = [_sentence(comparison, pair, verdicts[id(pair)]) for pair in pairs]
    if len(pairs) <= MAX_SENTENCES:
        return sentences
    counts = [f"{n} {verdict}" for verdict in order if (n := [*verdicts.values()].count(verdict))]
    return [f"Of {len(pairs)} pairs: {', '.join(counts)}.", *sentences]


def _sentence(comparison: Comparison, pair: PairResult, verdict: Verdict) -> str:
    ahead, behind = (pair.a, pair.b) if comparison.metric.sign * pair.difference.value >= 0 else (pair.b, pair.a)
    size, seeds = _difference(pair), _seeds(pair)
    if verdict == "too few seeds":
        return f"{ahead} and {behind}: {seeds} are too few to conclude anything; the means differ by {number(abs(pair.difference.value))}."
    if verdict == "told apart":
        text = f"{ahead} is better than {behind} by {size} ({_p(comparison, pair)}; {seeds})."
    elif verdict == "about equal":
        text = (
            f"{ahead} and {behind} are about equal: the difference of {size} is below {comparison.difference:g} either way, "
            f"if there is one ({_p(comparison, pair)}; {seeds})."
        )
    else:
        text = (
            f"{ahead} and {behind} cannot be told apart with {seeds}: difference {size}, {_p(comparison, pair)}."
            f"{_chance(comparison, pair)} {_needed(comparison, pair)}"
        )
    return text + _but(comparison, pair, verdict)


def _difference(pair: PairResult) -> str:
    """Its size, with the interval turned along."""
    value, low, high = pair.difference
    size = Interval(-value, -high, -low) if value < 0 else pair.difference
    return interval(size) + (", the same in all seeds" if math.isnan(low) else "")


def _seeds(pair: PairResult) -> str:
    if pair.seeds:
        return f"{len(pair.seeds)} shared seeds"
    return f"{pair.num_seeds[0]} and {pair.num_seeds[1]} seeds"


def _p(comparison: Comparison, pair: PairResult) -> str:
    if math.isnan(pair.p_holm):
        return "no p value"
    holm = f" after Holm's correction for {len(comparison.pairs)} comparisons" if len(comparison.pairs) > 1 else ""
    return f"p {p_text(pair.p_holm)}{holm}"


def _chance(comparison: Comparison, pair: PairResult) -> str:
    """The trap of looking at one interval among many."""
    _, low, high = pair.difference
    if pair.p <= ALPHA and len(comparison.pairs) > 1 and (low > 0 or high < 0):
        return " The interval leaves out 0, but among so many comparisons that is to be expected now and then."
    return ""


def _needed(comparison: Comparison, pair: PairResult) -> str:
    if math.isnan(pair.difference.low):
        return "Without spread between the seeds nobody can say how many would be needed."
    number = f"More than {MAX_SEEDS:,}" if pair.needed is None else f"About {pair.needed}"
    return f"{number} seeds would be needed to see a difference of {comparison.difference:g} in {POWER:.0%} of the cases."


def _but(comparison: Comparison, pair: PairResult, verdict: Verdict) -> str:
    others = confounds(comparison, pair)
    if not others:
        return ""
    what = "the difference may be due to it" if verdict == "told apart" else "this is not about the compared key alone"
    return f" But they also differ in {listed(others)}: {what}."
