"""The faults, each with what has to come of it."""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass
from typing import Literal

SEED = 20
BACKEND = "rllm_lightning.trainer.backend:LightningBackend"
MODULE = "rllm_lightning.trainer.module:UnifiedLightningModule"
ENGINE = "rllm_lightning.rollout.hf:HFEngine"
REPLACE_CKPT = '"os:replace", {act}, {nth}, {after}, only=lambda new, path: path.suffix == ".ckpt" and path.name.startswith("step")'
SCORED = ("task.name=scored",)


@dataclass(frozen=True)
class Case:
    """One fault.

    `plugin`: the code of the module `fault`; `cured`: that of the run that goes on. `codes`: exit codes that are right.
    `says`: what the one message holds. `speaker`: whose it is; "user": a traceback, since it was the user's code that failed.
    `at`: a signal from outside, at this share of the CPU time of an undisturbed run. `damage`: done to the checkpoints afterwards.
    """

    name: str
    plugin: str = ""
    cured: str = ""
    argv: tuple[str, ...] = ()
    codes: tuple[int, ...] = (-signal.SIGKILL,)
    says: tuple[str, ...] = ()
    speaker: Literal["nobody", "library", "user"] = "nobody"
    at: float | None = None
    signum: int = signal.SIGKILL
    second: float | None = None  # SIGKILL for the run that goes on, at this share
    by_directory: bool = False  # resume=RUN_DIR where there is a checkpoint, else resume=auto
    disk: bool = False  # the run root is a file system of its own, where that can be had
    damage: str = ""
    finishes: bool = False  # nothing is to be resumed
    same: bool = True  # the end is that of the undisturbed run
    cold: bool = False  # without the forge's imports
    litter: bool = False  # temporary folders of another library stay: a killed process cannot remove them
    again: tuple[str, ...] = ()  # the arguments of the run that goes on, where they differ


def place(function: str, nth: int = 1, after: bool = False, act: str = "kill()", only: str = "") -> str:
    """The plugin that acts where a function is called."""
    return f"on_call({function!r}, {act}, {nth}, {after}{', only=' + only if only else ''})"


PLACES = {
    "a model call": (f"{ENGINE}.get_model_response", 20, ""),
    "an update": (f"{BACKEND}.update_policy", 5, ""),
    "a validation": (f"{MODULE}.validate", 3, ""),
    "the rename of a checkpoint": ("os:replace", 3, "lambda new, path: 'step_' in path.name"),
    "the rename of last.ckpt": ("os:replace", 3, "lambda new, path: path.name == 'last.ckpt'"),
    "the removal of old checkpoints": ("rllm_lightning.trainer.checkpoints:prune", 3, ""),
    "a row of metrics.csv": ("rllm_lightning.tracking.metrics_table:MetricsTable.append", 6, ""),
    "the rename of metrics.csv": ("os:replace", 3, "lambda new, path: path.name == 'metrics.csv'"),
    "the rename of an episode file": ("os:replace", 8, "lambda new, path: path.suffix == '.jsonl'"),
    "the rename of summary.json": ("os:replace", 4, "lambda new, path: path.name == 'summary.json'"),
    "the saving of the model": (f"{MODULE}.save_model", 1, ""),
    "the report": ("rllm_lightning.trainer.unified_trainer:write_report", 1, ""),
}


def at_place(name: str, nth: int, after: bool, act: str = "kill()") -> str:
    function, _, only = PLACES[name]
    return place(function, nth, after, act, only)


def kills_at_places() -> list[Case]:
    """SIGKILL before or after a call of every named place, which call is drawn; and in the middle of what is written."""
    draw = random.Random(SEED)
    cases = [Case("SIGKILL in the middle of a checkpoint", "kill_in_save(2)"), Case("SIGKILL in a row of metrics.csv", "kill_in_row(4)")]
    for index, (name, (_, count, _)) in enumerate(PLACES.items()):
        nth, after = draw.randint(1, count), draw.random() < 0.5 and "model call" not in name
        word = "after" if after else "before"
        cases.append(Case(f"SIGKILL {word} {name}, no. {nth}", at_place(name, nth, after), by_directory=index % 2 == 0))
    return cases


def kills_at_times(count: int) -> list[Case]:
    """SIGKILL at random; one in four of the resumed runs is killed too."""
    draw = random.Random(SEED + 1)
    cases = []
    for index in range(count):
        share, second = round(draw.uniform(0.1, 0.8), 3), round(draw.uniform(0.1, 0.9), 3) if index % 4 == 3 else None
        name = f"SIGKILL at {share:.1%}" + (f", and the resumed run at {second:.1%}" if second else "")
        cases.append(Case(name, at=share, second=second, by_directory=index % 2 == 0))
    return cases


def stops(count: int) -> list[Case]:
    """SIGTERM and SIGINT, by time from outside and at places from within."""
    draw = random.Random(SEED + 2)
    cases = []
    for index in range(count):
        signum = (signal.SIGTERM, signal.SIGINT)[index % 2]
        codes = (128 + signum, -signum, 0)  # the last two where it comes while Python ends
        if index % 3 == 2:
            name = draw.choice(list(PLACES))
            nth = draw.randint(1, PLACES[name][1])
            plugin = at_place(name, nth, False, f"kill({int(signum)})")
            cases.append(Case(f"{signum.name} at {name}, no. {nth}", plugin, codes=codes, by_directory=True))
        else:
            share = round(draw.uniform(0.1, 0.8), 3)
            cases.append(Case(f"{signum.name} at {share:.1%}", codes=codes, at=share, signum=signum, by_directory=index % 4 == 0))
    return cases


# --------------------------------------------------------------------------------------------------------------- files, memory

LIBRARY = {"codes": (1,), "speaker": "library"}
ATOMIC = "rllm_lightning.tracking.run_directory:atomic_write"


def _full(name: str, plugin: str, **kwargs: object) -> Case:
    kwargs = {**LIBRARY, "says": ("cannot write", "resume=")} | kwargs
    return Case(f"disk full at {name}", plugin, disk=True, **kwargs)


def _atomic(name: str, nth: int) -> str:
    return place(ATOMIC, nth, act="fill_disk", only=f"writes({name!r})")


DISK = [
    _full("config.yaml", _atomic("config.yaml", 1), codes=(2,), says=("run_root",)),
    _full("summary.json, at the beginning", _atomic("summary.json", 1), says=("cannot write",)),
    _full("metrics.csv", place("rllm_lightning.tracking.metrics_table:MetricsTable.append", 4, act="fill_disk")),
    _full("an episode file", _atomic(".jsonl", 5)),
    _full("summary.json", _atomic("summary.json", 4)),
    _full("the first checkpoint", place(f"{MODULE}.save_checkpoint", 1, act="fill_disk"), says=("cannot write", "step_2.ckpt")),
    _full("the second checkpoint", place(f"{MODULE}.save_checkpoint", 2, act="fill_disk"), says=("cannot write", "step_4.ckpt", "resume=")),
    _full("the model", place(f"{MODULE}.save_model", 1, act="fill_disk")),
    _full(
        "the report",
        place("rllm_lightning.trainer.unified_trainer:write_report", 1, act="fill_disk"),
        codes=(0,),
        speaker="nobody",
        says=("report",),
        finishes=True,
        same=False,
    ),
    Case(
        "the run root becomes read-only",
        place(f"{BACKEND}.update_policy", 3, act="make_read_only"),
        disk=True,
        says=("cannot write", "Read-only"),
        **LIBRARY,
    ),
    Case("the run root is read-only", disk=True, damage="read-only", codes=(2,), says=("run_root",), speaker="library"),
]

MEMORY = [
    Case(
        f"{error.partition('(')[0]} in {stage}", place(where, nth, act=f"fail({error})"), says=("out of memory", key, "resume="), **LIBRARY
    )
    for error in ("torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2 GiB.')", "MemoryError()")
    for stage, where, nth, key in (
        ("a rollout", f"{ENGINE}.get_model_response", 14, "n_parallel_tasks"),
        ("an update", f"{BACKEND}.update_policy", 3, "micro_batch_tokens"),
    )
]
MEMORY = [Case(**{**vars(case), "plugin": "import torch\n" + case.plugin}) for case in MEMORY]

DAMAGE = [
    Case(f"last checkpoint {word}", at_place("the report", 1, False), damage=how, by_directory=index % 2 == 0)
    for index, (word, how) in enumerate((("cut off", "cut"), ("of zero bytes", "zero"), ("with a flipped byte", "flip"), ("gone", "gone")))
]

CLOCK = [
    Case("the clock goes back an hour", "set_clock_back(2)", codes=(0,), finishes=True),
    Case("the clock goes back an hour, then SIGKILL", "set_clock_back(2)\n" + at_place("an update", 4, True)),
]

# ------------------------------------------------------------------------------------------------------------ a user's own code

USER = {"argv": SCORED, "cured": "scored()"}
REWARDS = [
    Case(
        f"a reward function returns {name}",
        f"import numpy, torch\nscored(lambda: {value}, 9)",
        says=("reward function",),
        **USER,
        **LIBRARY,
    )
    for name, value in (
        ("None", "None"),
        ("NaN", "float('nan')"),
        ("inf", "float('inf')"),
        ("text", "'1.0'"),
        ("a tensor", "torch.tensor([1.0, 2.0])"),
        ("a coroutine of None", "soon(None)"),
    )
]
REWARDS += [
    Case(
        "a reward function raises",
        "scored(fail(KeyError('lost on purpose')), 9)",
        codes=(1,),
        says=("lost on purpose",),
        speaker="user",
        **USER,
    ),
    Case(
        "a reward function hangs (workflow.timeout)",
        "scored(hang, 9)",
        codes=(0,),
        argv=(*SCORED, "rllm.workflow.timeout=0.5"),
        finishes=True,
        same=False,
    ),
    *(
        Case(
            f"a reward function returns {name}",
            f"import numpy, torch\nlate(lambda reward: {value})",
            codes=(0,),
            argv=SCORED,
            finishes=True,
        )
        for name, value in (("a coroutine", "soon(reward)"), ("a NumPy scalar", "numpy.float64(reward.reward)"))
    ),
    Case(
        "a reward function returns a bool", "late(lambda reward: reward.reward > 0.5)", codes=(0,), argv=SCORED, finishes=True, same=False
    ),
]

LEAKY = ("rllm.workflow.name=leaky",)
LEAKS = [
    Case(f"a workflow leaks {name}", f"working({leak})", codes=(0,), argv=LEAKY, finishes=True)
    for name, leak in (("asyncio tasks", "leak_task"), ("threads", "leak_thread"), ("threads of the executor", "leak_executor"))
]
DYING = "rllm.trainer.logger=[csv,dying]"
TRACKERS = [
    Case(
        f"a tracker raises in {method}",
        f"tracking({method!r})",
        argv=(DYING,),
        codes=(1,),
        says=("said on purpose",),
        speaker="user",
        again=("rllm.trainer.logger=[csv]",),
    )
    for method in ("begin", "log_metrics", "log_episodes")
] + [
    Case("a tracker raises in close", "tracking('close')", argv=(DYING,), codes=(0,), says=("said on purpose",), finishes=True),
    Case(
        "W&B's folder vanishes",
        place(f"{BACKEND}.update_policy", 3, act="forget_wandb"),
        argv=("rllm.trainer.logger=[csv,wandb]",),
        codes=(0,),
        finishes=True,
    ),
    Case("SIGKILL with W&B", at_place("an update", 3, True), argv=("rllm.trainer.logger=[csv,wandb]",), litter=True),
]

SHORT = [
    kills_at_places()[0],
    Case("SIGTERM in an update", at_place("an update", 3, False, f"kill({int(signal.SIGTERM)})"), codes=(143,), by_directory=True),
]
COLD = [Case("SIGKILL of the bare command", at_place("an update", 3, True), cold=True)]
LONG = [
    Case(**{**vars(DISK[6]), "disk": False}),
    *DISK,
    *MEMORY,
    *REWARDS,
    *LEAKS,
    *TRACKERS,
    *DAMAGE,
    *CLOCK,
    *kills_at_places(),
    *stops(20),
    *kills_at_times(26),
    *COLD,
]
