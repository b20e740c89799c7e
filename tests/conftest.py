"""A hermetic run: no network, no login, nothing written outside a temporary folder, few threads, the same examples each time.

The environment is set when this file is imported, before anything that reads it at import (torch, huggingface_hub, wandb).
"""

import os
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings

SCRATCH = Path(tempfile.mkdtemp(prefix="rllm-lightning-tests-"))

for name in list(os.environ):
    if name.startswith(("WANDB_", "SLURM_")) or name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]

os.environ |= {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MPLBACKEND": "Agg",
    "HF_HUB_OFFLINE": "1",
    "HF_HOME": str(SCRATCH / "huggingface"),
    "RLLM_LIGHTNING_CACHE": str(SCRATCH / "cache"),
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_DIR": str(SCRATCH / "wandb"),
    "WANDB_DATA_DIR": str(SCRATCH / "wandb-data"),
    "WANDB_CACHE_DIR": str(SCRATCH / "wandb-cache"),
    "WANDB_CONFIG_DIR": str(SCRATCH / "wandb-config"),
    "WANDB_ARTIFACT_DIR": str(SCRATCH / "wandb-artifacts"),
    "NETRC": str(SCRATCH / "netrc"),
}

settings.register_profile("reproducible", deadline=None, derandomize=True, database=None)
settings.load_profile("reproducible")


def pytest_unconfigure():
    shutil.rmtree(SCRATCH, ignore_errors=True)
