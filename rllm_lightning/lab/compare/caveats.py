"""What would mislead a reader of a comparison, in plain words, the gravest first.

To add one: a function `Comparison -> iterator of sentences` in `CAVEATS`. `confounds` is what two groups differ in beside the compared
keys; a conclusion about the two repeats it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from rllm_lightning.lab.compare.groups import NOT_SET, Group
from rllm_lightning.lab.compare.measures import MEASURES
from rllm_lightning.lab.compare.results import Comparison, PairResult
from rllm_lightning.lab.compare.runs import SOFTWARE, Run
from rllm_lightning.lab.compare.statistics import is_constant
from rllm_lightning.lab.compare.words import count_runs, number, seed_range
from rllm_lightning.lab.words import MAX_SHOWN, listed

MIN_SEEDS = 3  # below it nothing is concluded
NEAR_END = 0.06  # of a share: as measured by `coverage` for Beta(40, 2), whose mean is 0.952

# keys, and sections, that say where a run is written and not what it computes; a plugin shows in the names that it brings
HARMLESS = (
    "seed",
    "run_root",
    "plugins",
    "wandb",
    "rllm.episode_logging",
    *(f"rllm.trainer.{key}" for key in ("experiment_name", "project_name", "logger", "save_freq", "keep_checkpoints", "resume")),
)
# keys, and sections, that shape what a run answers before its first update
BEFORE_TRAINING = ("data", "lightning", "model", "rllm.rollout.n_val", "rllm.workflow", "rollout_engine", "sampling", "task", "warm_start")
WEIGHTY = ("rllm.algorithm", "training")  # sections whose keys are told first
LOSS = "the loss"
QUESTIONS = "the validation questions"


def caveats_of(comparison: Comparison, num_left_out: int = 0) -> list[str]:
    """Every caveat. `num_left_out`: runs that were not done, and that the user did not want."""
    found = [sentence for caveat in CAVEATS for sentence in caveat(comparison)]
    if num_left_out:
        found.insert(0, f"{count_runs(num_left_out)} left out that did not come to the end: those that fail may be those that do badly")
    return found


# ----------------------------------------------------------------------------------------------------------- runs that lack something


def _without_value(comparison: Comparison) -> Iterator[str]:
    for result in comparison.groups:
        lacking = [m for m in result.group.members if not math.isfinite(MEASURES[comparison.measure](m.curve))]
        if lacking:
            names = listed(member.run.path.name for member in lacking)
            what = f"{comparison.measure} value of {comparison.metric_name}"
            yield f"{result.label}: {count_runs(len(lacking))} without a {what}, not counted: {names}"


def _not_done(comparison: Comparison) -> Iterator[str]:
    for result in comparison.groups:
        members = result.group.members
        for status in sorted({run.status for run in result.group.runs} - {"done"}):
            ended = [f"{m.run.path.name} (step {m.run.last_step})" for m in members if m.run.status == status]
            meaning = " (under way, or killed)" if status == "running" else ""
            yield (
                f"{result.label}: {len(ended)} of {count_runs(len(members))} {status}{meaning}, counted with the last value "
                f"(--done-only leaves such runs out): {listed(ended)}"
            )


def _few_seeds(comparison: Comparison) -> Iterator[str]:
    few = [f"{r.label} ({len(r.summaries[comparison.measure].values)})" for r in comparison.groups if _num_seeds(comparison, r) < MIN_SEEDS]
    if few:
        yield f"fewer than {MIN_SEEDS} seeds, too few to conclude anything from: {listed(few)}"


def _num_seeds(comparison: Comparison, result: Any) -> int:
    return len(result.summaries[comparison.measure].values)


def _one_seed_many_runs(comparison: Comparison) -> Iterator[str]:
    for result in comparison.groups:
        if repeated := [str(seed) for seed, curves in result.group.curves().items() if len(curves) > 1]:
            yield f"{result.label}: several runs of one seed, counted as one by their mean: seed {listed(repeated)}"


def _no_spread(comparison: Comparison) -> Iterator[str]:
    for result in comparison.groups:
        values = np.array([*result.summaries[comparison.measure].values.values()])
        if len(values) > 1 and is_constant(values):
            yield f"{result.label}: all {len(values)} seeds came to {number(values[0])}; without spread there is no interval"


def _end_of_scale(comparison: Comparison) -> Iterator[str]:
    means = {result.label: result.summaries[comparison.measure].mean for result in comparison.groups}
    near = [label for label, mean in means.items() if math.isfinite(mean.low) and min(mean.value, 1 - mean.value) < NEAR_END]
    if near and comparison.metric.is_share:
        yield f"close to the end of the scale, where seeds are skewed and the interval of a mean holds some 92% of the time: {listed(near)}"


# ------------------------------------------------------------------------------------------------------------- unequal conditions


def _other_keys(comparison: Comparison) -> Iterator[str]:
    differing = differing_keys(comparison.runs, comparison.by)
    shown = [f"{key} ({_by_group(comparison, key)})" for key in differing[:MAX_SHOWN]]
    if differing:
        more = f"; and {len(differing) - MAX_SHOWN} more" if len(differing) > MAX_SHOWN else ""
        yield f"the configs differ in more than {listed(comparison.by)}: {'; '.join(shown)}{more}"


def _by_group(comparison: Comparison, key: str) -> str:
    values = {result.label: _values(result.group.runs, key) for result in comparison.groups}
    if len({frozenset(found) for found in values.values()}) == 1:
        return f"within every group: {listed(sorted(next(iter(values.values()))))}"
    return listed((f"{label}: {' or '.join(sorted(found))}" for label, found in values.items()), "; ")


def _loss(comparison: Comparison) -> Iterator[str]:
    losses = {result.label: _losses(result.group) for result in comparison.groups}
    if len(set().union(*losses.values())) > 1 and not any(key.startswith("rllm.algorithm.loss_fn") for key in comparison.by):
        named = listed(f"{label}: {' or '.join(sorted(found)) or 'unknown'}" for label, found in losses.items())
        yield f"the loss differs ({named}), so a difference may be the loss's; fix rllm.algorithm.loss_fn in all runs"


def _validation_questions(comparison: Comparison) -> Iterator[str]:
    pairs = [pair for pair in comparison.pairs if questions_differ(comparison, pair)]
    if pairs:
        yield f"not validated on the same questions: {listed(f'{pair.a} and {pair.b}' for pair in pairs)}"
    sources = {", ".join(comparison.metric.keys(run)) for run in comparison.runs} - {""}
    if len(sources) > 1:
        yield f"{comparison.metric_name} does not mean the same in all runs: {listed(sorted(sources), '; ')}"


def _unequal_seeds(comparison: Comparison) -> Iterator[str]:
    seeds = {result.label: list(result.summaries[comparison.measure].values) for result in comparison.groups}
    if len({tuple(found) for found in seeds.values()}) > 1:
        yield f"unequal seeds: {listed(f'{label} has {seed_range(found)}' for label, found in seeds.items())}"


def _unequal_starts(comparison: Comparison) -> Iterator[str]:
    keys = (*comparison.by, *differing_keys(comparison.runs, comparison.by))
    if any(_is_below(key, section) for key in keys for section in BEFORE_TRAINING):
        return
    starts = {seed: _values_before_training(comparison, seed) for seed in sorted({run.seed for run in comparison.runs})}
    if apart := [f"{seed} ({listed(map(number, sorted(found)))})" for seed, found in starts.items() if len(found) > 1]:
        yield (
            f"runs of one seed that do not begin alike, by {comparison.metric_name} before training: seed {listed(apart)}. They started "
            "from other weights (a warm start made on another machine, or with another number of threads), so these pairs share less luck"
        )


def _values_before_training(comparison: Comparison, seed: int) -> set[float]:
    curves = [curve for result in comparison.groups for curve in result.group.curves().get(seed, [])]
    return {float(curve.values[0]) for curve in curves if curve.steps.size and curve.steps[0] == 0 and math.isfinite(curve.values[0])}


def _unequal_steps(comparison: Comparison) -> Iterator[str]:
    steps = {
        result.label: [member.curve.steps.tolist() for member in result.group.members if member.curve.steps.size]
        for result in comparison.groups
    }
    ends = {label: sorted({found[-1] for found in lists}) for label, lists in steps.items() if lists}
    if len(set().union(*ends.values())) > 1:
        named = listed(f"{label} at {' or '.join(map(str, found))}" for label, found in ends.items())
        yield f"unequal steps, last measured: {named}"
    elif len({tuple(found) for lists in steps.values() for found in lists}) > 1:
        yield "not all runs were measured at the same steps: best, area under the curve and steps to the threshold depend on that"


def _software(comparison: Comparison) -> Iterator[str]:
    versions = {name: {run.software[name] for run in comparison.runs if name in run.software} for name in (*SOFTWARE, "commit")}
    if differing := [f"{name} {listed(sorted(found))}" for name, found in versions.items() if len(found) > 1]:
        yield f"made by different software: {'; '.join(differing)}"


def _best(comparison: Comparison) -> Iterator[str]:
    if comparison.measure == "best":
        yield "the best of many validations is the luckiest, too: it favours noisy curves, and those measured more often"


CAVEATS: tuple[Callable[[Comparison], Iterator[str]], ...] = (
    _few_seeds,
    _not_done,
    _without_value,
    _loss,
    _other_keys,
    _validation_questions,
    _unequal_seeds,
    _unequal_starts,
    _unequal_steps,
    _one_seed_many_runs,
    _no_spread,
    _end_of_scale,
    _best,
    _software,
)


# ------------------------------------------------------------------------------------------------------------------ differences


def differing_keys(runs: Sequence[Run], by: Sequence[str]) -> list[str]:
    """The keys in which runs differ, beside the compared ones and those that cannot matter; those of `WEIGHTY` first.

    Where a mapping is empty in some runs and has keys in others, those keys say it.
    """
    known = list(dict.fromkeys(key for run in runs for key in run.settings))
    mappings = {".".join(parts[:end]) for parts in (key.split(".") for key in known) for end in range(1, len(parts))}
    keys = [key for key in known if len(_values(runs, key)) > 1 and not (key in mappings and _values(runs, key) == {"{}", NOT_SET})]
    keys = [key for key in keys if not any(_is_below(key, other) for other in (*by, *HARMLESS))]
    return sorted(keys, key=lambda key: not any(_is_below(key, section) for section in WEIGHTY))


def confounds(comparison: Comparison, pair: PairResult) -> list[str]:
    """What two groups differ in beside the compared keys: keys of the config, the loss, the questions."""
    a, b = (comparison.group(label).group for label in (pair.a, pair.b))
    keys = [key for key in differing_keys([*a.runs, *b.runs], comparison.by) if _values(a.runs, key) != _values(b.runs, key)]
    by_loss = any(key.startswith("rllm.algorithm.loss_fn") for key in comparison.by)
    loss = [LOSS] if _losses(a) != _losses(b) and not by_loss else []
    return loss + keys + ([QUESTIONS] if questions_differ(comparison, pair) else [])


def questions_differ(comparison: Comparison, pair: PairResult) -> bool:
    """Whether two groups were asked different questions: seed by seed where they are paired, else all in all; unknown ones do not count."""
    a, b = (comparison.group(label).group for label in (pair.a, pair.b))
    if not pair.seeds:
        return len(_questions([*a.runs, *b.runs])) > 1
    return any(len(_questions([run for run in [*a.runs, *b.runs] if run.seed == seed])) > 1 for seed in pair.seeds)


def _questions(runs: Iterable[Run]) -> set[str]:
    return {run.questions for run in runs if run.questions is not None}


def _losses(group: Group) -> set[str]:
    return {run.loss for run in group.runs if run.loss is not None}


def _values(runs: Iterable[Run], key: str) -> set[str]:
    return {run.settings.get(key, NOT_SET) for run in runs}


def _is_below(key: str, other: str) -> bool:
    return key == other or key.startswith(f"{other}.")
