"""Which estimators are replayed, and with which settings: `grpo`, `pass_at_k:k=4`, `grpo:norm_adv_by_std_in_grpo=false`.

Every role goes through the named estimator, and every estimator is trained with the loss that the run had. Keywords are those of the
run where the run used that estimator, else the estimator's own defaults; what is written behind its name comes first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rllm_lightning.config import AlgorithmConfig
from rllm_lightning.registry import ESTIMATORS
from rllm_lightning.values import guess

NORM = "norm_adv_by_std_in_grpo"


@dataclass(frozen=True)
class Subject:
    """An estimator to be replayed: `label` as the user wrote it, and the algorithm that the run would have had with it."""

    label: str
    algorithm: AlgorithmConfig

    @property
    def name(self) -> str:
        return self.algorithm.estimator_of("")

    @property
    def keeps_state(self) -> bool:
        return "state" in ESTIMATORS.get(self.name).needs


def split_estimators(text: str) -> list[str]:
    """`a,b:k=[1,2],c` -> the three; commas inside brackets stay."""
    return [part.strip() for part in re.split(r",(?![^\[{]*[\]}])", text) if part.strip()]


def parse_subjects(labels: Sequence[str], run: AlgorithmConfig) -> list[Subject]:
    """The estimators named by `labels`, each with `run`'s other settings.

    Raises:
        ValueError: none is named, one twice, one is not registered, or a keyword is unknown or lacking.
    """
    if not labels:
        raise ValueError(f"--estimators: name at least one of: {', '.join(ESTIMATORS.names())}")
    if double := sorted({label for label in labels if labels.count(label) > 1}):
        raise ValueError(f"--estimators: {double[0]} is named twice")
    return [Subject(label, _algorithm(label, run)) for label in labels]


def own_subject(run: AlgorithmConfig) -> Subject:
    """What the run itself did, roles and all."""
    return Subject(run.estimator_of(""), run)


def is_own(subject: Subject, run: AlgorithmConfig) -> bool:
    """Whether a subject is what the run itself did."""
    asked = subject.algorithm
    return (
        own_names(run) == [subject.name]
        and asked.estimator_kwargs == run.estimator_kwargs
        and asked.norm_adv_by_std_in_grpo == run.norm_adv_by_std_in_grpo
        and not run.use_precomputed_advantage
    )


def own_names(run: AlgorithmConfig) -> list[str]:
    """The estimators that the run used."""
    return list(dict.fromkeys([run.estimator_of(""), *map(run.estimator_of, run.estimator_map)]))


def _algorithm(label: str, run: AlgorithmConfig) -> AlgorithmConfig:
    name, *words = re.split(r":(?=\w+=)", label)
    if name not in ESTIMATORS:
        raise ValueError(ESTIMATORS.unknown(name, "--estimators"))
    entry = ESTIMATORS.get(name)
    given: dict[str, Any] = {key: guess(value) for key, value in (word.split("=", 1) for word in words)}
    norm = given.pop(NORM, run.norm_adv_by_std_in_grpo)
    if not isinstance(norm, bool):
        raise ValueError(f"--estimators: {label}: {NORM} must be true or false, got {norm!r}")
    if unknown := sorted(set(given) - set(entry.kwargs)):
        raise ValueError(f"--estimators: {name} has no keyword {unknown[0]!r}; it has: {', '.join((*entry.kwargs, NORM))}")
    inherited = run.estimator_kwargs if name in own_names(run) else {}
    kwargs = {key: value for key, value in inherited.items() if key in entry.kwargs} | given
    if lacking := [key for key in entry.required if key not in kwargs]:
        raise ValueError(f"--estimators: {name} needs a value for {lacking[0]}; write {name}:{lacking[0]}=...")
    return replace(
        run,
        estimator=name,
        estimator_map={},
        estimator_kwargs=kwargs,
        norm_adv_by_std_in_grpo=norm,
        use_precomputed_advantage=False,
        # what stands here in place of null is what the run's own estimator made of it: one loss for all
        loss_fn=run.loss_of(""),
        loss_fn_map={role: run.loss_of(role) for role in (*run.estimator_map, *run.loss_fn_map)},
    )
