"""Starts a trial's command so that it cannot outlive the runner:  python leash.py RUNNER_PID LOCK_FILE COMMAND...

Run as a script of its own, which then becomes the command: nothing of Python stays between a fork and the trial. When the runner
dies, however it dies, the kernel sends the trial SIGTERM (on Linux), upon which a run saves itself. The lock file, which holds the
trial's process id, stays locked as long as the trial lives: so a runner that starts again knows whether to wait for it.
"""

import ctypes
import fcntl
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(runner: int, lock_file: str, command: list[str]) -> None:
    lock = os.open(lock_file, os.O_RDWR | os.O_CREAT, 0o644)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.truncate(lock, 0)
    os.write(lock, str(os.getpid()).encode())
    os.set_inheritable(lock, True)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != runner:  # it died before the kernel was told
        sys.exit(128 + signal.SIGTERM)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"error: cannot start {command[0]!r}: {error.strerror}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
