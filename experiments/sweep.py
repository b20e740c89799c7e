"""A W&B sweep on this machine, without a server.

    python experiments/sweep.py sweeps/x.yaml [--count N] [--jobs J] [--folder DIR]

The YAML is one that `wandb sweep` takes as well. Trials are chosen by W&B's own engine (grid, random, bayes; early_terminate) and
run as W&B's agent would run them. All that they leave lies in one folder, runs/sweeps/NAME. Ended by Ctrl-C, SIGTERM or a power cut, the
same command goes on: done trials stay, half-done ones continue from their checkpoints, failed ones are tried again.

Exit codes: 0 all trials done, 1 a trial failed, 2 nothing could be started, 130/143 interrupted or terminated.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rllm_lightning.lab.sweep.definition import read_sweep
from rllm_lightning.lab.sweep.runner import Runner
from rllm_lightning.lab.sweep.view import View
from rllm_lightning.tracking.terminal import say

ROOT = Path("runs/sweeps")


def main(argv: list[str]) -> int:
    """Run a command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path, metavar="SWEEP.yaml")
    parser.add_argument("--count", type=_positive, metavar="N", help="trials at most, those of earlier times included")
    parser.add_argument(
        "--jobs", type=_positive, default=1, metavar="J", help="trials at a time; they share out cores and GPUs (%(default)s)"
    )
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where everything goes (runs/sweeps/ and the YAML's name)")
    options = parser.parse_args(argv)
    folder = (options.folder or ROOT / options.sweep.stem).expanduser().absolute()
    try:
        sweep = read_sweep(options.sweep)
        view = View(sweep)
        runner = Runner(sweep, folder, options.count, options.jobs, view)
        code = runner.run()
    except ValueError as error:
        for problem in str(error).splitlines():
            say(problem)
        return 2
    except KeyboardInterrupt:
        return 130
    view.console.print(view.table(runner.trials), soft_wrap=True)
    if runner.problem:
        say(runner.problem)
    if code in (130, 143):
        print("interrupted; the same command goes on", file=sys.stderr)
    _say_what_next(runner, options.folder or ROOT / options.sweep.stem)
    return code


def _say_what_next(runner: Runner, folder: Path) -> None:
    if runner.sweep.varied_keys and any(trial.run_directory() for trial in runner.trials):
        print(f"compare: python experiments/compare.py {folder}")
    if any(runner.folder.glob("trials/*/*/*/wandb/offline-run-*")):
        print(f"upload:  wandb sync {folder}/trials/*/*/*/wandb/offline-run-*")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text}")
    return number


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
