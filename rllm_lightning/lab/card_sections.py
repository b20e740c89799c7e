"""Cards as tables of text, one column a card: what the terminal and the page both show.

    [Card, ...]  ->  [Section(title, rows of (name, one cell a card)), ...]

To show one more number: a row in one of the functions below.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from rllm_lightning.lab.card import Card
from rllm_lightning.lab.exact import COMPANION, PASS_RATES, PROMPTS, SIZES
from rllm_lightning.lab.objectives import IN_WORDS
from rllm_lightning.lab.probes import CANONICAL, CHECKS, ODD_ONE_SIZES

Cell = Callable[[Card], str]


@dataclass(frozen=True)
class Section:
    title: str
    rows: list[tuple[str, Cell]]


def sections() -> list[Section]:
    solved = ", ".join(f"{name} {p:g}" for name, p in PROMPTS.items())
    return [
        Section("What it is", _identity()),
        Section("Advantages, from the best to the worst reward of a group", [(name, _advantages(name)) for name in CANONICAL]),
        Section("The odd one out, as groups grow", _odd_one_out()),
        Section("Properties, as tried (nearly: up to 0.001)", _properties()),
        Section(f"Exact gradient of a batch of three prompts (solved: {solved}), rewards 0 and 1", _gradients("binary")),
        Section("The same with graded rewards", _gradients("graded")),
    ]


def weights_title() -> str:
    rates = f"{PASS_RATES[0]:g} to {PASS_RATES[-1]:g}"
    return f"Weight of a prompt by its pass rate, {rates} (beside a prompt at {COMPANION:g} where that matters)"


def _identity() -> list[tuple[str, Cell]]:
    return [
        ("looks at: declared", lambda card: card.declared_scope),
        ("looks at: seen", lambda card: card.measured_scope or "?"),
        ("needs beside the reward", lambda card: ", ".join(card.needs) or "nothing"),
        ("climbs", lambda card: IN_WORDS[card.objective]),
        ("one advantage for each", lambda card: card.per),
        ("seconds for 1e6 trajectories", lambda card: number(card.seconds_per_million)),
    ]


def _advantages(name: str) -> Cell:
    def cell(card: Card) -> str:
        group = card.behaviour(name)
        if group.problem:
            return group.problem.partition(":")[0]
        if group.advantages is None:
            return "dropped"
        means = [sum(row) / len(row) for row in group.advantages]
        best, worst = (means[group.rewards.index(pick(group.rewards))] for pick in (max, min))
        return f"{best:+.3g}" if best == worst else f"{best:+.3g} … {worst:+.3g}"

    return cell


def _odd_one_out() -> list[tuple[str, Cell]]:
    rows: list[tuple[str, Cell]] = []
    for index, n in enumerate(ODD_ONE_SIZES):
        rows.append((f"only right answer among {n}", lambda card, i=index: number(card.odd_one_out[i].only_right)))  # type: ignore[misc]
        rows.append((f"only wrong answer among {n}", lambda card, i=index: number(card.odd_one_out[i].only_wrong)))  # type: ignore[misc]
    return rows


def _properties() -> list[tuple[str, Cell]]:
    def verdict(name: str) -> Cell:
        return lambda card: card.checks[name].verdict

    left_alone = {True: "yes", False: "no", None: "fails"}
    return [
        *((meaning, verdict(name)) for name, (meaning, _) in CHECKS.items()),
        ("the rewards it is given stay as they are", lambda card: left_alone[card.input_left_alone]),
    ]


def _gradients(kind: str) -> list[tuple[str, Cell]]:
    def value(n: int, prompt: str, field: str) -> Cell:
        def cell(card: Card) -> str:
            row = card.row(kind, n, prompt)
            found = getattr(row, field)
            if field == "bias" and found is not None and found < 1e-12:
                return "0"
            text = f"{found:.6f}" if field == "cosine" and found is not None else number(found)
            return f"{text} ± {row.scale_error:.1g}" if field == "scale" and row.scale_error else text

        return cell

    rows: list[tuple[str, Cell]] = []
    for n in SIZES:
        rows += [
            (f"n={n}: bias relative to the gradient", value(n, "all", "bias")),
            (f"n={n}: cosine to it", value(n, "all", "cosine")),
            *((f"n={n}: scale, {prompt} prompt", value(n, prompt, "scale")) for prompt in PROMPTS),
            (f"n={n}: variance", value(n, "all", "variance")),
            *((f"n={n}: signal to noise, {prompt}", value(n, prompt, "signal_to_noise")) for prompt in (*PROMPTS, "all")),
            (f"n={n}: the same, relative to rloo", value(n, "all", "signal_over_rloo")),
        ]
    return rows


def number(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.4g}"
