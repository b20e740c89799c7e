"""Scorer `composite`: several rewards at once, each of them kept for estimators that want it (`gdpo`).

task.scorer=composite
task.scorer_args.parts=[{scorer: numeric, extract: last_number}, {name: format, scorer: regex, weight: 0.1, args: {pattern: "..."}}]
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rllm_lightning import schema
from rllm_lightning.registry import register_scorer
from rllm_lightning.tasks.scorers import make_reward
from rllm_lightning.tasks.scoring import Extract
from rllm_lightning.types import RewardOutput
from rllm_lightning.workflows.reward import RewardFunction, score


@dataclass
class PartConfig:
    """One entry of `parts`."""

    scorer: str = ""  # registered name
    args: dict[str, Any] = field(default_factory=dict)  # its keywords
    name: str | None = None  # of the component (null: the scorer's)
    weight: float = 1.0  # in the sum
    extract: Extract | None = None  # where the part looks for its answer (null: as task.extract says)

    def __post_init__(self) -> None:
        schema.check(
            self,
            (self.scorer not in ("", "composite"), "scorer: must be given, and not composite"),
            (math.isfinite(self.weight), "weight: must be finite"),
        )


@dataclass(frozen=True)
class Part:
    name: str
    weight: float
    reward: RewardFunction


@dataclass(frozen=True)
class CompositeReward:
    """The weighted sum of the parts' rewards. The first part decides about `is_correct`.

    The unweighted rewards are in `metadata["rewards"]`, and so in the trajectory's `info["rewards"]`.
    """

    provides: ClassVar[frozenset[str]] = frozenset({"reward_components"})
    parts: tuple[Part, ...]

    async def __call__(self, task: dict[str, Any], response: str) -> RewardOutput:
        outputs = {part.name: await score(part.reward, task, response) for part in self.parts}
        first = outputs[self.parts[0].name]
        metadata = {key: value for output in outputs.values() for key, value in output.metadata.items()}
        metadata["rewards"] = {name: output.reward for name, output in outputs.items()}
        return RewardOutput(
            sum(part.weight * outputs[part.name].reward for part in self.parts),
            is_correct=first.reward > 0 if first.is_correct is None else first.is_correct,
            metadata=metadata,
        )

    @property
    def extract(self) -> Extract | None:
        """Where the first part looks for the answer: what a solution is written for."""
        return getattr(self.parts[0].reward, "extract", None)

    @property
    def checks_every_task(self) -> bool:
        return getattr(self.parts[0].reward, "checks_every_task", False)

    def check(self, task: dict[str, Any], solution: str) -> None:
        if hasattr(self.parts[0].reward, "check"):
            self.parts[0].reward.check(task, solution)


@register_scorer("composite")
def composite(extract: Extract, *, parts: list[dict[str, Any]]) -> RewardFunction:
    """The weighted sum of several scorers, `{scorer, args, name, weight, extract}` each; the first one says what is correct."""
    if not parts:
        raise ValueError("parts: give one or more, such as {scorer: exact}")
    made = []
    for index, given in enumerate(parts):
        at, problems = f"task.scorer_args.parts.{index}", list[str]()
        part = schema.build(PartConfig, given, problems, f"{at}.")
        if problems:
            raise ValueError("\n".join(problems))
        reward = make_reward(part.scorer, part.args, part.extract or extract, f"{at}.scorer", f"{at}.args")
        made.append(Part(part.name or part.scorer, part.weight, reward))
    names = [part.name for part in made]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"parts: two are called {twice!r}; give each a name of its own")
    return CompositeReward(tuple(made))
