"""One forge and one undisturbed run for all cases, and a fresh place for each."""

import os
import subprocess

import pytest

from tests.faults.runs import Forge, Place, result_of


@pytest.fixture(scope="session")
def forge():
    made = Forge()
    yield made
    made.close()


@pytest.fixture(scope="session")
def whole(forge, tmp_path_factory):
    """What the job comes to when nothing happens, and the CPU time it takes."""
    place = Place(tmp_path_factory.mktemp("whole") / "run")
    run = forge.start(place)
    cpu_s = 0.0
    while run.code is None:
        cpu_s = max(cpu_s, run.cpu_s if run.code is None and run.cpu_s < 1e6 else 0.0)
        run.waiter.join(0.02)
    end = run.end()
    assert end.code == 0, end.err
    (folder,) = place.directories()
    result = result_of(folder)
    assert result["scraps"] == []
    assert len({row["optim/grad_norm"] for row in result["rows"] if row["step"] != "0"}) > 1, "the weights move"
    return {"result": result, "cpu_s": cpu_s}


@pytest.fixture
def place(tmp_path):
    """Folders of a case; a file system that was mounted there goes with it."""
    made = Place(tmp_path / "case")
    yield made
    if os.path.ismount(made.runs):
        subprocess.run(["umount", "-l", made.runs], check=True)
