"""How a W&B run begins: online or offline, under which names, with which settings."""

import subprocess
import sys

import pytest
import wandb

from rllm_lightning.config import ConfigError
from rllm_lightning.tracking.run_directory import RunDirectory
from rllm_lightning.tracking.wandb_settings import choose_mode, run_arguments, settings
from rllm_lightning.tracking.wandb_tracker import WandbTracker


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


def test_every_key_of_the_section_reaches_wandb(make_config, run):
    config = make_config(
        **{
            "wandb.entity": "team",
            "wandb.group": "ablation",
            "wandb.job_type": "train",
            "wandb.tags": ["a", "b"],
            "wandb.notes": "why",
            "wandb.id": "abc",
            "wandb.resume": "must",
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
        "resume": "must",
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


def test_runs_that_differ_in_the_seed_alone_fall_into_one_group(make_config):
    groups = {run_arguments(config, RunDirectory.create(config))["group"] for config in (make_config(seed=1), make_config(seed=2))}
    assert groups == {"grpo"}


def test_a_run_directory_that_has_a_wandb_run_is_appended_to(config, run):
    assert "resume" not in run_arguments(config, run)
    (run.wandb / "cache").mkdir(parents=True)
    assert "resume" not in run_arguments(config, run)
    (run.wandb / f"offline-run-20260101_000000-{run.id}").mkdir()
    assert run_arguments(config, run)["resume"] == "allow"


def test_every_setting_is_one_of_this_wandb_and_a_server_is_waited_for_half_a_minute_at_the_most():
    chosen = settings()
    wandb.Settings(**chosen)
    assert (chosen["init_timeout"], chosen["finish_timeout"]) == (20, 30)


@pytest.mark.parametrize(
    ("argument", "is_left_out"), [("task.api_key=sk-hidden", True), ("data.max_response_length=8", False), ("task.note=token-mean", False)]
)
def test_metadata_with_a_secret_on_the_command_line_is_left_out(monkeypatch, argument, is_left_out):
    monkeypatch.setattr(sys, "argv", ["run.py", argument])
    assert settings()["x_disable_meta"] is is_left_out


@pytest.mark.parametrize(
    ("name", "value", "is_left_out"),
    [
        ("SLURM_JWT", "eyJhbGciOi.planted", True),
        ("SLURM_COMMENT", "see https://me:planted@host", True),
        ("SLURM_JOB_ID", "12345678", False),
    ],
)
def test_metadata_with_a_secret_of_the_scheduler_is_left_out(monkeypatch, name, value, is_left_out):
    monkeypatch.setattr(sys, "argv", ["run.py"])
    monkeypatch.setenv(name, value)
    assert settings()["x_disable_meta"] is is_left_out


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("https://ghp_planted:x-oauth-basic@github.com/a/b.git", "https://***@github.com/a/b.git"),
        ("https://github.com/a/b.git", None),  # left to W&B
        ("git@github.com:a/b.git", None),
    ],
)
def test_a_token_in_the_repositorys_address_is_masked(tmp_path, monkeypatch, address, shown):
    monkeypatch.chdir(tmp_path)
    for command in (["init", "-q"], ["remote", "add", "origin", address]):
        subprocess.run(["git", *command], check=True)
    assert settings().get("git_remote_url") == shown
