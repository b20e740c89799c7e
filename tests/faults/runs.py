"""Runs as processes: begun through the forge, watched until their end, and compared by what they leave behind."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.processes import GONE
from tests.quick import QUICK

ROOT = Path(__file__).parents[2]
LIMIT_S = 30  # within which a run has ended after a fault
PATIENCE_S = 90  # for a run that nothing happens to, on a busy machine
MARK = "RLLM_FAULTS_RUN"  # in the environment of a run and of all that it starts
JOB = [
    *QUICK,
    "task.partial_credit=true",
    "rllm.algorithm.entropy_coeff=0.1",  # so that the weights move in every step, whatever the rewards
    "rllm.trainer.total_batches=5",
    "rllm.trainer.test_freq=2",
    "rllm.trainer.save_freq=2",
    "rllm.trainer.val_before_train=true",
    "plugins=[fault]",
]


class Forge:
    """The process that forks runs; see `forge.py`."""

    def __init__(self) -> None:
        self.ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("forge.py")), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": "0"},
        )
        theirs.close()

    def start(self, place: Place, *argv: str, cold: bool = False) -> Run:
        """Begin a run of the job in `place`."""
        report, theirs = socket.socketpair()
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        request = {"argv": [*JOB, f"run_root={place.runs}", *argv], "cwd": str(place.folder), "env": place.environment(), "cold": cold}
        socket.send_fds(self.ours, [json.dumps(request).encode()], [theirs.fileno(), out_end, err_end])
        for end in (out_end, err_end):
            os.close(end)
        theirs.close()
        return Run(report.makefile("r"), out, err, place)

    def close(self) -> None:
        self.ours.close()
        self.process.kill()
        self.process.wait()


@dataclass
class Place:
    """Where one case happens: the working directory with the plugin `fault`, the run root, and a folder for temporary files."""

    folder: Path
    runs: Path = field(init=False)

    def __post_init__(self) -> None:
        self.runs = self.folder / "runs"
        for path in (self.runs, self.temporary):
            path.mkdir(parents=True)
        self.set_fault("")

    @property
    def temporary(self) -> Path:
        return self.folder / "tmp"

    @property
    def struck(self) -> Path:
        """The file that a fault writes when it happens."""
        return self.folder / "struck"

    def set_fault(self, code: str) -> None:
        """What the plugin does; nothing where `code` is empty."""
        (self.folder / "fault.py").write_text(f"from tests.faults.hooks import *\n{code}\n" if code else "")

    def environment(self) -> dict[str, str]:
        return {MARK: str(self.folder), "TMPDIR": str(self.temporary), "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}

    def set_disk(self) -> bool:
        """Make the run root a file system of its own, of a few MB, where this process may."""
        command = ["mount", "-t", "tmpfs", "-o", "size=48m", "none", str(self.runs)]
        return subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0

    def empty(self) -> None:
        """Forget the run that was here."""
        self.struck.unlink(missing_ok=True)
        for path in self.runs.iterdir():
            shutil.rmtree(path)

    def directories(self) -> list[Path]:
        return sorted(path.parent for path in self.runs.glob("*/*/config.yaml"))


@dataclass
class End:
    """How a run ended."""

    code: int
    out: str
    err: str
    seconds: float  # from the fault, or the beginning, to the end
    processes: list[str]  # that outlive it


class Run:
    """A running process."""

    def __init__(self, report: Any, out: int, err: int, place: Place):
        self.report, self.place = report, place
        self.begun, self.waited_s = time.monotonic(), 0.0
        self.texts: dict[str, str] = {}
        self.readers = [threading.Thread(target=self._read, args=(name, file)) for name, file in (("out", out), ("err", err))]
        for reader in self.readers:
            reader.start()
        self.pid = int(report.readline())
        self.code: int | None = None
        self.waiter = threading.Thread(target=self._wait)
        self.waiter.start()

    def _read(self, name: str, file: int) -> None:
        with open(file, encoding="utf-8", errors="replace") as stream:
            self.texts[name] = stream.read()

    def _wait(self) -> None:
        self.code = int(self.report.readline())

    @property
    def cpu_s(self) -> float:
        """Seconds of CPU time so far: a clock that a busy machine does not drive on."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except GONE:
            return float("inf")
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def signal_after(self, cpu_s: float, signum: int) -> bool:
        """Send a signal when the run has used that much CPU time; False: it had ended before."""
        start = self.cpu_s
        while self.code is None and self.cpu_s - start < cpu_s:
            time.sleep(0.005)
        return self.signal(signum)

    def signal(self, signum: int) -> bool:
        if self.code is not None:
            return False
        try:
            os.kill(self.pid, signum)
        except ProcessLookupError:
            return False
        self.place.struck.touch()
        return True

    def end(self, patience: float = PATIENCE_S) -> End:
        """Wait for the end. A run that has not ended `LIMIT_S` after a fault is killed, as one that takes too long (code `HUNG`)."""
        begun, since = 0.0, "the beginning"
        hung = False
        while self.waiter.is_alive():
            self.waiter.join(0.02)
            if since == "the beginning" and self.place.struck.exists():
                begun, since = self.clock_s(), "the fault"
            if self.clock_s() - begun > (LIMIT_S if since == "the fault" else patience) and not hung:
                hung = True
                os.killpg(self.pid, signal.SIGKILL)
        left = leftovers(self.pid, str(self.place.folder))
        for reader in self.readers:
            reader.join()
        assert self.code is not None
        return End(HUNG if hung else self.code, self.texts["out"], self.texts["err"], self.clock_s() - begun, left)

    def clock_s(self) -> float:
        """Seconds since the beginning that the run could have used: without those in which it waited for a busy machine's processor."""
        with contextlib.suppress(OSError, IndexError):
            self.waited_s = int(Path(f"/proc/{self.pid}/schedstat").read_text().split()[1]) / 1e9
        return time.monotonic() - self.begun - self.waited_s


HUNG = 999


def leftovers(session: int, mark: str, patience: float = 10.0) -> list[str]:
    """Processes of a run's session, or with its mark, that live on for longer than a moment. They are ended."""
    deadline = time.time() + patience
    while (found := _processes(session, mark)) and time.time() < deadline:
        time.sleep(0.1)
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    return list(found.values())


def _processes(session: int, mark: str) -> dict[int, str]:
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, own_session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            is_ours = int(own_session) == session or f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0")
            if is_ours and state != "Z":
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (OSError, ValueError):
            continue
    return found


# --------------------------------------------------------------------------------------------------------- what a run came to


def result_of(folder: Path) -> dict[str, Any]:
    """All that has to be the same whatever happened on the way."""
    checkpoint = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    state = checkpoint["rllm_lightning"]
    return {
        "weights": {name: _digest(value) for name, value in checkpoint["state_dict"].items()},
        "optimizer": _digest(checkpoint["optimizer_states"]),
        "steps": state["global_step"],
        "best": _digest(torch.load(folder / "checkpoints" / "best.ckpt", weights_only=True)["state_dict"]),
        "checkpoints": sorted(path.name for path in (folder / "checkpoints").iterdir()),
        "model": _files(folder / "checkpoints" / "model"),
        "rows": rows_of(folder),
        "episodes": _files(folder / "episodes"),
        "summary": _summary(folder),
        "files": sorted(path.name for path in folder.iterdir() if path.name != "wandb"),
        "scraps": scraps(folder),
    }


def rows_of(folder: Path) -> list[dict[str, str]]:
    """The rows of `metrics.csv` without the columns of the wall clock."""
    with open(folder / "metrics.csv", newline="") as file:
        return [{key: value for key, value in row.items() if value and not key.startswith("time/")} for row in csv.DictReader(file)]


def scraps(folder: Path) -> list[str]:
    """Files whose writing was begun and not ended."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob(".*"))


def _summary(folder: Path) -> dict[str, Any]:
    summary = json.loads((folder / "summary.json").read_text())
    return {key: value for key, value in summary.items() if key not in ("id", "wall_time_s", "tokens_per_s")}


def _files(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): _digest(path.read_bytes()) for path in sorted(folder.rglob("*")) if path.is_file()}


def _digest(value: Any) -> str:
    import hashlib

    digest = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            digest.update(
                f"{part.dtype}{tuple(part.shape)}".encode() + part.contiguous().view(torch.uint8).numpy().tobytes()
                if part.dim()
                else repr((part.dtype, part.item())).encode()
            )
        elif isinstance(part, dict):
            for key in part:
                add(repr(key))
                add(part[key])
        elif isinstance(part, list | tuple):
            for item in part:
                add(item)
        else:
            digest.update(part if isinstance(part, bytes) else repr(part).encode())

    add(value)
    return digest.hexdigest()


def differences(result: dict[str, Any], whole: dict[str, Any]) -> list[str]:
    """Which parts of a result are not those of the undisturbed run."""
    return [key for key in whole if result[key] != whole[key]]


def messages(err: str) -> list[str]:
    """What was said at the end: the lines of `error: ...`, and one for each traceback."""
    return [line for line in err.splitlines() if line.startswith("error: ") or re.match(r"Traceback \(most recent", line)]
