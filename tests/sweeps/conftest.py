"""Sweeps of a stand-in for the training script, and the server that the real command-line tools talk to."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from experiments import sweep as sweep_script
from rllm_lightning.lab.sweep import runner
from rllm_lightning.lab.sweep.trial import load_trials
from tests.processes import is_alive, start_of
from tests.sweeps.helpers import FAKE_RUN, ROOT
from tests.sweeps.wandb_server import PROJECT, WandbServer


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


class Cloud:
    """A W&B server of the test's own, and the real command-line tools logged in to it, in a folder of the test's own."""

    def __init__(self, folder):
        self.folder, self.server = folder, WandbServer()
        self.runs = folder / "runs"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
        self.environment = kept | {
            "WANDB_BASE_URL": self.server.url,
            "WANDB_API_KEY": "0" * 40,
            "WANDB_ERROR_REPORTING": "false",
            "WANDB_X_FILE_STREAM_TRANSMIT_INTERVAL": "1",  # seconds; else the server hears of nothing for 15
            "HOME": str(folder),
            "NETRC": str(folder / "netrc"),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            **{f"WANDB_{kind}_DIR": str(folder / kind) for kind in ("CONFIG", "CACHE", "DATA", "ARTIFACT")},
            "WANDB_DIR": str(folder),
        }
        self._agents = []

    def wandb(self, *words):
        """Run a `wandb` command to its end; what it printed."""
        command = ["wandb", *map(str, words)]
        answer = subprocess.run(command, cwd=ROOT, env=self.environment, text=True, capture_output=True, timeout=120)
        assert answer.returncode == 0, answer.stdout + answer.stderr
        return answer.stdout + answer.stderr

    def sweep(self, content):
        """The id of a new sweep, made by `wandb sweep` from a file of this content."""
        path = self.folder / "sweep.yaml"
        path.write_text(yaml.safe_dump(content))
        return re.search(r"wandb agent (\S+)", self.wandb("sweep", "--project", PROJECT, path))[1]

    def agent(self, sweep, *options):
        """Start `wandb agent`; what it prints goes to its `log`."""
        log = self.folder / f"agent{len(self._agents)}.log"
        with log.open("w") as file:
            command = ["wandb", "agent", *options, sweep]
            process = subprocess.Popen(command, cwd=ROOT, env=self.environment, stdout=file, stderr=subprocess.STDOUT)
        process.log = log
        self._agents.append(process)
        return process

    def trial_pids(self):
        """The processes whose command line or files belong to this folder, agents aside."""
        mark, agents = str(self.folder).encode(), {process.pid for process in self._agents}
        pids = {int(path.name) for path in Path("/proc").glob("[0-9]*")} - agents
        return sorted(pid for pid in pids if mark in b"".join(start_of(pid)) and is_alive(pid))

    def close(self):
        for process in self._agents:
            process.kill()
            process.wait()
        for pid in self.trial_pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.server.close()


@pytest.fixture
def cloud(tmp_path):
    cloud = Cloud(tmp_path)
    yield cloud
    cloud.close()
