"""The catalogue of estimators that give one number a trajectory, by hand."""

import itertools
import math

import numpy as np
import pytest

from rllm_lightning.registry import ESTIMATORS


@pytest.fixture
def call(arrays):
    """Name, groups of rewards and keywords -> advantages as nested lists."""

    def run(name, groups, **keywords):
        advantages, returns = ESTIMATORS.get(name)(arrays(*groups), **keywords)
        assert len(returns) == len(groups)
        return [of_group.tolist() for of_group in advantages]

    return run


def approx(nested):
    return [pytest.approx(of_group, rel=1e-12, abs=1e-15) for of_group in nested]


def test_opo_weights_the_baseline_by_length(call):
    """(3 * 1 + 1 * 0) / 4 = .75; a group without tokens has the plain mean; one trajectory is its own baseline."""
    groups, lengths = [[1, 0], [1, 0], [5]], [[3, 1], [0, 0], [7]]
    assert call("opo", groups, lengths=lengths) == [[0.25, -0.75], [0.5, -0.5], [0]]


def test_maxrl_divides_by_the_mean(call):
    """[1, 0, 0, 0]: .75/.25 = 3, -.25/.25 = -1."""
    assert call("maxrl", [[1, 0, 0, 0], [0, 0], [1, 1], [2], []]) == [[3, -1, -1, -1], [0, 0], [0, 0], [0], []]


def test_maxrl_refuses_negative_rewards_and_places_them(call):
    with pytest.raises(ValueError, match=r"maxrl: group 1, position 1: the reward is -1\.0"):
        call("maxrl", [[1, 0], [1, -1]])


def test_mapo_mixes_by_certainty(call):
    """[1, 0, 0, 0]: p = .25, L = 1 - 4 * .25 * .75 = .25: .25 * 3 + .75 * .75/.4330127 = 2.0490381.
    [1, 0]: p = .5, L = 0: the standardised distance alone. Mean -.5: no relative part; p is cut to 0, so L = 1: 0."""
    std = (3 / 16) ** 0.5
    expected = [[0.75 + 0.75 * 0.75 / std] + [-0.25 - 0.75 * 0.25 / std] * 3, [1, -1], [0, 0], [0], [0, 0]]
    assert call("mapo", [[1, 0, 0, 0], [1, 0], [0, -1], [1], [1, 1]]) == approx(expected)


def test_grpo_passk_pushes_the_best_by_its_lead(call):
    """[1, 2, 6]: lead 4, variance (4 + 1 + 9)/3 = 14/3."""
    std = (14 / 3) ** 0.5
    groups = [[1, 2, 6], [1, 1, 0], [1], [0.7, 0.7]]
    assert call("grpo_passk", groups) == approx([[0, 0, 4 / (std + 1e-6)], [0, 0, 0], [0], [0, 0]])
    assert call("grpo_passk", groups, norm_adv_by_std_in_grpo=False) == [[0, 0, 4], [0, 0, 0], [0], [0, 0]]


# ------------------------------------------------------------------------------------------------------------- PKPO


def subsets_that_hold(i, n, k):
    return [subset for subset in itertools.combinations(range(n), k) if i in subset]


@pytest.mark.parametrize(("rewards", "k"), [([3, 1, 2, 5], 2), ([0, 1, 0, 1, 1], 3), ([-1, 4, 4, 2], 4), ([2, 7, 1], 1)])
def test_pass_at_k_without_baseline_is_the_papers_matrix(call, rewards, k):
    """s_i = sum_j m_ij g_j over ascending g, m_ii = C(i-1, k-1)/C(n, k), m_ij = C(j-2, k-2)/C(n, k) for j > i (i, j from 1)."""
    n, ascending = len(rewards), sorted(rewards)

    def m(i, j):
        if j < i or (j > i and k < 2):
            return 0
        return (math.comb(i - 1, k - 1) if i == j else math.comb(j - 2, k - 2)) / math.comb(n, k)

    s = [sum(m(i, j) * ascending[j - 1] for j in range(1, n + 1)) for i in range(1, n + 1)]
    (advantages,) = call("pass_at_k", [rewards], k=k, baseline="none")
    assert sorted(advantages) == pytest.approx(sorted(s), rel=1e-12)
    for reward, advantage in zip(rewards, advantages, strict=True):
        assert advantage == pytest.approx(s[ascending.index(reward)], rel=1e-12)


@pytest.mark.parametrize(("rewards", "k"), [([3, 1, 2, 5], 2), ([0, 1, 0, 1, 1], 3), ([-1, 4, 4, 2], 4), ([0, 0, 1], 2)])
def test_pass_at_k_is_what_each_sample_adds_to_the_best_of_its_subsets(call, rewards, k):
    """sum over the subsets I that hold i of (max I - max of I without i), over C(n, k)."""
    n = len(rewards)
    expected = [
        sum(max(rewards[j] for j in s) - max(rewards[j] for j in s if j != i) for s in subsets_that_hold(i, n, k)) / math.comb(n, k)
        for i in range(n)
    ]
    assert call("pass_at_k", [rewards], k=k)[0] == pytest.approx(expected, rel=1e-12)


def test_pass_at_k_by_hand(call):
    """k = 2 of [1, 0, 0, 0]: the 3 of 6 pairs that hold the 1 fall from 1 to 0 without it. k = 1: leave-one-out over n."""
    assert call("pass_at_k", [[1, 0, 0, 0], [1, 1]]) == [[0.5, 0, 0, 0], [0, 0]]
    assert call("pass_at_k", [[1, 2, 6], [3]], k=1) == approx([[-1, -0.5, 1.5], [3]])


@pytest.mark.parametrize("baseline", ["loo", "none"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_pass_at_k_estimates_the_gradient_of_pass_at_k_without_bias(call, baseline, k):
    """Answers are right with probability p = sigmoid(theta): d/dtheta (1 - (1-p)^k) = k (1-p)^(k-1) p (1-p), and the estimate is
    sum_i A_i (r_i - p), averaged exactly over all 2^4 groups of four."""
    p, n = 0.3, 4
    gradient = 0.0
    for rewards in itertools.product([0, 1], repeat=n):
        probability = math.prod(p if r else 1 - p for r in rewards)
        (advantages,) = call("pass_at_k", [rewards], k=k, baseline=baseline)
        gradient += probability * sum(a * (r - p) for a, r in zip(advantages, rewards, strict=True))
    assert gradient == pytest.approx(k * (1 - p) ** k * p, rel=1e-12)


def test_pass_at_k_needs_groups_of_k(call):
    with pytest.raises(ValueError, match=r"group 1 holds 2 trajectories, fewer than k=3.*rllm\.rollout\.n"):
        call("pass_at_k", [[1, 0, 0], [1, 0]], k=3)
    with pytest.raises(ValueError, match="k >= 1"):
        call("pass_at_k", [[1, 0]], k=0)


def test_pass_at_k_of_large_groups_is_finite(call):
    """C(2000, 1000) is beyond float64."""
    (advantages,) = call("pass_at_k", [[1] + [0] * 1999], k=1000)
    assert advantages[0] == pytest.approx(0.5)


# --------------------------------------------------------------------------------------------------- the role-batch


def test_prpo_whitens_over_all_groups(call):
    """0, 1, 0, 10: mean 2.75, variance (101 - 4 * 7.5625)/4 = 17.6875."""
    std = 17.6875**0.5 + 1e-6
    assert call("prpo", [[0, 1], [0, 10]]) == approx([[-2.75 / std, -1.75 / std], [-2.75 / std, 7.25 / std]])
    assert call("prpo", [[1], [1, 1]]) == [[0], [0, 0]]
    assert call("prpo", [[5]]) == [[0]]


def test_reinforce_plus_plus_weights_by_tokens(call):
    """Three tokens with 1, one with 0: mean .75, variance 3/16. Without tokens: 0, and no part of the mean."""
    std = (3 / 16) ** 0.5 + 1e-6
    assert call("reinforce_plus_plus", [[1, 0], [9]], lengths=[[3, 1], [0]]) == approx([[0.25 / std, -0.75 / std], [0]])
    assert call("reinforce_plus_plus", [[1, 1]], lengths=[[3, 1]]) == [[0, 0]]


def test_gpg_scales_up_for_groups_that_teach_nothing(call):
    """Three groups (the empty one does not count), of which [1, 1] and [3] have no spread: 3/(3-2) = 3."""
    assert call("gpg", [[1, 0], [1, 1], [3], []]) == [[1.5, -1.5], [0, 0], [0], []]
    assert call("gpg", [[1, 1]]) == [[0, 0]]


def test_gdpo_normalises_each_component_before_adding(call, arrays):
    """Group 1: a = [1, 0] and b = [100, 0] count the same: [2, -2] * .99999..; group 2: a alone: [1, -1] * .99999..
    Mean 0, so whitening divides by sqrt((4 + 4 + 1 + 1)/4) = sqrt(2.5) times nearly one."""
    components = {"a": arrays([1, 0], [1, 0]), "b": arrays([100, 0], [5, 5])}
    a, b = 0.5 / (0.5 + 1e-6), 50 / (50 + 1e-6)
    std = (((a + b) ** 2 + a**2) / 2) ** 0.5 + 1e-6
    groups = [[101, 0], [6, 5]]
    assert call("gdpo", groups, reward_components=components) == approx([[(a + b) / std, -(a + b) / std], [a / std, -a / std]])
    only_b = call("gdpo", groups, reward_components=components, weights={"a": 0, "b": 2})
    std = 2 * b / 2**0.5 + 1e-6
    assert only_b == approx([[2 * b / std, -2 * b / std], [0, 0]])


def test_gdpo_wants_a_weight_for_each_component_or_none(call, arrays):
    with pytest.raises(ValueError, match=r"weights names \['a'\], the reward components are \['a', 'b'\]"):
        call("gdpo", [[1, 0]], reward_components={"a": arrays([1, 0]), "b": arrays([1, 0])}, weights={"a": 1})


def test_rae_subtracts_the_average_of_earlier_batches(call):
    """0, then .1 * 2 = .2, then .9 * .2 + .1 * 1 = .28."""
    state = {}
    assert call("rae", [[3, 1], [2]], state=state, decay=0.9) == [[3, 1], [2]]
    assert call("rae", [[1]], state=state, decay=0.9) == approx([[0.8]])
    assert state == {"baseline": pytest.approx(0.28)}
    assert call("rae", [], state=state, decay=0.9) == []
    assert state == {"baseline": pytest.approx(0.28)}
    with pytest.raises(ValueError, match="decay"):
        call("rae", [[1]], state=state, decay=1.5)


def test_remax_subtracts_the_greedy_answers_reward(call):
    assert call("remax", [[1, 0], [3]], greedy_rewards=[[0.5, 0.5], [1]]) == [[0.5, -0.5], [2]]


@pytest.mark.parametrize("extreme", [1.7e308, 5e-324])
@pytest.mark.parametrize(
    "name", ["opo", "maxrl", "mapo", "grpo_passk", "pass_at_k", "prpo", "reinforce_plus_plus", "gpg", "gdpo", "rae", "remax"]
)
def test_the_ends_of_float64(call, arrays, name, extreme):
    """Finite, without a warning, and in the order of the rewards."""
    sign = 1 if name == "maxrl" else -1
    groups = [[extreme, 0, sign * extreme / 2], [1, 0, 0]]
    keywords = {
        "opo": {"lengths": [[3, 1, 1]] * 2},
        "reinforce_plus_plus": {"lengths": [[3, 1, 1]] * 2},
        "gdpo": {"reward_components": {"a": arrays(*groups)}},
        "rae": {"state": {"baseline": sign * extreme}},
        "remax": {"greedy_rewards": [[sign * extreme] * 3, [0, 0, 0]]},
    }
    (first, second) = call(name, groups, **keywords.get(name, {}))
    assert np.isfinite(first).all()
    assert np.isfinite(second).all()
    assert first[0] >= first[1]
