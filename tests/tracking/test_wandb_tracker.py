import json
import os
import subprocess
import sys

import pytest
import wandb

from rllm_lightning import schema
from rllm_lightning.tracking.run_directory import RunDirectory
from rllm_lightning.tracking.table import Table
from rllm_lightning.tracking.wandb_tracker import STEP, WandbTracker
from tests.tracking import offline


def rows(run):
    return offline.history(run.wandb)


def summary_of(run):
    return {key: value for record in offline.records(run.wandb, "summary") for key, value in offline.values(record.update).items()}


def config_of(run):
    return offline.values(offline.records(run.wandb, "run")[0].config.update)


def test_wandbs_own_viewer_reads_the_run(config, run, follow):
    follow(config, run, {0: {"a": 0.5}})
    (path,) = run.wandb.glob("offline-run-*/run-*.wandb")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    found = [json.loads(line) for line in answer.stdout.splitlines()]
    (item,) = [record["history"]["item"] for record in found if record["type"] == "history"]
    assert (item[STEP], item["a"]) == (0, 0.5)


def test_every_step_is_one_row_against_the_global_step(config, run, make_episode):
    """B45: train steps 1 to 4, validation at 0, 2, 4, a table at 2; nothing is dropped and no step goes backwards."""
    tracker = WandbTracker(config, run)
    for step in range(5):
        metrics = {"reward/a/mean": step / 4} if step else {}
        tracker.log_metrics(metrics | ({"val/x/pass@1": 0.5 - step / 8} if step % 2 == 0 else {}), step)
        if step == 2:
            tracker.log_episodes([make_episode()], step)
    tracker.close(0)

    found = rows(run)
    table = found.pop(3)
    assert found == [
        {STEP: 0, "val/x/pass@1": 0.5},
        {STEP: 1, "reward/a/mean": 0.25},
        {STEP: 2, "reward/a/mean": 0.5, "val/x/pass@1": 0.25},
        {STEP: 3, "reward/a/mean": 0.75},
        {STEP: 4, "reward/a/mean": 1.0, "val/x/pass@1": 0.0},
    ]
    assert table[STEP] == 2
    assert table["episodes.nrows"] == 1
    assert ("*", STEP) in [(record.glob_name, record.step_metric) for record in offline.records(run.wandb, "metric")]
    assert summary_of(run)["val/x/pass@1"] == {"max": 0.5, "last": 0.0}
    assert summary_of(run)["reward/a/mean"] == 1.0
    assert [record.exit_code for record in offline.records(run.wandb, "exit")] == [0]


@pytest.mark.parametrize("exit_code", [1, 130, 143])
def test_the_run_ends_with_the_exit_code_of_the_process_whatever_lightning_says(config, run, exit_code, follow):
    follow(config, run, {1: {"a": 1.0}}, exit_code)
    assert [record.exit_code for record in offline.records(run.wandb, "exit")] == [exit_code]


def test_closing_twice_is_closing_once_and_nothing_reopens(config, run):
    tracker = WandbTracker(config, run)
    tracker.log_metrics({"a": 1.0}, 1)
    tracker.close(0)
    tracker.close(1)
    tracker.log_metrics({"a": 2.0}, 2)
    assert tracker.experiment is None
    assert len(offline.records(run.wandb, "exit")) == 1


def test_two_runs_in_one_process_are_two(make_config, follow):
    config, runs = make_config(), []
    for value in (1.0, 2.0):
        runs.append(RunDirectory.create(config))
        follow(config, runs[-1], {1: {"a": value}})
    assert [rows(run) for run in runs] == [[{STEP: 1, "a": 1.0}], [{STEP: 1, "a": 2.0}]]


def test_values_that_are_not_finite_are_left_out(config, run, follow):
    """B43: the objective is numeric or omitted."""
    follow(config, run, {1: {"a": float("nan"), "b": float("inf"), "c": 0.5}})
    assert rows(run) == [{STEP: 1, "c": 0.5}]


def test_the_config_is_the_resolved_one_nested_and_without_secrets(make_config, follow):
    config = make_config(**{"task.api_key": "sk-hidden", "training.learning_rate": 0.25, "rllm.algorithm.adv_estimator": "rloo"})
    run = RunDirectory.create(config)
    follow(config, run, {})
    shown = config_of(run)
    shown.pop("_wandb")
    expected = schema.to_plain_tree(config)
    expected["task"]["api_key"] = "***"
    assert shown == json.loads(json.dumps(expected))


def test_the_table_shows_rollouts_with_reward_and_advantage(config, run, make_episode):
    tracker = WandbTracker(config, run)
    tracker.log_episodes([make_episode(reward=1.0, advantage=[0.5, 1.5])], 3)
    tracker.close(0)
    (path,) = run.wandb.rglob("*.table.json")
    table = json.loads(path.read_text())
    assert dict(zip(table["columns"], table["data"][0], strict=True)) == {
        "task": "sum:1",
        "rollout": "0",
        "role": "solver",
        "prompt": "1+1=?",
        "response": "2",
        "reward": 1.0,
        "advantage": 1.0,  # the mean over its tokens
        "correct": True,
        "termination": "env_done",
    }


def test_rewards_advantages_and_lengths_are_histograms_of_the_step_of_the_table(config, run, make_episode):
    tracker = WandbTracker(config, run)
    tracker.log_episodes([make_episode(reward=1.0, advantage=0.5), make_episode(rollout=1, reward=0.0, advantage=-0.5)], 3)
    tracker.close(0)
    (row,) = rows(run)
    assert row[STEP] == 3
    for name, low, high in (("reward", 0.0, 1.0), ("advantage", -0.5, 0.5)):
        bins = row[f"distribution/{name}.bins"]
        assert (bins[0], bins[-1]) == (low, high)
        assert sum(row[f"distribution/{name}.values"]) == 2
    assert sum(row["distribution/response_length.values"]) == 2


def test_a_table_of_the_run_stands_at_its_first_step(config, run):
    tracker = WandbTracker(config, run)
    tracker.tables = {"estimator_card": Table(["property", "grpo"], [["scope", "group"], ["needs", "nothing"]])}
    tracker.begin(0)
    tracker.log_metrics({"a": 1.0}, 0)
    tracker.close(0)
    first, second = rows(run)
    assert (first[STEP], first["estimator_card.nrows"]) == (0, 2)
    assert second == {STEP: 0, "a": 1.0}
    (path,) = run.wandb.rglob("*.table.json")
    assert json.loads(path.read_text()) == {"columns": ["property", "grpo"], "data": [["scope", "group"], ["needs", "nothing"]]}


def test_the_final_model_is_an_artifact_only_when_asked_for(make_config, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_text("w")
    for asked, number in ((False, 0), (True, 1)):
        config = make_config(**{"wandb.log_model": asked})
        run = RunDirectory.create(config)
        tracker = WandbTracker(config, run)
        tracker.begin(0)
        tracker.log_model(tmp_path / "model")
        tracker.close(0)
        assert len(offline.records(run.wandb, "artifact")) == number


def test_all_files_lie_in_the_run_directory_and_the_environment_is_as_before(config, run, tmp_path, monkeypatch, make_episode):
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    tracker = WandbTracker(config, run)
    tracker.log_metrics({"a": 1.0}, 1)
    tracker.log_episodes([make_episode()], 1)
    tracker.close(0)
    outside = [path for path in tmp_path.rglob("*") if path.is_file() and not path.is_relative_to(run.path)]
    assert outside == []
    assert dict(os.environ) == before


def test_disabled_costs_nothing(make_config):
    """Not even the import; the trackers' base needs Lightning, which does not import it."""
    config = make_config(**{"wandb.mode": "disabled"})
    run = RunDirectory.create(config)
    program = (
        "import sys\n"
        "from rllm_lightning.config import Config, load_config\n"
        "from rllm_lightning.tracking.run_directory import RunDirectory\n"
        "from rllm_lightning.tracking.trackers import make_trackers\n"
        "run = RunDirectory.open(sys.argv[1])\n"
        "config = Config.from_config(load_config(['wandb.mode=disabled', 'rllm.trainer.logger=[wandb]']))\n"
        "(tracker,) = make_trackers(config, run)\n"
        "tracker.begin(0); tracker.log_metrics({'a': 1.0}, 1); tracker.log_episodes([], 1); tracker.close(0)\n"
        "assert 'wandb' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program, str(run.path)], check=True)
    assert not run.wandb.exists()


def test_a_users_own_open_run_is_used_and_left_open(config, run, tmp_path):
    own = wandb.init(mode="offline", dir=tmp_path, settings=wandb.Settings(silent=True))
    tracker = WandbTracker(config, run)
    tracker.log_metrics({"a": 1.0}, 1)
    tracker.close(0)
    assert wandb.run is own
    assert own.config["seed"] == 7
    own.finish()
