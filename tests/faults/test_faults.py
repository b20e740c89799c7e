"""Whatever happens to a run, it either goes on to the very result of an undisturbed one, or ends soon with one clear message.

After every fault: the right exit code within 30 seconds, one message (of what is ours without a traceback), whole checkpoints, no process
of the run, no temporary file; then one command goes on (`rllm.trainer.resume=auto` or the run directory) to weights, optimizer state,
rows, episodes, model and summary that are equal bit by bit, and without scraps. A port would be held by one of its processes.
"""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from tests.faults.cases import LONG, SHORT
from tests.faults.runs import HUNG, differences, messages, result_of

ROWS = os.environ.get("RLLM_FAULTS_ROWS")  # where the table of docs/faults.md is gathered


def directory_of(end):
    return Path(end.out.partition("run:")[2].split()[0])


def check_end(case, end, place):
    assert end.code != HUNG, f"did not end\n{end.err}"
    assert end.code in case.codes, (end.code, end.err)
    assert end.processes == []
    assert case.litter or os.listdir(place.temporary) == []
    said = messages(end.err)
    for words in case.says:
        assert words in end.err, end.err
    if case.speaker == "user":
        assert said, end.err
    elif end.code != 0 or case.speaker == "nobody":
        assert len(said) == (case.speaker == "library"), end.err
    assert case.speaker == "user" or "Traceback" not in end.err, end.err
    for checkpoint in place.runs.rglob("checkpoints/[!.]*.ckpt"):
        torch.load(checkpoint, weights_only=True)


def heal(case, place):
    """The fault is over: the disk has room, the user's code is right."""
    place.set_fault(case.cured)
    if case.disk and os.path.ismount(place.runs):
        subprocess.run(["mount", "-o", "remount,rw", place.runs], check=True)
        (place.runs / "filler").unlink(missing_ok=True)
    place.struck.unlink(missing_ok=True)


def damage(how, place):
    """Spoil `last.ckpt`, and with it the step's own file, which it is a hard link to."""
    (last,) = place.runs.rglob("last.ckpt")
    data = bytearray(last.read_bytes())
    middle = len(data) // 2
    data[middle] ^= 0xFF
    content = {"cut": data[:middle], "zero": b"", "flip": data}.get(how)
    if content is None:
        last.unlink()
    else:
        last.write_bytes(content)


def resume_argument(case, place):
    saved = [path for path in place.directories() if list(path.glob("checkpoints/*.ckpt"))]
    return f"rllm.trainer.resume={saved[-1] if saved and case.by_directory else 'auto'}"


def end_by_signal(case, forge, place, whole):
    """How the run ends that a signal reaches. One that is over when it comes, since the machine has become faster, is begun again, and
    signals come earlier from then on."""
    while True:
        run = forge.start(place, *case.argv, cold=case.cold)
        is_struck = run.signal_after(case.at * whole["cpu_s"], case.signum)
        end = run.end()
        if end.code != 0 or (is_struck and 0 in case.codes):
            return end
        whole["cpu_s"] *= 0.9
        place.empty()


def go_through(case, forge, place, whole):
    """The outcome in words, and the seconds from the fault to the end of the run."""
    place.set_fault(case.plugin)
    has_disk = case.disk and place.set_disk()
    if case.damage == "read-only":
        if not has_disk:
            place.runs.rmdir()
            place.runs.touch()
        else:
            subprocess.run(["mount", "-o", "remount,ro", place.runs], check=True)
    if case.at is None:
        end = forge.start(place, *case.argv, cold=case.cold).end()
    else:
        end = end_by_signal(case, forge, place, whole)
    check_end(case, end, place)
    if case.finishes or end.code == 0:
        gaps = differences(result_of(directory_of(end)), whole["result"]) if case.same else []
        assert gaps == [], end.err
        return ("ends as if undisturbed" if case.same else "goes on"), end.seconds
    if case.damage == "read-only":
        return "refused", end.seconds
    heal(case, place)
    if case.damage:
        damage(case.damage, place)
    argv = case.again or case.argv
    if case.second is not None:
        second = forge.start(place, *argv, resume_argument(case, place))
        second.signal_after(case.second * whole["cpu_s"], signal.SIGKILL)
        assert second.end().processes == []
        heal(case, place)
    resumed = forge.start(place, *argv, resume_argument(case, place)).end()
    assert resumed.code == 0, resumed.err
    assert resumed.processes == []
    assert case.litter or os.listdir(place.temporary) == []
    assert differences(result_of(directory_of(resumed)), whole["result"]) == [], resumed.err
    word = {0: "done", 1: "failed", 2: "refused"}.get(end.code, "killed" if end.code == -9 else "stopped")
    return f"{word} ({end.code}); resumed to the same end", end.seconds


def record(case, outcome, seconds):
    if ROWS:
        with open(ROWS, "a") as file:
            file.write(json.dumps({"fault": case.name, "outcome": outcome, "seconds": round(seconds, 1)}) + "\n")


@pytest.mark.parametrize("case", SHORT, ids=lambda case: case.name)
def test_a_run_gets_over_it(case, forge, place, whole):
    go_through(case, forge, place, whole)


@pytest.mark.long
@pytest.mark.parametrize("case", LONG, ids=lambda case: case.name)
def test_a_run_gets_over_all_of_it(case, forge, place, whole):
    try:
        outcome, seconds = go_through(case, forge, place, whole)
    except BaseException:
        record(case, "FAILED", 0.0)
        raise
    record(case, outcome, seconds)
