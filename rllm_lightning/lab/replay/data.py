"""A replay as strict JSON data: every number that is shown, batch by batch, and how it was made."""

from __future__ import annotations

import dataclasses
from typing import Any

from rllm_lightning.lab.replay.results import Estimate, EstimatorResult, GradientReport, PairResult, Replay, TrainingReport
from rllm_lightning.lab.replay.sentences import caveats, conclusions, relation
from rllm_lightning.lab.replay.tables import methods
from rllm_lightning.types import to_plain


def replay_data(replay: Replay) -> dict[str, Any]:
    """Every number is finite or null (not defined; of a noise scale also: beyond measure)."""
    counts = ("num_episodes", "num_failed", "num_groups", "num_single", "num_uniform", "num_trajectories")
    return to_plain(
        {
            "run": str(replay.path),
            "trained_with": replay.own,
            "loss": replay.loss,
            "steps": replay.steps,
            "empty_steps": replay.empty,
            "unusable_steps": replay.unusable,
            **{name: getattr(replay, name) for name in counts},
            "conclusions": conclusions(replay),
            "caveats": caveats(replay),
            "failures": replay.failures,
            "reproduction": dataclasses.asdict(replay.reproduction),
            "estimators": [_estimator(result) for result in replay.estimators],
            "pairs": [_pair(pair) for pair in replay.pairs],
            "gradients": None if replay.gradients is None else _gradients(replay.gradients),
            "training": None if replay.training is None else _training(replay.training),
            "methods": methods(replay),
        }
    )


def _estimator(result: EstimatorResult) -> dict[str, Any]:
    names = ("effective", "zero", "dropped", "sizes")
    return {"label": result.label, **{name: _summary(result.summary(name), getattr(result, name)) for name in names}}


def _pair(pair: PairResult) -> dict[str, Any]:
    names = ("pearson", "spearman", "cosine", "factor", "flips", "one_sided")
    return {
        "a": pair.a,
        "b": pair.b,
        "relation": relation(pair),
        **{name: _summary(pair.mean(name), [getattr(batch, name) for batch in pair.batches]) for name in names},
        "extremes": [dataclasses.asdict(extreme) for extreme in pair.extremes.largest()],
    }


def _summary(estimate: Estimate, by_batch: list[float]) -> dict[str, Any]:
    return {"mean": estimate.value, "error": estimate.error, "by_batch": by_batch}


def _gradients(report: GradientReport) -> dict[str, Any]:
    plain = {f.name: getattr(report, f.name) for f in dataclasses.fields(report) if f.name not in ("values", "errors")}
    numbers = {
        f.name: {"value": getattr(report.values, f.name), "error": getattr(report.errors, f.name)}
        for f in dataclasses.fields(report.values)
    }
    return plain | numbers


def _training(report: TrainingReport) -> dict[str, Any]:
    trained = [dataclasses.asdict(trained) | {"path": str(trained.path)} for trained in report.trained]
    return dataclasses.asdict(report) | {"trained": trained}
