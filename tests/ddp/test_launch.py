"""Ways to start several processes, and that none of them can hang: real commands, real signals."""

import csv
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from tests.ddp.conftest import ROOT, free_port, rank_environment
from tests.processes import children_of, is_alive, start_of
from tests.quick import QUICK

TWO = [
    *QUICK,
    "model.name=builtin:tiny",
    "task.val_size=5",
    "data.train_batch_size=4",
    "lightning.accelerator=cpu",
    "lightning.devices=2",
]
long = pytest.mark.long
LIMIT_S = 30  # within which all ranks have ended after a fault


@pytest.fixture
def start(tmp_path):
    """Begin a command; whatever it left behind is ended with the test."""
    begun = []

    def begin(*argv, command=("experiments/run.py",), env=None, **kwargs):
        argv = [sys.executable, *command, *TWO, f"run_root={tmp_path / 'runs'}", *argv]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        begun.append(subprocess.Popen(argv, cwd=ROOT, env=env or dict(os.environ), start_new_session=True, **pipes, **kwargs))
        return begun[-1]

    yield begin
    for process in begun:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def finish(process, timeout=120):
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == 0, err
    return out, err


def run_directories(tmp_path):
    return sorted((tmp_path / "runs").glob("*/*/config.yaml"))


def rows_of(tmp_path):
    (config,) = run_directories(tmp_path)
    with open(config.parent / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def ranks_of(pid):
    """The further ranks of a run, without the processes that score answers, and those that are about to become another program."""
    starts = {child: start_of(child) for child in children_of(pid)}
    return [child for child, (command, environment) in starts.items() if b"experiments/run.py" in command and b"LOCAL_RANK=" in environment]


def wait_for(condition, process, timeout=90):
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if found := condition():
            return found
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise AssertionError("waited too long")


def wait_for_rows(tmp_path, process, count=3):
    def enough():
        found = list((tmp_path / "runs").glob("*/*/metrics.csv"))
        return bool(found) and len(found[0].read_text().splitlines()) > count

    wait_for(enough, process)


# ------------------------------------------------------------------------------------------------------------ launching


@pytest.mark.parametrize(
    "strategy", ["auto", *(pytest.param(s, marks=long) for s in ("ddp", "ddp_find_unused_parameters_true", "ddp_spawn"))]
)
def test_one_command_starts_two_processes_that_make_one_run(start, tmp_path, strategy):
    """B44: one run directory, one table, each step once; the trained model can be loaded. Of a validation of five tasks, rows are
    gathered and nothing is padded: pass@1 is a multiple of a fifth."""
    out, err = finish(start("rllm.trainer.total_batches=2", "rllm.trainer.val_before_train=true", f"lightning.strategy={strategy}"))
    assert out.count("run: ") == 1
    assert "Traceback" not in err
    validation, *rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == ["1", "2"]
    assert all(float(row["time/rank_wait"]) >= 0 for row in rows)
    assert float(validation["val/spell_backward/pass@1"]) * 5 % 1 == 0
    (config,) = run_directories(tmp_path)
    assert (config.parent / "checkpoints" / "model" / "model.safetensors").is_file()
    assert len((config.parent / "episodes" / "val_step_0.jsonl").read_text().splitlines()) == 5
    assert json.loads((config.parent / "summary.json").read_text())["status"] == "done"


@long
def test_torchrun_starts_them_too(start, tmp_path):
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}", "experiments/run.py")
    finish(start("rllm.trainer.total_batches=2", command=launcher))
    assert [row["step"] for row in rows_of(tmp_path)] == ["1", "2"]


@long
def test_two_nodes_of_one_process_each(tmp_path, start):
    """As on two machines: each node gets the same command, its NODE_RANK and the first one's address."""
    port = str(free_port())
    argv = ["rllm.trainer.total_batches=2", "lightning.devices=1", "lightning.num_nodes=2"]
    nodes = [start(*argv, env=os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NODE_RANK": str(rank)}) for rank in (0, 1)]
    for node in nodes:
        finish(node)
    assert [row["step"] for row in rows_of(tmp_path)] == ["1", "2"]


def test_ranks_with_different_command_lines_are_refused(start, tmp_path):
    """B44: a swept learning rate that reached one rank only is noticed before a model is built; the key is named once."""
    port = free_port()
    ranks = [start(f"training.learning_rate={1e-3 * (1 + rank)}", env=rank_environment(rank, 2, port)) for rank in (0, 1)]
    errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert {rank.returncode for rank in ranks} <= {1, 2}
    assert sum(error.count("training.learning_rate: rank 1 has another value") for error in errors) == 1
    assert not list((tmp_path / "runs").glob("*/*/checkpoints/*"))


# ---------------------------------------------------------------------------------------------------------------- faults


def assert_all_end(process, pids, limit=LIMIT_S):
    start = time.monotonic()
    _, err = process.communicate(timeout=limit)
    while any(map(is_alive, pids)):
        assert time.monotonic() - start < limit, "a process outlives the run"
        time.sleep(0.1)
    return err


@long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_other(start, tmp_path, rank):
    """As the kernel's out-of-memory killer does it: nothing is said by the one that dies."""
    process = start("rllm.trainer.total_batches=100000")
    wait_for_rows(tmp_path, process)
    (child,) = ranks_of(process.pid)
    os.kill([process.pid, child][rank], signal.SIGKILL)
    err = assert_all_end(process, [child])
    assert process.returncode == (-signal.SIGKILL if rank == 0 else 1)
    if rank == 1:
        assert err.count("rank 1 ended without a word") == 1
        (config,) = run_directories(tmp_path)
        assert json.loads((config.parent / "summary.json").read_text())["status"] == "failed"


@pytest.mark.parametrize(
    ("signum", "rank"),
    [
        (signal.SIGTERM, 1),
        *(
            pytest.param(*case, marks=long)
            for case in [(signal.SIGINT, 0), (signal.SIGTERM, 0), (signal.SIGINT, 1), (signal.SIGUSR1, 0), (signal.SIGUSR1, 1)]
        ),
    ],
)
def test_a_signal_to_any_rank_stops_all_at_the_last_finished_step(start, tmp_path, rank, signum):
    process = start("rllm.trainer.total_batches=100000")
    wait_for_rows(tmp_path, process)
    (child,) = ranks_of(process.pid)
    begun = time.monotonic()
    os.kill([process.pid, child][rank], signum)
    err = assert_all_end(process, [child])
    assert time.monotonic() - begun < LIMIT_S
    assert process.returncode == 128 + signum, err
    assert "Traceback" not in err
    assert err.count("continue with") == 1
    (config,) = run_directories(tmp_path)
    saved = torch.load(config.parent / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["rllm_lightning"]["global_step"] == int(rows_of(tmp_path)[-1]["step"])
    assert json.loads((config.parent / "summary.json").read_text())["status"] == "interrupted"


FAULTY = '''
import os
import torch
from rllm_lightning import register_workflow
from rllm_lightning.workflows.single_turn import SingleTurnWorkflow


@register_workflow("faulty")
class Faulty(SingleTurnWorkflow):
    """Fails on one rank, in its third batch."""

    def __init__(self, *args, how="raise", rank=1, **kwargs):
        super().__init__(*args, **kwargs)
        self.how, self.rank = how, rank

    async def run(self, task, uid, **kwargs):
        from rllm_lightning.rollout.engine import REQUEST

        if REQUEST.get().global_step == 3 and os.environ["LOCAL_RANK"] == str(self.rank):
            if self.how == "memory":
                raise torch.OutOfMemoryError("no memory left, said on purpose")
            if self.how == "exit":
                os._exit(7)
            raise KeyError("lost on purpose")
        return await super().run(task, uid, **kwargs)
'''


@pytest.mark.parametrize(
    ("how", "rank"),
    [
        ("raise", 1),
        *(pytest.param(*case, marks=long) for case in [("exit", 1), ("raise", 0), ("memory", 0), ("memory", 1), ("exit", 0)]),
    ],
)
def test_a_rank_that_fails_ends_all_and_is_heard_once(start, tmp_path, how, rank):
    (tmp_path / "faulty.py").write_text(FAULTY)
    process = start(
        "rllm.trainer.total_batches=100000",
        "plugins=[faulty]",
        "rllm.workflow.name=faulty",
        f"rllm.workflow.workflow_args={{how: {how}, rank: {rank}}}",
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    wait_for(lambda: ranks_of(process.pid), process)
    (child,) = ranks_of(process.pid)
    wait_for(lambda: run_directories(tmp_path), process)
    err = assert_all_end(process, [child], limit=90)
    assert process.returncode in (1, 7), err
    if how == "exit":
        assert rank == 0 or err.count("rank 1 ended without a word") == 1, err
    elif how == "memory":
        assert err.count("error: out of memory (no memory left, said on purpose) in a rollout") == 1, err
        assert "Traceback" not in err
    else:
        assert "KeyError: 'lost on purpose'" in err
        assert err.count("Traceback (most recent call last)") == 2, err  # the failure and its cause, on one rank
    assert [row["step"] for row in rows_of(tmp_path)] == ["1", "2"]
