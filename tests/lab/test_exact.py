"""The exact numbers of a card, against closed forms."""

import numpy as np
import pytest

from rllm_lightning.lab import probes
from rllm_lightning.lab.exact import PASS_RATES, SIZES, ExactGradients
from rllm_lightning.lab.subject import Subject

P = np.array(PASS_RATES)


def exact(name, scope="group", max_batches=2000, **kwargs):
    subject = Subject(name, **kwargs)
    checks = {check: probes.check(subject, check) for check in ("order", "rewards_only")}
    return ExactGradients(subject, checks, scope, max_batches)


@pytest.mark.parametrize("kind", ["binary", "graded"])
@pytest.mark.parametrize(
    ("name", "scope"), [("rloo", "group"), ("reinforce", "trajectory"), ("remax", "trajectory"), ("gae", "trajectory")]
)
def test_unbiased_estimators_have_no_bias(name, scope, kind):
    for n in (2, 4):
        for row in exact(name, scope).rows(kind, n):
            assert row.exact
            assert row.bias < 1e-12
            assert row.scale == pytest.approx(1, abs=1e-12)


def test_rloo_and_reinforce_have_no_bias_in_groups_of_eight():
    for name in ("rloo", "reinforce"):
        assert max(row.bias for kind in ("binary", "graded") for row in exact(name).rows(kind, 8)) < 1e-12


@pytest.mark.parametrize("n", SIZES)
def test_dr_grpo_is_the_gradient_times_n_minus_1_over_n(n):
    for kind in ("binary", "graded"):
        for row in exact("dr_grpo").rows(kind, n):
            assert row.scale == pytest.approx((n - 1) / n, abs=1e-12)
            assert row.bias == pytest.approx(1 / n, abs=1e-12)
            assert row.cosine == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_pass_at_k_has_no_bias_against_pass_at_k(k):
    # its advantages are shares of the group: the mean over n samples is the gradient over n
    for n in (4, 8):
        for kind in ("binary", "graded"):
            for row in exact("pass_at_k", k=k).rows(kind, n):
                assert row.bias < 1e-12
                assert row.scale == pytest.approx(1 / n, abs=1e-12)


def test_pass_at_k_asks_for_groups_of_k():
    (row, *_) = exact("pass_at_k", k=4).rows("binary", 2)
    assert row.bias is None
    assert "fewer than k=4" in row.problem


def test_maxrl_has_no_bias_against_the_truncated_log_likelihood_and_none_is_defined_for_graded_rewards():
    assert max(row.bias for row in exact("maxrl").rows("binary", 8)) < 1e-12
    graded = exact("maxrl").rows("graded", 8)[-1]
    assert graded.bias is None
    assert graded.variance > 0
    assert "needs rewards 0 and 1" in graded.problem


def test_distillation_with_the_whole_future_has_no_bias_and_without_it_has():
    assert exact("distill", "trajectory", gamma=1.0).rows("binary", 2)[-1].bias < 1e-12
    assert exact("distill", "trajectory").rows("binary", 2)[-1].bias > 0.1


def test_grpo_bends_the_direction_over_several_prompts_but_not_on_one_with_two_rewards():
    *single, together = exact("grpo").rows("binary", 8)
    assert all(row.cosine == pytest.approx(1, abs=1e-12) for row in single)
    assert 0.99 < together.cosine < 0.999


# weight w(p) = E[A | right] - E[A | wrong], derived for each formula
@pytest.mark.parametrize(
    ("name", "weight"),
    [
        ("rloo", lambda n: np.ones_like(P)),
        ("dr_grpo", lambda n: np.full_like(P, (n - 1) / n)),
        ("maxrl", lambda n: (1 - (1 - P) ** (n - 1)) / P),
        ("pass_at_k", lambda n: 2 * (1 - P) / n),  # k = 2: d/dp (1 - (1-p)^2) = 2 (1-p), shared by n
    ],
)
@pytest.mark.parametrize("n", SIZES)
def test_implied_weights_are_those_of_the_formula(name, weight, n):
    curve = exact(name).weight_curve(n)
    assert curve.exact
    np.testing.assert_allclose(curve.weights, weight(n), atol=1e-12)


def test_signal_over_rloo_of_rloo_is_one():
    assert [row.signal_over_rloo for row in exact("rloo").rows("graded", 4)] == pytest.approx([1, 1, 1, 1])


def test_drawn_rows_say_so_and_agree_with_listed_ones():
    listed = exact("reinforce_plus_plus_baseline", "role-batch").rows("binary", 4)
    drawn = exact("reinforce_plus_plus_baseline", "role-batch", max_batches=100).rows("binary", 4)
    for a, b in zip(listed, drawn, strict=True):
        assert (a.exact, a.num_batches, b.exact, b.num_batches) == (True, 5**3, False, 100)
        assert 0 < b.scale_error < 0.1
        assert abs(a.scale - b.scale) < 4 * b.scale_error


def test_advantages_that_are_not_finite_leave_no_gradient(register):
    def odds(rewards):
        with np.errstate(all="ignore"):
            return [(r - r.mean()) / (1 - r.mean()) for r in rewards], rewards

    oracle = exact(register(odds))
    assert {row.problem for row in oracle.rows("binary", 4)} == {"some groups of 4 get advantages that are not finite"}
    assert oracle.weight_curve(4).weights == [None] * len(P)


def test_an_estimator_that_minds_the_order_is_listed_in_tuples(register):
    def first_is_baseline(rewards):
        return [np.concatenate([[0.0], r[1:] - r[0]]) for r in rewards], rewards

    row = exact(register(first_is_baseline)).rows("binary", 4)[-1]
    assert row.num_batches == 3 * 2**4
    assert row.scale == pytest.approx(0.75, abs=1e-12)  # three samples of four have a baseline that another one drew
