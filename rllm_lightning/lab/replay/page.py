"""A replay as one self-contained page: conclusions and caveats, tables, curves by step, and trajectories with their text."""

from __future__ import annotations

from collections.abc import Iterable

from rllm_lightning.lab.page import items, page, table
from rllm_lightning.lab.replay.results import Replay
from rllm_lightning.lab.replay.sentences import caveats, conclusions, headline
from rllm_lightning.lab.replay.tables import extremes_table, methods, tables_of
from rllm_lightning.tracking.chart import line_chart

MAX_LINES = 8  # in one chart; more could not be told apart


def replay_page(replay: Replay) -> str:
    """The page as text."""
    body = [
        f"<h2>What comes out</h2>{items(conclusions(replay))}",
        f"<h2>What to beware of</h2>{items(caveats(replay) or ['nothing was found'], 'caveats')}",
        *map(table, tables_of(replay)),
        f'<h2>Step by step</h2><div class="charts">{"".join(charts_of(replay))}</div>',
        f"<h2>How the numbers were made</h2>{items(methods(replay), 'methods')}",
        *(table(extremes_table(pair, str)) for pair in replay.pairs if pair.extremes.largest()),
    ]
    return page(headline(replay), body)


def charts_of(replay: Replay) -> list[str]:
    """Each number by step, a line a pair or an estimator."""

    def by_step(values: Iterable[float]) -> list[tuple[float, float]]:
        return list(zip(map(float, replay.steps), values, strict=True))

    pairs = replay.pairs[:MAX_LINES]
    charts = {
        "Correlation of advantages": {f"{p.a} - {p.b}": by_step(batch.pearson for batch in p.batches) for p in pairs},
        "Share of trajectories whose sign flips": {f"{p.a} - {p.b}": by_step(batch.flips for batch in p.batches) for p in pairs},
        "Effective sample size, share": {r.label: by_step(r.effective) for r in replay.estimators[:MAX_LINES]},
        "Share with an advantage of 0": {r.label: by_step(r.zero) for r in replay.estimators[:MAX_LINES]},
    }
    return [line_chart(title, lines) for title, lines in charts.items() if lines]
