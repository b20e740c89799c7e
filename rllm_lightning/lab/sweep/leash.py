"""Runs a trial's command so that it cannot outlive the runner:  python leash.py RUNNER_PID LOCK_FILE COMMAND...

A script of its own between the two, since a process learns of its parent's death (from the kernel, on Linux, by a signal) once for
each of the parent's threads that had to go: this one has a single thread and passes SIGTERM on once, upon which a run saves itself; a
second one would end it on the spot. The exit code is the command's, 128 + signal where one ended it.

The lock file holds the trial's process group, and stays locked as long as anything of the trial lives: so a runner that starts again
knows whether to wait.
"""

import ctypes
import fcntl
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(runner: int, lock_file: str, command: list[str]) -> int:
    lock = os.open(lock_file, os.O_RDWR | os.O_CREAT, 0o644)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.truncate(lock, 0)
    os.write(lock, str(os.getpid()).encode())
    os.set_inheritable(lock, True)

    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # until there is a child to pass it on to
    _end_with_parent(runner)
    leash = os.getpid()
    if (child := os.fork()) == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        _end_with_parent(leash)
        try:
            os.execvp(command[0], command)
        except OSError as error:
            os.write(2, f"error: cannot start {command[0]!r}: {error.strerror}\n".encode())
            os._exit(1)

    def pass_on(signum: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.kill(child, signal.SIGTERM)

    signal.signal(signal.SIGTERM, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if code >= 0 else 128 - code


def _end_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before the kernel was told
        os._exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
