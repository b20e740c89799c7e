"""Runs of many steps: what a process holds, and what a step costs, does not grow with their number."""

import os
import statistics
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from rllm_lightning.rollout.engine import EngineSetup
from rllm_lightning.rollout.scripted import ScriptedEngine
from rllm_lightning.trainer.backend import LightningBackend
from tests.trainer.conftest import make_tasks

SMALLEST = ["data.train_batch_size=1", "rllm.rollout.n=2", "data.max_response_length=2"]
SETTLED = 100  # steps after which a run has everything it needs


@dataclass
class Usage:
    """Of this process after a step: bytes of memory, open files, threads, and CPU seconds so far."""

    memory: int
    num_files: int
    num_threads: int
    cpu_s: float

    @classmethod
    def now(cls):
        memory = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return cls(memory, len(os.listdir("/proc/self/fd")), threading.active_count(), time.process_time())


class Measured(LightningBackend):
    def __init__(self, config):
        super().__init__(config)
        self.usages = []

    async def on_batch_end(self, trainer_state):
        self.usages.append(Usage.now())


class WithoutModel(Measured):
    """One weight and answers from a script: the loop, its logs and its files are the real ones."""

    def validate_config(self):
        pass

    def build_policy(self):
        policy = torch.nn.Module()
        policy.weight = torch.nn.Parameter(torch.ones(()))
        return policy

    def init_rollout_engine(self, **configs):
        return ScriptedEngine(EngineSetup(), answers=["a", "1"])

    async def on_train_start(self, trainer_state):
        pass

    async def process_backend_batch(self, trainer_state):
        pass

    def update_policy(self, trainer_state):
        self.optimizer.zero_grad()
        self.backward(self.policy.weight * 1.0)
        self.optimizer.step()


def assert_flat(usages):
    """3 % more memory than after step 100, and not one file or thread more."""
    settled = usages[SETTLED - 1]
    for step, usage in enumerate(usages[SETTLED:], start=SETTLED + 1):
        assert usage.memory <= 1.03 * settled.memory, (step, usage, settled)
        assert (usage.num_files, usage.num_threads) == (settled.num_files, settled.num_threads), (step, usage, settled)


def test_three_hundred_steps_of_the_loop_hold_no_more_than_a_hundred(fit):
    """The short form: no model, and nothing about time."""
    overrides = ["rllm.trainer.total_batches=300", "rllm.trainer.test_freq=10", "rllm.trainer.save_freq=50", *SMALLEST]
    run = fit(*overrides, backend=WithoutModel, val=make_tasks(1, "held"))
    assert len(run.trainer.backend.usages) == 300
    assert_flat(run.trainer.backend.usages)


@pytest.mark.long
def test_two_thousand_steps_hold_no_more_and_take_no_longer_than_a_hundred(fit):
    """CPU time, of which the median step of the last quarter takes at most half as much again as that of the first after step 100."""
    run = fit("rllm.trainer.total_batches=2000", *SMALLEST, backend=Measured)
    usages = run.trainer.backend.usages
    assert len(usages) == 2000
    assert_flat(usages)
    seconds = [after.cpu_s - before.cpu_s for before, after in zip(usages[SETTLED:], usages[SETTLED + 1 :], strict=False)]
    quarter = len(seconds) // 4
    assert statistics.median(seconds[-quarter:]) <= 1.5 * statistics.median(seconds[:quarter])
