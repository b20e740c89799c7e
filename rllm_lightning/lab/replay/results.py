"""What a replay found: for each estimator and each pair of them one number a batch, and their summaries."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rllm_lightning.lab.replay.agreement import Agreement
from rllm_lightning.lab.replay.extremes import Extremes
from rllm_lightning.lab.replay.noise import SignalAndNoise


class Estimate(NamedTuple):
    """A mean and its standard error: NaN where there is none."""

    value: float
    error: float


def over_batches(values: Iterable[float]) -> Estimate:
    """The mean over the batches where the number is defined, and the standard error that their scatter gives it."""
    finite = np.array([value for value in values if math.isfinite(value)])
    if not finite.size:
        return Estimate(math.nan, math.nan)
    error = float(finite.std(ddof=1)) / math.sqrt(finite.size) if finite.size > 1 else math.nan
    return Estimate(float(finite.mean()), error)


@dataclass
class EstimatorResult:
    """One entry a batch in each list. `sizes`: root mean square advantage; `effective`: effective sample size as a share of the
    trajectories; `zero`: share with an advantage of 0; `dropped`: share that it did not weigh at all."""

    label: str
    sizes: list[float] = field(default_factory=list)
    effective: list[float] = field(default_factory=list)
    zero: list[float] = field(default_factory=list)
    dropped: list[float] = field(default_factory=list)

    def summary(self, name: str) -> Estimate:
        """Of one of the lists."""
        return over_batches(getattr(self, name))


@dataclass
class PairResult:
    """Two estimators, `batches[i]` on the i-th batch."""

    a: str
    b: str
    batches: list[Agreement] = field(default_factory=list)
    extremes: Extremes = field(default_factory=Extremes)

    def mean(self, name: str) -> Estimate:
        """Of one of the numbers of `Agreement`."""
        return over_batches(getattr(batch, name) for batch in self.batches)

    def values(self, name: str) -> list[float]:
        """Of the batches where it is defined."""
        return [value for batch in self.batches if math.isfinite(value := getattr(batch, name))]


@dataclass
class Reproduction:
    """Whether the advantages that the run wrote down come out again: over the `num_steps` model calls that hold one, in `num_batches`,
    the largest difference relative to the largest advantage. `problem`: why they could not be computed."""

    num_batches: int = 0
    num_steps: int = 0
    worst: float = 0.0
    problem: str | None = None


@dataclass(frozen=True)
class GradientReport:
    """Gradients at the weights of step `step` on the batches of `steps`, `num_prompts` prompts in all.

    `values` and `errors` are in the order of `labels`. `on_policy`: the rollouts were drawn from these very weights. `drift`: mean KL
    (k3) a token from the sampler to these weights, NaN where the sampler gave no log-probs. `exact_sums`: only the standard errors and
    `signal_cosine` rest on sketches, whose inner products err by `relative_error` of the norms.
    """

    labels: list[str]
    step: int
    steps: list[int]
    on_policy: bool
    drift: float
    num_prompts: int
    num_rows: int
    num_parameters: int
    dimensions: int
    relative_error: float
    exact_sums: bool
    values: SignalAndNoise
    errors: SignalAndNoise

    def estimate(self, name: str, *index: int) -> Estimate:
        """One of the numbers of `SignalAndNoise`, of one estimator or (for cosines) of two."""
        return Estimate(float(getattr(self.values, name)[index]), float(getattr(self.errors, name)[index]))


@dataclass(frozen=True)
class TrainedOn:
    """What an estimator made of a checkpoint and stored batches.

    `path`: its run directory. `off_policy`: the batches that were drawn from another policy; on them `drift` is the largest KL (k3) a
    token from their sampler, `effective` the smallest effective sample size of the weights, as a share of the tokens. `score`: mean pass@1
    of the validation at the end. `moved`: length of the change of all weights. NaN where there is none.
    """

    label: str
    path: Path
    off_policy: list[int]
    score: float
    moved: float
    drift: float
    effective: float


@dataclass(frozen=True)
class TrainingReport:
    """Training on from step `step` with the batches of `steps`. `score`: of the run's own validation at `step` (NaN: it had none);
    `cosines[i, j]`: of the changes of the weights, in the order of `trained`."""

    step: int
    steps: list[int]
    score: float
    trained: list[TrainedOn]
    cosines: np.ndarray


@dataclass
class Replay:
    """A run's batches seen by several estimators.

    `steps` are those with something to train on, `empty` those without, `unusable` those that no estimator can be applied to (and
    why). `failures`: estimators that are left out, and why. `gradients`: None without a checkpoint; `training`: None where nothing
    was trained on.
    """

    path: Path
    own: str
    loss: str
    steps: list[int] = field(default_factory=list)
    empty: list[int] = field(default_factory=list)
    unusable: dict[int, str] = field(default_factory=dict)
    num_episodes: int = 0
    num_failed: int = 0
    num_groups: int = 0
    num_single: int = 0
    num_uniform: int = 0
    num_trajectories: int = 0
    estimators: list[EstimatorResult] = field(default_factory=list)
    pairs: list[PairResult] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    reproduction: Reproduction = field(default_factory=Reproduction)
    remarks: list[str] = field(default_factory=list)
    gradients: GradientReport | None = None
    training: TrainingReport | None = None

    @property
    def labels(self) -> list[str]:
        return [result.label for result in self.estimators]

    def pair(self, a: str, b: str) -> PairResult:
        """Raises KeyError where there is none (in this order)."""
        for pair in self.pairs:
            if (pair.a, pair.b) == (a, b):
                return pair
        raise KeyError(f"no pair {a}, {b}; there are {[(pair.a, pair.b) for pair in self.pairs]}")
