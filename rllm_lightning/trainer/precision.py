"""What `lightning.precision=auto` means for a model and the device it is trained on.

    weights in float32, on CUDA with bf16                                          -> bf16-mixed
    weights in float32, on a CPU with bf16 matrix instructions, a model wide enough -> bf16-mixed
    anything else                                                                  -> 32-true, no autocast

The choice follows from what the hardware is, never from a clock: two runs of one config on one machine have the same
precision. What the clock says goes to the log, so that whoever doubts the choice can set the key.
"""

from __future__ import annotations

import logging
import platform
import time
from functools import cache

import torch

from rllm_lightning.trainer.policy import Policy

logger = logging.getLogger(__name__)

AUTO, FULL, MIXED = "auto", "32-true", "bf16-mixed"
# Hidden size from which autocast pays on a CPU: its casts cost as much as they save in smaller matrix products.
MIN_WIDTH = 512
NUM_ROWS = 512  # tokens of the products that are timed for the log


def choose_precision(policy: torch.nn.Module | None, device: torch.device) -> str:
    """Lightning's name of the precision to train `policy` with on `device`; the choice and its reason are logged."""
    precision, reason = _choice(policy, device)
    logger.info("lightning.precision=auto: %s (%s)", precision, reason)
    return precision


def _choice(policy: torch.nn.Module | None, device: torch.device) -> tuple[str, str]:
    if not isinstance(policy, Policy):
        return FULL, "the backend's policy is none of ours"
    if policy.model.dtype != torch.float32:
        return FULL, f"the weights are {policy.model.dtype}, which needs no autocast"
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return (MIXED, "CUDA with bf16") if native else (FULL, "this CUDA device has no bf16")
    if device.type != "cpu":
        return FULL, f"bf16 is not tried on {device.type}"
    if not has_bf16_instructions():
        return FULL, "this CPU has no bf16 matrix instructions"
    width = policy.model.config.get_text_config(decoder=True).hidden_size
    if width < MIN_WIDTH:
        return FULL, f"hidden size {width}: bf16 pays from {MIN_WIDTH} on"
    return MIXED, f"this CPU multiplies bf16 matrices of the model's size {bf16_speedup(width):.1f} times as fast as fp32 ones"


def has_bf16_instructions() -> bool:
    """Whether this CPU multiplies bf16 matrices in hardware, and PyTorch was built to use it."""
    if not torch.backends.mkldnn.is_available():
        return False
    if platform.machine().lower() in ("x86_64", "amd64"):  # oneDNN's own answer there is true for slow emulation too
        return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


@cache
def bf16_speedup(width: int) -> float:
    """Time of the product [512, width] x [width, 4 width] in fp32 over its time in bf16, the best of a few on this CPU."""
    return _product_seconds(width, torch.float32) / _product_seconds(width, torch.bfloat16)


def _product_seconds(width: int, dtype: torch.dtype) -> float:
    left, right = torch.ones(NUM_ROWS, width, dtype=dtype), torch.ones(width, 4 * width, dtype=dtype)
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        torch.mm(left, right)
        seconds.append(time.perf_counter() - start)
    return min(seconds)
