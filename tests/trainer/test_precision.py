"""`lightning.precision=auto`: what it means on which hardware, and that a given value always wins."""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rllm_lightning.trainer import precision
from rllm_lightning.trainer.policy import Policy
from rllm_lightning.trainer.precision import choose_precision

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def policy_of(width=512, dtype=torch.float32):
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=width,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=8,
    )
    return Policy(LlamaForCausalLM(config).to(dtype), SimpleNamespace())


@pytest.fixture
def hardware(monkeypatch):
    """`hardware(cpu=True)`: a CPU with bf16 matrix instructions; `hardware(cuda=True)`: a CUDA device with bf16."""

    def pretend(cpu=False, cuda=False):
        monkeypatch.setattr(precision, "has_bf16_instructions", lambda: cpu)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: cuda)

    return pretend


@pytest.mark.parametrize(("cpu", "width", "chosen"), [(True, 512, "bf16-mixed"), (True, 508, "32-true"), (False, 512, "32-true")])
def test_a_cpu_needs_the_instructions_and_the_model_the_width(hardware, cpu, width, chosen):
    hardware(cpu=cpu)
    assert choose_precision(policy_of(width), CPU) == chosen


@pytest.mark.parametrize(("cuda", "chosen"), [(True, "bf16-mixed"), (False, "32-true")])
def test_on_cuda_the_device_decides_whatever_the_width(hardware, cuda, chosen):
    hardware(cuda=cuda)
    assert choose_precision(policy_of(width=8), CUDA) == chosen


def test_no_autocast_for_weights_that_are_not_float32_nor_for_a_foreign_policy_or_device(hardware):
    hardware(cpu=True, cuda=True)
    assert choose_precision(policy_of(dtype=torch.bfloat16), CPU) == "32-true"
    assert choose_precision(torch.nn.Linear(512, 512), CPU) == "32-true"
    assert choose_precision(None, CUDA) == "32-true"
    assert choose_precision(policy_of(), torch.device("mps")) == "32-true"


@pytest.mark.parametrize("speedup", [0.1, 10.0])
def test_what_the_clock_says_is_logged_but_decides_nothing(hardware, monkeypatch, caplog, speedup):
    hardware(cpu=True)
    monkeypatch.setattr(precision, "bf16_speedup", lambda width: speedup)
    with caplog.at_level("INFO", logger=precision.__name__):
        assert choose_precision(policy_of(), CPU) == "bf16-mixed"
    assert f"{speedup} times as fast" in caplog.text


def test_emulated_bf16_does_not_count_as_instructions(monkeypatch):
    """oneDNN supports bf16 on any CPU with AVX-512, and is slower than fp32 there."""
    monkeypatch.setattr(precision.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    assert not precision.has_bf16_instructions()


@pytest.mark.parametrize(
    ("given", "trained_in"),
    [([], "32-true"), (["lightning.precision=auto"], "32-true"), (["lightning.precision=bf16-mixed"], "bf16-mixed")],
)
def test_a_run_is_trained_in_what_is_given_and_its_summary_says_in_what(fit, given, trained_in):
    """The tiny model is too narrow for bf16 to pay."""
    run = fit("rllm.trainer.total_batches=1", "lightning.accelerator=cpu", *given)
    assert run.trainer.lightning.precision == trained_in
    assert json.loads(run.directory.summary_json.read_text())["precision"] == trained_in


def test_auto_reaches_the_update(fit, monkeypatch):
    """bf16 rounds what the update computes, not what is sampled: so the log-probs of both differ."""
    gap = "rollout/correction/gap/max"
    exact = fit("rllm.trainer.total_batches=1", "lightning.accelerator=cpu")
    monkeypatch.setattr(precision, "MIN_WIDTH", 1)
    monkeypatch.setattr(precision, "has_bf16_instructions", lambda: True)
    rounded = fit("rllm.trainer.total_batches=1", "lightning.accelerator=cpu")
    assert rounded.trainer.lightning.precision == "bf16-mixed"
    assert rounded.column(gap)[0] > 100 * exact.column(gap)[0]
