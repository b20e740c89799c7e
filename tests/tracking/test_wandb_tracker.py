import json
import os
import subprocess
import sys

import pytest
import wandb
import yaml

from rllm_lightning import schema
from rllm_lightning.config import ConfigError
from rllm_lightning.tracking import wandb_tracker
from rllm_lightning.tracking.run_directory import RunDirectory
from rllm_lightning.tracking.wandb_tracker import STEP, WandbTracker, choose_mode, run_arguments, settings
from tests.tracking import offline


@pytest.fixture(autouse=True)
def no_run_is_left_open():
    yield
    open_run = wandb.run is not None
    wandb.teardown()
    assert not open_run


def rows(run):
    return offline.history(run.wandb)


def summary_of(run):
    return {key: value for record in offline.records(run.wandb, "summary") for key, value in offline.values(record.update).items()}


def config_of(run):
    return offline.values(offline.records(run.wandb, "run")[0].config.update)


def follow(config, run, metrics_by_step, exit_code=0):
    tracker = WandbTracker(config, run)
    tracker.begin(0)
    for step, metrics in metrics_by_step.items():
        tracker.log_metrics(metrics, step)
    tracker.finalize("success")
    tracker.close(exit_code)


def test_wandbs_own_viewer_reads_the_run(config, run):
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
def test_the_run_ends_with_the_exit_code_of_the_process_whatever_lightning_says(config, run, exit_code):
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


def test_two_runs_in_one_process_are_two(make_config):
    config, runs = make_config(), []
    for value in (1.0, 2.0):
        runs.append(RunDirectory.create(config))
        follow(config, runs[-1], {1: {"a": value}})
    assert [rows(run) for run in runs] == [[{STEP: 1, "a": 1.0}], [{STEP: 1, "a": 2.0}]]


def test_values_that_are_not_finite_are_left_out(config, run):
    """B43: the objective is numeric or omitted."""
    follow(config, run, {1: {"a": float("nan"), "b": float("inf"), "c": 0.5}})
    assert rows(run) == [{STEP: 1, "c": 0.5}]


def test_the_config_is_the_resolved_one_nested_and_without_secrets(make_config):
    config = make_config(**{"task.api_key": "sk-hidden", "training.learning_rate": 0.25, "rllm.algorithm.adv_estimator": "rloo"})
    run = RunDirectory.create(config)
    follow(config, run, {})
    shown = config_of(run)
    shown.pop("_wandb")
    expected = schema.to_plain_tree(config)
    expected["task"]["api_key"] = "***"
    assert shown == json.loads(json.dumps(expected))


def test_no_secret_reaches_any_file(make_config, monkeypatch, make_episode):
    monkeypatch.setenv("HF_TOKEN", "hf_environment")
    monkeypatch.setattr(sys, "argv", ["run.py", "task.api_key=sk-hidden"])
    config = make_config(**{"task.api_key": "sk-hidden", "wandb.notes": "by https://me:pass-word@host", "wandb.tags": ["hf_environment"]})
    run = RunDirectory.create(config)
    tracker = WandbTracker(config, run)
    tracker.log_episodes([make_episode(prompt="hf_environment", response="https://me:pass-word@host")], 1)
    tracker.close(0)
    content = b"".join(path.read_bytes() for path in run.path.rglob("*") if path.is_file())
    assert not any(secret in content for secret in (b"sk-hidden", b"pass-word", b"hf_environment"))


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


def test_a_killed_process_loses_at_most_the_last_second(config, run, tmp_path):
    """The process is killed two seconds after its last row; by default W&B would hold the rows back for 15 s."""
    program = (
        "import os, signal, sys, time\n"
        "from rllm_lightning.config import Config, load_config\n"
        "from rllm_lightning.tracking.run_directory import RunDirectory\n"
        "from rllm_lightning.tracking.wandb_tracker import WandbTracker\n"
        "config = Config.from_config(load_config(['rllm.trainer.project_name=demo']))\n"
        "tracker = WandbTracker(config, RunDirectory.open(sys.argv[1]))\n"
        "for step in range(5): tracker.log_metrics({'a': 1.0}, step)\n"
        "time.sleep(2)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(run.path)], check=False, stderr=subprocess.DEVNULL)
    assert [row[STEP] for row in rows(run)] == [0, 1, 2, 3, 4]


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


# ----------------------------------------------------------------------------------------------------------------- modes


def test_offline_is_the_default_and_a_login_makes_it_online(make_config, monkeypatch, tmp_path):
    assert choose_mode(make_config()) == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert choose_mode(make_config()) == "online"
    monkeypatch.delenv("WANDB_API_KEY")
    (tmp_path / "netrc").write_text("machine 127.0.0.1:9\n  login user\n  password " + "0" * 40 + "\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert choose_mode(make_config()) == "online"


def test_a_login_elsewhere_is_no_login_here(make_config, monkeypatch, tmp_path):
    (tmp_path / "netrc").write_text("machine github.com\n  login user\n  password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert choose_mode(make_config()) == "offline"


def test_the_config_decides_over_the_environment_and_that_over_the_login(make_config, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_MODE", "dryrun")
    assert choose_mode(make_config()) == "offline"
    assert choose_mode(make_config(**{"wandb.mode": "disabled"})) == "disabled"


def test_online_without_a_login_is_refused_at_once(make_config):
    config = make_config(**{"wandb.mode": "online"})
    with pytest.raises(ConfigError, match=r"^wandb\.mode: online needs a login"):
        WandbTracker(config, RunDirectory.create(config))


def test_a_server_that_is_down_leaves_an_offline_run(make_config, monkeypatch, caplog):
    """The base URL of these tests leads to a port where nothing listens."""
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    chosen = settings() | {"init_timeout": 1}
    monkeypatch.setattr(wandb_tracker, "settings", lambda: chosen)
    config = make_config(**{"wandb.mode": "online"})
    run = RunDirectory.create(config)
    follow(config, run, {1: {"a": 1.0}})
    assert rows(run) == [{STEP: 1, "a": 1.0}]
    assert "recorded offline" in caplog.text


def test_an_online_run_sends_every_row_and_how_the_process_ends(make_config, wandb_server):
    config = make_config(**{"wandb.group": "ablation"})
    run = RunDirectory.create(config)
    follow(config, run, {step: {"a": step / 2} for step in range(4)}, exit_code=143)
    assert wandb_server.rows == [{STEP: step, "a": step / 2} for step in range(4)]
    assert wandb_server.exit_codes == [143]
    sent = wandb_server.runs[run.id]
    assert {key: sent[key] for key in ("project", "groupName", "displayName")} == {
        "project": "demo",
        "groupName": "ablation",
        "displayName": run.path.name,
    }
    assert json.loads(sent["config"])["seed"]["value"] == 7


def test_retries_are_bounded():
    chosen = settings()
    wandb.Settings(**chosen)  # every name is one of this version
    assert {name for name in chosen if name.endswith("retry_max")} == {
        f"x_{part}_retry_max" for part in ("graphql", "file_stream", "file_transfer")
    }
    assert chosen["finish_timeout"] <= 60


# ------------------------------------------------------------------------------------------------------------- arguments


def test_every_key_of_the_section_reaches_wandb(make_config, run):
    config = make_config(
        **{
            "wandb.entity": "team",
            "wandb.group": "ablation",
            "wandb.job_type": "train",
            "wandb.tags": ["a", "b"],
            "wandb.notes": "why",
            "wandb.id": "abc",
        }
    )
    assert run_arguments(config, run) == {
        "id": "abc",
        "entity": "team",
        "project": "demo",
        "name": run.path.name,
        "group": "ablation",
        "job_type": "train",
        "tags": ["a", "b"],
        "notes": "why",
    }


def test_the_group_is_the_sweep_else_the_estimator(make_config, run, monkeypatch):
    config = make_config(**{"rllm.algorithm.adv_estimator": "rloo"})
    assert run_arguments(config, run)["group"] == "rloo"
    monkeypatch.setenv("WANDB_SWEEP_ID", "sw33p")
    assert run_arguments(config, run)["group"] == "sw33p"


def test_a_resumed_run_directory_is_the_same_wandb_run(config, run):
    assert run_arguments(config, run)["id"] == run_arguments(config, RunDirectory.open(run.path))["id"] == run.id


def test_what_an_agent_has_set_stands(config, run, monkeypatch):
    monkeypatch.setenv("WANDB_RUN_ID", "from-agent")
    monkeypatch.setenv("WANDB_SWEEP_ID", "sw33p")
    assert not {"id", "project"} & run_arguments(config, run).keys()


def test_a_users_own_open_run_is_used_and_left_open(config, run, tmp_path):
    own = wandb.init(mode="offline", dir=tmp_path, settings=wandb.Settings(silent=True))
    tracker = WandbTracker(config, run)
    tracker.log_metrics({"a": 1.0}, 1)
    tracker.close(0)
    assert wandb.run is own
    assert own.config["seed"] == 7
    own.finish()


# ---------------------------------------------------------------------------------------------------------------- sweeps


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    def issue(**values):
        path = tmp_path / "sweep-values.yaml"
        path.write_text(yaml.safe_dump({"wandb_version": 1} | {key: {"value": value} for key, value in values.items()}, sort_keys=False))
        monkeypatch.setenv("WANDB_SWEEP_PARAM_PATH", str(path))
        monkeypatch.setenv("WANDB_SWEEP_ID", "sw33p")

    return issue


def test_a_sweeps_values_are_those_the_run_uses(make_config, sweep):
    """B41: dotted and nested parameters; the config shown is the one in effect."""
    sweep(**{"training.learning_rate": 1e-3, "rllm": {"algorithm": {"adv_estimator": "rloo"}}, "task.level": 4.0, "seed": 7})
    config = make_config(**{"training.learning_rate": "1e-3", "rllm.algorithm.adv_estimator": "rloo", "task.level": 4})
    run = RunDirectory.create(config)
    follow(config, run, {1: {"a": 1.0}})
    shown = config_of(run)
    assert shown["training"]["learning_rate"] == 1e-3
    assert shown["training.learning_rate"] == 1e-3
    assert shown["rllm"]["algorithm"]["adv_estimator"] == "rloo"


def test_a_run_that_would_be_shown_with_other_values_is_refused(make_config, sweep):
    sweep(**{"training.learning_rate": 1e-3, "rllm": {"algorithm": {"adv_estimator": "rloo"}}, "seed": 7})
    config = make_config(**{"rllm.algorithm.adv_estimator": "grpo", "training.learning_rate": 1e-4})
    with pytest.raises(ConfigError) as caught:
        WandbTracker(config, RunDirectory.create(config))
    lines = str(caught.value).splitlines()
    assert lines[0] == "training.learning_rate: the sweep says 0.001, this run uses 0.0001"
    assert lines[1] == "rllm.algorithm.adv_estimator: the sweep says 'rloo', this run uses 'grpo'"
    assert len(lines) == 3


def test_a_swept_key_that_nothing_reads_is_refused(make_config, sweep):
    sweep(**{"training.learning_rat": 1e-3})
    config = make_config()
    with pytest.raises(ValueError, match=r"training\.learning_rat: unknown key"):
        WandbTracker(config, RunDirectory.create(config))


def test_every_rank_refuses(make_config, sweep, monkeypatch):
    """B44: rank 1 does not train on while rank 0 stops."""
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    sweep(seed=8)
    config = make_config()
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    with pytest.raises(ValueError, match="seed: the sweep says 8, this run uses 7"):
        WandbTracker(config, RunDirectory.create(config))
