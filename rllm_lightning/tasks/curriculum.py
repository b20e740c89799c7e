"""Training tasks that get harder: levels of tasks, and when to go to the next one.

    loader: curriculum[i]  ->  a batch of tasks of the present level  ->  rollouts  ->  observe(pass rates)  ->  maybe the next level

The tasks of all levels are there from the start, equally many of each, so that a level that cannot be made is known before
training, and position i of an epoch is a task of whatever level is present when its batch is drawn. What is decided depends on the
pass rates alone; all ranks know those of the whole batch. The state is two small values, which go into the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rllm_lightning.schema import check


@dataclass
class CurriculumConfig:
    """When the level rises, and what the levels are."""

    threshold: float = 0.8  # mean pass rate of the window from which on the level rises
    window: int = 64  # latest tasks of the present level that the mean is over; the level stays until there are so many
    attributes: list[str] = field(default_factory=list)  # of the data set's own curriculum, raised together (empty: all)
    num_levels: int | None = None  # of the data set's own curriculum, from the first on (null: all)
    levels: list[dict[str, Any]] = field(default_factory=list)  # parameters of each level, instead of the data set's own curriculum

    def __post_init__(self) -> None:
        own = not (self.attributes or self.num_levels)
        check(
            self,
            (own or not self.levels, "levels: not together with attributes or num_levels, which are of the data set's own curriculum"),
            (len(self.levels) != 1, "levels: one level is no curriculum; give two or more"),
            threshold="[0, 1]",
            window="[1, inf)",
            num_levels="[2, inf)",
        )


class Curriculum(Sequence[dict[str, Any]]):
    """The training tasks of the present level.

    Args:
        levels: the tasks of each level, equally many; their ids are unique over all levels.
        threshold, window: see `CurriculumConfig`.
    """

    def __init__(self, levels: Sequence[Sequence[dict[str, Any]]], threshold: float, window: int):
        sizes = {len(tasks) for tasks in levels}
        ids = [{task["id"] for task in tasks} for tasks in levels]
        if len(sizes) != 1 or len(set().union(*ids)) != sum(map(len, levels)):
            raise ValueError(
                f"a curriculum needs equally many tasks in each level, with different ids; got {[len(level) for level in levels]}"
            )
        self.levels, self.threshold, self.window = levels, threshold, window
        self.level = 0
        self._ids = ids
        self._recent: list[float] = []  # pass rates of tasks of the present level, the latest last

    def __len__(self) -> int:
        return len(self.levels[0])

    def __getitem__(self, index: Any) -> Any:
        return self.levels[self.level][index]

    def observe(self, pass_rates: Mapping[str, float]) -> dict[str, float]:
        """Take note of a batch, and go to the next level where the present one is mastered.

        Args:
            pass_rates: task id -> share of its rollouts that were correct; tasks of other levels or sources do not count.

        Returns:
            `curriculum/level`: that of the batch, from 0; `curriculum/pass_rate`: mean over its window, left out while that is empty.
        """
        self._recent += [rate for task_id, rate in pass_rates.items() if task_id in self._ids[self.level]]
        self._recent = self._recent[-self.window :]
        metrics = {"curriculum/level": float(self.level)}
        if self._recent:
            metrics["curriculum/pass_rate"] = sum(self._recent) / len(self._recent)
        mastered = len(self._recent) == self.window and metrics["curriculum/pass_rate"] >= self.threshold
        if mastered and self.level < len(self.levels) - 1:
            self.level, self._recent = self.level + 1, []
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return {"level": self.level, "recent": list(self._recent)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.level, self._recent = state["level"], list(state["recent"])
