"""The machine that a comparison ran on, and the limit that its matrix products set."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rllm_lightning.trainer.precision import has_bf16_instructions

CPUINFO, STATUS, CLEAR_REFS = Path("/proc/cpuinfo"), Path("/proc/self/status"), Path("/proc/self/clear_refs")
NUM_WEIGHTS = 16  # matrices that take turns, so that a product finds its weights where a model's would be
LIMIT_S = 1.0  # of measuring one rate


def describe() -> dict[str, Any]:
    """What a reader needs to know to compare numbers with those of another machine."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "bf16_instructions": has_bf16_instructions(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in ("torch", "transformers", "numpy")},
    }


def _cpu_name() -> str:
    if CPUINFO.exists():
        for line in CPUINFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@dataclass(frozen=True)
class Limits:
    """The rates in FLOP/s of the products [num_rows, width] x [width, 4 width], by dtype."""

    num_rows: int
    width: int
    rates: dict[str, float]

    @classmethod
    def measure(cls, num_rows: int, width: int, dtypes: Mapping[str, torch.dtype], limit_s: float = LIMIT_S) -> Limits:
        return cls(num_rows, width, {name: matrix_rate(num_rows, width, dtype, limit_s) for name, dtype in dtypes.items()})

    def in_words(self) -> str:
        rates = ", ".join(f"{dtype} {rate / 1e9:,.0f} GFLOP/s" for dtype, rate in self.rates.items())
        return f"[{self.num_rows}, {self.width}] x [{self.width}, {4 * self.width}]: {rates}"


def matrix_rate(num_rows: int, width: int, dtype: torch.dtype, limit_s: float) -> float:
    """FLOP a second of the products [num_rows, width] x [width, 4 width] on the CPU: the best that was seen within `limit_s`."""
    left = torch.randn(num_rows, width).to(dtype)
    weights = [torch.randn(4 * width, width).to(dtype) for _ in range(NUM_WEIGHTS)]
    best, end = 0.0, time.perf_counter() + limit_s
    while time.perf_counter() < end or not best:
        start = time.perf_counter()
        for weight in weights:
            torch.nn.functional.linear(left, weight)
        best = max(best, len(weights) * 8 * num_rows * width * width / (time.perf_counter() - start))
    return best


def reset_peak_memory() -> None:
    """Let `peak_memory` count from now on, where the system can (Linux); elsewhere it counts from the start of the process."""
    if CLEAR_REFS.exists():
        CLEAR_REFS.write_text("5")


def peak_memory() -> int:
    """The most memory that this process held at once, in bytes."""
    if STATUS.exists():
        return _status("VmHWM")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024


def _status(name: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024
