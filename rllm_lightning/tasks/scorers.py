"""Scorers by name: what decides, for tasks with a known answer, whether a response is right.

    task.extract=last_line task.scorer=numeric task.scorer_args.tolerance=0.01
        response --extract_answer--> answer --scorer--> reward          (no answer where `extract` looks for it: 0)

To add one, register a function that makes a reward function, here or in a module of your own:

    @register_scorer("x")
    def x(extract: Extract, *, strict: bool = True) -> RewardFunction: ...

Its keyword-only parameters are the keys of `task.scorer_args`. A reward function may have a method `check(task, solution)`, which
raises a `ValueError` where it could never reward that task; sources call it before training, with every task if its attribute
`checks_every_task` is true, else with the first. One without it is tried on the first task's solution, unless it is async.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from rllm_lightning.registry import SCORERS, register_scorer
from rllm_lightning.schema import typed_keywords
from rllm_lightning.tasks.scoring import Extract, answer_text, choice_of, exact_match, extract_answer, numeric_match
from rllm_lightning.workflows.reward import RewardFunction


def make_reward(
    name: str, args: Mapping[str, Any] | None, extract: Extract, at: str = "task.scorer", args_at: str = "task.scorer_args"
) -> RewardFunction:
    """The reward function of a scorer.

    Args:
        args: keywords of the scorer.
        at, args_at: the config keys that `name` and `args` stand under.

    Raises:
        ValueError: an unknown name, a keyword that the scorer does not take, or a value that it refuses; the key is named.
    """
    if name not in SCORERS:
        raise ValueError(SCORERS.unknown(name, at))
    maker = SCORERS.get(name)
    keywords = typed_keywords(maker, args or {}, args_at, f"scorer {name!r}")
    try:
        return maker(extract, **keywords)
    except ValueError as error:
        raise ValueError(str(error) if str(error).startswith("task.") else f"{args_at}.{error}") from error


@dataclass(frozen=True)
class MatchReward:
    """1.0 where `matches(answer in the response, the task's answer)`, else 0.0."""

    checks_every_task: ClassVar[bool] = True
    matches: Callable[[str, str], bool]
    extract: Extract

    def __call__(self, task: dict[str, Any], response: str) -> float:
        given = extract_answer(response, self.extract)
        return float(given is not None and self.matches(given, answer_text(task)))

    def check(self, task: dict[str, Any], solution: str) -> None:
        answer = answer_text(task)
        if not self.matches(answer, answer):
            raise ValueError(f"task.scorer cannot judge by the answer {answer!r:.60}: it finds nothing in it to compare with")
        if not self(task, solution):
            raise ValueError("the solution does not hold the answer where task.extract and task.scorer look for it")


@register_scorer("exact")
def exact(extract: Extract) -> RewardFunction:
    """The same text but for case, whitespace and Unicode's compatible forms."""
    return MatchReward(exact_match, extract)


@register_scorer("numeric")
def numeric(extract: Extract, *, tolerance: float = 1e-6) -> RewardFunction:
    """The last numbers x in the response and y in the answer: |x - y| <= tolerance · max(1, |y|)."""
    if tolerance < 0:
        raise ValueError(f"tolerance: must not be negative, got {tolerance}")
    return MatchReward(partial(numeric_match, tolerance=tolerance), extract)


@register_scorer("choice")
def choice(extract: Extract, *, letters: str = "ABCDEFGHIJ") -> RewardFunction:
    """The letter of a multiple-choice answer, as in `B`, `(b)`, `\\boxed{B}` or "The answer is B."."""
    if not re.fullmatch("[A-Z]+", letters):
        raise ValueError(f"letters: must be capital letters, got {letters!r}")
    return MatchReward(partial(_same_choice, letters=letters), extract)


def _same_choice(given: str, answer: str, letters: str) -> bool:
    chosen = choice_of(answer, letters)
    return chosen is not None and choice_of(given, letters) == chosen


@dataclass(frozen=True)
class RegexReward:
    """1.0 where the pattern is found, else 0.0. With a group `answer`, what its last match holds must be the task's answer."""

    pattern: str
    extract: Extract

    def __call__(self, task: dict[str, Any], response: str) -> float:
        given = extract_answer(response, self.extract)
        found = list(re.finditer(self.pattern, given)) if given is not None else []
        if found and "answer" in found[-1].re.groupindex:
            return float(exact_match(found[-1]["answer"] or "", answer_text(task)))
        return float(bool(found))


@register_scorer("regex")
def regex(extract: Extract, *, pattern: str) -> RewardFunction:
    """A pattern of Python's `re` is found; a group `(?P<answer>...)` of it, where there is one, holds the task's answer."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"pattern: {pattern!r} is no regular expression: {error}") from error
    return RegexReward(pattern, extract)
