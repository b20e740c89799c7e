"""Runs in one and in several real processes, started side by side as torchrun would."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from rllm_lightning.config import Config
from rllm_lightning.models.load import load_model

ROOT = Path(__file__).parents[2]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def rank_environment(rank, world_size, port):
    return os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "LOCAL_RANK": str(rank),
        "RANK": str(rank),
        "NODE_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "PYTHONPATH": str(ROOT),
    }


@pytest.fixture(scope="session")
def exact_model(tmp_path_factory):
    """The folder of a small model that computes wholly in its weights' dtype (Llama's norms are float32 in any)."""
    torch.manual_seed(0)
    tokenizer = load_model(Config().model, seed=0)[1]
    sizes = {"vocab_size": len(tokenizer), "n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 2}
    ends = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
    folder = tmp_path_factory.mktemp("exact-model")
    GPT2LMHeadModel(GPT2Config(**sizes, **ends, initializer_range=0.2)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def run_cases(tmp_path_factory):
    """`run_cases(cases, world_size)`: what each case came to in that many processes."""

    def run(cases, world_size, timeout=300):
        folder = tmp_path_factory.mktemp(f"ranks-{world_size}")
        (folder / "cases.json").write_text(json.dumps(cases))
        command = [sys.executable, str(Path(__file__).parent / "worker.py"), str(folder / "cases.json"), str(folder)]
        port = free_port()
        processes = [
            subprocess.Popen(command, env=rank_environment(rank, world_size, port), cwd=ROOT, stderr=subprocess.PIPE, text=True)
            for rank in range(world_size)
        ]
        try:
            errors = [process.communicate(timeout=timeout)[1] for process in processes]
        finally:
            for process in processes:
                process.kill()
        assert [process.returncode for process in processes] == [0] * world_size, "\n".join(errors)
        for name in cases:
            sums = {(folder / f"{name}-{rank}.txt").read_text() for rank in range(world_size)}
            assert len(sums) == 1, f"{name}: the ranks' weights differ"
        return {name: torch.load(folder / f"{name}.pt", weights_only=True) for name in cases}

    return run
