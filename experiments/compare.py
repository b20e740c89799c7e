"""Compare runs: what differs between groups of them, and whether that can be said with so few seeds.

    python experiments/compare.py RUN_DIR... --by rllm.algorithm.adv_estimator [--by KEY] [--metric M] [--measure final|best|auc]
    python experiments/compare.py SWEEP_DIR         by the keys that the sweep varied
    python experiments/compare.py --coverage        how often the intervals hold, measured on made-up runs

RUN_DIR is a run folder, or any folder below which run folders lie. Prints tables; writes comparison.json and comparison.html into that
folder (beside a run, or where several are named into the deepest one that holds all runs; or into --out); --wandb makes a W&B run of it
as well. How to read it: docs/compare.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

from rich.console import Console

from rllm_lightning.lab.compare import Comparison, compare_runs, comparison_data, comparison_page, figures_of, print_comparison
from rllm_lightning.lab.compare.comparison import DEFAULT_DIFFERENCE
from rllm_lightning.lab.compare.measures import DEFAULT_METRIC, MEASURES
from rllm_lightning.lab.sweep.definition import swept_keys
from rllm_lightning.tracking.run_directory import atomic_write, safe_name
from rllm_lightning.tracking.terminal import say

PIPED_WIDTH = 220  # characters, where the output is not a terminal


def main(argv: list[str]) -> int:
    """Run a command line; returns the exit code: 0 done, 2 bad command line."""
    options = parse(argv)
    console = Console(width=shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPED_WIDTH)
    if options.coverage:
        from rllm_lightning.lab.compare.coverage import print_coverage

        print_coverage(console)
        return 0
    try:
        comparison = compare_runs(
            options.folders,
            options.by,
            metric=options.metric,
            measure=options.measure,
            smaller_is_better=options.smaller_is_better,
            threshold=options.threshold,
            difference=options.difference,
            done_only=options.done_only,
        )
        write(comparison, options, console)
    except (ValueError, OSError) as error:
        say(error)
        return 2
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", metavar="RUN_DIR", help="run folders, or folders above them")
    parser.add_argument("--by", action="append", metavar="KEY", default=[], help="config key to group by (those that the sweep varied)")
    parser.add_argument("--metric", default=DEFAULT_METRIC, metavar="M", help="column of metrics.csv (%(default)s)")
    parser.add_argument("--measure", default="final", choices=list(MEASURES), help="what of a run is compared (%(default)s)")
    parser.add_argument("--smaller-is-better", action="store_true", help="of the metric")
    parser.add_argument("--threshold", type=float, metavar="T", help="tell what reaching it cost (half-way from start to the best end)")
    parser.add_argument(
        "--difference", type=float, default=DEFAULT_DIFFERENCE, metavar="D", help="the smallest that would matter (%(default)s)"
    )
    parser.add_argument("--done-only", action="store_true", help="leave out runs that did not come to their end")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for comparison.json, comparison.html and figures/")
    parser.add_argument("--wandb", action="store_true", help="make a W&B run of it (offline unless logged in)")
    parser.add_argument("--coverage", action="store_true", help="measure how often the intervals hold, and stop")
    options = parser.parse_intermixed_args(argv)
    try:
        options.by = options.by or swept_keys(options.folders)
    except ValueError as error:
        parser.error(str(error))
    if not options.coverage and not (options.folders and options.by):
        parser.error("name at least one run folder, and a config key with --by (not needed for a folder of sweep.py that varies a key)")
    return options


def write(comparison: Comparison, options: argparse.Namespace, console: Console) -> None:
    """Print the comparison, and write its files."""
    folder = options.out or _home(comparison, options.folders)
    figures = figures_of(comparison)
    page = comparison_page(comparison, figures)
    atomic_write(folder / "comparison.json", json.dumps(comparison_data(comparison), indent=2, allow_nan=False) + "\n")
    atomic_write(folder / "comparison.html", page)
    for figure in figures:
        atomic_write(folder / "figures" / f"{safe_name(figure.title)}.svg", figure.svg)
    print_comparison(comparison, console)
    print(f"{folder / 'comparison.html'}\n{folder / 'comparison.json'}")
    if options.wandb:
        from rllm_lightning.lab.compare.wandb_run import log_comparison

        log_comparison(comparison, page, folder)


def _home(comparison: Comparison, folders: list[str]) -> Path:
    """The named folder where it is one and holds the runs; else the deepest one that holds them."""
    named = Path(folders[0]).expanduser()
    is_run = named.resolve() in (run.path for run in comparison.runs)
    return comparison.common_folder if len(folders) > 1 or is_run else named


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
