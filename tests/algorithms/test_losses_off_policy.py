"""Off-policy behaviour: what the losses do in expectation, and over several updates on the same samples.

A bandit of a few actions, so that expectations over samples of the old policy are exact sums.
"""

import math

import pytest
import torch

from rllm_lightning.algorithms.losses import compute_policy_loss
from rllm_lightning.registry import LOSSES

ADVANTAGES = torch.tensor([1.0, -0.5, 0.2, -0.7], dtype=torch.float64)


def policies(drift, seed=0):
    """Logits of the policy as it is now (leaf) and log-probs of the old one; `drift` scales their difference."""
    generator = torch.Generator().manual_seed(seed)
    old = torch.randn(4, generator=generator, dtype=torch.float64)
    now = old + drift * torch.randn(4, generator=generator, dtype=torch.float64)
    return now.requires_grad_(), torch.log_softmax(old, -1)


def expected_loss(name, logits, old, advantages=ADVANTAGES, **kwargs):
    """Σ over actions of the old policy's probability times the action's loss; each action is a row of one token."""
    logprobs = torch.log_softmax(logits, -1)
    loss, metrics = compute_policy_loss(
        LOSSES.get(name), logprobs[:, None], old[:, None], advantages[:, None], torch.ones(len(old), 1), **kwargs
    )
    return (old.exp() * loss[:, 0]).sum(), metrics


def gradient(name, logits, old, **kwargs):
    return torch.autograd.grad(expected_loss(name, logits, old, **kwargs)[0], logits)[0]


def true_gradient(logits, advantages=ADVANTAGES):
    """Of minus the expected advantage under the policy as it is now."""
    return torch.autograd.grad(-(torch.softmax(logits, -1) * advantages).sum(), logits)[0]


@pytest.mark.parametrize("drift", [0.0, 0.1, 1.0])
def test_importance_sampling_has_the_true_gradient_from_any_old_policy(drift):
    logits, old = policies(drift)
    torch.testing.assert_close(gradient("importance_sampling", logits, old), true_gradient(logits))


def test_reinforce_has_the_true_gradient_from_its_own_samples_only():
    logits, old = policies(0.0)
    torch.testing.assert_close(gradient("reinforce", logits, old), true_gradient(logits))
    logits, old = policies(1.0)
    assert (gradient("reinforce", logits, old) - true_gradient(logits)).norm() > 0.1 * true_gradient(logits).norm()


@pytest.mark.parametrize("name", ["ppo", "gmpo", "dppo", "cispo"])
def test_within_the_trust_region_the_gradient_is_the_true_one(name):
    logits, old = policies(0.02)
    _, metrics = expected_loss(name, logits, old)
    assert not metrics["clip_frac"].any()
    torch.testing.assert_close(gradient(name, logits, old), true_gradient(logits))


@pytest.mark.parametrize(
    ("name", "keeps"),
    [
        ("importance_sampling", True), ("cispo", True), ("reinforce", True), ("sapo", True),
        ("ppo", False), ("gspo", False), ("gmpo", False), ("dppo", False), ("clip_cov", False),
    ],
)  # fmt: skip
def test_whether_a_token_far_beyond_the_bound_keeps_a_gradient(name, keeps):
    """A > 0 and a probability that went from .1 to .6 already: clipping losses stop, the others go on."""
    now = torch.tensor([[math.log(0.6)]], requires_grad=True)
    loss, _ = compute_policy_loss(LOSSES.get(name), now, torch.tensor([[math.log(0.1)]]), torch.ones(1, 1), torch.ones(1, 1))
    loss.sum().backward()
    assert (now.grad.item() < 0) == keeps
    assert keeps or now.grad.item() == 0


@pytest.mark.parametrize("name", ["ppo", "gspo", "gmpo", "dppo", "clip_cov", "sapo", "cispo", "importance_sampling", "dro"])
def test_a_token_that_went_the_wrong_way_is_always_pulled_back(name):
    """A < 0 and a probability that went up, A > 0 and one that went down: the gradient is never cut."""
    for now, old, advantage in ((0.6, 0.1, -1.0), (0.1, 0.6, 1.0)):
        logprob = torch.tensor([[math.log(now)]], requires_grad=True)
        loss, _ = compute_policy_loss(
            LOSSES.get(name), logprob, torch.tensor([[math.log(old)]]), torch.tensor([[advantage]]), torch.ones(1, 1)
        )
        loss.sum().backward()
        assert logprob.grad.item() * -advantage > 0


def ratios_after_updates(name, num_updates=300, lr=0.1, **kwargs):
    """Ratios of the actions after gradient descent on samples of the first policy, which is uniform."""
    logits = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    old = torch.log_softmax(logits.detach(), -1)
    optimizer = torch.optim.SGD([logits], lr=lr)
    for _ in range(num_updates):
        optimizer.zero_grad()
        expected_loss(name, logits, old, **kwargs)[0].backward()
        optimizer.step()
    return (torch.log_softmax(logits.detach(), -1) - old).exp()


def test_many_updates_on_the_same_samples_stop_near_the_bound_for_clipping_losses_only():
    assert ratios_after_updates("ppo").max() < 1.3  # bound 1.2, and one step beyond
    assert ratios_after_updates("gmpo").max() < math.exp(0.4) + 0.1
    assert ratios_after_updates("dppo").max() < 1.9  # probability .25 + .2 is a ratio of 1.8
    assert ratios_after_updates("importance_sampling").max() > 3
    assert ratios_after_updates("cispo").max() > 3


def test_dro_settles_where_the_log_ratio_is_the_advantage_over_beta():
    """∂/∂logπ of A·logπ - ½β(logπ - logπ_old)² is 0 at logπ - logπ_old = A/β."""
    now, old, advantages = torch.full((1, 3), -1.0, requires_grad=True), torch.full((1, 3), -1.0), torch.tensor([[0.5, -0.2, 0.0]])
    optimizer = torch.optim.SGD([now], lr=0.5)
    for _ in range(200):
        optimizer.zero_grad()
        compute_policy_loss(LOSSES.get("dro"), now, old, advantages, torch.ones(1, 3), beta=0.5)[0].sum().backward()
        optimizer.step()
    torch.testing.assert_close(now.detach() - old, advantages / 0.5, atol=1e-5, rtol=0)


def test_ppo_forgives_what_dppo_blocks_and_the_other_way_round():
    """.0001 -> .001 is a ratio of 10, but moves little probability; .6 -> .85 moves a quarter of it, but is a ratio of 1.417 < 1.5."""
    for now, old, ppo_stops, dppo_stops in ((0.001, 0.0001, True, False), (0.85, 0.6, False, True)):
        for name, kwargs, stops in (("ppo", {"clip_high": 0.5}, ppo_stops), ("dppo", {"delta": 0.2}, dppo_stops)):
            logprob = torch.tensor([[math.log(now)]], requires_grad=True)
            loss, metrics = compute_policy_loss(
                LOSSES.get(name), logprob, torch.tensor([[math.log(old)]]), torch.ones(1, 1), torch.ones(1, 1), **kwargs
            )
            loss.sum().backward()
            assert (logprob.grad.item() == 0) == stops
            assert metrics["clip_frac"].item() == stops


def test_one_wild_token_silences_its_row_in_gspo_and_itself_alone_in_gmpo_and_ppo():
    old = torch.full((1, 4), -2.0)
    shifts = torch.tensor([[1.5, 0.0, 0.0, 0.0]])
    for name, silent in (("gspo", [0, 1, 2, 3]), ("gmpo", [0]), ("ppo", [0])):
        now = (old + shifts).requires_grad_()
        compute_policy_loss(LOSSES.get(name), now, old, torch.ones(1, 4), torch.ones(1, 4))[0].sum().backward()
        assert [t for t in range(4) if now.grad[0, t] == 0] == silent


def test_kl_cov_slows_the_collapse_of_the_entropy():
    """Covariance is highest for likely actions with high advantage: pulling those back keeps the policy more random."""
    free = ratios_after_updates("kl_cov", num_updates=60, coef=0.0)
    pulled = ratios_after_updates("kl_cov", num_updates=60, fraction=0.25, coef=2.0)

    def entropy(ratios):
        probabilities = ratios / 4
        return -(probabilities * probabilities.log()).sum()

    assert entropy(pulled) > entropy(free)
