"""Looking at processes while they end. Between opening a file of /proc and reading it, a process may be gone."""

from pathlib import Path

GONE = (FileNotFoundError, ProcessLookupError)


def is_alive(pid):
    """Whether a process runs; one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except GONE:
        return False


def start_of(pid):
    """Command line and environment that a process was started with, as bytes; both empty for one that has ended or is another user's."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes(), Path(f"/proc/{pid}/environ").read_bytes()
    except (*GONE, PermissionError):
        return b"", b""


def children_of(pid):
    """The ids of its child processes."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except GONE:
        return []
