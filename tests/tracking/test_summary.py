import json
import math
import subprocess

import pytest

from rllm_lightning.tracking import summary
from rllm_lightning.tracking.metrics_table import MetricsTable
from rllm_lightning.tracking.summary import RunSummary, git_commit, is_headline, status_of


@pytest.fixture
def clock(monkeypatch):
    """Seconds since some moment; the test moves them."""
    now = [100.0]
    monkeypatch.setattr(summary.time, "monotonic", lambda: now[0])
    return now


def read(run):
    return json.loads(run.summary_json.read_text())


def test_a_run_is_running_from_its_begin_and_has_its_status_at_the_end(run, config):
    follower = RunSummary(run, config)
    follower.begin()
    assert read(run)["status"] == "running"
    follower.finish("done")
    assert read(run)["status"] == "done"


@pytest.mark.parametrize(
    ("exit_code", "status"),
    [(0, "done"), (1, "failed"), (2, "failed"), (130, "interrupted"), (143, "interrupted"), (138, "interrupted"), (137, "failed")],
)
def test_exit_codes_have_their_status(exit_code, status):
    assert status_of(exit_code) == status


def test_it_says_what_ran_and_on_what(run, config):
    follower = RunSummary(run, config)
    follower.precision = "32-true"
    follower.begin()
    content = read(run)
    assert {key: content[key] for key in ("name", "id", "seed", "estimator", "loss_fn", "precision", "steps")} == {
        "name": "first",
        "id": run.id,
        "seed": 7,
        "estimator": "grpo",
        "loss_fn": "ppo",
        "precision": "32-true",
        "steps": 0,
    }
    assert {"python", "torch", "lightning", "rllm-lightning"} <= content["versions"].keys()


def test_headline_metrics_are_validation_and_mean_rewards():
    assert [
        key for key in ("val/x/pass@1", "reward/solver/mean", "reward/a/b/mean", "reward/solver/std", "actor/val/x") if is_headline(key)
    ] == [*("val/x/pass@1", "reward/solver/mean", "reward/a/b/mean")]


def test_each_headline_metric_has_first_last_best_and_the_first_step_of_the_best(run, config):
    follower = RunSummary(run, config)
    follower.begin()
    for step, value in enumerate([0.2, 0.6, 0.6, 0.4]):
        follower.add({"val/x/pass@1": value, "actor/loss": 1.0}, step)
    follower.finish("done")
    assert read(run)["metrics"] == {"val/x/pass@1": {"first": 0.2, "last": 0.4, "best": 0.6, "best_step": 1}}
    assert read(run)["steps"] == 3


def test_a_value_that_is_not_a_number_is_null_and_never_the_best(run, config):
    follower = RunSummary(run, config)
    follower.begin()
    for step, value in enumerate([math.nan, 0.5, math.inf, math.nan]):
        follower.add({"val/x": value, "val/none": math.nan}, step)
    follower.finish("failed")
    assert read(run)["metrics"] == {
        "val/x": {"first": None, "last": None, "best": 0.5, "best_step": 1},
        "val/none": {"first": None, "last": None, "best": None, "best_step": None},
    }


def test_tokens_per_second_are_all_tokens_over_all_time(run, config, clock):
    """10 tokens in 1 s and 90 in 9 s, and 10 s without any: 100 / 20 = 5 (the mean of rates would be 10)."""
    follower = RunSummary(run, config)
    follower.begin()
    for step, (tokens, seconds) in enumerate([(10, 1), (90, 9)], start=1):
        clock[0] += seconds
        follower.add({"rollout/num_response_tokens": tokens}, step)
    clock[0] += 10
    follower.finish("done")
    assert (read(run)["tokens_per_s"], read(run)["wall_time_s"]) == (5.0, 20.0)


def test_without_tokens_there_is_no_rate(run, config):
    follower = RunSummary(run, config)
    follower.begin()
    follower.finish("done")
    assert read(run)["tokens_per_s"] is None


def test_a_resumed_run_takes_up_metrics_and_time_and_forgets_the_steps_it_does_again(run, config, clock):
    """Steps 1 to 3 are done in 30 s; it resumes after step 2, so the best of step 3 never was."""
    table, first = MetricsTable(run.metrics_csv), RunSummary(run, config)
    first.begin()
    for step, value in ((1, 0.1), (2, 0.2), (3, 0.9)):
        table.append(step, {"val/x": value})
        first.add({"val/x": value}, step)
    clock[0] += 30
    first.finish("interrupted")

    second = RunSummary(run, config)
    second.begin(step=2)
    clock[0] += 10
    second.add({"val/x": 0.3}, 3)
    second.finish("done")
    assert read(run)["metrics"]["val/x"] == {"first": 0.1, "last": 0.3, "best": 0.3, "best_step": 3}
    assert read(run)["wall_time_s"] == 40.0


def test_a_resumed_run_that_fails_before_it_begins_keeps_what_it_came_to(run, config):
    first = RunSummary(run, config)
    first.begin()
    first.add({"val/x": 0.5}, 4)
    first.finish("interrupted")
    before = read(run)
    RunSummary(run, config).finish("failed")
    assert read(run) == before | {"status": "failed"}


def test_a_new_run_that_fails_before_it_begins_has_a_summary(run, config):
    RunSummary(run, config).finish("failed")
    assert (read(run)["status"], read(run)["steps"]) == ("failed", 0)


def test_validation_is_on_disk_before_the_end(run, config):
    follower = RunSummary(run, config)
    follower.begin()
    follower.add({"val/x": 0.5}, 4)
    assert read(run)["metrics"]["val/x"]["last"] == 0.5
    assert read(run)["status"] == "running"


def test_no_secret_reaches_the_summary(run, config, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    config.rllm.trainer.experiment_name = "hf_0123456789"
    RunSummary(run, config).begin()
    assert read(run)["name"] == "***"


def test_a_metric_about_a_secret_word_is_a_metric(run, config):
    follower = RunSummary(run, config)
    follower.begin()
    follower.add({"val/secret_word/pass@1": 1}, 3)
    assert read(run)["metrics"] == {"val/secret_word/pass@1": {"first": 1, "last": 1, "best": 1, "best_step": 3}}


def test_the_commit_is_that_of_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_commit() is None
    who = ["-c", "user.name=n", "-c", "user.email=e"]
    for command in (["init", "-q"], [*who, "commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run(["git", *command], check=True)
    head = subprocess.run(["git", "log", "-1", "--format=%H"], capture_output=True, text=True, check=True).stdout.strip()
    assert git_commit() == head
