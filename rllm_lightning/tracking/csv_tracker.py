"""The tracker `csv`: `metrics.csv` in the run directory."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_only

from rllm_lightning.tracking.metrics_table import MetricsTable, as_numbers
from rllm_lightning.tracking.tracker import Tracker


class CSVTracker(Tracker):
    """One row a step; a resumed run continues the table."""

    @cached_property
    def table(self) -> MetricsTable:
        return MetricsTable(self.run.metrics_csv)

    @rank_zero_only
    def begin(self, step: int, total_steps: int | None = None) -> None:
        self.table.truncate_after(step)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        assert step is not None, "metrics are logged with their step"
        self.table.append(step, as_numbers(metrics))
