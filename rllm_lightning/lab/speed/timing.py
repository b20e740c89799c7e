"""Variants of one job, timed in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Variant:
    """One way to do the job. `run(round)` does it once and returns how much it did (tokens, trajectories)."""

    name: str
    run: Callable[[int], float]


@dataclass
class Timing:
    """What one variant took: seconds and work of each round."""

    seconds: list[float] = field(default_factory=list)
    work: list[float] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def rate(self) -> float:
        """Work a second, the median over the rounds."""
        return statistics.median(work / seconds for work, seconds in zip(self.work, self.seconds, strict=True))


def take_turns(variants: Sequence[Variant], repeats: int) -> dict[str, Timing]:
    """Each variant once to warm up, then `repeats` rounds in which each runs once: A B A B, so that the machine's drift meets all."""
    for variant in variants:
        variant.run(0)
    timings = {variant.name: Timing() for variant in variants}
    assert len(timings) == len(variants), "names are distinct"
    for number in range(1, repeats + 1):
        for variant in variants:
            start = time.perf_counter()
            work = variant.run(number)
            timings[variant.name].seconds.append(time.perf_counter() - start)
            timings[variant.name].work.append(work)
    return timings
