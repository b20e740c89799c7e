"""How fast this library is on this machine, beside plain code, other libraries and the machine's limit.

    python experiments/benchmark.py advantage                      estimators over a million trajectories
    python experiments/benchmark.py rollout                        sampling, beside Hugging Face `generate`
    python experiments/benchmark.py train                          one update pass, beside padded rows with full logits
    python experiments/benchmark.py step [--peer PYTHON]           whole GRPO steps, beside TRL in the environment of PYTHON
    python experiments/benchmark.py ddp                            whole GRPO steps by two processes, beside one
    python experiments/benchmark.py harness                        what is neither model nor update, for each episode by stage

Variants of a table take turns in one run; ratios are ratios of medians. Without --model, SmolLM2 and the tiny model are measured.
Let nothing else run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rllm_lightning.lab.speed.report import Report
    from rllm_lightning.lab.speed.workload import Counts

RUN_SCRIPT = Path(__file__).parent / "run.py"
PEER_SCRIPT = Path(__file__).parent / "peers" / "trl_grpo.py"
MODELS = ("smollm2", "builtin:tiny")
REPEATS = {"advantage": 5, "rollout": 5, "train": 3, "step": 1, "ddp": 1, "harness": 3}
PIPED_WIDTH = 200  # characters, where the output is not a terminal


def main(argv: list[str]) -> int:
    """Run a command line; returns the exit code: 0 done, 2 bad command line."""
    options = _parser().parse_args(argv)
    # read when their libraries are imported, here and in the processes that are started
    os.environ |= {"OMP_NUM_THREADS": str(options.threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    import torch

    torch.set_num_threads(options.threads)
    from rllm_lightning.lab.speed.machine import describe

    machine, reports = describe(), []
    try:
        for report in measure(options):
            reports.append(report)
            if not options.json:
                show(report, machine if len(reports) == 1 else None)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps({"machine": machine, "reports": [report.as_json() for report in reports]}, indent=2, allow_nan=False))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=tuple(REPEATS))
    parser.add_argument("--model", help=f"a model.name: {', '.join(MODELS)}, or a folder (default: {' and '.join(MODELS)})")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of PyTorch (default: %(default)s)")
    parser.add_argument("--repeats", type=int, help=f"measured rounds, with step and ddp: runs with other seeds (default: {REPEATS})")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--peer", type=Path, metavar="PYTHON", help="with step: the interpreter to run TRL with")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), help="with step: only in this one (default: both)")
    sizes = parser.add_argument_group("sizes, where others than the usual ones are wanted")
    sizes.add_argument("--trajectories", type=int, default=1_000_000, help="with advantage, in groups of 8 (default: %(default)s)")
    sizes.add_argument("--episodes", type=int, default=10_000, help="with harness, in groups of 8 (default: %(default)s)")
    for name in ("prompts", "samples", "max-tokens"):
        sizes.add_argument(f"--{name}", type=int, metavar="N", help="with rollout, train, step and ddp")
    sizes.add_argument("--agents", type=int, default=64, metavar="N", help="of conversations, with rollout (default: %(default)s)")
    sizes.add_argument("--steps", type=int, default=6, metavar="N", help="with step and ddp, of one run (default: %(default)s)")
    return parser


def measure(options: argparse.Namespace) -> Iterator[Report]:
    """The reports that a command line asks for, each when it is there.

    Raises:
        ValueError: a model cannot be loaded, a count is out of range, or the peer failed.
    """
    repeats = REPEATS[options.what] if options.repeats is None else options.repeats
    counted = [repeats, options.threads, options.trajectories // 8, options.episodes // 8, options.agents, options.steps]
    counted += [n for n in (options.prompts, options.samples, options.max_tokens) if n is not None]
    if min(counted) < 1:
        raise ValueError("counts, repeats and threads must be at least 1, trajectories and episodes at least 8")
    if options.what == "advantage":
        from rllm_lightning.lab.speed import advantage

        yield from advantage.measure(options.trajectories, repeats=repeats)
    elif options.what == "harness":
        from rllm_lightning.lab.speed import harness

        yield from harness.measure(options.episodes, repeats=repeats)
    else:
        for name in [options.model] if options.model else MODELS:
            yield from _of_model(name, options, repeats)


def _of_model(name: str, options: argparse.Namespace, repeats: int) -> Iterator[Report]:
    from rllm_lightning.lab.speed import ddp, rollout, step, train
    from rllm_lightning.lab.speed.workload import DTYPES, load
    from rllm_lightning.trainer.precision import has_bf16_instructions

    counts = _counts(name, options)
    if options.what == "step":
        dtypes = [options.dtype] if options.dtype else DTYPES
        yield from step.measure(name, counts, options.steps, repeats, options.peer, PEER_SCRIPT, dtypes)
        return
    if options.what == "ddp":
        yield from ddp.measure(name, counts, options.steps, repeats, RUN_SCRIPT)
        return
    model, tokenizer = load(name)
    dtype = "bf16" if name != "builtin:tiny" and has_bf16_instructions() else "fp32"
    if options.what == "train":
        yield from train.measure(name, model, tokenizer, counts, repeats)
        num_agents = max(1, counts.num_prompts // 2)
        yield from train.measure_turns(name, model, tokenizer, dtype, counts.max_tokens, num_agents, repeats=repeats)
    else:
        yield from rollout.measure(name, model, tokenizer, counts, repeats)
        yield from rollout.measure_turns(name, model, tokenizer, dtype, options.agents, max_tokens=counts.max_tokens, repeats=repeats)


def _counts(name: str, options: argparse.Namespace) -> Counts:
    from dataclasses import replace

    from rllm_lightning.lab.speed.workload import counts_of

    given = {"num_prompts": options.prompts, "num_samples": options.samples, "max_tokens": options.max_tokens}
    return replace(counts_of(name), **{key: value for key, value in given.items() if value is not None})


def show(report: Report, machine: dict[str, Any] | None) -> None:
    """A table, behind the machine in a line where that is to be told."""
    from rich.console import Console

    console = Console(width=shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPED_WIDTH)
    if machine is not None:
        console.print(", ".join(f"{key.replace('_', ' ')} {value}" for key, value in machine.items()), highlight=False)
    report.print(console)
    sys.stdout.flush()  # the next one takes minutes


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
