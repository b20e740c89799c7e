"""Online runs, servers that are down or refuse, and runs that are resumed; W&B's own SDK and command line against a loopback server."""

import json
import os
import subprocess
import sys

import pytest
import wandb

from rllm_lightning.config import ConfigError
from rllm_lightning.tracking import wandb_tracker
from rllm_lightning.tracking.metrics_table import MetricsTable
from rllm_lightning.tracking.run_directory import RunDirectory
from rllm_lightning.tracking.wandb_settings import settings
from rllm_lightning.tracking.wandb_tracker import STEP, WandbTracker
from tests.tracking import offline
from tests.tracking.wandb_server import WandbServer

ONLINE = {"wandb.mode": "online"}


@pytest.fixture
def impatient(monkeypatch):
    """Seconds instead of half a minute."""
    chosen = settings() | {"init_timeout": 1, "finish_timeout": 2}
    monkeypatch.setattr(wandb_tracker, "settings", lambda: chosen)


def sync(server, *paths):
    """`wandb sync` as a user runs it, against `server`."""
    environment = os.environ | {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": "0" * 40}
    command = [sys.executable, "-m", "wandb", "sync", *map(str, paths)]
    subprocess.run(command, env=environment, cwd=paths[-1].parent, check=True, capture_output=True, timeout=60)


def test_an_online_run_sends_every_row_and_how_the_process_ends(make_config, wandb_server, follow):
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


# ------------------------------------------------------------------------------------------------- down, refusing, silent


def test_a_server_that_is_down_leaves_an_offline_run(make_config, monkeypatch, caplog, impatient, follow):
    """The base URL of these tests leads to a port where nothing listens."""
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    config = make_config(**ONLINE)
    run = RunDirectory.create(config)
    follow(config, run, {1: {"a": 1.0}})
    assert offline.history(run.wandb) == [{STEP: 1, "a": 1.0}]
    (warning,) = [record.getMessage() for record in caplog.records if record.name.startswith("rllm_lightning")]
    assert f"recorded offline in {run.wandb}, upload it with `wandb sync {run.wandb}`" in warning


def test_a_malformed_key_leaves_an_offline_run(make_config, monkeypatch, caplog, impatient, wandb_server, follow):
    monkeypatch.setenv("WANDB_API_KEY", "short")
    config = make_config(**ONLINE)
    run = RunDirectory.create(config)
    follow(config, run, {1: {"a": 1.0}})
    assert offline.history(run.wandb) == [{STEP: 1, "a": 1.0}]
    assert "recorded offline" in caplog.text


@pytest.mark.parametrize("fault", ["refuses", "is silent", "dies"])
def test_a_run_outlives_its_server_and_can_be_uploaded_to_another(make_config, wandb_server, caplog, impatient, fault, follow):
    config = make_config(**ONLINE)
    run = RunDirectory.create(config)
    tracker = WandbTracker(config, run)
    tracker.begin(0)
    wandb_server.status = {"refuses": 403, "is silent": 0, "dies": 200}[fault]
    if fault == "dies":
        wandb_server.stop()
    for step in range(4):
        tracker.log_metrics({"a": step / 2}, step)
    tracker.close(0)

    (folder,) = run.wandb.glob("run-*")
    (warning,) = [record.getMessage() for record in caplog.records if record.name.startswith("rllm_lightning")]
    assert f"it is complete in {folder}, upload it with `wandb sync --include-online {folder}`" in warning
    another = WandbServer()
    sync(another, "--include-online", folder)
    assert another.rows == [{STEP: step, "a": step / 2} for step in range(4)]
    assert another.exit_codes == [0]
    another.stop()


def test_a_table_that_the_server_does_not_take_does_not_end_training(make_config, wandb_server, caplog, monkeypatch, make_episode):
    """W&B asks the server before it stages the first table. One that died raises there after 20 s; here it does so at once."""

    def fail(*args, **kwargs):
        raise wandb.errors.AuthenticationError("Failed to verify credentials")

    config = make_config(**ONLINE)
    tracker = WandbTracker(config, RunDirectory.create(config))
    tracker.begin(0)
    monkeypatch.setattr("wandb.sdk.wandb_login._verify_login", fail)
    for step in (1, 2):
        tracker.log_metrics({"a": step}, step)
        tracker.log_episodes([make_episode()], step)
    tracker.close(0)
    assert caplog.text.count("no more tables and files, the server does not answer: Failed to verify credentials") == 1
    assert [row["a"] for row in wandb_server.rows if "a" in row] == [1, 2]


def test_resuming_what_is_not_there_is_refused_where_it_must_be(make_config, wandb_server):
    config = make_config(**ONLINE, **{"wandb.id": "gone", "wandb.resume": "must"})
    with pytest.raises(ConfigError, match=r"^wandb\.resume: must was refused: "):
        WandbTracker(config, RunDirectory.create(config)).begin(0)
    wandb.teardown()


# ---------------------------------------------------------------------------------------------------------------- resumed

FIRST = {0: {"val/x/pass@1": 0.9}, 1: {"a": 0.1}, 2: {"a": 0.2, "val/x/pass@1": 0.5}}
SECOND = {3: {"a": 0.3}, 4: {"a": 0.4, "val/x/pass@1": 0.6}}
BOTH = [{STEP: step, **metrics} for step, metrics in (FIRST | SECOND).items()]


@pytest.fixture
def two_parts(run, follow):
    """A run of two processes, with the table that the tracker `csv` keeps beside it."""

    def go(config):
        table = MetricsTable(run.metrics_csv)
        for step, metrics in FIRST.items():
            table.append(step, metrics)
        follow(config, run, FIRST, exit_code=143)
        follow(config, RunDirectory.open(run.path), SECOND, begin=2)

    return go


def test_an_offline_run_of_two_parts_is_uploaded_as_one(config, run, two_parts):
    """One `wandb sync` of the folder; W&B's own count of rows goes on, too."""
    two_parts(config)
    assert len(list(run.wandb.glob("offline-run-*"))) == 2
    server = WandbServer()
    sync(server, run.wandb)
    assert server.rows == BOTH
    assert [line["_step"] for _, line in sorted(server.lines[run.id].items())] == [0, 1, 2, 3, 4]
    assert server.exit_codes == [143, 0]
    server.stop()


def test_an_online_run_of_two_parts_is_one(make_config, run, two_parts, wandb_server):
    two_parts(make_config(**ONLINE))
    assert wandb_server.rows == BOTH
    assert list(wandb_server.runs) == [run.id]


def test_the_best_pass_rate_of_a_resumed_run_is_that_of_the_whole_run(config, run, two_parts):
    two_parts(config)
    last_part = max(run.wandb.glob("offline-run-*/run-*.wandb"))
    summaries = [offline.values(record.update) for record in offline.records_of(last_part, "summary")]
    assert [summary["val/x/pass@1"] for summary in summaries if "val/x/pass@1" in summary][-1] == {"max": 0.9, "last": 0.6}


def test_a_run_whose_beginning_is_not_uploaded_goes_on_offline(make_config, run, follow, wandb_server, caplog):
    """Else the server would get the end first, and the beginning in its place later."""
    follow(make_config(**{"wandb.mode": "offline"}), run, FIRST)
    follow(make_config(**ONLINE), run, SECOND, begin=2)
    assert wandb_server.runs == {}
    assert "its beginning was recorded offline" in caplog.text
    sync(wandb_server, run.wandb)
    assert wandb_server.rows == BOTH


def test_a_run_whose_beginning_is_uploaded_goes_on_online(make_config, run, follow, wandb_server):
    follow(make_config(**{"wandb.mode": "offline"}), run, FIRST)
    sync(wandb_server, run.wandb)
    follow(make_config(**ONLINE), run, SECOND, begin=2)
    assert wandb_server.rows == BOTH
