"""Numbers and lists as a replay writes them, in sentences and tables alike."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rllm_lightning.lab.replay.results import Estimate
from rllm_lightning.lab.words import NOTHING, listed


def number(value: float) -> str:
    """Three decimals around one, three digits elsewhere; a dash where there is none."""
    if math.isnan(value):
        return NOTHING
    if math.isinf(value):
        return "beyond measure"
    if value == 0 or 0.01 <= abs(value) < 10:
        return f"{value:.3f}"
    return f"{value:.2g}" if abs(value) < 0.01 else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}"


def estimate(found: Estimate) -> str:
    """`0.988 ± 0.001`; without an error the value alone. An error that is but rounding is 0."""
    if not math.isfinite(found.error):
        return number(found.value)
    return f"{number(found.value)} ± {number(found.error) if found.error > 1e-9 * abs(found.value) else '0'}"


def firm(found: Estimate) -> str:
    """An estimate that is not worth showing without its error."""
    return estimate(found) if math.isfinite(found.error) else "beyond measure" if math.isfinite(found.value) else number(found.value)


def percent(value: float) -> str:
    """`2.1%`; never 0.0% for what is above 0, nor 100.0% for what is below 1."""
    if math.isnan(value):
        return NOTHING
    if 0 < value < 0.0005:
        return "<0.1%"
    return ">99.9%" if 0.9995 <= value < 1 else f"{100 * value:.1f}%"


def steps_text(steps: Sequence[int]) -> str:
    """`step 3`, `steps 1-15`, `steps 1-4, 7`."""
    ranges: list[list[int]] = []
    for step in sorted(steps):
        if ranges and step == ranges[-1][1] + 1:
            ranges[-1][1] = step
        else:
            ranges.append([step, step])
    return f"step{'s' * (len(steps) != 1)} " + listed(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def visible(text: str, max_characters: int) -> str:
    """`text` on one line, without the characters that could steer a terminal, cut to `max_characters`."""
    line = "".join(c if c.isprintable() else "·" for c in " ".join(text.split()))
    return line if len(line) <= max_characters else f"{line[: max_characters - 1]}…"
