"""A scripted engine, threads, and small workflows that end in every possible way."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from rllm_lightning.rollout.engine import EngineSetup
from rllm_lightning.rollout.scripted import ScriptedEngine


@pytest.fixture
def engine():
    return ScriptedEngine(EngineSetup(), answers=["a", "b", "c"])


@pytest.fixture
def executor():
    with ThreadPoolExecutor(2) as threads:
        yield threads
