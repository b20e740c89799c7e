"""Runs by the values of the compared keys, and seeds that two groups share.

Two runs of a group with the same seed are no two samples: their mean is the seed's value.
"""

from __future__ import annotations

import difflib
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rllm_lightning.lab.compare.measures import MEASURES, NEVER, Curve, Metric, Reach, curve_of, reach
from rllm_lightning.lab.compare.runs import Run

NOT_SET = "(not set)"
MIN_SHARED = 3  # seeds that two groups must share to be compared seed by seed


@dataclass(frozen=True)
class Member:
    run: Run
    curve: Curve


@dataclass(frozen=True)
class Group:
    """The runs of one value of every compared key. `label` is that value, with its key where several keys are compared."""

    label: str
    settings: dict[str, Any]
    members: list[Member]

    @property
    def runs(self) -> list[Run]:
        return [member.run for member in self.members]

    def values(self, measure: str) -> dict[int, float]:
        """Seed -> its finite value, in the order of the seeds; a seed all of whose runs lack it is left out."""
        values = {seed: [MEASURES[measure](curve) for curve in curves] for seed, curves in self.curves().items()}
        finite = {seed: [value for value in found if math.isfinite(value)] for seed, found in values.items()}
        return {seed: math.fsum(found) / len(found) for seed, found in finite.items() if found}

    def reaches(self, threshold: float) -> dict[int, Reach]:
        """Seed -> what it took to reach the threshold, for all seeds that have a curve; of several runs the mean, or `NEVER`."""
        found = {seed: [reach(c, threshold) for c in curves if c.values.size] for seed, curves in self.curves().items()}
        return {seed: _mean_reach(reaches) for seed, reaches in found.items() if reaches}

    def curves(self) -> dict[int, list[Curve]]:
        curves: dict[int, list[Curve]] = defaultdict(list)
        for member in self.members:
            curves[member.run.seed].append(member.curve)
        return dict(sorted(curves.items()))


def _mean_reach(reaches: Sequence[Reach]) -> Reach:
    if NEVER in reaches:
        return NEVER
    return Reach(*(math.fsum(getattr(r, part) for r in reaches) / len(reaches) for part in ("step", "samples", "seconds")))


def make_groups(runs: Sequence[Run], by: Sequence[str], metric: Metric) -> list[Group]:
    """Runs grouped by the values of the keys `by`, in the order of the labels.

    Raises:
        ValueError: a key is in no run's config, or is the seed, which is what is averaged over.
    """
    for key in by:
        _check_key(key, runs)
    members: dict[str, list[Member]] = defaultdict(list)
    settings: dict[str, dict[str, Any]] = {}
    for run in runs:
        values = {key: value_of(run.config, key) for key in by}
        name = json.dumps(values)
        settings[name] = values
        members[name].append(Member(run, curve_of(run, metric)))
    groups = [Group(_label(settings[name]), settings[name], members[name]) for name in members]
    return sorted(groups, key=lambda group: group.label)


def _check_key(key: str, runs: Sequence[Run]) -> None:
    if key == "seed":
        raise ValueError("seed: a comparison is over seeds; group by what you want to compare")
    if all(value_of(run.config, key) == NOT_SET for run in runs):
        known = sorted({known for run in runs for known in run.settings})
        near = difflib.get_close_matches(key, known, n=1)
        raise ValueError(f"{key}: no run has this key" + (f"; did you mean {near[0]}?" if near else ""))


def value_of(config: Mapping[str, Any], key: str) -> Any:
    """The value under a dotted key; `NOT_SET` where there is none."""
    value: Any = config
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return NOT_SET
        value = value[part]
    return value


def show(value: Any) -> str:
    """A configured value as text."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _label(settings: Mapping[str, Any]) -> str:
    if len(settings) == 1:
        return show(*settings.values())
    short = {key: key.rpartition(".")[2] for key in settings}
    names = short if len(set(short.values())) == len(short) else {key: key for key in settings}
    return ", ".join(f"{names[key]}={show(value)}" for key, value in settings.items())


def shared_seeds(a: Mapping[int, float], b: Mapping[int, float]) -> list[int]:
    """The seeds by which two groups are paired: those of both, if they are at least `MIN_SHARED` and at least half of either group.

    Otherwise none: then more is lost by leaving seeds out than pairing gains, and the groups are compared as independent.
    """
    shared = sorted(a.keys() & b.keys())
    return shared if len(shared) >= MIN_SHARED and 2 * len(shared) >= max(len(a), len(b)) else []
