"""Training on from a checkpoint with stored rollouts: the run's own estimator does again what it did, another one what it would have."""

import json
import math

import numpy as np
import pytest
import torch

from rllm_lightning.config import Config, load_config
from rllm_lightning.lab.replay import caveats, replay_data, replay_run
from rllm_lightning.lab.replay.episodes import read_step, step_files
from rllm_lightning.lab.replay.subjects import is_own, parse_subjects
from rllm_lightning.lab.replay.tables import tables_of
from rllm_lightning.lab.replay.training import OFF_POLICY, as_sampled, train_on
from rllm_lightning.registry import TASKS
from rllm_lightning.tracking.metrics_table import read_metrics
from rllm_lightning.trainer.backend import LightningBackend
from rllm_lightning.trainer.unified_trainer import UnifiedTrainer
from rllm_lightning.workflows.single_turn import SingleTurnWorkflow
from tests.quick import QUICK

RUN = [
    *QUICK,
    "rllm.rollout.n=6",
    "data.max_response_length=6",
    "warm_start.steps=25",
    "rllm.trainer.total_batches=5",
    "rllm.trainer.save_freq=1",
    "rllm.trainer.keep_checkpoints=-1",
    "rllm.trainer.test_freq=2",
    "rllm.algorithm.adv_estimator=grpo",
    "rllm.algorithm.lr_schedule=linear",
    "training.learning_rate=1e-3",
]


def uneven(task, action):
    """Some of each group are right, whatever the model says."""
    return float(len(str(action)) % 2)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    config = load_config([*RUN, f"run_root={tmp_path_factory.mktemp('runs')}"])
    cfg = Config.from_config(config)
    tasks = TASKS.get(cfg.task.name)(cfg.data_seed, **cfg.task.args)
    trainer = UnifiedTrainer(LightningBackend, config, SingleTurnWorkflow, tasks.train, tasks.val, {"reward_function": uneven})
    trainer.fit()
    return trainer.run_directory


@pytest.fixture(scope="module")
def replay(run):
    return replay_run(run.path, ["grpo", "dr_grpo", "rloo"], checkpoint=run.checkpoints / "step_1.ckpt", train=3)


def weights(path):
    return torch.load(path, weights_only=True)["state_dict"]


def test_the_runs_own_estimator_ends_at_the_runs_own_weights(run, replay):
    """Bit for bit, over three batches, with the optimizer's state and a schedule laid out for the run's length."""
    own = replay.training.trained[0]
    assert own.label == "grpo"
    again, then = weights(own.path / "checkpoints" / "last.ckpt"), weights(run.checkpoints / "step_4.ckpt")
    assert all(torch.equal(again[key], value) for key, value in then.items())
    assert own.off_policy == []
    assert own.moved > 0


def test_another_estimator_meets_its_own_rollouts_once_and_then_another_policys(replay):
    """The later batches are counted, weighted, and named."""
    report = replay.training
    for trained in report.trained[1:]:
        assert trained.off_policy == [3, 4]
        assert trained.drift > 0
        assert 0 < trained.effective < 1
    rows = {int(row["step"]): row for row in read_metrics(report.trained[1].path / "metrics.csv")}
    assert [rows[step][OFF_POLICY] for step in (2, 3, 4)] == [0, 1, 1]
    (warning,) = (sentence for sentence in caveats(replay) if "another policy's" in sentence)
    assert "dr_grpo, rloo" in warning
    assert "steps 3-4" in warning


def test_the_first_update_is_the_one_that_the_estimator_would_have_made(replay):
    """The gradient of step 2 is that of a run which had the other estimator from the checkpoint on: its norm is the one that the
    gradients' comparison finds at the checkpoint."""
    report = replay.training
    for index, trained in enumerate(report.trained):
        row = next(row for row in read_metrics(trained.path / "metrics.csv") if row["step"] == 2)
        assert row["optim/grad_norm"] == pytest.approx(replay.gradients.values.norm[index], rel=1e-3)


def test_directions_of_the_changes_are_compared(replay):
    cosines = replay.training.cosines
    assert np.diag(cosines) == pytest.approx(np.ones(3))
    assert cosines == pytest.approx(cosines.T)
    assert 0 < cosines[0, 1] < 1
    # rloo is dr_grpo times 6/5: AdamW hardly sees the size
    assert cosines[1, 2] > 0.99


def test_it_stands_in_tables_and_data(run, replay):
    titles = [table.title for table in tables_of(replay)]
    assert any(title.startswith("Trained on from step 1 with the batches of steps 2-4") for title in titles)
    data = json.loads(json.dumps(replay_data(replay), allow_nan=False))["training"]
    assert [trained["label"] for trained in data["trained"]] == ["grpo", "dr_grpo", "rloo"]
    assert data["trained"][1]["off_policy"] == [3, 4]
    assert math.isfinite(data["trained"][0]["score"])
    assert data["trained"][0]["path"].startswith(str(run.path.parent))


def test_stored_advantages_and_kl_do_not_leak_into_the_next_training(run):
    """A group that the new estimator drops keeps no advantage of the old one; a KL that was taken from a reward is given back."""
    episodes = read_step(step_files(run.episodes)[2])
    trajectory = episodes[0].trajectories[0]
    assert trajectory.steps[0].advantage is not None
    reward, trajectory.reward = trajectory.reward, trajectory.reward - 0.25
    trajectory.info["kl_penalty"] = 0.25
    as_sampled(episodes)
    assert trajectory.reward == reward
    assert "kl_penalty" not in trajectory.info
    assert all(step.advantage is None for episode in episodes for t in episode.trajectories for step in t.steps)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train": 3}, "a --checkpoint to train on from"),
        ({"train": -1, "checkpoint": "step_1.ckpt"}, "expected a number of batches"),
        ({"train": 5, "checkpoint": "step_1.ckpt"}, "no episodes of step 6, after the checkpoint of step 1"),
    ],
)
def test_what_cannot_be_trained_on_is_said_before_it_begins(run, arguments, message):
    if "checkpoint" in arguments:
        arguments["checkpoint"] = run.checkpoints / arguments["checkpoint"]
    before = {path.name for path in run.path.parent.iterdir()}
    with pytest.raises(ValueError, match=message):
        replay_run(run.path, ["rloo"], **arguments)
    assert {path.name for path in run.path.parent.iterdir()} == before


def test_an_estimator_with_values_needs_a_checkpoint_with_a_value_head(run):
    config = Config.from_config(load_config([], default=str(run.config_yaml)))
    subjects = parse_subjects(["gae"], config.rllm.algorithm)
    with pytest.raises(ValueError, match="gae and the checkpoint do not go together: only one of them has a value head"):
        train_on(run, config, step_files(run.episodes), run.checkpoints / "step_1.ckpt", subjects, 1)


def test_what_the_run_did_is_known_from_its_settings(run):
    algorithm = Config.from_config(load_config([], default=str(run.config_yaml))).rllm.algorithm
    subjects = parse_subjects(["grpo", "grpo:norm_adv_by_std_in_grpo=false", "rloo"], algorithm)
    assert [is_own(subject, algorithm) for subject in subjects] == [True, False, False]
