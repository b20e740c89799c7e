"""A process that has imported what a run imports, and forks one run a request: `python forge.py FD`.

A run is `experiments/run.py` as `__main__`, in a session of its own, with the interpreter's ordinary end; only the seconds of importing
are saved, also those of the process that scores answers, which is forked from the run. With `"cold"` it is the bare command instead,
with its own. The parent of a run, a fork without other work, reports over the request's connection:
the process id, then the exit code.
"""

import importlib
import json
import os
import runpy
import signal
import socket
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parents[2]
RUN = ROOT / "experiments" / "run.py"
sys.path[0] = str(ROOT)
IMPORTED = (
    "reasoning_gym",
    *(
        f"rllm_lightning.{name}"
        for name in ("models.tiny", "rollout.batch", "rollout.packed", "trainer.backend", "trainer.unified_trainer")
    ),
)
for module in IMPORTED:
    importlib.import_module(module)
reasoning_gym_worker = importlib.import_module("rllm_lightning.tasks.reasoning_gym_worker")


class ForkedScorer:
    """In place of the `subprocess.Popen` that starts the scoring process."""

    def __init__(self, command: list[str], **kwargs: object):
        pipe = int(command[-1])
        if (pid := os.fork()) == 0:
            os.closerange(3, pipe)
            os.closerange(pipe + 1, 1 << 16)
            os.dup2(0, 1)
            reasoning_gym_worker._serve(Connection(pipe))
            os._exit(0)
        self.pid = pid

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def serve(requests: socket.socket) -> dict | None:
    """Fork for every request until the other end is gone (None); in the run itself: return the request."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the parents of the runs
    while True:
        data, files, *_ = socket.recv_fds(requests, 1 << 16, 3)
        if not data:
            return None
        if os.fork() == 0:
            requests.close()
            return begin(json.loads(data), *files)
        for file in files:
            os.close(file)


def begin(request: dict, report: int, out: int, err: int) -> dict:
    """Fork the run and wait for it; in the run: what is to be run."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if (pid := os.fork()) != 0:
        os.close(out)
        os.close(err)
        os.write(report, f"{pid}\n".encode())
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.write(report, f"{code}\n".encode())
        os._exit(0)
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    for file in (report, out, err):
        os.close(file)
    os.chdir(request["cwd"])
    os.environ.update(request["env"])
    tempfile.tempdir = None
    return request


if __name__ == "__main__":
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    if request is not None:
        if request["cold"]:
            os.execv(sys.executable, [sys.executable, str(RUN), *request["argv"]])
        reasoning_gym_worker.subprocess = SimpleNamespace(Popen=ForkedScorer, DEVNULL=None)
        sys.argv = [str(RUN), *request["argv"]]
        runpy.run_path(str(RUN), run_name="__main__")
