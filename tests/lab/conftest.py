"""Estimators that live for one test, and the command as a function."""

import importlib.util
from pathlib import Path

import pytest

from rllm_lightning.algorithms.estimator import register_rllm_adv_estimator
from rllm_lightning.registry import ESTIMATORS

CARD = Path(__file__).parents[2] / "experiments" / "card.py"


@pytest.fixture(autouse=True)
def same_registry_afterwards():
    ESTIMATORS.load_home()
    before = dict(ESTIMATORS._entries)
    yield
    ESTIMATORS._entries.clear()
    ESTIMATORS._entries.update(before)


@pytest.fixture
def register():
    """`register(function, **declared)` registers a function, under its own name unless told so, and returns the name."""

    def add(function, name=None, **declared):
        name = name or function.__name__
        register_rllm_adv_estimator(name, **declared)(function)
        return name

    return add


@pytest.fixture
def card_command():
    """`main(argv)` of experiments/card.py."""
    spec = importlib.util.spec_from_file_location("card_command", CARD)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main
