"""Probes find what a function does, whatever it declares."""

import numpy as np
import pytest

from rllm_lightning.lab import probes
from rllm_lightning.lab.subject import Subject


def verdict(subject, name):
    return probes.check(subject, name).verdict


def scope_of(subject):
    return probes.measured_scope({name: probes.check(subject, name) for name in ("groups_apart", "trajectories_apart")})


# rows of the spec's catalogue: what each formula is invariant to
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("reinforce", {"offset": "no", "scale_kept": "yes", "zero_sum": "no", "sign": "yes", "size": "yes"}),
        ("rloo", {"offset": "yes", "scale_kept": "yes", "zero_sum": "yes", "size": "no", "prompt_scale_ignored": "no"}),
        ("grpo", {"offset": "yes", "scale_ignored": "nearly", "prompt_scale_ignored": "nearly", "zero_sum": "yes", "size": "yes"}),
        ("reinforce_plus_plus_baseline", {"scale_ignored": "nearly", "prompt_scale_ignored": "no", "zero_sum": "yes"}),
        ("maxrl", {"offset": "no", "scale_ignored": "yes", "sign": "fails"}),
        ("pass_at_k", {"offset": "yes", "scale_kept": "yes", "sign": "no", "mixed_sizes": "fails", "monotone": "yes"}),
        ("opo", {"rewards_only": "no", "zero_sum": "yes"}),
        ("distill", {"rewards_only": "no", "scale_ignored": "yes", "offset": "yes"}),
    ],
)
def test_invariances_are_those_of_the_formula(name, expected):
    subject = Subject(name)
    assert {check: verdict(subject, check) for check in expected} == expected


@pytest.mark.parametrize(
    ("name", "scope"),
    [
        ("reinforce", "trajectory"),
        ("remax", "trajectory"),
        ("gae", "trajectory"),
        ("rloo", "group"),
        ("grpo_passk", "group"),
        ("gigpo", "group"),
        ("gpg", "role-batch"),  # other groups matter only by how many have no spread
        ("prpo", "role-batch"),
        ("grpo_batch_std", "role-batch"),
    ],
)
def test_the_scope_is_seen(name, scope):
    assert scope_of(Subject(name)) == scope


def test_a_deviation_is_relative_to_the_largest_advantage(register):
    def shifted_by_a_thousandth(rewards):
        """Twice the advantages off by 1 in 2000 of the largest where rewards are large."""
        return [r - r.mean() + 0.0005 * (r.max() > 2.5) * (r - r.mean()) for r in rewards], rewards

    found = probes.check(Subject(register(shifted_by_a_thousandth)), "offset")
    assert found.verdict == "nearly"
    assert found.deviation == pytest.approx(0.0005)


def test_the_order_within_a_group_is_tried(register):
    def first_is_baseline(rewards):
        return [r - r[0] for r in rewards], rewards

    assert verdict(Subject(register(first_is_baseline)), "order") == "no"


def test_a_better_reward_that_gets_less_is_seen(register):
    def upside_down(rewards):
        return [-r for r in rewards], rewards

    assert verdict(Subject(register(upside_down)), "monotone") == "no"


def test_random_advantages_are_seen(register):
    rng = np.random.default_rng(0)

    def noisy(rewards):
        return [r + rng.normal(size=len(r)) for r in rewards], rewards

    assert verdict(Subject(register(noisy)), "repeatable") == "no"


def test_an_input_that_is_changed_or_handed_out_is_seen(register):
    def in_place(rewards):
        for r in rewards:
            r -= r.mean()
        return [r.copy() for r in rewards], rewards

    def handed_out(rewards):
        return rewards, rewards

    def fresh(rewards):
        return [r.copy() for r in rewards], rewards

    found = [probes.leaves_input_alone(Subject(register(function))) for function in (in_place, handed_out, fresh)]
    assert found == [False, False, True]


def test_canonical_groups_of_grpo_by_hand():
    found = {b.name: b for b in probes.behaviours(Subject("grpo"))}
    # 1 of 8: mean 1/8, std sqrt(7)/8: 7/sqrt(7) and -1/sqrt(7), less a part in 1e6 for epsilon
    assert found["1 of 8 right"].advantages[0] == pytest.approx([np.sqrt(7)], rel=1e-5)
    assert found["1 of 8 right"].advantages[1] == pytest.approx([-1 / np.sqrt(7)], rel=1e-5)
    assert found["all equal"].advantages == [[0.0]] * 8
    assert found["a group of one"].advantages[0] == pytest.approx([0.7], rel=1e-5)
    assert found["large offset"].rewards[:2] == [1e7 + 1, 1e7]
    assert found["large offset"].advantages[0] == pytest.approx([np.sqrt(7)], rel=1e-5)
    assert all(b.problem is None for b in found.values())


def test_a_value_that_is_not_finite_is_a_problem_and_stays_visible(register):
    def odds(rewards):
        with np.errstate(all="ignore"):
            return [(r - r.mean()) / (1 - r.mean()) for r in rewards], rewards

    found = {b.name: b for b in probes.behaviours(Subject(register(odds)))}
    assert found["all right"].problem == "returns nan"
    assert np.isnan(found["all right"].advantages[0][0])
    assert found["4 of 8 right"].problem is None


def test_the_odd_one_out_grows_with_the_formula():
    # maxrl: (1 - 1/n) / (1/n) = n - 1 for the only right answer, -1 for the only wrong one; rloo: 1 and -1 whatever n
    assert [(o.n, o.only_right, o.only_wrong) for o in probes.odd_one_out(Subject("maxrl"))] == [
        (8, pytest.approx(7), pytest.approx(-1)),
        (64, pytest.approx(63), pytest.approx(-1)),
        (512, pytest.approx(511), pytest.approx(-1)),
    ]
    assert [o.only_right for o in probes.odd_one_out(Subject("rloo"))] == pytest.approx([1, 1, 1])


def test_an_estimator_that_fails_has_no_cost_and_no_odd_one_out(register):
    def broken(rewards):
        raise KeyError("x")

    subject = Subject(register(broken))
    assert probes.seconds_per_million(subject) is None
    assert probes.odd_one_out(subject)[0].only_right is None
    assert probes.leaves_input_alone(subject) is None
    assert scope_of(subject) is None
