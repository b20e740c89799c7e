"""A hermetic run: no network, no login, nothing written outside a temporary folder, few threads, the same examples each time.

The environment is set when this file is imported, before anything that reads it at import (torch, huggingface_hub, wandb).
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

from rllm_lightning import registry

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


@pytest.fixture(autouse=True)
def _plugins_of_a_test_end_with_it(tmp_path_factory):
    """What a test registers, and the modules it imported from temporary folders, are not there for the next."""
    registries = [value for value in vars(registry).values() if isinstance(value, registry.Registry)]
    entries, modules = [set(r._entries) for r in registries], set(sys.modules)
    yield
    for each, before in zip(registries, entries, strict=True):
        for name in set(each._entries) - before:
            if not registry._origin(each._entries[name]).startswith("rllm_lightning."):
                del each._entries[name]
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path_factory.getbasetemp())):
            del sys.modules[name]


class PairsInTurn(LoadFileScheduling):
    """Files go to workers, all of tests/ddp to one: two pairs of processes at once, each waiting for its other half at every step, would
    spend their time waiting."""

    def _split_scope(self, nodeid):
        file = super()._split_scope(nodeid)
        return "tests/ddp" if file.startswith("tests/ddp/") else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return PairsInTurn(config, log)


def pytest_unconfigure():
    shutil.rmtree(SCRATCH, ignore_errors=True)
