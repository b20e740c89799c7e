"""The page `docs/estimators.md`, generated from the registry: `python -m rllm_lightning.lab.catalogue` writes it again.

A test compares the page with what this module generates, so that the page cannot lag behind the code.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rllm_lightning.algorithms.estimator import Estimator
from rllm_lightning.algorithms.rl_algo import KNOBS
from rllm_lightning.lab.objectives import IN_WORDS
from rllm_lightning.registry import ESTIMATORS

PAGE = Path(__file__).parents[2] / "docs" / "estimators.md"

INTRODUCTION = """\
# Advantage estimators

Generated from the registry by `python -m rllm_lightning.lab.catalogue`; do not edit.

Choose one with `rllm.algorithm.adv_estimator=NAME` and set its keywords under `rllm.algorithm.estimator_kwargs`. What one does, and
whether it is biased, noisy or blows up, is on its card: `python experiments/card.py NAME` ([how to read it](card.md)).

*Scope* is the smallest set of trajectories it must see at once: a `role-batch` estimator gets all groups of the role, from all ranks.
*Needs* is what it takes beside one reward a trajectory. *Climbs* is the objective that its bias is measured against.
"""

PRESETS = """
## Presets

Well-known libraries mean different things by "GRPO". Each of these names stands for choices of the knobs of `rl_algo.normalise`
({knobs}), every one of which can be overridden in `estimator_kwargs`. The last columns are computed: the first advantage of a group
with rewards 1, 0, 0, 0, and that of a group with the one reward 0.7.
"""


def estimators_page() -> str:
    """The page's text: the estimators of this library, whatever plugins are loaded."""
    entries = [(name, entry) for name, entry in ESTIMATORS.items() if entry.function.__module__.startswith("rllm_lightning.")]
    presets = [(name, entry) for name, entry in entries if entry.preset is not None]
    return "\n".join(
        [
            INTRODUCTION,
            *_table(["name", "advantage", "scope", "per", "needs", "climbs", "keywords", "source"], [_row(*pair) for pair in entries]),
            PRESETS.format(knobs=", ".join(f"`{knob}`" for knob in KNOBS)),
            *_table(["name", "knobs", "A of 1, 0, 0, 0", "A of 0.7 alone"], [_preset_row(*pair) for pair in presets]),
            "",
        ]
    )


def _row(name: str, entry: Estimator) -> list[str]:
    takes_knobs = set(KNOBS) <= set(entry.kwargs)
    own = [f"`{key}`" for key in entry.kwargs if not (takes_knobs and key in (*KNOBS, "episilon"))]
    keywords = ", ".join([*own, "[knobs](#presets)"] if takes_knobs else own)
    needs = ", ".join(f"`{need}`" for need in entry.needs)
    return [f"`{name}`", f"`{entry.formula}`", entry.scope, entry.per, needs, IN_WORDS[entry.objective], keywords, entry.source]


def _preset_row(name: str, entry: Estimator) -> list[str]:
    knobs = ", ".join(f"`{key}={value}`" for key, value in (entry.preset or {}).items()) or "the defaults"
    return [f"`{name}`", knobs, _first_advantage(entry, [1, 0, 0, 0]), _first_advantage(entry, [0.7])]


def _first_advantage(entry: Estimator, rewards: list[float]) -> str:
    advantages: Any = entry([np.array(rewards)])[0][0]
    return "dropped" if advantages is None else f"{advantages[0]:.6f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(estimators_page(), encoding="utf-8")
