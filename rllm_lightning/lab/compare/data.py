"""A comparison as strict JSON data: every number that is shown, every run behind it, and how it was made."""

from __future__ import annotations

from typing import Any

from rllm_lightning.lab.compare.conclusions import verdict_of
from rllm_lightning.lab.compare.groups import Member
from rllm_lightning.lab.compare.measures import MEASURES
from rllm_lightning.lab.compare.results import Comparison, GroupResult, PairResult, Summary
from rllm_lightning.lab.compare.statistics import ALPHA, LEVEL, NUM_RESAMPLES, POWER
from rllm_lightning.lab.compare.tables import methods
from rllm_lightning.types import to_plain


def comparison_data(comparison: Comparison) -> dict[str, Any]:
    """Every number is finite or null; a null cost in a seed's `reach`: the threshold was never reached, or the cost not counted."""
    return to_plain(
        {
            "by": comparison.by,
            "metric": comparison.metric.name,
            "smaller_is_better": comparison.metric.sign < 0,
            "measure": comparison.measure,
            "threshold": comparison.threshold,
            "difference_of_interest": comparison.difference,
            "level": LEVEL,
            "alpha": round(ALPHA, 12),
            "power": POWER,
            "num_resamples": NUM_RESAMPLES,
            "conclusions": comparison.conclusions,
            "caveats": comparison.caveats,
            "groups": [_group(result) for result in comparison.groups],
            "pairs": [_pair(pair) for pair in comparison.pairs],
            "methods": methods(comparison),
        }
    )


def _group(result: GroupResult) -> dict[str, Any]:
    return {
        "label": result.label,
        "settings": result.group.settings,
        **{name: _summary(summary) for name, summary in result.summaries.items()},
        "reach": result.reaches,
        "median_reach": result.median_reach(),
        "runs": [_run(member) for member in result.group.members],
    }


def _summary(summary: Summary) -> dict[str, Any]:
    return {
        "values": summary.values,
        "mean": summary.mean._asdict(),
        "interquartile_mean": summary.interquartile_mean._asdict(),
    }


def _run(member: Member) -> dict[str, Any]:
    run, curve = member.run, member.curve
    return {
        "path": str(run.path),
        "seed": run.seed,
        "status": run.status,
        "loss_fn": run.loss,
        "software": run.software,
        **{name: measure(curve) for name, measure in MEASURES.items()},
        "curve": {"step": curve.steps, "value": curve.values, "samples": curve.samples, "seconds": curve.seconds},
    }


def _pair(pair: PairResult) -> dict[str, Any]:
    return {
        "a": pair.a,
        "b": pair.b,
        "paired_by_seeds": pair.seeds,
        "num_seeds": pair.num_seeds,
        "difference": pair.difference._asdict(),
        "p": pair.p,
        "p_holm": pair.p_holm,
        "p_equal_holm": pair.p_equal,
        "probability_of_improvement": pair.improvement._asdict(),
        "ahead": pair.wins,
        "chances": pair.chances,
        "seeds_needed": pair.needed,
        "verdict": verdict_of(pair),
    }
