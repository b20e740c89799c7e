"""Checks of a config that need more than the section they stand in: names that registries know, and keywords that those take.

Every function returns one line for each problem.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rllm_lightning.registry import ENGINES, ESTIMATORS, LOSSES, TASKS, TRACKERS, WORKFLOWS, Registry
from rllm_lightning.schema import emptying, hints_of, show
from rllm_lightning.values import Mismatch, coerce

if TYPE_CHECKING:
    from rllm_lightning.config import AlgorithmConfig, Config

NORM = "norm_adv_by_std_in_grpo"


def check_names(config: Config) -> list[str]:
    """Everything that the config names is registered."""
    chosen: list[tuple[Registry[Any], str]] = [
        (WORKFLOWS, config.rllm.workflow.name),
        (TASKS, config.task.name),
        (ENGINES, config.rollout_engine.name),
        *((TRACKERS, name) for name in config.rllm.trainer.logger),
    ]
    problems = [registry.unknown(name) for registry, name in chosen if name not in registry] + check_algorithm(config.rllm.algorithm)
    return problems + check_engine(config)


def check_engine(config: Config) -> list[str]:
    """The rollout engine can do what it is chosen for with the keys it is given."""
    name, keys = config.rollout_engine.name, config.rollout_engine.args
    check_keys = getattr(ENGINES.get(name), "check_keys", None) if name in ENGINES else None
    problems = [] if check_keys is None else check_keys(keys, training=not config.rllm.trainer.val_only)
    return [f"rollout_engine.{problem}" for problem in problems]


def check_algorithm(algorithm: AlgorithmConfig) -> list[str]:
    """Estimators and losses are registered and take the keywords that are given, which get their declared types."""
    at = "rllm.algorithm."
    roles = {"": f"{at}adv_estimator"} | {role: f"{at}estimator_map.{role}" for role in algorithm.estimator_map}
    estimators = {key: algorithm.estimator_of(role) for role, key in roles.items()}
    problems = [ESTIMATORS.unknown(name, key) for key, name in estimators.items() if name not in ESTIMATORS]
    problems += _type_keywords(f"{at}estimator_kwargs", algorithm.estimator_kwargs, ESTIMATORS, estimators.values())

    losses = {f"{at}loss_fn": algorithm.loss_fn} | {f"{at}loss_fn_map.{key}": name for key, name in algorithm.loss_fn_map.items()}
    losses |= {roles[role]: entry[1] for role, entry in algorithm.estimator_map.items() if isinstance(entry, tuple)}
    # the losses import torch, so they are looked at only where one is named
    problems += [LOSSES.unknown(name, key) for key, name in losses.items() if name is not None and name not in LOSSES]
    in_use = [algorithm.loss_of(role) for role in ("", *algorithm.estimator_map, *algorithm.loss_fn_map)]
    return problems + _type_keywords(f"{at}loss_kwargs", algorithm.loss_kwargs, LOSSES, in_use)


def _type_keywords(key: str, given: dict[str, Any], registry: Registry[Any], names: Iterable[str]) -> list[str]:
    """Give the keywords the types that the entries called `names` declare; each must belong to one of these."""
    if not given:
        return []
    names = sorted({name for name in names if name in registry})
    declared: dict[str, Any] = {}
    for name in names:
        entry = registry.get(name)
        declared |= {keyword: hints_of(entry.function).get(keyword, Any) for keyword in entry.kwargs}
    problems = []
    for keyword, value in given.items():
        if keyword not in declared:
            known = ", ".join(sorted(declared)) or "none"
            found = f"no keyword of {registry.kind} {', '.join(names)}; keywords there: {known}"
            problems.append(f"{key}.{keyword}: {found}{emptying(key, keyword, declared)}")
            continue
        try:
            given[keyword] = coerce(value, declared[keyword])
        except Mismatch as mismatch:
            problems.append(f"{key}.{keyword}: expected {mismatch}, got {show(value)}")
    return problems


def check_two_homes(tree: Mapping[str, Any]) -> list[str]:
    """`norm_adv_by_std_in_grpo` may be given in its old home, but not with another value than in its own."""
    rllm = tree.get("rllm")
    sections = [rllm.get(name) for name in ("algorithm", "stepwise_advantage")] if isinstance(rllm, Mapping) else []
    given = [section[NORM] for section in sections if isinstance(section, Mapping) and NORM in section]
    try:
        values = {coerce(value, bool | None) for value in given}
    except Mismatch:  # reported with its key when the sections are built
        return []
    if values == {True, False}:
        return [f"rllm.algorithm.{NORM}={given[0]} and rllm.stepwise_advantage.{NORM}={given[1]} differ; give one"]
    return []
