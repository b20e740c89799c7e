"""The engine contract as checks that run against any engine over any model.

    python -m rllm_lightning.rollout.conformance ENGINE MODEL [--draws N] [--tolerance T] [key=value ...]

    rllm_lightning.rollout.conformance hf builtin:tiny fast=false

prints one line a check, with the numbers it measured, and exits with 1 if one failed. The measure is `Reference`: plain forward
passes of the same model. What an engine does not promise (`RolloutEngine.gives_tokens`, `.repeatable`) is not asked of it. To add
a check: write it in `conformance_checks.py`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rllm_lightning.registry import ENGINES, load_plugins
from rllm_lightning.rollout.conformance_checks import CHECKS
from rllm_lightning.rollout.conformance_subject import PROMPT_LIMIT, Failure, Reference, Subject
from rllm_lightning.rollout.tokens import positions_of

PASSED, FAILED, NOT_PROMISED = "passed", "FAILED", "not promised"


@dataclass(frozen=True)
class Result:
    """What came of one check."""

    check: str
    outcome: str
    numbers: str


def run_checks(subject: Subject, only: Sequence[str] | None = None) -> list[Result]:
    """Every check (or those named) in turn; what a check raises is its failure."""
    reference, results = Reference(subject.model), []
    for name, check in CHECKS.items():
        if only is not None and name not in only:
            continue
        if not all(getattr(subject, promise) for promise in check.needs):
            results.append(Result(name, NOT_PROMISED, ""))
            continue
        try:
            results.append(Result(name, PASSED, check.function(subject, reference)))
        except Failure as failure:
            results.append(Result(name, FAILED, str(failure)))
        except Exception as error:  # an engine may raise anything, and the other checks still tell something
            results.append(Result(name, FAILED, f"{type(error).__name__}: {error}"))
    return results


def table(results: Sequence[Result]) -> str:
    """One line a check."""
    width, outcome = max(len(r.check) for r in results), max(len(r.outcome) for r in results)
    return "\n".join(f"{r.check:{width}}  {r.outcome:{outcome}}  {r.numbers}".rstrip() for r in results)


def subject_of(engine: str, model: str, keys: Mapping[str, Any], **settings: Any) -> Subject:
    """The registered engine with the given keys, over a model by its name (see `models.load`).

    Raises:
        ConfigError: the model, the engine or a key is not there.
    """
    from rllm_lightning.config import ConfigError, ModelConfig, RolloutEngineConfig
    from rllm_lightning.models.load import load_model
    from rllm_lightning.schema import build

    problems: list[str] = []
    section = build(RolloutEngineConfig, {"name": engine, **keys}, problems, "rollout_engine.")
    if engine not in ENGINES:
        problems.append(ENGINES.unknown(engine))
    if problems:
        raise ConfigError(problems)
    policy, tokenizer = load_model(ModelConfig(name=model))
    limit = positions_of(policy)
    if limit is not None and limit < PROMPT_LIMIT + 64:
        raise ConfigError([f"{model}: the checks need {PROMPT_LIMIT + 64} positions, it has {limit}"])
    return Subject(lambda setup: ENGINES.get(engine)(setup, **section.args), policy, tokenizer, **settings)


def main(argv: Sequence[str]) -> int:
    """Exit code 0: all that the engine promises holds; 1: something does not; 2: it could not be asked."""
    parser = argparse.ArgumentParser(prog="python -m rllm_lightning.rollout.conformance", description="Check an engine's contract.")
    parser.add_argument("engine", help="name of a registered engine")
    parser.add_argument("model", help="as model.name: builtin:tiny, smollm2, a folder, a name on the hub")
    parser.add_argument("keys", nargs="*", metavar="key=value", help="keys under rollout_engine")
    parser.add_argument("--draws", type=int, default=Subject.draws, help="tokens drawn where frequencies are compared")
    parser.add_argument("--tolerance", type=float, default=Subject.tolerance, help="largest difference of log-probs")
    parser.add_argument("--plugins", nargs="*", default=[], help="modules that register engines of your own")
    options = parser.parse_intermixed_args(argv)
    try:
        load_plugins(options.plugins)
        keys = dict(pair.split("=", 1) if "=" in pair else (pair, "true") for pair in options.keys)
        subject = subject_of(options.engine, options.model, keys, draws=options.draws, tolerance=options.tolerance)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    results = run_checks(subject)
    sys.stdout.write(f"{table(results)}\n")
    return int(any(result.outcome == FAILED for result in results))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
