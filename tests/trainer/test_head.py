"""Log-probs and entropies of chosen tokens, chunk by chunk."""

import math

import pytest
import torch

from rllm_lightning.trainer import head


def dense(hidden, weight, bias, targets, temperature):
    """By definition: all logits at once, float64."""
    logits = (hidden.double() @ weight.double().T + (0 if bias is None else bias.double())) / temperature
    logprobs = logits.log_softmax(-1)
    return logprobs.gather(-1, targets[:, None]).squeeze(-1), -(logprobs.exp() * logprobs).sum(-1)


@pytest.fixture
def case():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(37, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(50, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(50, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 50, (37,), generator=generator)
    return hidden, weight, bias, targets


# the smallest chunk is 16 tokens: 3 chunks, 3 chunks, 1 chunk; blocks of 1 token, of 6, of all
@pytest.mark.parametrize(("chunk_elements", "block_elements"), [(1, 1), (50 * 16, 50 * 6), (10**6, 10**6)])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("with_bias", [True, False])
def test_values_and_gradients_are_those_of_all_logits_at_once(case, chunk_elements, block_elements, temperature, with_bias, monkeypatch):
    hidden, weight, bias, targets = case
    bias = bias if with_bias else None
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", chunk_elements)
    monkeypatch.setattr(head, "CPU_BLOCK_ELEMENTS", block_elements)
    inputs = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
    a, b = torch.linspace(-1, 2, 37, dtype=torch.float64), torch.linspace(0.5, -1, 37, dtype=torch.float64)

    logprobs, entropies = head.token_logprobs(hidden, weight, bias, targets, temperature)
    expected = dense(hidden, weight, bias, targets, temperature)
    torch.testing.assert_close((logprobs, entropies), expected, rtol=1e-12, atol=1e-12)
    ours = torch.autograd.grad((a * logprobs + b * entropies).sum(), inputs)
    theirs = torch.autograd.grad((a * expected[0] + b * expected[1]).sum(), inputs)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_the_gradient_passes_gradcheck(case):
    hidden, weight, bias, targets = case
    assert torch.autograd.gradcheck(lambda h, w, b: head.token_logprobs(h, w, b, targets, 0.7), (hidden, weight, bias))


def test_temperature_divides_the_logits_of_the_trainer_too():
    """B12: logits [2, 0] at temperature 0.5 are [4, 0]: log-prob of token 0 is -log(1 + e^-4) = -0.018150 (unscaled -0.126928)."""
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[2.0], [0.0]])
    logprobs, _ = head.token_logprobs(hidden, weight, None, torch.tensor([0]), 0.5)
    assert logprobs.item() == pytest.approx(-math.log1p(math.exp(-4)), abs=1e-6)
    assert logprobs.item() == pytest.approx(-0.018150, abs=1e-6)


def test_half_precision_hidden_states_give_float32_log_probs():
    """B17: the difference of two log-probs survives: reductions are in float32 although the product was in bfloat16."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(5, 16, generator=generator).bfloat16()
    weight = torch.randn(1000, 16, generator=generator).bfloat16()
    targets = torch.arange(5)
    logprobs, entropies = head.token_logprobs(hidden, weight, None, targets)
    assert logprobs.dtype == entropies.dtype == torch.float32
    logits = (hidden @ weight.T).float()
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("output", [0, 1])
def test_either_output_may_be_trained_on_alone(case, output):
    hidden, weight, bias, targets = case
    ours = torch.autograd.grad(head.token_logprobs(hidden, weight, bias, targets, 0.5)[output].sum(), [hidden, weight, bias])
    theirs = torch.autograd.grad(dense(hidden, weight, bias, targets, 0.5)[output].sum(), [hidden, weight, bias])
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("block_elements", [1000, 10**6])
def test_gradients_under_autocast_are_those_of_plain_layers_under_autocast(block_elements, monkeypatch):
    """To the rounding of bfloat16: of gradients of size 1, 2**-9 each."""
    monkeypatch.setattr(head, "CPU_BLOCK_ELEMENTS", block_elements)
    generator = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(40, 16, generator=generator), torch.randn(1000, 16, generator=generator)
    inputs, targets = [hidden.requires_grad_(), weight.requires_grad_()], torch.arange(40)
    with torch.autocast("cpu", torch.bfloat16):
        ours = torch.autograd.grad(head.token_logprobs(*inputs, None, targets)[0].sum(), inputs)
        logits = torch.nn.functional.linear(*inputs)
        theirs = torch.autograd.grad(logits.float().log_softmax(-1).gather(-1, targets[:, None]).sum(), inputs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == torch.float32
        assert (one - other).norm() < 2**-8 * other.norm()


def test_a_frozen_head_gets_no_gradient(case):
    hidden, weight, _, targets = case
    logprobs, _ = head.token_logprobs(hidden, weight.detach(), None, targets)
    (grad,) = torch.autograd.grad(logprobs.sum(), [hidden])
    (expected,) = torch.autograd.grad(dense(hidden, weight.detach(), None, targets, 1.0)[0].sum(), [hidden])
    torch.testing.assert_close(grad, expected)


def test_no_tokens_give_empty_results_and_zero_gradients():
    hidden, weight = torch.zeros(0, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    logprobs, entropies = head.token_logprobs(hidden, weight, None, torch.zeros(0, dtype=torch.int64))
    (logprobs.sum() + entropies.sum()).backward()
    assert logprobs.shape == entropies.shape == (0,)
    assert weight.grad is not None
    assert weight.grad.abs().sum() == 0


def test_logits_that_are_there_give_the_same(case):
    hidden, weight, bias, targets = case
    logits = hidden @ weight.T + bias
    torch.testing.assert_close(head.logprobs_from_logits(logits, targets, 0.7), dense(hidden, weight, bias, targets, 0.7))
