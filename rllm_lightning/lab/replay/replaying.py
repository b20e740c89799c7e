"""`replay_run`: what other estimators would have made of the rollouts that a run wrote down.

config.yaml -> subjects            episodes/train_step_*.jsonl -> batches, one at a time, in order
                  \\                   /
                   advantages of each -> agreement of each pair, extremes, effective sample sizes   (no model)
                                      \\-> gradients at a checkpoint, on one batch or a few            (`gradients.py`)
                                      \\-> training on from it, batch after batch                      (`training.py`)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rllm_lightning.algorithms.needs import rewards_of
from rllm_lightning.algorithms.ragged import Ragged
from rllm_lightning.config import Config, load_config
from rllm_lightning.lab.replay.agreement import Array, agreement_of, effective_share, size, zero_share
from rllm_lightning.lab.replay.batches import Batch, read_batches
from rllm_lightning.lab.replay.episodes import choose_steps, step_files
from rllm_lightning.lab.replay.results import EstimatorResult, GradientReport, PairResult, Replay, Reproduction
from rllm_lightning.lab.replay.subjects import Subject, own_names, own_subject, parse_subjects
from rllm_lightning.lab.replay.weigh import Failure, StepAdvantages, Weigher, advantages_of
from rllm_lightning.registry import load_plugins
from rllm_lightning.tracking.run_directory import RunDirectory


def replay_run(
    run_dir: str | Path,
    estimators: Sequence[str],
    *,
    plugins: Sequence[str] = (),
    steps: str = "",
    checkpoint: str | Path | None = None,
    gradient_steps: str = "",
    train: int = 0,
) -> Replay:
    """Replay estimators on the batches of a run.

    Args:
        run_dir: the run's folder.
        estimators: names, with keywords behind colons where wanted (`subjects.py`).
        plugins: modules to import first, besides those of the run.
        steps: which batches are looked at, such as `1-20` (`episodes.choose_steps`); "": all.
        checkpoint: a checkpoint file; None: no gradients.
        gradient_steps: the batches whose gradients are taken; "": the one that was drawn from the checkpoint's weights, that is the next
            one, or where the run has none, the nearest.
        train: so many batches after the checkpoint are trained on by each estimator (`training.train_on`).

    Raises:
        ValueError: `run_dir` is no run or holds no episodes, a file of episodes is damaged, an estimator, step or checkpoint is not
            there; in one line.
    """
    if train < 0 or (train and checkpoint is None):
        raise ValueError(f"--train {train}: expected a number of batches, and a --checkpoint to train on from")
    load_plugins(plugins)
    run = RunDirectory.open(run_dir)
    config = Config.from_config(load_config([], default=str(run.config_yaml)))
    subjects = parse_subjects(list(estimators), config.rllm.algorithm)
    files = step_files(run.episodes_under(config.rllm.episode_logging.episode_log_dir))
    chosen = choose_steps(files, steps)
    content, of_gradient = None, []
    if checkpoint is not None:  # torch is imported here, and where gradients are taken
        from rllm_lightning.lab.replay.checkpoint import read_given
        from rllm_lightning.trainer.checkpoints import CHECKPOINT_KEY

        content = read_given(Path(checkpoint))
        of_gradient = _gradient_steps(files, gradient_steps, content[CHECKPOINT_KEY]["global_step"])
    pass_through = _Pass(run, config, subjects, set(chosen), set(of_gradient))
    wanted = {*chosen, *of_gradient}
    first = min(files) if pass_through.remembers else min(wanted)
    pass_through.over({step: path for step, path in files.items() if first <= step <= max(wanted)})
    replay = pass_through.replay
    if content is not None and replay.estimators:
        replay.gradients = _gradients(pass_through, Path(checkpoint or ""), content)
        if train:
            from rllm_lightning.lab.replay.training import train_on

            replay.training = train_on(run, config, files, Path(checkpoint or ""), pass_through.whole, train)
    return replay


def _gradient_steps(files: dict[int, Path], text: str, step: int) -> list[int]:
    """The batches whose gradients are taken at the weights of a step."""
    if text:
        return choose_steps(files, text)
    return [step + 1] if step + 1 in files else [min(files, key=lambda other: abs(other - step))]


class _Pass:
    """One pass over the batches of a run, in order. `kept`: the batches for gradients, with every estimator's advantages."""

    def __init__(self, run: RunDirectory, config: Config, subjects: list[Subject], chosen: set[int], of_gradient: set[int]):
        self.run, self.config, self.subjects, self.chosen, self.of_gradient = run, config, subjects, chosen, of_gradient
        algorithm = config.rllm.algorithm
        self.weighers = {subject.label: Weigher(subject) for subject in subjects}
        self.own = Weigher(own_subject(algorithm))
        self.kept: list[tuple[Batch, dict[str, StepAdvantages]]] = []
        self.results = {subject.label: EstimatorResult(subject.label) for subject in subjects}
        self.pairs = [PairResult(a, b) for a, b in itertools.combinations(self.results, 2)]
        self.replay = Replay(
            path=run.path,
            own=" + ".join(own_names(algorithm)),
            loss=" + ".join(dict.fromkeys(algorithm.loss_of(role) for role in ("", *algorithm.estimator_map, *algorithm.loss_fn_map))),
        )
        if algorithm.use_precomputed_advantage:
            self.replay.reproduction.problem = "the run used advantages that its workflow made"

    @property
    def remembers(self) -> bool:
        """Whether what happens in a batch depends on those before."""
        rejection = self.config.rllm.rejection_sample
        waits = rejection.enable and rejection.mode == "episode"
        return waits or any(weigher.subject.keeps_state for weigher in [*self.weighers.values(), self.own])

    @property
    def whole(self) -> list[Subject]:
        """The estimators that did not fail."""
        return [subject for subject in self.subjects if subject.label not in self.replay.failures]

    def over(self, files: dict[int, Path]) -> None:
        """Go over the files' batches, then sum up."""
        for batch in read_batches(files, self.config.rllm):
            if batch.step in self.chosen:
                self._count(batch)
            if batch.groups:
                self._look_at(batch)
            del batch  # before the next is read: memory is that of one
        replay = self.replay
        replay.estimators = [result for label, result in self.results.items() if label not in replay.failures]
        replay.pairs = [pair for pair in self.pairs if not {pair.a, pair.b} & set(replay.failures)]
        if gaps := sorted(set(range(min(files), max(files) + 1)) - set(files)):
            replay.remarks.append(f"no episodes of step {gaps[0]}" + (f" and {len(gaps) - 1} more" if len(gaps) > 1 else ""))

    def _count(self, batch: Batch) -> None:
        replay = self.replay
        replay.num_episodes += batch.num_episodes
        replay.num_failed += batch.num_failed
        if batch.problem:
            replay.unusable[batch.step] = batch.problem
        elif not batch.groups:
            replay.empty.append(batch.step)
        else:
            replay.steps.append(batch.step)
            replay.num_groups += len(batch.groups)
            replay.num_single += sum(len(group.trajectories) == 1 for group in batch.groups)
            replay.num_uniform += int((~Ragged.of([rewards_of(group) for group in batch.groups]).differs_G).sum())
            replay.num_trajectories += len(batch.trajectories)

    def _look_at(self, batch: Batch) -> None:
        self._reproduce(batch)
        counted, of_gradient = batch.step in self.chosen, batch.step in self.of_gradient
        found: dict[str, Array] = {}
        kept: dict[str, StepAdvantages] = {}
        for label, weigher in self.weighers.items():
            if label in self.replay.failures or not (counted or of_gradient or self.remembers):
                continue
            try:
                found[label] = weigher(batch)
            except Failure as failure:
                self.replay.failures[label] = f"step {batch.step}: {failure}"
                continue
            if of_gradient:
                kept[label] = advantages_of(batch)
        if of_gradient:
            self.kept.append((batch, kept))
        if not counted:
            return
        for label, advantages_N in found.items():
            result = self.results[label]
            result.sizes.append(size(advantages_N))
            result.effective.append(effective_share(advantages_N))
            result.zero.append(zero_share(advantages_N))
            result.dropped.append(float(np.isnan(advantages_N).mean()))
        for pair in self.pairs:
            if pair.a in found and pair.b in found:
                pair.batches.append(agreement_of(found[pair.a], found[pair.b]))
                pair.extremes.add(batch, found[pair.a], found[pair.b])

    def _reproduce(self, batch: Batch) -> None:
        """Compare what the run's own estimator says now with what the run wrote down."""
        report: Reproduction = self.replay.reproduction
        if report.problem:
            return
        written = advantages_of(batch)
        try:
            self.own(batch)
        except Failure as failure:
            report.problem = f"step {batch.step}: {failure}"
            return
        pairs = [(w, n) for w, n in zip(written, advantages_of(batch), strict=True) if w is not None]
        if not pairs or batch.step not in self.chosen:
            return
        gaps = [np.abs(np.subtract(n, w)).max(initial=0.0) if n is not None and np.shape(n) == np.shape(w) else np.inf for w, n in pairs]
        largest = max(float(np.abs(w).max(initial=0.0)) for w, _ in pairs) or 1.0
        report.num_batches += 1
        report.num_steps += len(pairs)
        report.worst = max(report.worst, float(max(gaps)) / largest)


def _gradients(done: _Pass, path: Path, content: dict[str, Any]) -> GradientReport | None:
    from rllm_lightning.lab.replay.checkpoint import load_checkpoint
    from rllm_lightning.lab.replay.gradients import measure_gradients

    if not done.kept:
        done.replay.remarks.append(f"no gradients: step {', '.join(map(str, sorted(done.of_gradient)))} left nothing to train on")
        return None
    return measure_gradients(
        done.kept,
        done.whole,
        load_checkpoint(path, content, done.config),
        done.config,
        is_own_checkpoint=path.resolve().parent == done.run.checkpoints.resolve(),
    )
