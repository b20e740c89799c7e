"""Rollout correction: weights and metrics by hand, against plain Python, and what they correct."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rllm_lightning.algorithms.correction import effective_sample_size, rollout_correction_weights
from rllm_lightning.algorithms.losses import compute_policy_loss
from rllm_lightning.registry import LOSSES

# log-ratios (trainer - sampler): row 0 .5, 1.0, padding; row 1 -.5, padding, padding
TRAIN = torch.tensor([[-1.0, -1.0, torch.nan], [-1.5, torch.inf, 0.0]])
ROLLOUT = torch.tensor([[-1.5, -2.0, 0.0], [-1.0, torch.nan, 0.0]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])
E = math.exp


@pytest.mark.parametrize(
    ("mode", "level", "weights"),
    [
        # token ratios e^.5 = 1.6487, e^1 = 2.7183, e^-.5 = .6065; cap 2
        ("none", "token", [[1, 1, 0], [1, 0, 0]]),
        ("none", "sequence", [[1, 1, 0], [1, 0, 0]]),
        ("tis", "token", [[E(0.5), 2, 0], [E(-0.5), 0, 0]]),
        ("mask", "token", [[E(0.5), 0, 0], [E(-0.5), 0, 0]]),
        # row 0: e^1.5 = 4.48 at both of its tokens
        ("tis", "sequence", [[2, 2, 0], [E(-0.5), 0, 0]]),
        ("mask", "sequence", [[0, 0, 0], [E(-0.5), 0, 0]]),
    ],
)
def test_weights_are_those_worked_out_by_hand(mode, level, weights):
    got, metrics = rollout_correction_weights(TRAIN, ROLLOUT, MASK, mode, level, 2.0)
    np.testing.assert_allclose(got, weights, rtol=1e-6)
    beyond = [[0, 1, 0], [0, 0, 0]] if level == "token" else [[1, 1, 0], [0, 0, 0]]
    assert metrics["clip_frac"].tolist() == beyond
    if mode != "none":
        np.testing.assert_allclose(metrics["weight"], weights, rtol=1e-6)
        np.testing.assert_allclose(metrics["weight_square"], np.square(weights), rtol=1e-6)


def test_metrics_say_how_far_sampler_and_trainer_are_apart():
    _, metrics = rollout_correction_weights(TRAIN, ROLLOUT, MASK, "tis", "token", 2.0)
    # KL(rollout ‖ train) with x = train - rollout: -x, x²/2, e^x - x - 1
    np.testing.assert_allclose(metrics["kl_k1"], [[-0.5, -1, 0], [0.5, 0, 0]], rtol=1e-6)
    np.testing.assert_allclose(metrics["kl_k2"], [[0.125, 0.5, 0], [0.125, 0, 0]], rtol=1e-6)
    np.testing.assert_allclose(metrics["kl_k3"], [[E(0.5) - 1.5, E(1) - 2, 0], [E(-0.5) - 0.5, 0, 0]], rtol=1e-5)
    np.testing.assert_allclose(metrics["gap/max"], [[0.5, 1, 0], [0.5, 0, 0]], rtol=1e-6)


def test_without_correction_the_weight_metrics_say_what_truncation_would_do():
    _, none = rollout_correction_weights(TRAIN, ROLLOUT, MASK, "none", "token", 2.0)
    _, tis = rollout_correction_weights(TRAIN, ROLLOUT, MASK, "tis", "token", 2.0)
    assert none.keys() == tis.keys()
    for name in none:
        assert torch.equal(none[name], tis[name])


def test_effective_sample_size_is_the_share_of_equal_weights():
    # weights 1, 1, 1, 1 -> 1; 2, 0, 0, 0 -> (2/4)² / (4/4) = 1/4; none -> 0
    for weights, expected in (([1.0] * 4, 1.0), ([2.0, 0, 0, 0], 0.25), ([0.0] * 4, 0.0)):
        means = {"weight": np.mean(weights), "weight_square": np.mean(np.square(weights))}
        assert effective_sample_size(means) == expected


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.lists(st.tuples(st.floats(-4, 0), st.floats(-4, 0)), max_size=4), min_size=1, max_size=4),
    mode=st.sampled_from(["none", "tis", "mask"]),
    level=st.sampled_from(["token", "sequence"]),
    cap=st.floats(0.5, 5),
)
def test_weights_agree_with_plain_python(rows, mode, level, cap):
    train, rollout = torch.full((2, len(rows), 5), torch.nan, dtype=torch.float64)
    mask = torch.zeros(len(rows), 5)
    expected = np.zeros((len(rows), 5))
    for b, row in enumerate(rows):
        for t, (now, then) in enumerate(row):
            train[b, t], rollout[b, t], mask[b, t] = now, then, 1
            ratio = E(now - then) if level == "token" else math.prod(E(n - o) for n, o in row)
            cut = {"tis": min(ratio, cap), "mask": ratio if ratio <= cap else 0.0, "none": 1.0}
            expected[b, t] = cut[mode]
    weights, _ = rollout_correction_weights(train, rollout, mask, mode, level, cap)
    np.testing.assert_allclose(weights, expected, rtol=1e-9)


def test_equal_policies_have_weight_one_everywhere():
    weights, metrics = rollout_correction_weights(TRAIN, TRAIN, MASK, "tis", "sequence", 2.0)
    assert torch.equal(weights, MASK.float())
    assert not any(metrics[name].any() for name in ("kl_k1", "kl_k2", "kl_k3", "gap/max", "clip_frac"))


def test_a_weight_at_the_cap_stays():
    weights, metrics = rollout_correction_weights(TRAIN, TRAIN, MASK, "mask", "token", 1.0)
    assert torch.equal(weights, MASK.float())
    assert not metrics["clip_frac"].any()


def test_weights_are_constants_in_float32():
    train = torch.tensor([[-1.0]], dtype=torch.bfloat16, requires_grad=True)
    weights, metrics = rollout_correction_weights(train, torch.tensor([[-1.5]]), torch.ones(1, 1), "tis", "token", 2.0)
    assert weights.dtype == torch.float32
    assert not any(value.requires_grad for value in (weights, *metrics.values()))


def test_unknown_modes_and_levels_are_named():
    for mode, level in (("clip", "token"), ("tis", "row")):
        with pytest.raises(ValueError, match=rf"rllm\.algorithm\.rollout_correction: unknown mode '{mode}'.*level '{level}'"):
            rollout_correction_weights(TRAIN, ROLLOUT, MASK, mode, level, 2.0)


def test_nothing_is_read_back_to_the_host():
    """On the device `meta` reading a value, or mixing in a CPU tensor, raises."""
    logprobs, mask = torch.zeros(2, 3, device="meta"), torch.ones(2, 3, device="meta")
    for mode, level in itertools.product(("none", "tis", "mask"), ("token", "sequence")):
        weights, metrics = rollout_correction_weights(logprobs, logprobs, mask, mode, level, 2.0)
        assert {value.device.type for value in (weights, *metrics.values())} == {"meta"}


# -------------------------------------------------------------------------------------------------- what it corrects


def two_step_task(seed):
    """A policy of two independent choices of 3 (logits [2, 3]), a sampler a little off, and a reward of both choices together.

    Returns logits (leaf), the sampler's log-probs [2, 3], all 9 answers [9, 2] and their rewards [9].
    """
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    sampler = torch.log_softmax(logits + 0.5 * torch.randn(2, 3, generator=generator, dtype=torch.float64), -1)
    answers = torch.tensor(list(itertools.product(range(3), repeat=2)))
    return logits.requires_grad_(), sampler, answers, torch.randn(9, generator=generator, dtype=torch.float64)


def chosen(logprobs, answers):
    """Log-probs [9, 2] of the answers' tokens."""
    return logprobs[torch.arange(2), answers]


def gradients(seed, mode, level, cap=1e9, bypass=False):
    """The true gradient of minus the expected reward, and the loss's, each answer weighed by the sampler's probability."""
    logits, sampler, answers, rewards = two_step_task(seed)
    logprobs = chosen(torch.log_softmax(logits, -1), answers)
    (true,) = torch.autograd.grad(-(logprobs.sum(-1).exp() * rewards).sum(), logits, retain_graph=True)

    rollout, mask = chosen(sampler, answers), torch.ones(9, 2)
    old = rollout if bypass else logprobs.detach()
    loss, _ = compute_policy_loss(LOSSES.get("importance_sampling"), logprobs, old, rewards[:, None].expand(9, 2), mask)
    weights, _ = rollout_correction_weights(logprobs, rollout, mask, mode, level, cap)
    (estimate,) = torch.autograd.grad((rollout.sum(-1).exp()[:, None] * loss * weights).sum(), logits)
    return true, estimate


@pytest.mark.parametrize("seed", range(3))
def test_the_sequence_weight_makes_the_gradient_exact(seed):
    true, corrected = gradients(seed, "tis", "sequence")
    torch.testing.assert_close(corrected, true)
    _, uncorrected = gradients(seed, "none", "sequence")
    assert (uncorrected - true).norm() > 0.02 * true.norm()


@pytest.mark.parametrize("seed", range(3))
def test_the_token_weight_and_bypass_mode_are_the_same_correction(seed):
    """One token's ratio, either as a weight or as the loss's own ratio to the sampler; exact but for the other tokens of the row."""
    _, weighted = gradients(seed, "tis", "token")
    _, bypassed = gradients(seed, "none", "token", bypass=True)
    torch.testing.assert_close(weighted, bypassed)


def test_a_tighter_cap_trades_exactness_for_bounded_weights():
    errors = []
    for cap in (1e9, 1.5, 1.0, 0.5):
        true, corrected = gradients(0, "tis", "sequence", cap)
        errors.append(((corrected / corrected.norm() - true / true.norm()).norm()).item())
    assert errors[0] < 1e-9
    assert all(error > 1e-3 for error in errors[1:])
