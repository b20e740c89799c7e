"""(Re)build the report of a run, or keep it up to date while the run goes on.

python experiments/view.py RUN_DIR...
python experiments/view.py RUN_DIR --watch [SECONDS]     writes the page anew while the run trains; the open page follows (default: 5)
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from rllm_lightning.tracking.report import write_report
from rllm_lightning.tracking.report_watch import watch
from rllm_lightning.tracking.run_directory import RunDirectory


def main(argv: Sequence[str]) -> int:
    """Write `report.html` into each run directory and print where it lies. Exit code 2: not a run directory; 130: Ctrl-C ended a watch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN_DIR")
    parser.add_argument("--watch", nargs="?", type=_seconds, const=5.0, metavar="SECONDS", help="until the run has ended")
    options = parser.parse_args(argv)
    if options.watch is not None and len(options.runs) > 1:
        parser.error("--watch follows one run; start it once for each")
    try:
        for path in options.runs:
            run = RunDirectory.open(path)
            if options.watch is not None:
                print(run.report_html, flush=True)
                watch(run, options.watch)
            else:
                print(write_report(run))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"expected 0.1 to 3600 seconds, got {text}")
    return seconds


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    sys.exit(main(sys.argv[1:]))
