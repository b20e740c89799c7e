"""(Re)build the report of a run:  python experiments/view.py RUN_DIR..."""

import sys
from collections.abc import Sequence

from rllm_lightning.tracking.report import write_report
from rllm_lightning.tracking.run_directory import RunDirectory


def main(argv: Sequence[str]) -> int:
    """Write `report.html` into each run directory and print where it lies. Exit code 2: not a run directory."""
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if argv else 2
    try:
        for path in argv:
            print(write_report(RunDirectory.open(path)))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
