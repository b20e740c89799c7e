"""What the plugin `fault` of a run is made of: `on_call(PLACE, act)` lets something happen where the run calls a function.

The plugin lies in the working directory of the run, outside of the library; the run that goes on after the fault finds an empty one, or
one that defines the same names without the fault.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import io
import os
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Act = Callable[[], Any]


def replace(place: str, wrap: Callable[[Any], Any]) -> None:
    """Put `wrap(function)` where `place` ("module:name" or "module:Class.name") is, and wherever the library has imported it to."""
    module, _, path = place.partition(":")
    *parents, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for parent in parents:
        owner = getattr(owner, parent)
    former = getattr(owner, name)
    new = wrap(former)
    setattr(owner, name, new)
    for other in [module for key, module in sys.modules.items() if key.startswith("rllm_lightning") and not parents]:
        for key in [key for key, value in vars(other).items() if value is former]:
            setattr(other, key, new)


def on_call(place: str, act: Act, nth: int = 1, after: bool = False, only: Callable[..., bool] = lambda *args: True) -> None:
    """`act` before (or after) the `nth` call of a function, of those whose arguments are `only` such."""
    count = 0

    def wrap(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            is_meant = only(*args)
            count += is_meant
            is_now = is_meant and count == nth
            if is_now and not after:
                strike(act)
            answer = function(*args, **kwargs)
            if is_now and after:
                strike(act)
            return answer

        return call

    replace(place, wrap)


def strike(act: Act) -> None:
    """The fault happens now, and whoever watches the run sees it."""
    Path("struck").touch()
    act()


def writes(name: str) -> Callable[..., bool]:
    """For `only`: the first argument is a path that contains `name`."""
    return lambda path, *args: name in str(path)


# ------------------------------------------------------------------------------------------------------------- what can happen


def kill(signum: int = signal.SIGKILL) -> Act:
    return lambda: os.kill(os.getpid(), signum)


def fail(error: BaseException) -> Act:
    def act() -> None:
        raise error

    return act


def fill_disk() -> None:
    """No byte more can be written below the run root: it is a small file system of its own, else files may not grow."""
    if not os.path.ismount("runs"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        return
    with open("runs/filler", "wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                continue


def make_read_only() -> None:
    os.system("mount -o remount,ro runs")


def forget_wandb() -> None:
    for folder in Path("runs").glob("*/*/wandb"):
        shutil.rmtree(folder)


def kill_in_save(nth: int) -> None:
    """SIGKILL when the first half of a checkpoint is written."""

    def wrap(save: Any) -> Any:
        def half(value: Any, file: Any) -> None:
            nonlocal nth
            nth -= 1
            if nth == 0:
                buffer = io.BytesIO()
                save(value, buffer)
                file.write(buffer.getvalue()[: buffer.tell() // 2])
                file.flush()
                strike(kill())
            save(value, file)

        return half

    replace("torch:save", wrap)


def kill_in_row(nth: int) -> None:
    """SIGKILL when half of a row of metrics.csv is written."""
    from rllm_lightning.tracking.metrics_table import MetricsTable

    def wrap(append: Any) -> Any:
        def half(table: MetricsTable, step: int, metrics: Any) -> None:
            nonlocal nth
            nth -= 1
            if nth == 0:
                with open(table.path, "a") as file:
                    file.write(f"{step},0.123")
                strike(kill())
            append(table, step, metrics)

        return half

    replace("rllm_lightning.tracking.metrics_table:MetricsTable.append", wrap)


def set_clock_back(nth: int, seconds: float = 3600.0) -> None:
    """From the `nth` update on `time.time()` is an hour early."""
    true = time.time
    on_call("rllm_lightning.trainer.backend:LightningBackend.update_policy", lambda: setattr(time, "time", lambda: true() - seconds), nth)


# ----------------------------------------------------------------------------------------------------------- a user's own code


def scored(answer: Callable[[], Any] | None = None, nth: int = 1) -> None:
    """The task `scored`: the job's own, but from the `nth` call on the reward is what `answer()` returns (None: nothing is wrong)."""
    from rllm_lightning.registry import register_task
    from rllm_lightning.tasks.reasoning_gym import reasoning_gym
    from rllm_lightning.tasks.task import TaskSet

    @register_task("scored")
    @functools.wraps(reasoning_gym)  # and with it the keys of `task`
    def make(seed: int, **kwargs: Any) -> TaskSet:
        tasks = reasoning_gym(seed, **kwargs)
        count = 0

        def reward(task: dict[str, Any], response: str) -> Any:
            nonlocal count
            count += 1
            if answer is None or count < nth:
                return tasks.reward_function(task, response)
            if count == nth:
                Path("struck").touch()
            return answer()

        return TaskSet(tasks.train, tasks.val, reward)


def late(kind: Callable[[float], Any]) -> None:
    """The task `scored`, whose rewards come in another kind: a coroutine, a NumPy scalar, ..."""
    from rllm_lightning.registry import register_task
    from rllm_lightning.tasks.reasoning_gym import reasoning_gym
    from rllm_lightning.tasks.task import TaskSet

    @register_task("scored")
    @functools.wraps(reasoning_gym)  # and with it the keys of `task`
    def make(seed: int, **kwargs: Any) -> TaskSet:
        tasks = reasoning_gym(seed, **kwargs)
        return TaskSet(tasks.train, tasks.val, lambda task, response: kind(tasks.reward_function(task, response)))


async def soon(value: Any) -> Any:
    await asyncio.sleep(0)
    return value


async def hang() -> None:
    await asyncio.sleep(1e6)


def working(leak: Callable[[Any], Any] | None = None) -> None:
    """The workflow `leaky`: the job's own; `leak` is called in every run of it."""
    from rllm_lightning.registry import register_workflow
    from rllm_lightning.workflows.single_turn import SingleTurnWorkflow

    @register_workflow("leaky")
    class Leaky(SingleTurnWorkflow):
        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Any:
            if leak is not None:
                leak(self)
            return await super().run(task, uid, **kwargs)


def leak_task(workflow: Any) -> None:
    workflow.__class__.kept = asyncio.create_task(asyncio.sleep(1e6))


def leak_thread(workflow: Any) -> None:
    threading.Thread(target=time.sleep, args=(1e6,)).start()


def leak_executor(workflow: Any) -> None:
    workflow.__class__.kept = asyncio.ensure_future(workflow.run_in_executor(time.sleep, 1e6))


def tracking(method: str | None = None) -> None:
    """The tracker `dying`, which raises in one of its methods."""
    from rllm_lightning.registry import register_tracker
    from rllm_lightning.tracking.tracker import Tracker

    class Dying(Tracker):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            pass

    if method is not None:
        setattr(Dying, method, lambda *args, **kwargs: strike(fail(RuntimeError("the tracker is gone, said on purpose"))))

    register_tracker("dying")(lambda config, run: Dying(run))
