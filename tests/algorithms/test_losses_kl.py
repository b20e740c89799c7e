"""KL estimates: values, gradients, what they mean in expectation, and large differences."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rllm_lightning.algorithms.kl import drift_metrics, kl_penalty
from rllm_lightning.algorithms.losses import metric_totals


def value_and_gradient(logprob, ref, estimator, dtype=torch.float64):
    logprob = torch.tensor(logprob, dtype=dtype, requires_grad=True)
    value = kl_penalty(logprob, torch.tensor(ref, dtype=dtype), estimator)
    value.backward()
    return value.item(), logprob.grad.item()


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [("k1", 0.5, 1.0), ("k2", 0.125, 0.5), ("k3", 0.106531, 0.393469)],  # d = -.5: -d, d²/2, e^d - d - 1; and 1, -d, 1 - e^d
)
def test_estimates_and_gradients_of_half_a_nat(estimator, value, gradient):
    """B13: logp -1, ref -1.5; the gradient is trained, not cut off."""
    assert value_and_gradient(-1.0, -1.5, estimator) == pytest.approx((value, gradient), abs=1e-6)
    assert value_and_gradient(-1.0, -1.5, estimator, torch.float32) == pytest.approx((value, gradient), abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_equal_policies_have_no_divergence(estimator):
    value, gradient = value_and_gradient(-2.3, -2.3, estimator)
    assert value == 0
    assert gradient == (1.0 if estimator == "k1" else 0.0)


@settings(max_examples=50, deadline=None)
@given(logprob=st.floats(-30, 0), ref=st.floats(-30, 0), estimator=st.sampled_from(["k1", "k2", "k3"]))
def test_gradients_agree_with_differences(logprob, ref, estimator):
    def slow(x):
        d = ref - x
        return {"k1": -d, "k2": d * d / 2, "k3": math.exp(min(d, 20)) * (1 + max(d - 20, 0)) - d - 1}[estimator]

    value, gradient = value_and_gradient(logprob, ref, estimator)
    assert value == pytest.approx(slow(logprob), rel=1e-9, abs=1e-12)
    assert gradient == pytest.approx((slow(logprob + 1e-6) - slow(logprob - 1e-6)) / 2e-6, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("d", [15.0, 21.0, 100.0, 1e4])
def test_k3_of_a_token_that_the_policy_nearly_lost_is_finite_and_pulls_it_back(d):
    """B13: a clamp of the value must not stop the gradient: it stays negative (raise logp), and no smaller than at 20."""
    value, gradient = value_and_gradient(-d - 1.0, -1.0, "k3", torch.float32)
    assert math.isfinite(value)
    assert value > 0
    assert gradient == pytest.approx(1 - math.exp(min(d, 20)), rel=1e-5)


def test_k3_is_never_negative_and_keeps_small_differences():
    for d in (1e-2, 1e-3, -1e-2):
        value, _ = value_and_gradient(-1.0, -1.0 + d, "k3", torch.float32)
        assert value == pytest.approx(d * d / 2 + d**3 / 6, rel=0.05)


def expected_gradient(logits, ref, estimator):
    """Gradient by the logits of Σ_a π(a) · k(a), π(a) held: what sampling from π gives on average."""
    logits = logits.clone().requires_grad_()
    logprobs = torch.log_softmax(logits, -1)
    (logprobs.detach().exp() * kl_penalty(logprobs, ref, estimator)).sum().backward()
    return logits.grad


def test_in_expectation_each_estimator_trains_what_its_table_says():
    generator = torch.Generator().manual_seed(0)
    logits, ref = (torch.randn(6, generator=generator, dtype=torch.float64) for _ in range(2))
    ref = torch.log_softmax(ref, -1)
    leaf = logits.clone().requires_grad_()
    policy = torch.log_softmax(leaf, -1)
    (reverse,) = torch.autograd.grad((policy.exp() * (policy - ref)).sum(), leaf, retain_graph=True)  # KL(π ‖ ref)
    (forward,) = torch.autograd.grad((ref.exp() * (ref - policy)).sum(), leaf)  # KL(ref ‖ π)
    torch.testing.assert_close(expected_gradient(logits, ref, "k1"), torch.zeros(6, dtype=torch.float64))
    torch.testing.assert_close(expected_gradient(logits, ref, "k2"), reverse)
    torch.testing.assert_close(expected_gradient(logits, ref, "k3"), forward)


def test_k1_and_k3_are_unbiased():
    generator = torch.Generator().manual_seed(1)
    policy, ref = (torch.log_softmax(torch.randn(6, generator=generator, dtype=torch.float64), -1) for _ in range(2))
    exact = (policy.exp() * (policy - ref)).sum()
    for estimator in ("k1", "k3"):
        torch.testing.assert_close((policy.exp() * kl_penalty(policy, ref, estimator)).sum(), exact)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_reference_gets_no_gradient_and_padding_reaches_nothing(estimator):
    logprobs = torch.tensor([[-1.0, torch.nan, -torch.inf]], requires_grad=True)
    ref = torch.tensor([[-1.5, -1.0, torch.nan]], requires_grad=True)
    penalty = kl_penalty(logprobs, ref, estimator, torch.tensor([[1, 0, 0]]))
    penalty.sum().backward()
    assert ref.grad is None
    assert penalty[0, 1:].tolist() == [0.0, 0.0]
    assert logprobs.grad[0, 1:].tolist() == [0.0, 0.0]


def test_bfloat16_is_raised_before_the_difference():
    """B17: log-probs that bfloat16 can hold, one step apart, keep their gap; computed in float32."""
    penalty = kl_penalty(torch.tensor(-5.03125).bfloat16(), torch.tensor(-5.0).bfloat16(), "k1")
    assert penalty.dtype == torch.float32
    assert penalty.item() == -0.03125


def test_an_unknown_estimator_names_the_key():
    with pytest.raises(ValueError, match=r"rllm\.algorithm\.kl_estimator.*'k4'.*k1, k2, k3"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k4")


def test_drift_before_any_update_is_ratio_one_and_divergence_zero():
    """B17: the ratio is 1, approx KL 0 (not -1, which the mean of -ratio would be)."""
    logprobs, mask = torch.tensor([[-1.0, -2.0, torch.nan]]), torch.tensor([[1, 1, 0]])
    metrics = drift_metrics(logprobs, logprobs, mask)
    assert not any(value[0, 2] for value in metrics.values())
    totals = metric_totals(metrics, mask)
    assert {name: total.item() for name, total in totals.items()} == {"approx_kl": 0.0, "ratio": 2.0, "ratio_gap/max": 0.0}


def test_drift_after_an_update_is_that_worked_out_by_hand():
    # log-ratios .5 and -.25: ratios 1.648721 and .778801; k3 of KL(old ‖ now) is ratio - log-ratio - 1: .148721 and .028801
    now, old, mask = torch.tensor([[-1.0, -2.25]], requires_grad=True), torch.tensor([[-1.5, -2.0]]), torch.ones(1, 2)
    metrics = drift_metrics(now, old, mask)
    np.testing.assert_allclose(metrics["approx_kl"], [[0.148721, 0.028801]], atol=1e-6)
    np.testing.assert_allclose(metrics["ratio"], [[1.648721, 0.778801]], atol=1e-6)
    np.testing.assert_allclose(metrics["ratio_gap/max"], [[0.648721, 0.221199]], atol=1e-6)


def test_nothing_is_read_back_to_the_host():
    """On the device `meta` reading a value, or mixing in a CPU tensor, raises."""
    logprobs, mask = torch.zeros(2, 3, device="meta"), torch.ones(2, 3, device="meta")
    for estimator in ("k1", "k2", "k3"):
        assert kl_penalty(logprobs, logprobs, estimator, mask).device.type == "meta"
    assert {value.device.type for value in drift_metrics(logprobs, logprobs, mask).values()} == {"meta"}
