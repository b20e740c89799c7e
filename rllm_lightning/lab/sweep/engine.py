"""W&B's own search, the package `sweeps`: which values come next, and which trials are to be stopped.

The engine remembers nothing: it is told of all trials each time, so a runner that starts again goes on as if it had never stopped.
"""

from __future__ import annotations

import importlib
import random
import warnings
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from rllm_lightning.lab.sweep.definition import Sweep, Values
    from rllm_lightning.lab.sweep.trial import Trial

# of a trial of ours, in the engine's words
RUN_STATES = {
    "running": "running",
    "finished": "finished",
    "stopped": "killed",
    "failed": "failed",
    "interrupted": "pending",  # it will go on
}


def violations(content: Mapping[str, Any]) -> list[str]:
    """What W&B's schema of sweeps finds wrong, one line each, with its place where that is known."""
    engine, schema = _import("sweeps"), _import("sweeps.config.schema")
    try:
        found = [str(violation) for violation in engine.schema_violations_from_proposed_config(content)]
        places = {error.message: ".".join(map(str, error.absolute_path)) for error in schema.validator.iter_errors(content)}
    except (ValueError, TypeError, AssertionError) as error:  # the schema stumbles over some shapes instead of reporting them
        found, places = [str(error)], {}
    lines = [f"{places[violation]}: {violation}" if places.get(violation) else violation for violation in found]
    return [" ".join(line.split()) for line in lines]


def next_values(sweep: Sweep, trials: Sequence[Trial]) -> Values | None:
    """The values of the next trial; None when a grid is exhausted.

    The engine draws from the global generators of `random` and NumPy. They are set to the number of trials, so that a sweep
    proposes the same values again, and one that was interrupted does not propose those that it has tried.
    """
    state, np_state = random.getstate(), np.random.get_state()
    random.seed(len(trials))
    np.random.seed(len(trials))
    if sweep.method == "bayes":
        _import("sklearn.gaussian_process")
    try:
        run = _import("sweeps").next_run(sweep.content, [_as_run(trial, sweep) for trial in trials])
    finally:
        random.setstate(state)
        np.random.set_state(np_state)
    return None if run is None else {key: _plain(entry["value"]) for key, entry in run.config.items()}


def to_stop(sweep: Sweep, trials: Sequence[Trial]) -> list[Trial]:
    """The running trials that `early_terminate` gives up."""
    runs = [_as_run(trial, sweep) for trial in trials]
    names = {run.name for run in _import("sweeps").stop_runs(sweep.content, runs)}
    return [trial for trial in trials if trial.name in names]


def _as_run(trial: Trial, sweep: Sweep) -> Any:
    """A trial as the engine wants it. Its config is what was issued: a grid counts only the very same values as done."""
    metric = sweep.metric
    return _import("sweeps").SweepRun(
        name=trial.name,
        state=RUN_STATES[trial.state],
        config={key: {"value": value} for key, value in trial.values.items()},
        history=[{metric.name: value} for value in trial.history(metric.name)] if metric else [],
    )


def _plain(value: Any) -> Any:
    """Python's own numbers instead of NumPy's, at any depth."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def _import(module: str) -> ModuleType:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the engine's use of pydantic
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"a sweep needs the package {error.name!r}: pip install 'rllm-lightning[sweep]', then pip install --no-deps sweeps "
            "(it pins numpy<2 without need)"
        ) from error
