"""Every policy loss against a slow implementation in plain Python, written from the formulas; values and gradients.

The slow functions take lists of rows of floats and know no tensors, masks or stop-gradients: what is held constant when a
derivative is taken is spelt out beside them.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rllm_lightning.algorithms.aggregation import AGGREGATION_MODES, loss_weights
from rllm_lightning.algorithms.losses import aggregate_loss, compute_policy_loss
from rllm_lightning.registry import LOSSES


def clip(x, low, high):
    return min(max(x, low), high)


def slow_ppo_token(ratio, a, low, high, dual=None):
    objective = min(ratio * a, clip(ratio, 1 - low, 1 + high) * a)
    if dual is not None and a < 0:
        objective = max(objective, dual * a)
    return -objective


def per_token(formula):
    """Lift a formula of one token's (now, old, advantage) to rows."""

    def rows_of(now, old, advantages, **kwargs):
        return [[formula(n, o, a, **kwargs) for n, o, a in zip(*row, strict=True)] for row in zip(now, old, advantages, strict=True)]

    return rows_of


@per_token
def slow_dppo(n, o, a, divergence, delta):
    q, p = math.exp(n), math.exp(o)
    moved = abs(q - p) if divergence == "tv" else p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    blocked = moved > delta and ((a > 0 and q > p) or (a < 0 and q < p))
    return (-q / p * a, blocked)


@per_token
def slow_sapo(n, o, a, tau_pos, tau_neg):
    tau = tau_pos if a > 0 else tau_neg
    return -4 / tau / (1 + math.exp(-tau * (math.exp(n - o) - 1))) * a


def slow_gspo(now, old, advantages, clip_low, clip_high):
    rows = []
    for row_now, row_old, row_a in zip(now, old, advantages, strict=True):
        likelihood_ratio = math.prod(math.exp(n - o) for n, o in zip(row_now, row_old, strict=True))
        ratio = likelihood_ratio ** (1 / len(row_now)) if row_now else 1.0
        rows.append([slow_ppo_token(ratio, a, clip_low, clip_high) for a in row_a])
    return rows


def slow_gmpo(now, old, advantages, clip_low, clip_high):
    """(Π min(ρ^sgn, clip(ρ, e^-low, e^high)^sgn)^sgn)^(1/n) · A, as the paper writes it."""
    rows = []
    for row_now, row_old, row_a in zip(now, old, advantages, strict=True):
        product = 1.0
        for n, o, a in zip(row_now, row_old, row_a, strict=True):
            sign, ratio = (1 if a > 0 else -1), math.exp(n - o)
            product *= min(ratio**sign, clip(ratio, math.exp(-clip_low), math.exp(clip_high)) ** sign) ** sign
        rows.append([-(product ** (1 / len(row_now))) * a for a in row_a])
    return rows


def slow_covariances(now, advantages):
    flat_now, flat_a = [n for row in now for n in row], [a for row in advantages for a in row]
    mean_now, mean_a = sum(flat_now) / len(flat_now), sum(flat_a) / len(flat_a)
    return [(n - mean_now) * (a - mean_a) for n, a in zip(flat_now, flat_a, strict=True)]


def unflatten(values, like):
    values = iter(values)
    return [[next(values) for _ in row] for row in like]


def slow_kl_cov_picks(now, advantages, fraction):
    covariances = slow_covariances(now, advantages)
    count = max(1, int(len(covariances) * fraction))
    best = sorted(range(len(covariances)), key=lambda i: -covariances[i])[:count]
    return unflatten([i in best for i in range(len(covariances))], now)


def slow_clip_cov_picks(now, old, advantages, fraction, cov_low, cov_high, clip_low, clip_high):
    covariances = unflatten(slow_covariances(now, advantages), now)
    candidates = []
    for b, row in enumerate(now):
        for t, n in enumerate(row):
            ratio, a = math.exp(n - old[b][t]), advantages[b][t]
            ppo_clips = (a > 0 and ratio > 1 + clip_high) or (a < 0 and ratio < 1 - clip_low)
            if not ppo_clips and cov_low < covariances[b][t] < cov_high:
                candidates.append((b, t))
    count = min(max(1, int(sum(map(len, now)) * fraction)), len(candidates))
    chosen = {candidates[math.ceil((j + 1) * len(candidates) / count) - 1] for j in range(count)}
    return [[(b, t) in chosen for t in range(len(row))] for b, row in enumerate(now)]


KWARGS = {
    "reinforce": {},
    "cross_entropy": {"weight": 0.7},
    "importance_sampling": {},
    "ppo": {"clip_low": 0.15, "clip_high": 0.25, "dual_clip": 1.3},
    "cispo": {"ratio_low": 0.8, "ratio_high": 1.2},
    "dro": {"beta": 0.3},
    "sapo": {"tau_pos": 0.9, "tau_neg": 1.4},
    "dppo": {"divergence": "tv", "delta": 0.05},
    "dppo kl": {"divergence": "kl", "delta": 0.01},
    "gspo": {"clip_low": 0.05, "clip_high": 0.08},
    "gmpo": {"clip_low": 0.15, "clip_high": 0.2},
    "kl_cov": {"fraction": 0.3, "coef": 0.6},
    "clip_cov": {"fraction": 0.3, "cov_low": -0.5, "cov_high": 2.0, "clip_low": 0.15, "clip_high": 0.25},
}


def slow_loss(case, now, old, advantages, held=None):
    """Token losses of `case`. `held` is the `now` at which choices and stopped factors are taken (default: `now` itself)."""
    kwargs, held = KWARGS[case], now if held is None else held
    if case == "reinforce":
        return per_token(lambda n, o, a: -a * n)(now, old, advantages)
    if case == "cross_entropy":
        return per_token(lambda n, o, a: -kwargs["weight"] * n)(now, old, advantages)
    if case == "importance_sampling":
        return per_token(lambda n, o, a: -math.exp(n - o) * a)(now, old, advantages)
    if case == "ppo":
        return per_token(lambda n, o, a: slow_ppo_token(math.exp(n - o), a, *kwargs.values()))(now, old, advantages)
    if case == "cispo":
        weights = per_token(lambda n, o, a: clip(math.exp(n - o), *kwargs.values()))(held, old, advantages)
        return per_token(lambda n, w, a: -w * a * n)(now, weights, advantages)
    if case == "dro":
        return per_token(lambda n, o, a: -(a * n - 0.5 * kwargs["beta"] * (n - o) ** 2))(now, old, advantages)
    if case == "sapo":
        return slow_sapo(now, old, advantages, **kwargs)
    if case.startswith("dppo"):
        then, there = slow_dppo(now, old, advantages, **kwargs), slow_dppo(held, old, advantages, **kwargs)
        return [[h if blocked else v for (v, _), (h, blocked) in zip(*rows, strict=True)] for rows in zip(then, there, strict=True)]
    if case == "gspo":
        return slow_gspo(now, old, advantages, **kwargs)
    if case == "gmpo":
        return slow_gmpo(now, old, advantages, **kwargs)
    if case == "kl_cov":
        picks = slow_kl_cov_picks(held, advantages, kwargs["fraction"])
        free = per_token(lambda n, o, a: -math.exp(n - o) * a)(now, old, advantages)
        pull = per_token(lambda n, o, p: kwargs["coef"] * abs(n - o) if p else 0.0)(now, old, picks)
        return per_token(lambda f, p, _: f + p)(free, pull, picks)
    if case == "clip_cov":
        picks = slow_clip_cov_picks(held, old, advantages, **kwargs)
        free = per_token(lambda n, o, a: slow_ppo_token(math.exp(n - o), a, kwargs["clip_low"], kwargs["clip_high"]))(now, old, advantages)
        return per_token(lambda f, p, _: 0.0 if p else f)(free, picks, picks)
    raise AssertionError(case)


def random_rows(seed, lengths=(4, 1, 3, 6)):
    """Old and present log-probs, advantages (one a row: gspo and gmpo are defined for that), as lists of rows."""
    rng = np.random.default_rng(seed)
    old = [list(-rng.uniform(0.2, 3.0, n)) for n in lengths]
    now = [[min(o + d, -0.05) for o, d in zip(row, rng.uniform(-0.5, 0.5, len(row)), strict=True)] for row in old]
    advantages = [[float(a)] * n for a, n in zip(rng.normal(size=len(lengths)), lengths, strict=True)]
    return now, old, advantages


def pad(rows, filler=math.nan):
    width = max(map(len, rows)) + 1
    return torch.tensor([[*row, *[filler] * (width - len(row))] for row in rows], dtype=torch.float64)


def fast(case, now, old, advantages):
    """Token losses and their sum's gradient, as lists of rows."""
    lengths = [len(row) for row in now]
    logprobs = pad(now).requires_grad_()
    mask = torch.arange(logprobs.shape[1]) < torch.tensor(lengths)[:, None]
    loss, _ = compute_policy_loss(LOSSES.get(case.split()[0]), logprobs, pad(old), pad(advantages), mask, **KWARGS[case])
    loss.sum().backward()
    return ([row[:n].tolist() for row, n in zip(values, lengths, strict=True)] for values in (loss, logprobs.grad))


def slow_gradient(case, now, old, advantages, step):
    """Central differences of the slow loss, choices and stopped factors held."""

    def total(b, t, change):
        moved = [list(row) for row in now]
        moved[b][t] += change
        return sum(map(sum, slow_loss(case, moved, old, advantages, held=now)))

    return [[(total(b, t, step) - total(b, t, -step)) / (2 * step) for t in range(len(row))] for b, row in enumerate(now)]


@pytest.mark.parametrize("case", KWARGS)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_values_and_gradients_agree_with_plain_python(case, seed):
    now, old, advantages = random_rows(seed)
    loss, gradient = fast(case, now, old, advantages)
    for got, expected in zip(loss, slow_loss(case, now, old, advantages), strict=True):
        assert got == pytest.approx(expected, rel=1e-9, abs=1e-12)
    near, nearer = (slow_gradient(case, now, old, advantages, step) for step in (1e-5, 5e-6))
    assume(np.allclose(np.concatenate(near), np.concatenate(nearer), atol=1e-6))  # a kink lies between: no derivative to compare
    for got, expected in zip(gradient, near, strict=True):
        assert got == pytest.approx(expected, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("case", [case for case in KWARGS if case not in ("cispo", "gspo", "gmpo") and not case.startswith("dppo")])
def test_gradients_pass_gradcheck(case):
    """Not cispo and dppo, which stop gradients; gspo and gmpo, whose token gradients are right in the sum over a row: next test."""
    now, old, advantages = (pad(rows, -1.0) for rows in random_rows(3))
    mask = torch.arange(now.shape[1]) < torch.tensor([4, 1, 3, 6])[:, None]
    loss = LOSSES.get(case)
    assert torch.autograd.gradcheck(lambda x: compute_policy_loss(loss, x, old, advantages, mask, **KWARGS[case])[0], now.requires_grad_())


@pytest.mark.parametrize("case", ["gspo", "gmpo"])
def test_gradients_of_a_rows_sum_pass_gradcheck(case):
    now, old, advantages = (pad(rows, -1.0) for rows in random_rows(3))
    mask = torch.arange(now.shape[1]) < torch.tensor([4, 1, 3, 6])[:, None]
    loss = LOSSES.get(case)
    assert torch.autograd.gradcheck(
        lambda x: compute_policy_loss(loss, x, old, advantages, mask, **KWARGS[case])[0].sum(-1), now.requires_grad_()
    )


# ------------------------------------------------------------------------------------------------------------ relations


def both(seed, one, other, lengths=(4, 1, 3, 6)):
    """Loss and gradient of two (name, kwargs) on the same rows."""
    now, old, advantages = random_rows(seed, lengths)
    results = []
    for name, kwargs in (one, other):
        logprobs = pad(now).requires_grad_()
        mask = torch.arange(logprobs.shape[1]) < torch.tensor(lengths)[:, None]
        loss, _ = compute_policy_loss(LOSSES.get(name), logprobs, pad(old), pad(advantages), mask, **kwargs)
        loss.sum().backward()
        results.append(torch.stack([loss, logprobs.grad]))
    return results


INF = math.inf
RELATIONS = {
    "ppo without a clip is importance_sampling": (("ppo", {"clip_low": INF, "clip_high": INF}), ("importance_sampling", {}), (4, 1, 3)),
    "gspo on rows of one token is ppo": (
        ("gspo", {"clip_low": 0.1, "clip_high": 0.2}),
        ("ppo", {"clip_low": 0.1, "clip_high": 0.2}),
        (1, 1, 1),
    ),
    "gmpo without a clip is gspo without a clip": (
        ("gmpo", {"clip_low": INF, "clip_high": INF}),
        ("gspo", {"clip_low": INF, "clip_high": INF}),
        (4, 1, 3),
    ),
    "gmpo on rows of one token is ppo with bounds e^±x": (
        ("gmpo", {"clip_low": 0.1, "clip_high": 0.2}),
        ("ppo", {"clip_low": 1 - math.exp(-0.1), "clip_high": math.exp(0.2) - 1}),
        (1, 1, 1),
    ),
    "dppo with a threshold never reached is importance_sampling": (("dppo", {"delta": 1.0}), ("importance_sampling", {}), (4, 1, 3)),
    "cispo whose weight is cut to 1 is reinforce": (("cispo", {"ratio_low": 1.0, "ratio_high": 1.0}), ("reinforce", {}), (4, 1, 3)),
    "dro without a pull is reinforce": (("dro", {"beta": 0.0}), ("reinforce", {}), (4, 1, 3)),
    "kl_cov without a pull is importance_sampling": (("kl_cov", {"coef": 0.0}), ("importance_sampling", {}), (4, 1, 3)),
    "clip_cov without candidates is ppo": (("clip_cov", {"cov_low": 1e3, "cov_high": 1e4}), ("ppo", {}), (4, 1, 3)),
    "ppo with a far dual clip is ppo": (("ppo", {"dual_clip": 1e6}), ("ppo", {}), (4, 1, 3)),
}


@pytest.mark.parametrize("relation", RELATIONS)
def test_a_loss_with_its_extra_switched_off_is_the_plain_one(relation):
    one, other, lengths = RELATIONS[relation]
    for seed in range(5):
        torch.testing.assert_close(*both(seed, one, other, lengths), rtol=1e-12, atol=1e-12)


def test_cispo_has_the_gradient_of_importance_sampling_where_it_does_not_cut():
    """And otherwise that of a weight held at the cut: -clip(ρ)·A."""
    for seed in range(5):
        cispo, free = both(seed, ("cispo", {}), ("importance_sampling", {}))  # ratios below 4
        torch.testing.assert_close(cispo[1], free[1])
        cut, free = both(seed, ("cispo", {"ratio_low": 0.9, "ratio_high": 1.1}), ("importance_sampling", {}))
        advantages = pad(random_rows(seed)[2], 0.0)
        ratio = torch.where(advantages != 0, -free[0] / advantages, 1.0)
        torch.testing.assert_close(cut[1], -ratio.clamp(0.9, 1.1) * advantages)


def test_sapo_fades_faster_for_larger_tau():
    near, far = both(0, ("sapo", {"tau_pos": 1.0, "tau_neg": 1.0}), ("sapo", {"tau_pos": 3.0, "tau_neg": 3.0}))
    free = both(0, ("importance_sampling", {}), ("reinforce", {}))[0]
    assert (far[1].abs() <= near[1].abs()).all()
    assert (near[1].abs() <= free[1].abs()).all()


# ------------------------------------------------------------------------------------- any split, through loss and weights


@pytest.mark.parametrize("case", [case for case in KWARGS if LOSSES.get(case.split()[0]).scope != "call"])
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=7),
    mode=st.sampled_from(AGGREGATION_MODES),
    world_size=st.integers(1, 3),
    data=st.data(),
)
def test_any_split_into_ranks_and_micro_batches_gives_the_same_loss_and_gradient(case, seed, lengths, mode, world_size, data):
    """B09, for every loss whose tokens see nothing beyond their row, and every aggregation mode."""
    rng = np.random.default_rng(seed)
    num_rows = len(lengths)
    now, old, advantages = (pad(rows) for rows in random_rows(seed, lengths))
    mask = torch.arange(now.shape[1]) < torch.tensor(lengths)[:, None]
    weights = loss_weights(lengths, rng.integers(0, 4, num_rows), rng.integers(0, 3, num_rows), mode, 8)
    places = data.draw(
        st.lists(st.tuples(st.integers(0, world_size - 1), st.integers(0, 2)), min_size=num_rows, max_size=num_rows), label="rank, slice"
    )

    def loss_and_gradient(rows, scale):
        policy = torch.zeros(2, dtype=torch.float64, requires_grad=True)  # a shift of all log-probs, and of those at even positions
        even = (torch.arange(now.shape[1]) % 2 == 0).double()
        logprobs = now[rows] + policy[0] + policy[1] * even
        token_loss, _ = compute_policy_loss(LOSSES.get(case.split()[0]), logprobs, old[rows], advantages[rows], mask[rows], **KWARGS[case])
        loss = scale * aggregate_loss(token_loss, mask[rows], weights[rows])
        loss.backward()
        return np.append(policy.grad.numpy(), loss.item())

    whole = loss_and_gradient(list(range(num_rows)), 1.0)
    ranks = []  # each rank accumulates its micro-batches times the world size; gradients are then averaged over ranks
    for rank in range(world_size):
        slices = [[i for i, place in enumerate(places) if place == (rank, part)] for part in range(3)]
        ranks.append(sum(loss_and_gradient(rows, world_size) for rows in slices))
    assert np.isfinite(whole).all()
    np.testing.assert_allclose(np.mean(ranks, axis=0), whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["kl_cov", "clip_cov"])
def test_losses_of_scope_call_declare_that_they_depend_on_the_split(name):
    """The tokens they pick are picked within a call: split rows are compared with each other only."""
    now, old, advantages = (pad(rows, -1.0) for rows in random_rows(0, (4, 4)))
    mask = torch.arange(5).expand(2, 5) < 4
    kwargs = {"fraction": 0.001} | ({"cov_low": -1e3, "cov_high": 1e3} if name == "clip_cov" else {})

    def picked(rows):
        _, metrics = compute_policy_loss(LOSSES.get(name), now[rows], old[rows], advantages[rows], mask[rows], **kwargs)
        return metrics["kl_frac" if name == "kl_cov" else "cov_frac"].sum().item()

    assert LOSSES.get(name).scope == "call"
    assert picked(slice(0, 2)) == 1  # at least one a call
    assert picked(slice(0, 1)) + picked(slice(1, 2)) == 2
