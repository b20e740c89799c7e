"""The tables of a comparison, as text cells: what the terminal, the page and W&B show alike.

To add a column: a pair of its heading and a function in `GROUP_COLUMNS` or `PAIR_COLUMNS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from rllm_lightning.lab.compare.conclusions import verdict_of
from rllm_lightning.lab.compare.results import Comparison, GroupResult, PairResult
from rllm_lightning.lab.compare.statistics import LEVEL, NUM_RESAMPLES
from rllm_lightning.lab.compare.words import chance, count, interval, number, p_text, seed_range
from rllm_lightning.lab.text_table import TextTable
from rllm_lightning.lab.words import NOTHING

NAMES = {"final": "final", "best": "best", "auc": "area under curve"}


def tables_of(comparison: Comparison) -> list[TextTable]:
    """All tables: groups, pairs (where there are two groups), seeds."""
    return [groups_table(comparison), *([pairs_table(comparison)] if comparison.pairs else []), seeds_table(comparison)]


def headline(comparison: Comparison) -> str:
    """What is compared, in one line."""
    seeds = sorted({run.seed for run in comparison.runs})
    return (
        f"{', '.join(comparison.by)}: {len(comparison.groups)} group{'s' * (len(comparison.groups) != 1)}, {len(comparison.runs)} runs, "
        f"seeds {seed_range(seeds)} · {NAMES[comparison.measure]} {comparison.metric_name}"
        + (" (smaller is better)" if comparison.metric.sign < 0 else "")
    )


def methods(comparison: Comparison) -> list[str]:
    """How the numbers were made, a sentence each."""
    return [
        f"Intervals are {LEVEL:.0%} intervals. Means: Student's t. Interquartile means (IQM): ± c_n bootstrap standard errors, "
        f"{NUM_RESAMPLES:,} resamples of the seeds within each group (scipy.stats.bootstrap), c_n calibrated for normal scores.",
        "Differences: t on the differences of shared seeds; Welch's t where too few are shared. p values after Holm's correction.",
        "P(better): the chance that the first is ahead in a run with a further seed, by the noncentral t distribution.",
        f"The threshold is {number(comparison.threshold)}; steps, samples and seconds are medians over seeds, to the first validation "
        "that reached it; seconds are those of training steps.",
    ]


# ------------------------------------------------------------------------------------------------------------------------- cells


def reached(result: GroupResult) -> str:
    """How many seeds reached the threshold."""
    return f"{sum(math.isfinite(reach.step) for reach in result.reaches.values())} of {len(result.reaches)}"


GROUP_COLUMNS: list[tuple[str, Callable[[Comparison, GroupResult], str]]] = [
    ("group", lambda c, r: r.label),
    ("seeds", lambda c, r: str(len(r.summaries[c.measure].values))),
    ("final mean", lambda c, r: interval(r.summaries["final"].mean)),
    ("final IQM", lambda c, r: interval(r.summaries["final"].interquartile_mean)),
    ("best mean", lambda c, r: interval(r.summaries["best"].mean)),
    ("area under curve", lambda c, r: interval(r.summaries["auc"].mean)),
    ("reached", lambda c, r: reached(r)),
    ("steps", lambda c, r: count(r.median_reach().step)),
    ("samples", lambda c, r: count(r.median_reach().samples)),
    ("seconds", lambda c, r: count(r.median_reach().seconds)),
]

PAIR_COLUMNS: list[tuple[str, Callable[[Comparison, PairResult], str]]] = [
    ("pair", lambda c, p: f"{p.a} - {p.b}"),
    ("by", lambda c, p: f"{len(p.seeds)} shared seeds" if p.seeds else "independent"),
    ("difference", lambda c, p: interval(p.difference)),
    ("p (Holm)", lambda c, p: p_text(p.p_holm).removeprefix("= ")),
    ("P(better)", lambda c, p: interval(p.improvement, chance)),
    ("ahead", lambda c, p: f"{p.wins:g} of {p.chances}"),
    ("seeds needed", lambda c, p: NOTHING if p.needed is None else str(p.needed)),
    ("verdict", lambda c, p: verdict_of(p)),
]


# ------------------------------------------------------------------------------------------------------------------------ tables


def groups_table(comparison: Comparison) -> TextTable:
    rows = [[cell(comparison, result) for _, cell in GROUP_COLUMNS] for result in comparison.groups]
    return TextTable(f"Groups (threshold {number(comparison.threshold)})", [name for name, _ in GROUP_COLUMNS], rows)


def pairs_table(comparison: Comparison) -> TextTable:
    rows = [[cell(comparison, pair) for _, cell in PAIR_COLUMNS] for pair in comparison.pairs]
    title = f"Pairs ({NAMES[comparison.measure]}; seeds needed for a difference of {comparison.difference:g})"
    return TextTable(title, [name for name, _ in PAIR_COLUMNS], rows)


def seeds_table(comparison: Comparison) -> TextTable:
    """Every seed's value of the compared measure."""
    values = {id(result): result.summaries[comparison.measure].values for result in comparison.groups}
    seeds = sorted(set().union(*values.values()))
    rows = [[result.label, *(_value(values[id(result)], seed) for seed in seeds)] for result in comparison.groups]
    return TextTable(f"Every seed ({NAMES[comparison.measure]})", ["group", *(f"seed {seed}" for seed in seeds)], rows)


def _value(values: dict[int, float], seed: int) -> str:
    return number(values[seed]) if seed in values else NOTHING
