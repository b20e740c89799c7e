"""Trials under the real `wandb agent`, of sweeps made by the real `wandb sweep`, against a server of our own on loopback.

`wandb agent` exits with 0 whatever happened: what counts is what the server holds, and what is left in the run directories.
"""

import csv
import json
import re
import shlex

import pytest
import yaml

from rllm_lightning.lab.sweep.definition import read_sweep
from tests.sweeps.helpers import QUICK, wait_until
from tests.sweeps.wandb_server import Fault

METRIC = "optim/learning_rate"  # an objective that is known beforehand


@pytest.fixture
def definition(cloud):
    """definition(parameters, *words, **more): a sweep of quick trials; the words stand behind the macro."""

    def define(parameters, *words, macro="${args_no_hyphens}", total_batches=2, **more):
        command = ["python", "experiments/run.py", *QUICK, f"run_root={cloud.runs}", f"rllm.trainer.total_batches={total_batches}"]
        content = {"method": "grid", "metric": {"name": METRIC, "goal": "maximize"}, "program": "experiments/run.py"}
        return content | {"parameters": parameters, "command": [*command, macro, *words]} | more

    return define


def run_directories(cloud):
    return sorted(path.parent for path in cloud.runs.glob("*/*/config.yaml"))


def rows_of(folder):
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def status_of(folder):
    return json.loads((folder / "summary.json").read_text())["status"]


def test_two_agents_share_a_grid_of_four_over_a_bad_line(cloud, definition, tmp_path):
    """B40, B41, B50: every point runs once and is shown with the values it used, although the server is slow and answers 500 now and
    then. The last run's rows are refused for good (400): it trains to its end all the same, and its files are complete."""
    parameters = {
        "training": {"parameters": {"learning_rate": {"values": [0.5, "1e-3"]}}},
        "rllm.algorithm.adv_estimator": {"values": ["grpo", "rloo"]},
        "wandb.notes": {"value": "12:30, several words"},
        "rllm.workflow.workflow_args": {"value": {}},
    }
    sweep = cloud.sweep(definition(parameters, macro="${args}"))
    cloud.server.faults += [
        Fault("run0007/file_stream", status=400),
        Fault("file_stream", status=500, times=3),
        Fault("Heartbeat", status=503, times=1),
        Fault("UpsertBucket", status=200, delay_s=1.0, times=2),
    ]
    agents = [cloud.agent(sweep) for _ in range(2)]
    assert [agent.wait(timeout=240) for agent in agents] == [0, 0]

    runs = list(cloud.server.runs.values())
    assert len(runs) == 4
    points = {(run.issued["rllm.algorithm.adv_estimator"], run.issued["training"]["learning_rate"]) for run in runs}
    assert points == {("grpo", 0.5), ("grpo", "1e-3"), ("rloo", 0.5), ("rloo", "1e-3")}
    assert len({run.agent for run in runs}) == 2
    complete = [run for run in runs if run.name != "run0007"]
    assert [(run.state, run.exit_code, run.num_inits) for run in complete] == [("finished", 0, 1)] * 3
    for run in runs:
        learning_rate = float(run.issued["training"]["learning_rate"])
        assert float(run.config["training"]["learning_rate"]) == learning_rate  # W&B shows the text that it has issued
        assert run.config["training"]["beta1"] == 0.9
        assert run.config["rllm.algorithm.adv_estimator"] == run.config["rllm"]["algorithm"]["adv_estimator"]
        assert run.group == sweep.rpartition("/")[2]
    for run in complete:
        rows = {row["train/global_step"]: row[METRIC] for row in run.rows if METRIC in row}
        assert rows == dict.fromkeys([1, 2], float(run.issued["training"]["learning_rate"]))

    folders = run_directories(cloud)
    assert [status_of(folder) for folder in folders] == ["done"] * 4
    assert [[row["step"] for row in rows_of(folder)] for folder in folders] == [["1", "2"]] * 4
    used = {(c["rllm"]["algorithm"]["adv_estimator"], c["training"]["learning_rate"]) for c in map(_config, folders)}
    assert used == {("grpo", 0.5), ("grpo", 1e-3), ("rloo", 0.5), ("rloo", 1e-3)}

    # the command lines of the local runner are the agent's
    logs = "".join(agent.log.read_text() for agent in agents)
    printed = [shlex.split(line) for line in re.findall(r"About to run command: (.*)", logs)]
    local = read_sweep(tmp_path / "sweep.yaml")
    ours = [local.command_line(run.issued, tmp_path) for run in runs]
    assert sorted(map(_unquoted, printed)) == sorted(map(_unquoted, ours))


def _config(folder):
    return yaml.safe_load((folder / "config.yaml").read_text())


def _unquoted(words):
    """The agent's log quotes words with blanks, but not what stands inside of them."""
    return " ".join(words).replace('"', "").replace("'", "")


@pytest.mark.long
def test_hyperband_stops_a_trial_and_no_trial_outlives_its_agent(cloud, definition):
    """B43: a stop comes as SIGTERM: the trial saves itself and is shown as killed. An agent that is killed takes its trial with it, and
    so does one that is terminated; W&B's agent alone would leave them training."""
    early = {"type": "hyperband", "min_iter": 3, "eta": 2}
    parameters = {"training.learning_rate": {"values": [3e-4, 2e-4, 1e-4]}}
    sweep = cloud.sweep(definition(parameters, total_batches=100000, early_terminate=early))
    agents = [cloud.agent(sweep) for _ in range(3)]
    runs = cloud.server.runs
    hopeless = wait_until(lambda: next((run for run in runs.values() if run.exit_code is not None), None), timeout=180)
    assert hopeless.issued == {"training.learning_rate": 1e-4}
    assert (hopeless.state, hopeless.exit_code) == ("killed", 143)
    (folder,) = [folder for folder in run_directories(cloud) if _config(folder)["training"]["learning_rate"] == 1e-4]
    assert status_of(folder) == "interrupted"
    assert (folder / "checkpoints" / "last.ckpt").is_file()
    assert [row["train/global_step"] for row in hopeless.rows if METRIC in row] == [int(row["step"]) for row in rows_of(folder)]

    others = [run for run in runs.values() if run is not hopeless]
    assert [run.state for run in others] == ["running"] * 2
    busy = [agent for agent in agents if agent.poll() is None and hopeless.name not in agent.log.read_text()]
    busy[0].kill()
    busy[1].terminate()
    wait_until(lambda: all(run.exit_code == 143 for run in others))
    for agent in agents:
        agent.kill()
    wait_until(lambda: cloud.trial_pids() == [])
    assert [status_of(folder) for folder in run_directories(cloud)] == ["interrupted"] * 3


def test_a_sweep_that_cannot_work_ends_after_three_trials(cloud, definition):
    """B43, B40: the first two have an invalid config, the third would be shown with another learning rate than it uses, for the command
    sets one over it. All end before a model is loaded, with one clear line, and the agent gives up after three within 60 s."""
    parameters = {"data.train_batch_size": {"values": [-1, 2]}, "training.learning_rate": {"values": [0.1, 0.2]}}
    agent = cloud.agent(cloud.sweep(definition(parameters, "training.learning_rate=0.5")))
    assert agent.wait(timeout=120) == 0
    log = agent.log.read_text()
    errors = [line for line in log.splitlines() if line.startswith("error")]
    assert errors[:2] == ["error: data.train_batch_size: must be in [1, inf), got -1"] * 2
    assert errors[2].startswith("error: training.learning_rate: the sweep says 0.1, this run uses 0.5")
    assert len(errors) == 3
    assert "Traceback" not in log
    assert [run.num_inits for run in cloud.server.runs.values()] == [0, 0, 0]  # nothing was begun, so nothing is an objective
    assert run_directories(cloud) == []
    wait_until(lambda: cloud.trial_pids() == [])


PLUGIN = '''
import torch

from rllm_lightning import register_policy_loss


@register_policy_loss("greedy")
def greedy(logprobs_BT, old_logprobs_BT, advantages_BT, mask_BT):
    """Wants 4 TiB of memory."""
    return logprobs_BT + torch.empty(2**40).sum(), {}
'''


@pytest.mark.long
def test_a_trial_out_of_memory_fails_alone_and_a_server_that_dies_does_not_end_training(cloud, definition):
    """B43: the first trial fails, is shown so, and leaves nothing behind; the next one runs. The server dies in its midst: the trial
    trains to its end all the same, with complete files."""
    (cloud.folder / "greedy_loss.py").write_text(PLUGIN)
    cloud.environment["PYTHONPATH"] = str(cloud.folder)
    parameters = {"rllm.algorithm.loss_fn": {"values": ["greedy", "importance_sampling"]}}
    agent = cloud.agent(cloud.sweep(definition(parameters, "plugins=[greedy_loss]", total_batches=40)))
    first = wait_until(lambda: next((run for run in cloud.server.runs.values() if run.exit_code is not None), None), timeout=120)
    assert (first.state, first.exit_code) == ("failed", 1)
    assert not any(METRIC in row for row in first.rows)  # no objective rather than a false one

    second = wait_until(lambda: next((run for run in cloud.server.runs.values() if run is not first and run.rows), None), timeout=120)
    assert second.issued == {"rllm.algorithm.loss_fn": "importance_sampling"}
    assert "allocate" in agent.log.read_text()
    cloud.server.close()
    folder = wait_until(lambda: next((f for f in run_directories(cloud) if status_of(f) == "done"), None), timeout=120)
    assert [row["step"] for row in rows_of(folder)] == [str(step) for step in range(1, 41)]


@pytest.mark.long
def test_a_trial_of_two_processes_is_one_run(cloud, definition):
    """B44: the second process makes no run, and trains with the swept values as the first one does."""
    words = ["lightning.devices=2", "lightning.strategy=ddp", "lightning.accelerator=cpu"]
    agent = cloud.agent(cloud.sweep(definition({"training.learning_rate": {"values": [0.25]}}, *words)), "--count", "1")
    assert agent.wait(timeout=180) == 0
    (run,) = cloud.server.runs.values()
    assert (run.state, run.exit_code, run.num_inits) == ("finished", 0, 1), agent.log.read_text()
    assert run.config["training"]["learning_rate"] == 0.25
    rows = {row["train/global_step"]: row[METRIC] for row in run.rows if METRIC in row}
    assert rows == {1: 0.25, 2: 0.25}
    (folder,) = run_directories(cloud)
    assert [row["step"] for row in rows_of(folder)] == ["1", "2"]
    assert len(list((folder / "wandb").glob("run-*"))) == 1
    wait_until(lambda: cloud.trial_pids() == [])
