"""`python -m tests.fuzz [target ...] [--seconds 60]`: atheris on each target, from its corpus on.

Ends with exit code 1 where a target failed; the input lies in `build/fuzz/{target}/crash-*`, and belongs into the corpus once it is
understood.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import atheris

ROOT = Path(__file__).parents[2]
CORPUS = Path(__file__).parent / "corpus"
NAMES = sorted(folder.name for folder in CORPUS.iterdir())
MAX_BYTES = 4096


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("targets", nargs="*", default=NAMES, metavar="target", help=f"one of {', '.join(NAMES)} (all)")
    parser.add_argument("--seconds", type=int, default=60, help="of each target (60)")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # in this process, which atheris ends
    options = parser.parse_args()
    if options.here:
        fuzz(options.targets[0], options.seconds)
    failed = []
    for name in options.targets:
        print(f"{name}: {options.seconds} seconds", flush=True)
        command = [sys.executable, "-W", "ignore", "-m", "tests.fuzz", name, "--seconds", str(options.seconds), "--here"]
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "no failure")
    return bool(failed)


def fuzz(name: str, seconds: int) -> None:
    """Never returns."""
    with atheris.instrument_imports(include=["rllm_lightning", "yaml", "tests.fuzz.targets"]):
        from tests.fuzz.targets import TARGETS
    for example in sorted((CORPUS / name).iterdir()):
        TARGETS[name](example.read_bytes())  # imports what is imported late, which takes longer than an input may
    found = ROOT / "build" / "fuzz" / name
    found.mkdir(parents=True, exist_ok=True)
    limits = [f"-max_total_time={seconds}", f"-max_len={MAX_BYTES}", "-timeout=60", "-rss_limit_mb=4096", "-print_final_stats=1"]
    atheris.Setup([name, str(found), str(CORPUS / name), f"-artifact_prefix={found}/", *limits], TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
