"""Stands in for experiments/run.py where training is not the point: the same command line, files, signals and exit codes.

    python fake_run.py [level=0.5] [steps=3] [pause=0] [behave=...] --run_root=DIR [--rllm.trainer.resume=RUN_DIR]

Each step logs `score` = level * step and waits for `pause` seconds. `behave`: fail, late (fails at step 2), stubborn (ignores
SIGTERM), parent (starts a child that would live on), nan (scores that are no numbers), silent (logs no score).
"""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path


def main(argv):
    given = dict(word.lstrip("-").split("=", 1) for word in argv if "=" in word)
    behave, level = given.get("behave", ""), float(given.get("level", 0.5))
    resume = given.get("rllm.trainer.resume")
    folder = Path(resume) if resume else Path(given["run_root"]) / "demo" / f"x-20260101-000000-{secrets.token_hex(3)}"
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    note = {"argv": argv, "pid": os.getpid(), "env": {name: os.environ.get(name) for name in KEPT}}
    with open(folder.parents[1] / "starts.jsonl", "a") as file:
        print(json.dumps(note), file=file)
    (folder / "config.yaml").write_text("seed: 0\nrllm: {episode_logging: {}}\n")
    if behave == "fail":
        sys.exit("error: level: must be in [0, 1], got 7")
    if behave == "parent":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (folder.parents[1] / "child").write_text(str(child.pid))

    saved = folder / "checkpoints" / "last.ckpt"
    step = int(saved.read_text()) if resume else 0
    signal.signal(signal.SIGTERM, signal.SIG_IGN if behave == "stubborn" else lambda *_: end(folder, saved, step, "interrupted", 143))
    write_summary(folder, "running")
    table = folder / "metrics.csv"
    if not resume:
        table.write_text("step,loss\n" if behave == "silent" else "step,score\n")
    while step < int(given.get("steps", 3)):
        step += 1
        if behave == "late" and step == 2:
            raise MemoryError("out of memory")
        with table.open("a") as file:
            print(step, "nan" if behave == "nan" else level * step, sep=",", file=file)
        time.sleep(float(given.get("pause", 0)))
    end(folder, saved, step, "done", 0)


def write_summary(folder, status):
    (folder / "summary.json").write_text(json.dumps({"status": status, "loss_fn": "x", "versions": {}, "git_commit": None}))


def end(folder, saved, step, status, code):
    saved.write_text(str(step))
    write_summary(folder, status)
    os._exit(code)


KEPT = (
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "WANDB_RUN_ID",
    "WANDB_RUN_GROUP",
    "WANDB_MODE",
    "WANDB_SWEEP_PARAM_PATH",
    "WANDB_SWEEP_ID",
)

if __name__ == "__main__":
    main(sys.argv[1:])
