"""One rank of runs that are compared between different numbers of processes: `python worker.py CASES.json FOLDER`.

CASES.json maps a case's name to `overrides` of the config, a `kind` of workflow, and maybe a `backend`. What a run came to is
saved by the first rank as FOLDER/NAME.pt, the state of every rank's policy as a number in FOLDER/NAME-RANK.txt.
"""

import hashlib
import json
import logging
import os
import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from rllm_lightning.config import load_config
from rllm_lightning.registry import register_rollout_engine
from rllm_lightning.rollout.engine import EngineSetup
from rllm_lightning.rollout.hf import HFEngine
from rllm_lightning.rollout.scripted import ScriptedEngine
from rllm_lightning.tasks.curriculum import Curriculum
from rllm_lightning.trainer.backend import LightningBackend
from rllm_lightning.trainer.sharded import whole
from rllm_lightning.trainer.unified_trainer import UnifiedTrainer
from rllm_lightning.types import TerminationEvent, TerminationReason, to_plain
from rllm_lightning.workflows.multi_turn import MultiTurnWorkflow
from rllm_lightning.workflows.single_turn import SingleTurnWorkflow
from rllm_lightning.workflows.solver_judge import SolverJudgeWorkflow

BASE = [
    "model.name=builtin:tiny",
    "model.dtype=float64",
    "training.optimizer=sgd",
    "training.learning_rate=0.1",
    "training.max_grad_norm=0",
    "rllm.trainer.logger=[csv]",
    "rllm.trainer.total_batches=2",
    "rllm.trainer.test_freq=2",
    "rllm.trainer.val_before_train=false",
    "rllm.rollout.n=3",
    "data.train_batch_size=3",
    "data.max_prompt_length=32",
    "data.max_response_length=5",
    "lightning.accelerator=cpu",
]


def number(*words):
    """A number in [0, 1) that depends on the words alone."""
    return int.from_bytes(hashlib.sha256(repr(words).encode()).digest()[:4], "little") / 2**32


def make_tasks(count, source):
    letters = [chr(97 + i) for i in range(count)]
    return [
        {"id": f"{source}:{letter}", "question": f"say {letter * (1 + i % 3)}", "answer": letter, "solution": letter, "data_source": source}
        for i, letter in enumerate(letters)
    ]


def graded(task, response):
    """Ragged rewards; those of one task in four are all alike."""
    return 0.5 if number(task["id"]) < 0.25 else round(number(task["id"], response), 3)


class Informed(SingleTurnWorkflow):
    """Supplies what any estimator may need; one rollout in five has no trajectory, so that groups are ragged."""

    provides = frozenset({"reward_components", "state_keys", "teacher_logprobs"})
    lost = 0.2

    async def run(self, task, uid, **kwargs):
        if number(uid) < self.lost:
            raise TerminationEvent(TerminationReason.MAX_TURNS_EXCEEDED)
        episode = await super().run(task, uid, **kwargs)
        trajectory = episode.trajectories[0]
        step = trajectory.steps[0]
        trajectory.info["rewards"] = {"a": step.reward, "b": number(step.model_response)}
        step.info["state_key"] = "start" if number(uid, "state") < 0.5 else "elsewhere"
        step.info["teacher_logprobs"] = [-1.0 - number(token) for token in step.response_ids]
        return episode


class Sparse(Informed):
    """Most tasks are lost, so that a rank may be left without a row."""

    lost = 0.8


class Complete(Informed):
    lost = 0.0


class EveryOtherAlike(Complete):
    """Answers to the tasks a, c and e are all worth the same: to those of the first of two ranks, where tasks are not shuffled."""

    async def run(self, task, uid, **kwargs):
        episode = await super().run(task, uid, **kwargs)
        if task["answer"] in "ace":
            episode.trajectories[0].reward = episode.trajectories[0].steps[0].reward = 0.5
        return episode


@register_rollout_engine("uneven")
class Uneven(HFEngine):
    """Every answer of the first rank ends at its third token, every answer of another at its sixtieth."""

    ENDS = (3, 60)

    def _the_sampler(self):
        sampler = super()._the_sampler()
        if not isinstance(sampler.batch._decoder, EndsAt):
            sampler.batch._decoder = EndsAt(sampler.batch._decoder, sorted(self._stop_ids), self.ENDS[RANK])
        return sampler


class EndsAt:
    """A decoder for rows that join at once: before token number `length` none can end, there all must."""

    def __init__(self, decoder, stop_ids, length):
        self.decoder, self.stop_ids, self.length, self.count = decoder, stop_ids, length, 0

    def __getattr__(self, name):
        return getattr(self.decoder, name)

    def advance(self, tokens, prompts):
        logits_BV = self.decoder.advance(tokens, prompts).clone()
        self.count = 1 if prompts else self.count + 1
        if self.count < self.length:
            logits_BV[:, self.stop_ids] = -torch.inf
        else:
            logits_BV[:, self.stop_ids] += 1e4
        return logits_BV


class OneWeight(LightningBackend):
    """A weight of 1. The loss has the slope 2 in it on one of two ranks and 0 on the other, in `num_minibatches` equal parts."""

    def validate_config(self):
        pass

    def build_policy(self):
        policy = torch.nn.Module()
        policy.weight = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
        return policy

    def init_rollout_engine(self, **configs):
        return ScriptedEngine(EngineSetup(), answers=["a", "b"])

    async def on_train_start(self, trainer_state):
        pass

    async def process_backend_batch(self, trainer_state):
        pass

    def update_policy(self, trainer_state):
        num_parts = self.cfg.training.num_minibatches
        slope = sum(self.ranks.share([2.0, 0.0])) / 2 * self.ranks.world_size  # the mean over the two, shared out as a loss is
        self.optimizer.zero_grad()
        for part in range(num_parts):
            self.backward(self.policy.weight * slope / num_parts, sync=part == num_parts - 1)
        self.optimizer.step()


def held(parameters):
    """The share of the weights that is in this process."""
    parameters = list(parameters)
    local = [parameter.to_local() if isinstance(parameter, DTensor) else parameter for parameter in parameters]
    return sum(part.numel() for part in local) / sum(parameter.numel() for parameter in parameters)


KINDS = {
    "informed": Informed,
    "sparse": Sparse,
    "complete": Complete,
    "rising": Informed,
    "every-other-alike": EveryOtherAlike,
    "multi_turn": MultiTurnWorkflow,
    "solver_judge": SolverJudgeWorkflow,
}
BACKENDS = {"one-weight": OneWeight}


def train_tasks(kind):
    return Curriculum([make_tasks(5, f"level{level}") for level in range(4)], 0.5, 4) if kind == "rising" else make_tasks(5, "train")


def run(case, folder):
    config = load_config([*BASE, f"run_root={folder}", f"lightning.devices={WORLD_SIZE}", *case["overrides"]])
    backend = BACKENDS.get(case.get("backend"), LightningBackend)
    trainer = UnifiedTrainer(
        backend, config, KINDS[case["kind"]], train_tasks(case["kind"]), make_tasks(5, "held"), {"reward_function": graded}
    )
    trainer.fit()
    run, state = trainer.run_directory, trainer.module.trainer_state
    return {
        "weights": {name: whole(value).clone() for name, value in trainer.module.policy.state_dict().items()},
        "held": held(trainer.module.policy.parameters()),
        "rows": run.metrics_csv.read_text() if run.metrics_csv.exists() else "",
        "episodes": {path.name: path.read_text() for path in sorted(run.episodes.glob("*.jsonl"))},
        "state": to_plain(state.extra_info),
        "step": state.global_step,
        "directory": str(run.path),
    }


def main():
    cases, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    for name, case in cases.items():
        result = run(case, folder / name)
        (folder / f"{name}-{RANK}.txt").write_text(repr(sum(float(value.double().sum()) for value in result["weights"].values())))
        if RANK == 0:
            torch.save(result, folder / f"{name}.pt")


if __name__ == "__main__":
    RANK, WORLD_SIZE = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    main()
