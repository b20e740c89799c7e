"""Numbers and lists as a comparison writes them, in sentences, tables and figures alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rllm_lightning.lab.compare.statistics import Interval
from rllm_lightning.lab.words import NOTHING, listed


def number(value: float) -> str:
    """Three decimals for shares and scores, fewer for large numbers; `never` where infinite, a dash for none."""
    if math.isnan(value):
        return NOTHING
    if math.isinf(value):
        return "never" if value > 0 else NOTHING
    if value != 0 and abs(value) < 0.01:
        return f"{value:.2g}"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}" if abs(value) < 1000 else f"{value:,.0f}"


def interval(estimate: Interval, show: Callable[[float], str] = number) -> str:
    """`0.850 [0.835, 0.865]`; without bounds the value alone."""
    value, low, high = map(show, estimate)
    return value if math.isnan(estimate.low) else f"{value} [{low}, {high}]"


def count(value: float) -> str:
    """A median number of steps, samples or seconds."""
    return f"{value:,.0f}" if math.isfinite(value) else number(value)


def chance(probability: float) -> str:
    """Never quite 0 or 1."""
    if math.isnan(probability):
        return NOTHING
    return "<0.001" if probability < 0.001 else ">0.999" if probability > 0.999 else f"{probability:.3f}"


def p_text(p: float) -> str:
    """`= 0.034`, `< 0.001`; `–` where there is none."""
    if math.isnan(p):
        return NOTHING
    return "< 0.001" if p < 0.001 else f"= {p:.2g}"


def count_runs(number: int) -> str:
    return "1 run" if number == 1 else f"{number} runs"


def seed_range(seeds: Sequence[int]) -> str:
    """`0-4`, `0, 2, 5`; `none`."""
    if len(seeds) > 2 and list(seeds) == list(range(seeds[0], seeds[-1] + 1)):
        return f"{seeds[0]}-{seeds[-1]}"
    return listed(map(str, seeds)) or "none"
