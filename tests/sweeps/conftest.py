"""Sweeps of a stand-in for the training script, and the server that the real command-line tools talk to."""

import os
import signal
import subprocess
import sys

import pytest
import yaml

from experiments import sweep as sweep_script
from rllm_lightning.lab.sweep import runner
from rllm_lightning.lab.sweep.trial import load_trials
from tests.sweeps.helpers import FAKE_RUN, ROOT


@pytest.fixture
def write_sweep(tmp_path):
    """write_sweep(parameters, **more): a YAML whose trials are the stand-in's."""

    def write(parameters, method="grid", name="demo", **more):
        content = {"method": method, "metric": {"name": "score", "goal": "maximize"}, "parameters": parameters}
        content["command"] = ["python", str(FAKE_RUN), "${args_no_hyphens}"]
        path = tmp_path / f"{name}.yaml"
        content |= more
        path.write_text(yaml.safe_dump({key: value for key, value in content.items() if value is not None}))
        return path

    return write


@pytest.fixture
def run_sweep(tmp_path, capfd, monkeypatch):
    """run_sweep(yaml, *options): the command in this process; its exit code, output and trials."""
    monkeypatch.setattr(runner, "POLL_S", 0.05)

    def run(path, *options, folder="out"):
        code = sweep_script.main([str(path), "--folder", str(tmp_path / folder), *options])
        out, err = capfd.readouterr()
        return code, out + err, load_trials(tmp_path / folder / "trials")

    return run


@pytest.fixture
def start_sweep(tmp_path):
    """start_sweep(yaml, *options): the command in a process of its own, which is gone at the end of the test."""
    processes = []

    def start(path, *options, folder="out"):
        command = [sys.executable, str(ROOT / "experiments" / "sweep.py"), str(path), "--folder", str(tmp_path / folder), *options]
        process = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=os.environ)
        processes.append(process)
        return process

    yield start
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
