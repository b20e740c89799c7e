"""What an advantage estimator is, and its registration.

An estimator is a function of the rewards of one role:

    rewards: list of 1-D arrays, one a TrajectoryGroup   --estimator-->   (advantages, returns), two lists aligned with it

Everything else it wants, it asks for by naming a parameter (see `needs.py` for the names); the remaining parameters are its
own keywords, which users set under `rllm.algorithm.estimator_kwargs`. To add one, in a module of your own named in `plugins`:

    @register_rllm_adv_estimator("x")
    def x(rewards, alpha=0.5, **kwargs): ...

and choose it with `rllm.algorithm.adv_estimator=x`. Functions written for rLLM, `(rewards, **kwargs)` or
`(rewards, algorithm_config, **kwargs)`, run unchanged.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from rllm_lightning.algorithms.needs import NEEDS
from rllm_lightning.config import rLLMAdvantageEstimator
from rllm_lightning.registry import ESTIMATORS as RLLM_ADV_ESTIMATOR_REGISTRY

Scope = Literal["trajectory", "group", "role-batch"]
Per = Literal["trajectory", "step", "token"]
Objective = Literal["mean_reward", "pass_at_k", "pass_at_n", "log_likelihood", "teacher"]
F = TypeVar("F", bound=Callable[..., Any])

# What the caller hands to every estimator that names it.
CONTEXT = ("norm_adv_by_std_in_grpo", "algorithm_config", "traj_groups")


@dataclass(frozen=True)
class Estimator:
    """A registered estimator. Calling it calls its function.

    Attributes:
        function: `(rewards, **keywords) -> (advantages, returns)`.
        formula: one line.
        scope: the smallest set of trajectories it must see at once. `role-batch` is the safe choice.
        per: what one advantage belongs to. For each group the function returns `trajectory`: one number a trajectory; `step`:
            for each trajectory, one number a step; `token`: for each trajectory and step, one number a response token. None in
            place of a group's advantages: it is not trained on.
        needs: which of `needs.NEEDS` it takes.
        kwargs: its own keywords, and `required`, those without a default.
        source: where the formula comes from.
        objective: what it claims to climb, which its bias is measured against: the mean reward; pass@k with its keyword `k`, or
            with the group's size; the log-likelihood of a right answer to the order of the group's size minus 1; closeness to
            the teacher. `lab.objectives` defines them.
        preset: the knobs of `rl_algo.normalise` that the name stands for, where it is a preset of them (empty: the defaults).
    """

    function: Callable[..., Any]
    formula: str
    scope: Scope
    per: Per
    needs: tuple[str, ...]
    kwargs: tuple[str, ...]
    required: tuple[str, ...]
    source: str
    objective: Objective = "mean_reward"
    preset: Mapping[str, Any] | None = None

    def __call__(self, rewards: Any, **keywords: Any) -> Any:
        return self.function(rewards, **keywords)

    def accepted(self, offered: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the keywords that the function can take."""
        parameters = inspect.signature(self.function).parameters
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return dict(offered)
        return {name: value for name, value in offered.items() if name in parameters}


def needs_values(lacking: Sequence[str]) -> str:
    """What to say of own keywords without a default that were not given: where they are set, and what need not be."""
    given = ", ".join(sorted({"rewards", *CONTEXT, *NEEDS}))
    return f"needs a value for {', '.join(lacking)}: set rllm.algorithm.estimator_kwargs.{lacking[0]} (the library supplies: {given})"


def place_of(error: BaseException | None, function: Callable[..., Any]) -> str:
    """` (file.py:12)`: the innermost line in the file of an estimator that led to an error; empty for the library's own estimators."""
    target = inspect.unwrap(function)
    file = getattr(getattr(target, "__code__", None), "co_filename", "")
    while error is not None and not str(getattr(target, "__module__", "")).startswith("rllm_lightning."):
        if lines := [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]:
            return f" ({Path(file).name}:{lines[-1]})"
        error = error.__cause__  # ours came of the estimator's
    return ""


def register_rllm_adv_estimator(
    name: str | rLLMAdvantageEstimator,
    *,
    formula: str = "",
    scope: Scope = "role-batch",
    per: Per = "trajectory",
    source: str = "",
    kwargs: Iterable[str] = (),
    objective: Objective = "mean_reward",
    preset: Mapping[str, Any] | None = None,
) -> Callable[[F], F]:
    """Register a function as the advantage estimator `name`. Needs and keywords are read from its parameters.

    Args:
        formula, scope, per, source, objective, preset: see `Estimator`.
        kwargs: keywords it takes through `**kwargs`, besides those that are parameters.

    Raises:
        ValueError: another function has the name already, or `scope`, `per` or `objective` is none of the known ones.
    """
    for key, value, known in (("scope", scope, Scope), ("per", per, Per), ("objective", objective, Objective)):
        if value not in get_args(known):
            raise ValueError(f"advantage estimator {str(name)!r}: {key} must be one of {', '.join(get_args(known))}, got {value!r}")

    def register(function: F) -> F:
        parameters = list(inspect.signature(function).parameters.values())[1:]
        named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        own = tuple(dict.fromkeys([key for key in named if key not in CONTEXT + NEEDS] + list(kwargs)))
        needs = tuple(key for key in named if key in NEEDS)
        required = tuple(p.name for p in parameters if p.name in own and p.default is p.empty)
        entry = Estimator(function, formula, scope, per, needs, own, required, source, objective, preset)
        RLLM_ADV_ESTIMATOR_REGISTRY.add(str(name), entry)
        return function

    return register


def get_rllm_adv_estimator(name: str | rLLMAdvantageEstimator) -> Callable[..., Any]:
    """The function registered as `name`.

    Raises:
        ValueError: no such estimator; the message lists the registered names and the closest match.
    """
    return RLLM_ADV_ESTIMATOR_REGISTRY.get(str(name)).function
