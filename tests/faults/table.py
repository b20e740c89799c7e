"""The table of docs/faults.md, from the rows that a run of the matrix wrote: `python -m tests.faults.table ROWS.jsonl OUT.md`."""

import json
import re
import sys
from collections import Counter
from pathlib import Path

HEAD = """# What happens when something goes wrong

Written by `make faults`; do not edit. The job is the default one, cut down to five steps, each run a process of its own
(`tests/faults/`). SIGKILL, SIGTERM and SIGINT "at 40%" come from outside when the run has used that share of the CPU time of an undisturbed
run; all others happen in a named call. "Resumed to the same end": after the fault one command (`rllm.trainer.resume=auto` or the run
directory) came to the weights, optimizer state, `metrics.csv` rows, episodes, model and summary of the undisturbed run, bit by bit, and
left no unfinished file. Every run ended within 30 seconds of the fault with the exit code in brackets and at most one message, and left
no process and no temporary file. Seconds: from the fault (or, where the run goes on, from its beginning) to the end, without those in
which it waited for a processor; they are of a busy machine.
"""


def main(rows_file: Path, out: Path) -> None:
    """Write the table, in the order of the faults' names."""
    rows = [json.loads(line) for line in rows_file.read_text().splitlines()]
    kinds = Counter(re.match(r"SIG\w+|", row["fault"])[0] or "other" for row in rows)
    failed = sum(row["outcome"] == "FAILED" for row in rows)
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    lines = [HEAD, f"{len(rows)} faults ({counts}); {failed} came to something else.\n", "| fault | outcome | seconds |", "|---|---|---|"]
    lines += [f"| {row['fault']} | {row['outcome']} | {row['seconds']:.1f} |" for row in sorted(rows, key=lambda row: row["fault"])]
    out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
