"""Replay other estimators on the rollouts that a run wrote down: what would they have done with the very same batches?

    python experiments/replay.py RUN_DIR --estimators grpo,rloo,my_est [plugins=[my_pkg.my_mod]] [--steps 1-20]
                                 [--checkpoint FILE [--train N]]

An estimator's keywords stand behind its name: `pass_at_k:k=4`, `grpo:norm_adv_by_std_in_grpo=false`. Without a checkpoint no model is
loaded: advantages are compared. With one, so are the gradients at its weights, and with --train where the next N batches lead. Prints
tables; writes replay.json and replay.html into the run's folder (or into --out). How to read it: docs/replay.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

from rich.console import Console

from rllm_lightning.lab.replay import Replay, print_replay, replay_data, replay_page, replay_run
from rllm_lightning.lab.replay.subjects import split_estimators
from rllm_lightning.tracking.run_directory import atomic_write
from rllm_lightning.tracking.terminal import say
from rllm_lightning.values import parse_yaml

PIPED_WIDTH = 220  # characters, where the output is not a terminal


def main(argv: list[str]) -> int:
    """Run a command line; returns the exit code: 0 done, 2 bad command line."""
    options = parse(argv)
    console = Console(width=shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPED_WIDTH)
    try:
        replay = replay_run(
            options.folder,
            split_estimators(options.estimators),
            plugins=options.plugins,
            steps=options.steps,
            checkpoint=options.checkpoint,
            gradient_steps=options.gradient_steps,
            train=options.train,
        )
        if not replay.estimators:
            raise ValueError(f"no estimator is left: {'; '.join(f'{label}: {reason}' for label, reason in replay.failures.items())}")
        write(replay, options.out or replay.path, console)
    except (ValueError, OSError) as error:
        say(" ".join(str(error).split()))
        return 2
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="RUN_DIR", help="the run's folder")
    parser.add_argument("overrides", nargs="*", metavar="plugins=[M,...]", help="modules that register your own estimators")
    parser.add_argument("--estimators", required=True, metavar="A,B,...", help="names, with keywords behind colons: pass_at_k:k=4")
    parser.add_argument("--steps", default="", metavar="S", help="batches, such as 7, 1-20 or 10- (all)")
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="compare gradients at its weights")
    parser.add_argument("--gradient-steps", default="", metavar="S", help="batches for gradients (the one drawn from the checkpoint)")
    parser.add_argument("--train", type=int, default=0, metavar="N", help="train on from the checkpoint with the N batches after it")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for replay.json and replay.html (the run's)")
    options = parser.parse_intermixed_args(argv)
    if unknown := [word for word in options.overrides if not word.startswith("plugins=")]:
        parser.error(f"{unknown[0]}: only plugins=[...] is known; the other settings are the run's")
    given = [word.removeprefix("plugins=") for word in options.overrides]
    options.plugins = [str(name) for text in given for name in (parse_yaml(text) if text.startswith("[") else text.split(","))]
    return options


def write(replay: Replay, folder: Path, console: Console) -> None:
    """Write the files of a replay, and print it."""
    atomic_write(folder / "replay.json", json.dumps(replay_data(replay), indent=2, allow_nan=False) + "\n")
    atomic_write(folder / "replay.html", replay_page(replay))
    print_replay(replay, console)
    print(f"{folder / 'replay.html'}\n{folder / 'replay.json'}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
