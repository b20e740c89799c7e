"""The policy losses: hand-worked numbers, what all of them have in common, and how they are registered and called."""

import math

import pytest
import torch

from rllm_lightning.algorithms.joint_losses import sequence_ratio
from rllm_lightning.algorithms.losses import aggregate_loss, bounded_exp, compute_policy_loss, metric_totals
from rllm_lightning.registry import LOSSES, PolicyLoss, register_policy_loss

# the table of the specification
NAMES = ["importance_sampling", "ppo", "cispo", "dro", "cross_entropy", "reinforce", "gspo", "gmpo", "sapo", "dppo", "kl_cov", "clip_cov"]
E05 = math.exp(0.5)  # 1.648721, the ratio of log-probs -1.0 (now) and -1.5 (old)


def run(name, now, old, advantages, mask=None, **kwargs):
    """Token losses, gradient of their sum by the log-probs, and metrics, all as lists."""
    now = torch.tensor(now, requires_grad=True)
    mask = torch.ones_like(now) if mask is None else torch.tensor(mask)
    loss, metrics = compute_policy_loss(LOSSES.get(name), now, torch.tensor(old), torch.tensor(advantages), mask, **kwargs)
    loss.sum().backward()
    return loss.tolist(), now.grad.tolist(), {key: value.tolist() for key, value in metrics.items()}


# ------------------------------------------------------------------------------------------------------------ by hand


@pytest.mark.parametrize(
    ("name", "advantage", "kwargs", "loss", "gradient"),
    [
        # log-probs -1 now and -1.5 before: ρ = e^.5 = 1.648721
        ("reinforce", 2.0, {}, 2.0, -2.0),  # -2 · -1
        ("cross_entropy", 2.0, {}, 1.0, -1.0),
        ("cross_entropy", 2.0, {"weight": 0.25}, 0.25, -0.25),
        ("importance_sampling", 2.0, {}, -2 * E05, -2 * E05),
        ("importance_sampling", -2.0, {}, 2 * E05, 2 * E05),
        ("ppo", 2.0, {}, -2.4, 0.0),  # clipped at 1.2
        ("ppo", 2.0, {"clip_high": 0.7}, -2 * E05, -2 * E05),
        ("ppo", -2.0, {}, 2 * E05, 2 * E05),  # the pull back is never clipped
        ("ppo", -2.0, {"dual_clip": 1.5}, 3.0, 0.0),  # but bounded by 1.5·2
        ("ppo", -2.0, {"dual_clip": 3.0}, 2 * E05, 2 * E05),
        ("ppo", 2.0, {"dual_clip": 1.1}, -2.4, 0.0),  # dual_clip is for A < 0 only
        ("cispo", 2.0, {}, 2 * E05, -2 * E05),  # -ρ·2·-1
        ("cispo", 2.0, {"ratio_high": 1.5}, 3.0, -3.0),  # capped, with a gradient all the same
        ("cispo", 2.0, {"ratio_low": 1.7}, 3.4, -3.4),
        ("dro", 2.0, {"beta": 0.1}, 2.0125, -1.95),  # 2 + .05·.25;  -2 + .1·.5
        ("sapo", 2.0, {}, -8 * 0.6567216, -8 * 0.6567216 * 0.3432784 * E05),  # σ(.648721) = .6567216, σ' = σ(1-σ)
        ("sapo", -2.0, {}, 8 / 1.05 * 0.6639912, 8 * 0.6639912 * 0.3360088 * E05),  # σ(1.05·.648721) = .6639912
        ("dppo", 2.0, {}, -2 * E05, -2 * E05),  # probabilities .223130 -> .367879: .144749 moved
        ("dppo", 2.0, {"delta": 0.1}, -2 * E05, 0.0),
        ("dppo", -2.0, {"delta": 0.1}, 2 * E05, 2 * E05),  # back to the old policy is never blocked
        ("dppo", 2.0, {"divergence": "kl", "delta": 0.05}, -2 * E05, -2 * E05),  # .223130·-.5 + .776870·log(.776870/.632121) = .048608
        ("dppo", 2.0, {"divergence": "kl", "delta": 0.04}, -2 * E05, 0.0),
        ("gspo", 2.0, {}, -2.0008, 0.0),  # one token: ppo with 4e-4
        ("gmpo", 2.0, {}, -2 * math.exp(0.4), 0.0),  # log-ratio .5 cut to .4
        ("gmpo", -2.0, {}, 2 * E05, 2 * E05),
        ("kl_cov", 2.0, {"coef": 0.3}, -2 * E05 + 0.15, -2 * E05 + 0.3),  # at least one token is pulled
        ("clip_cov", 2.0, {"clip_high": 1.0}, -2 * E05, -2 * E05),  # one token has covariance 0: no candidate
    ],
)
def test_the_loss_and_gradient_of_one_token_are_those_worked_out_by_hand(name, advantage, kwargs, loss, gradient):
    got_loss, got_gradient, _ = run(name, [[-1.0]], [[-1.5]], [[advantage]], **kwargs)
    assert got_loss[0][0] == pytest.approx(loss, rel=1e-5)
    assert got_gradient[0][0] == pytest.approx(gradient, rel=1e-5)


def test_ppo_clips_below_and_above_each_with_its_own_bound():
    # ρ = e^-.5 = .606531 and e^.5; bounds .7 and 1.1
    loss, gradient, metrics = run(
        "ppo", [[-1.5, -1.5, -1.0, -1.0]], [[-1.0, -1.0, -1.5, -1.5]], [[1.0, -1.0, 1.0, -1.0]], clip_low=0.3, clip_high=0.1
    )
    assert loss[0] == pytest.approx([-0.606531, 0.7, -1.1, E05], rel=1e-5)
    assert gradient[0] == pytest.approx([-0.606531, 0.0, 0.0, E05], rel=1e-5)
    assert metrics == {"clip_frac": [[0.0, 1.0, 1.0, 0.0]]}


def test_the_sequence_losses_use_the_mean_log_ratio_of_the_row():
    now, old = [[-1.0, -2.1, -9.0]], [[-1.5, -2.0, 0.0]]  # log-ratios .5 and -.1, mean .2; the third is padding
    mask, advantages = [[1, 1, 0]], [[2.0, 2.0, 2.0]]
    loss, gradient, _ = run("gspo", now, old, advantages, mask, clip_high=0.3)
    assert loss[0] == pytest.approx([-2 * math.exp(0.2)] * 2 + [0], rel=1e-5)
    assert gradient[0] == pytest.approx([-2 * math.exp(0.2)] * 2 + [0], rel=1e-5)
    loss, gradient, metrics = run("gspo", now, old, advantages, mask, clip_high=0.2)
    assert loss[0] == pytest.approx([-2.4, -2.4, 0])
    assert gradient == [[0.0, 0.0, 0.0]]
    assert metrics == {"clip_frac": [[1.0, 1.0, 0.0]]}
    # gmpo: .5 is cut to .4, the mean is .15; only the second token has a gradient
    loss, gradient, metrics = run("gmpo", now, old, advantages, mask)
    assert loss[0] == pytest.approx([-2 * math.exp(0.15)] * 2 + [0], rel=1e-5)
    assert gradient[0] == pytest.approx([0, -2 * math.exp(0.15), 0], rel=1e-5)
    assert metrics == {"clip_frac": [[1.0, 0.0, 0.0]]}


@pytest.mark.parametrize(
    ("now", "old", "advantage", "blocked"), [(0.0, 0.0, 1.0, 0), (0.0, -1.0, 1.0, 1), (-1.0, 0.0, 1.0, 0), (-1.0, 0.0, -1.0, 1)]
)
def test_dppo_bears_probabilities_of_exactly_one(now, old, advantage, blocked):
    loss, gradient, metrics = run("dppo", [[now]], [[old]], [[advantage]], divergence="kl", delta=0.05)
    assert metrics == {"clip_frac": [[blocked]]}
    assert loss[0][0] == pytest.approx(-advantage * math.exp(now - old))
    assert gradient[0][0] == pytest.approx(-advantage * (1 - blocked) * math.exp(now - old))


def test_a_row_without_tokens_has_ratio_one():
    now = torch.zeros(1, 3, requires_grad=True)
    assert sequence_ratio(now, torch.zeros(1, 3, dtype=torch.bool)).tolist() == [[1.0, 1.0, 1.0]]


# log-probs of mean -2, so (1, -1, 1, -1) around it, and advantages of mean 0: covariances 2, -2, -1, 3
COV_NOW, COV_ADVANTAGES = [[-1.0, -3.0, -1.0, -3.0]], [[2.0, 2.0, -1.0, -3.0]]
COV_OLD = [[-1.1, -3.1, -1.1, -3.1]]  # log-ratios .1


def test_kl_cov_pulls_the_tokens_of_highest_covariance():
    for fraction, picked in ((0.0, [0, 0, 0, 1]), (0.25, [0, 0, 0, 1]), (0.5, [1, 0, 0, 1]), (1.0, [1, 1, 1, 1])):
        loss, gradient, metrics = run("kl_cov", COV_NOW, COV_OLD, COV_ADVANTAGES, fraction=fraction, coef=5.0)
        free = [-math.exp(0.1) * a for a in COV_ADVANTAGES[0]]
        assert metrics == {"kl_frac": [picked]}
        assert loss[0] == pytest.approx([f + 0.5 * p for f, p in zip(free, picked, strict=True)], rel=1e-5)
        assert gradient[0] == pytest.approx([f + 5 * p for f, p in zip(free, picked, strict=True)], rel=1e-5)


def test_kl_cov_does_not_pull_along_a_rounding_error():
    """Log-ratios of 2e-7 in float32: without the pull the gradient is -A, with it -A plus or minus coef."""
    old = [[-1.0 + 2.4e-7, -3.0 - 2.4e-7, -2.0]]
    assert torch.tensor(old)[0, 0] != -1.0
    _, gradient, metrics = run("kl_cov", [[-1.0, -3.0, -2.0]], old, [[1.0, -1.0, 0.5]], fraction=1.0, coef=5.0)
    assert gradient == [pytest.approx([-1.0, 1.0, -0.5], abs=1e-6)]
    assert metrics["kl_frac"] == [[1.0, 1.0, 1.0]]


def test_kl_cov_ranks_tokens_only_and_not_padding():
    """Two tokens of negative covariance (advantage up, log-prob down) beside two padded positions."""
    _, _, metrics = run("kl_cov", [[-1.0, -3.0, 0.0, 0.0]], [[-1.0] * 4], [[-1.0, 1.0, 0.0, 0.0]], [[1, 1, 0, 0]], fraction=1.0)
    assert metrics == {"kl_frac": [[1, 1, 0, 0]]}


def test_clip_cov_drops_tokens_within_the_bounds():
    for bounds, fraction, dropped in (((1, 5), 0.5, [1, 0, 0, 1]), ((1, 2.5), 0.5, [1, 0, 0, 0]), ((-3, 5), 0.5, [0, 1, 0, 1])):
        loss, gradient, metrics = run(
            "clip_cov", COV_NOW, COV_OLD, COV_ADVANTAGES, fraction=fraction, cov_low=bounds[0], cov_high=bounds[1]
        )
        expected = [-math.exp(0.1) * a * (1 - d) for a, d in zip(COV_ADVANTAGES[0], dropped, strict=True)]
        assert metrics == {"clip_frac": [[0.0] * 4], "cov_frac": [dropped]}
        assert loss[0] == pytest.approx(expected, rel=1e-5)
        assert gradient[0] == pytest.approx(expected, rel=1e-5)


def test_clip_cov_leaves_alone_what_ppo_clips():
    _, gradient, metrics = run("clip_cov", COV_NOW, COV_OLD, COV_ADVANTAGES, fraction=0.5, clip_high=0.05)  # e^.1 > 1.05
    assert metrics == {"clip_frac": [[1, 1, 0, 0]], "cov_frac": [[0, 0, 0, 1]]}
    assert gradient[0] == pytest.approx([0, 0, math.exp(0.1), 0], rel=1e-5)


# ------------------------------------------------------------------------------------------------------- all of them


def batch(dtype=torch.float64, seed=0, shape=(3, 5)):
    """Random log-probs (now within .3 of old), one advantage a row, and a right-padded mask."""
    generator = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(shape, generator=generator, dtype=dtype) - 0.5
    now = old + 0.6 * torch.rand(shape, generator=generator, dtype=dtype) - 0.3
    advantages = torch.randn((shape[0], 1), generator=generator, dtype=dtype).expand(shape)
    lengths = torch.tensor([[5], [3], [1]])[: shape[0]]
    return now, old, advantages, torch.arange(shape[1]) < lengths


def test_every_loss_of_the_table_is_registered_with_formula_and_source():
    assert set(NAMES) <= set(LOSSES)
    for name in NAMES:
        assert LOSSES.get(name).formula, name
        assert LOSSES.get(name).source, name


@pytest.mark.parametrize("name", NAMES)
def test_at_ratio_one_the_gradient_is_that_of_reinforce(name):
    """-A·∇logπ; exceptions: cross_entropy knows no advantage, and clip_cov has no gradient where it drops a token (none here)."""
    now, _, advantages, mask = batch()
    now.requires_grad_()
    loss, _ = compute_policy_loss(LOSSES.get(name), now, now.detach(), advantages, mask)
    loss.sum().backward()
    expected = -torch.ones_like(now) if name == "cross_entropy" else -advantages
    torch.testing.assert_close(now.grad, torch.where(mask, expected, 0.0))


@pytest.mark.parametrize("name", NAMES)
def test_without_old_log_probs_the_ratio_is_one(name):
    now, _, advantages, mask = batch()
    now.requires_grad_()
    loss, metrics = compute_policy_loss(LOSSES.get(name), now, None, advantages, mask)
    expected, _ = compute_policy_loss(LOSSES.get(name), now, now.detach(), advantages, mask)
    torch.testing.assert_close(loss, expected, rtol=0, atol=0)
    assert not any(value.any() for key, value in metrics.items() if "clip" in key)


@pytest.mark.parametrize("name", NAMES)
def test_a_loss_that_declares_no_need_of_old_log_probs_ignores_them(name):
    now, old, advantages, mask = batch()
    kwargs = {"clip_low": 0.9, "clip_high": 0.9} if name == "gspo" else {}  # its default clips all of these rows
    loss, _ = compute_policy_loss(LOSSES.get(name), now, old, advantages, mask, **kwargs)
    other, _ = compute_policy_loss(LOSSES.get(name), now, old - 0.1, advantages, mask, **kwargs)
    assert torch.equal(loss, other) != LOSSES.get(name).needs_old_logprobs


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf, 1e30, 0.0])
@pytest.mark.parametrize("name", NAMES)
def test_what_stands_in_padding_reaches_neither_loss_nor_gradient_nor_metrics(name, garbage):
    now, old, advantages, mask = batch()
    results = []
    for filler in (garbage, -1.0):
        inputs = [torch.where(mask, tensor, filler) for tensor in (now, old, advantages)]
        inputs[0].requires_grad_()
        loss, metrics = compute_policy_loss(LOSSES.get(name), *inputs, mask)
        loss.sum().backward()
        results.append([loss, inputs[0].grad, *metrics.values()])
    for dirty, plain in zip(*results, strict=True):
        torch.testing.assert_close(dirty, plain, rtol=0, atol=0)
        assert not dirty[~mask].any()


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_read_back_to_the_host_and_nothing_is_made_on_another_device(name):
    """On the device `meta` tensors have no values: reading one, or mixing in a CPU tensor, raises."""
    now, old, advantages, mask = (tensor.to("meta") for tensor in batch(torch.bfloat16))
    kwargs = {"dual_clip": 3.0} if name == "ppo" else {}
    loss, metrics = compute_policy_loss(LOSSES.get(name), now, old, advantages, mask, **kwargs)
    totals = metric_totals(metrics, mask)
    assert {tensor.device.type for tensor in (loss, *metrics.values(), *totals.values())} == {"meta"}
    assert loss.dtype == torch.float32


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gap", [-1e4, -100.0, 100.0, 1e4])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_a_huge_log_ratio_gives_finite_losses_and_a_gradient_that_never_points_the_wrong_way(name, gap, advantage):
    loss, gradient, _ = run(name, [[-1.0]], [[-1.0 - gap]], [[advantage]])
    assert math.isfinite(loss[0][0])
    assert math.isfinite(gradient[0][0])
    if name not in ("dro", "kl_cov", "cross_entropy"):  # these pull to the old policy, or know no advantage
        assert gradient[0][0] * -advantage >= 0


def test_beyond_the_largest_log_ratio_the_gradient_goes_on():
    values = torch.tensor([-30.0, 0.5, 30.0], requires_grad=True)
    result = bounded_exp(values)
    result.sum().backward()
    expected = torch.tensor([math.exp(-20), E05, math.exp(20)])
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(values.grad, expected)


def test_a_difference_of_a_hundredth_survives():
    """B17: log-probs -5.04125 and -5.03125 keep their .01 gap; a subtraction in bfloat16 gives 0."""
    now, old = torch.tensor([[-5.03125]]), torch.tensor([[-5.04125]])
    assert (now.bfloat16() - old.bfloat16()).item() == 0
    loss, _ = compute_policy_loss(LOSSES.get("importance_sampling"), now, old, torch.ones(1, 1), torch.ones(1, 1))
    assert loss.item() == pytest.approx(-math.exp(0.01), abs=1e-6)


def test_the_ratio_is_one_before_any_update():
    """B17: log-probs within float32 noise of the old ones leave |ratio - 1| ≤ 1e-5 and the clip fraction 0."""
    _, old, advantages, mask = batch(torch.float32)
    noise = 2e-6 * torch.randn(old.shape, generator=torch.Generator().manual_seed(1))
    loss, metrics = compute_policy_loss(LOSSES.get("ppo"), old + noise, old, advantages, mask)
    ratio = torch.where(mask, loss / -advantages, 1.0)
    assert (ratio - 1).abs().max() <= 1e-5
    assert not metrics["clip_frac"].any()


@pytest.mark.parametrize(
    ("dtype", "expected"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)]
)
def test_losses_are_computed_in_float32_or_better(dtype, expected):
    now, old, advantages, mask = batch(torch.float64)
    loss, metrics = compute_policy_loss(LOSSES.get("ppo"), now.to(dtype), old.to(dtype), advantages, mask)
    assert loss.dtype == expected
    assert metrics["clip_frac"].dtype in (torch.float32, expected)


# ------------------------------------------------------------------------------------------------- registering, calling


@pytest.fixture
def registered():
    """Registers losses for one test."""
    names = []

    def register(function, **details):
        names.append(f"test_loss_{len(names)}")
        register_policy_loss(names[-1], **details)(function)
        return LOSSES.get(names[-1])

    yield register
    for name in names:
        del LOSSES._entries[name]


def test_a_users_loss_needs_nothing_but_a_name(registered):
    def half(logprobs_BT, old_logprobs_BT, advantages_BT, mask_BT, *, scale=0.5):
        """Half of REINFORCE."""
        return -scale * advantages_BT * logprobs_BT

    loss = registered(half)
    assert loss == PolicyLoss(half, "Half of REINFORCE.", "", True, "token")
    assert loss.kwargs == {"scale": 0.5}
    token_loss, metrics = compute_policy_loss(loss, torch.tensor([[-2.0, torch.nan]]), None, torch.ones(1, 2), torch.tensor([[1, 0]]))
    assert token_loss.tolist() == [[1.0, 0.0]]
    assert metrics == {}


def test_registering_leaves_the_function_as_it_is():
    def mine(logprobs_BT, old_logprobs_BT, advantages_BT, mask_BT):
        return logprobs_BT

    assert register_policy_loss("test_loss_same")(mine) is mine
    del LOSSES._entries["test_loss_same"]


def test_a_loss_that_averages_itself_is_an_error_that_names_it(registered):
    def averaged(logprobs_BT, old_logprobs_BT, advantages_BT, mask_BT):
        return logprobs_BT.mean()

    def bad_metric(logprobs_BT, old_logprobs_BT, advantages_BT, mask_BT):
        return logprobs_BT, {"gap": 1.0}

    with pytest.raises(ValueError, match=r"'averaged'.*loss must be one number a token.*\(1, 2\)"):
        compute_policy_loss(registered(averaged), torch.zeros(1, 2), None, torch.zeros(1, 2), torch.ones(1, 2))
    with pytest.raises(ValueError, match=r"'bad_metric'.*gap must be one number a token.*1\.0"):
        compute_policy_loss(registered(bad_metric), torch.zeros(1, 2), None, torch.zeros(1, 2), torch.ones(1, 2))


def test_what_a_loss_says_of_padding_is_ignored(registered):
    def shifted(logprobs_BT, old_logprobs_BT, advantages_BT, mask_BT):
        return logprobs_BT - 1, {"ones": torch.ones_like(logprobs_BT)}

    loss, metrics = compute_policy_loss(registered(shifted), torch.zeros(1, 2), None, torch.zeros(1, 2), torch.tensor([[1, 0]]))
    assert loss.tolist() == [[-1.0, 0.0]]
    assert metrics["ones"].tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize("name", NAMES)
def test_only_the_present_log_probs_get_a_gradient(name):
    now, old, advantages, mask = batch()
    inputs = [tensor.clone().requires_grad_() for tensor in (now, old, advantages)]
    compute_policy_loss(LOSSES.get(name), *inputs, mask)[0].sum().backward()
    assert [tensor.grad is None for tensor in inputs] == [False, True, True]


def test_metrics_carry_no_gradient(registered):
    def leaky(logprobs_BT, old_logprobs_BT, advantages_BT, mask_BT):
        return logprobs_BT, {"logprob": logprobs_BT}

    _, metrics = compute_policy_loss(registered(leaky), torch.zeros(1, 2, requires_grad=True), None, torch.zeros(1, 2), torch.ones(1, 2))
    assert not metrics["logprob"].requires_grad


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [("ppo", {"dual_clip": 1.0}, "dual_clip: must be above 1"), ("dppo", {"divergence": "js"}, "divergence: expected tv or kl")],
)
def test_keywords_out_of_range_are_named(name, kwargs, message):
    with pytest.raises(ValueError, match=rf"rllm\.algorithm\.loss_kwargs\.{message}"):
        run(name, [[-1.0]], [[-1.0]], [[1.0]], **kwargs)


def test_metric_totals_are_sums_over_tokens_and_maxima():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    values = torch.tensor([[-1.0, -2.0, torch.nan], [-4.0, torch.inf, 0.0]])
    totals = metric_totals({"a": values, "b/max": values}, mask)
    assert {name: total.item() for name, total in totals.items()} == {"a": -7.0, "b/max": -1.0}
    assert metric_totals({"b/max": values}, torch.zeros_like(mask))["b/max"] == -torch.inf
    assert metric_totals({"b/max": values[:0]}, mask[:0])["b/max"] == -torch.inf


def test_a_call_without_rows_or_without_tokens_has_loss_zero():
    for name in NAMES:
        for shape in ((0, 3), (2, 0), (2, 3)):
            now = torch.zeros(shape, requires_grad=True)
            mask = torch.zeros(shape)
            loss, _ = compute_policy_loss(LOSSES.get(name), now, now.detach(), torch.zeros(shape), mask)
            total = aggregate_loss(loss, mask, torch.zeros(shape[0]))
            total.backward()
            assert total.item() == 0.0
            assert not now.grad.any()
