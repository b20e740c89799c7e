"""The tables of a replay, as text cells: what the terminal and the page show alike.

To add a column: a pair of its heading and a function in `ESTIMATOR_COLUMNS`, `PAIR_COLUMNS`, `GRADIENT_COLUMNS` or `TRAINING_COLUMNS`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from rllm_lightning.lab.replay.extremes import Extreme
from rllm_lightning.lab.replay.results import Estimate, EstimatorResult, GradientReport, PairResult, Replay, TrainedOn, TrainingReport
from rllm_lightning.lab.replay.sentences import gradient_cosine
from rllm_lightning.lab.replay.words import estimate, firm, number, percent, steps_text
from rllm_lightning.lab.text_table import TextTable

ESTIMATOR_COLUMNS: list[tuple[str, Callable[[EstimatorResult], str]]] = [
    ("estimator", lambda r: r.label),
    ("effective sample size", lambda r: percent(r.summary("effective").value)),
    ("advantage 0", lambda r: percent(r.summary("zero").value)),
    ("dropped", lambda r: percent(r.summary("dropped").value)),
    ("size (root mean square)", lambda r: estimate(r.summary("sizes"))),
]
PAIR_COLUMNS: list[tuple[str, Callable[[PairResult], str]]] = [
    ("pair", lambda p: f"{p.a} - {p.b}"),
    ("correlation", lambda p: estimate(p.mean("pearson"))),
    ("of ranks", lambda p: estimate(p.mean("spearman"))),
    ("lowest batch", lambda p: number(min(p.values("pearson"), default=float("nan")))),
    ("cosine", lambda p: estimate(p.mean("cosine"))),
    ("factor", lambda p: estimate(p.mean("factor"))),
    ("signs flip", lambda p: percent(p.mean("flips").value)),
    ("only one pushes", lambda p: percent(p.mean("one_sided").value)),
    ("batches", lambda p: str(len(p.values("pearson")))),
]
GRADIENT_COLUMNS: dict[str, tuple[str, Callable[[Estimate], str]]] = {
    "norm": ("norm", estimate),
    "variance of a prompt": ("variance", estimate),
    "signal (norm² without noise)": ("signal", estimate),
    "signal to noise": ("signal_to_noise", estimate),
    "noise scale (prompts)": ("noise_scale", firm),
}


TRAINING_COLUMNS: list[tuple[str, Callable[[TrainedOn], str]]] = [
    ("estimator", lambda t: t.label),
    ("pass@1", lambda t: number(t.score)),
    ("weights moved by", lambda t: number(t.moved)),
    ("off-policy batches", lambda t: str(len(t.off_policy))),
    ("largest KL a token from their sampler", lambda t: number(t.drift)),
    ("smallest effective sample size", lambda t: percent(t.effective)),
    ("run", lambda t: t.path.name),
]


def tables_of(replay: Replay) -> list[TextTable]:
    """All tables but those of single trajectories."""
    rows = [[cell(result) for _, cell in ESTIMATOR_COLUMNS] for result in replay.estimators]
    tables = [TextTable("Estimators", [name for name, _ in ESTIMATOR_COLUMNS], rows)]
    if replay.pairs:
        rows = [[cell(pair) for _, cell in PAIR_COLUMNS] for pair in replay.pairs]
        tables.append(TextTable("Agreement of advantages, mean over batches", [name for name, _ in PAIR_COLUMNS], rows))
    if replay.gradients is not None:
        tables += _gradient_tables(replay, replay.gradients)
    if replay.training is not None:
        tables += _training_tables(replay.training)
    return tables


def _training_tables(report: TrainingReport) -> list[TextTable]:
    rows = [[cell(trained) for _, cell in TRAINING_COLUMNS] for trained in report.trained]
    title = f"Trained on from step {report.step} with the batches of {steps_text(report.steps)}; pass@1 before: {number(report.score)}"
    tables = [TextTable(title, [name for name, _ in TRAINING_COLUMNS], rows)]
    pairs = itertools.combinations(enumerate(report.trained), 2)
    rows = [[f"{a.label} - {b.label}", number(float(report.cosines[i, j]))] for (i, a), (j, b) in pairs]
    return [*tables, TextTable("Agreement of the changes of the weights", ["pair", "cosine"], rows)] if rows else tables


def _gradient_tables(replay: Replay, report: GradientReport) -> list[TextTable]:
    rows = [
        [label, *(show(report.estimate(name, index)) for name, show in GRADIENT_COLUMNS.values())]
        for index, label in enumerate(report.labels)
    ]
    tables = [TextTable(f"Gradients at step {report.step}, {report.num_prompts} prompts", ["estimator", *GRADIENT_COLUMNS], rows)]
    if replay.pairs:
        rows = [
            [f"{p.a} - {p.b}", estimate(gradient_cosine(report, p)), firm(gradient_cosine(report, p, "signal_cosine"))]
            for p in replay.pairs
        ]
        tables.append(TextTable("Agreement of gradients", ["pair", "cosine", "cosine of the signals"], rows))
    return tables


def extremes_table(pair: PairResult, show: Callable[[str], str]) -> TextTable:
    """The trajectories that a pair weighs most differently; `show` makes a long text fit."""
    head = ["step", "task", "rollout", "role", "reward", pair.a, pair.b, "apart, in units of their sizes", "asked", "answered"]
    rows = [_extreme_row(extreme, show) for extreme in pair.extremes.largest()]
    return TextTable(f"Weighed most differently by {pair.a} and {pair.b}", head, rows)


def _extreme_row(extreme: Extreme, show: Callable[[str], str]) -> list[str]:
    numbers = [number(value) for value in (extreme.reward, extreme.a, extreme.b, extreme.difference)]
    names = [show(name) for name in (extreme.task_id, extreme.rollout_idx, extreme.role)]
    return [str(extreme.step), *names, *numbers, show(extreme.prompt), show(extreme.response)]


def methods(replay: Replay) -> list[str]:
    """How the numbers were made, a sentence each."""
    sentences = [
        "A trajectory's advantage is the mean over its tokens. Correlations and shares are means over batches, ± the standard error that "
        "their scatter gives, as if batches were independent.",
        "Effective sample size: (Σ|A|)² / ΣA² as a share of the trajectories. Factor: what the second is to be multiplied by to come "
        "closest to the first.",
        "Apart: difference of the advantages, each in units of its root mean square in the batch.",
        f"Every role goes through the named estimator; the loss is the run's for all: {replay.loss}.",
    ]
    if (report := replay.gradients) is not None:
        sentences += [
            f"Gradients: the whole batch as one minibatch, in the weights' own precision, {report.num_parameters:,} parameters, KL and "
            "entropy terms of the run included, a value head's loss not. Errors are the jackknife's over prompts, on inner products "
            + ("without rounding." if report.relative_error == 0 else f"of sketches (± {percent(report.relative_error)} of the norms)."),
            "Signal: the mean inner product of the gradients of disjoint halves of the prompts, over all ways to halve. Noise scale: the "
            "number of prompts at which noise and signal are equal.",
        ]
    return sentences
