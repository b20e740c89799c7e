"""Small runs of the real loop: the builtin model, the real engine, tasks of a few characters."""

import csv

import pytest

from rllm_lightning.config import load_config
from rllm_lightning.trainer.backend import LightningBackend
from rllm_lightning.trainer.unified_trainer import UnifiedTrainer
from rllm_lightning.workflows.single_turn import SingleTurnWorkflow

SMALL = [
    "model.name=builtin:tiny",
    "rllm.trainer.logger=[csv]",
    "rllm.rollout.n=4",
    "data.train_batch_size=2",
    "data.max_prompt_length=32",
    "data.max_response_length=4",
    "training.learning_rate=1e-3",
    "rllm.trainer.test_freq=-1",
    "rllm.trainer.val_before_train=false",
]


def make_tasks(count, source="letters", start=0):
    return [
        {
            "id": f"{source}:{i}",
            "question": f"say {chr(97 + i % 26)}",
            "answer": chr(97 + i % 26),
            "solution": chr(97 + i % 26),
            "data_source": source,
        }
        for i in range(start, start + count)
    ]


def vowel_reward(task, response):
    """A reward that a random model gets now and then: the share of letters in the response."""
    return sum(c.isalpha() for c in response) / max(1, len(response))


class Run:
    """A trainer that ran, and what it wrote."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.directory = trainer.run_directory
        self.state = trainer.module.trainer_state if trainer.module else None

    @property
    def rows(self):
        with open(self.directory.metrics_csv, newline="") as file:
            return [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]

    def column(self, key):
        return [row[key] for row in self.rows if key in row]

    def deterministic_rows(self):
        """Without the columns of the wall clock."""
        return [{key: value for key, value in row.items() if not key.startswith("time/")} for row in self.rows]


@pytest.fixture
def make_trainer(tmp_path):
    def make(
        *overrides,
        train=None,
        val=None,
        backend=LightningBackend,
        workflow=SingleTurnWorkflow,
        workflow_args=None,
        reward=vowel_reward,
        **kwargs,
    ):
        config = load_config([*SMALL, f"run_root={tmp_path / 'runs'}", *overrides])
        args = {"reward_function": reward} if workflow_args is None else workflow_args
        train = make_tasks(4) if train is None else train
        return UnifiedTrainer(backend, config, workflow, train, val, args, **kwargs)

    return make


@pytest.fixture
def fit(make_trainer):
    def run(*overrides, **kwargs):
        trainer = make_trainer(*overrides, **kwargs)
        trainer.fit()
        return Run(trainer)

    return run
