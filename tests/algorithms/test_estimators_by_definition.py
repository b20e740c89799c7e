"""Every estimator against a slow, independent one written down from its definition, and the properties that it declares.

The slow ones are plain Python over plain lists, one trajectory at a time; they share nothing with the library.
"""

import itertools
import math
from statistics import fmean, median

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rllm_lightning.registry import ESTIMATORS

few = settings(max_examples=25)

# Multiples of 1/8: sums and means are exact, so that nothing hangs on what counts as equal.
rewards_of_groups = st.lists(st.lists(st.integers(-40, 40).map(lambda i: i / 8), min_size=0, max_size=6), min_size=0, max_size=5)


def std(values, ddof=0):
    middle = fmean(values)
    return math.sqrt(sum((v - middle) ** 2 for v in values) / (len(values) - ddof)) if len(values) > ddof else 0.0


def others(values, i):
    return values[:i] + values[i + 1 :]


def pooled(groups):
    return [r for group in groups for r in group]


def by_group(formula, singleton):
    """Apply `formula(group, i)`; equal rewards give 0, a group of one `singleton(r)`."""

    def apply(groups, **keywords):
        return [
            [
                singleton(r, **keywords) if len(group) == 1 else 0.0 if len(set(group)) == 1 else formula(group, i, **keywords)
                for i, r in enumerate(group)
            ]
            for group in groups
        ]

    return apply


def zero(r, **keywords):
    return 0.0


def lone(r, **keywords):
    return r / (1 + 1e-6)


def grpo(ddof, epsilon):
    return lambda g, i: (g[i] - fmean(g)) / (std(g, ddof) + epsilon)


def nemo(g, i):
    rest = others(g, i)
    spread = std(rest, 1)
    return (g[i] - fmean(rest)) / (spread + 1e-6 if spread else 1)


def mad(g, i):
    return (g[i] - median(g)) / (1.4826 * median([abs(r - median(g)) for r in g]) + 1e-6)


def relative(g, i):
    return (g[i] - fmean(g)) / fmean(g) if fmean(g) > 0 else 0.0


def mapo(g, i):
    p = min(max(fmean(g), 0), 1)
    certainty = 1 - 4 * p * (1 - p)
    return certainty * relative(g, i) + (1 - certainty) * (g[i] - fmean(g)) / std(g)


def passk(g, i):
    best, second = sorted(g, reverse=True)[:2]
    return (best - second) / (std(g) + 1e-6) if g.index(best) == i else 0.0


def pkpo(g, i):
    """k = 2: what i adds to the best of each pair."""
    pairs = list(itertools.combinations(range(len(g)), 2))
    return sum(max(g[a], g[b]) - g[b if a == i else a] for a, b in pairs if i in (a, b)) / len(pairs)


def batch_std(groups):
    everything = pooled(groups)
    return [[0.0 if len(g) == 1 else (r - fmean(g)) / (std(everything, 1) + 1e-4) for r in g] for g in groups]


def plus_plus_baseline(groups):
    centred = [[r - (fmean(g) if len(g) > 1 else 0.0) for r in g] for g in groups]
    everything = pooled(centred)
    spread = std(everything) if len(set(everything)) > 1 else 1.0
    return [[c / (spread + 1e-6) for c in g] for g in centred]


def whiten(groups):
    everything = pooled(groups)
    if len(set(everything)) < 2:
        return [[0.0] * len(g) for g in groups]
    return [[(r - fmean(everything)) / (std(everything) + 1e-6) for r in g] for g in groups]


def token_whiten(groups, lengths):
    """As if each token had its trajectory's reward."""
    tokens = [r for g, of in zip(groups, lengths, strict=True) for r, n in zip(g, of, strict=True) for _ in range(n)]
    if len(set(tokens)) < 2:
        return [[0.0] * len(g) for g in groups]
    scale = std(tokens) + 1e-6
    return [[(r - fmean(tokens)) / scale if n else 0.0 for r, n in zip(g, of, strict=True)] for g, of in zip(groups, lengths, strict=True)]


def token_baseline(groups, lengths):
    def baseline(g, of):
        return fmean([r for r, n in zip(g, of, strict=True) for _ in range(n)] or g)

    return [[0.0 if len(set(g)) == 1 else r - baseline(g, of) for r in g] for g, of in zip(groups, lengths, strict=True)]


def gpg(groups):
    filled = [g for g in groups if g]
    teaching = [g for g in filled if len(set(g)) > 1]
    factor = len(filled) / len(teaching) if teaching else 0.0
    return [[(r - fmean(g)) * factor for r in g] for g in groups]


DEFINITIONS = {
    "grpo": by_group(grpo(0, 1e-6), lone),
    "grpo_trl": by_group(grpo(1, 1e-4), zero),
    "grpo_verl": by_group(grpo(1, 1e-6), lone),
    "grpo_nemo": by_group(nemo, zero),
    "dr_grpo": by_group(lambda g, i: g[i] - fmean(g), zero),
    "grpo_batch_std": batch_std,
    "median_mad": by_group(mad, lone),
    "reinforce": lambda groups: groups,
    "rloo": by_group(lambda g, i: g[i] - fmean(others(g, i)), lambda r: r),
    "reinforce_plus_plus_baseline": plus_plus_baseline,
    "reinforce_plus_plus": token_whiten,
    "prpo": whiten,
    "opo": token_baseline,
    "gpg": gpg,
    "maxrl": by_group(relative, zero),
    "mapo": by_group(mapo, zero),
    "grpo_passk": by_group(passk, zero),
    "pass_at_k": by_group(pkpo, zero),
    "remax": lambda groups, greedy_rewards: [
        [r - b for r, b in zip(*pair, strict=True)] for pair in zip(groups, greedy_rewards, strict=True)
    ],
    "rae": lambda groups, state: [[r - state["baseline"] for r in g] for g in groups],
    "gdpo": lambda groups, reward_components: whiten(
        [
            [sum(parts) for parts in zip(*of_group, strict=True)]
            for of_group in zip(*(DEFINITIONS["grpo"](component) for component in reward_components.values()), strict=True)
        ]
    ),
}
PER_STEP = {"turn_level", "gigpo", "gae", "distill"}  # by definition below
NEEDS_TWO = {"pass_at_k"}
NOT_NEGATIVE = {"maxrl"}


def shaped_like(draw, groups, values):
    return [[draw(values) for _ in group] for group in groups]


def keywords_of(draw, name, groups):
    """What the estimator needs, drawn to fit the groups."""
    eighths = st.integers(-40, 40).map(lambda i: i / 8)
    match ESTIMATORS.get(name).needs:
        case ("lengths",):
            return {"lengths": shaped_like(draw, groups, st.integers(0, 5))}
        case ("greedy_rewards",):
            return {"greedy_rewards": shaped_like(draw, groups, eighths)}
        case ("state",):
            return {"state": {"baseline": draw(eighths)}}
        case ("reward_components",):
            return {"reward_components": {key: shaped_like(draw, groups, eighths) for key in ("a", "b")}}
    return {}


@st.composite
def problems(draw, name):
    """Groups that the estimator `name` takes, and its keywords."""
    groups = draw(rewards_of_groups)
    if name in NEEDS_TWO:
        groups = [group for group in groups if len(group) != 1]
    if name in NOT_NEGATIVE:
        groups = [[abs(r) for r in group] for group in groups]
    return groups, keywords_of(draw, name, groups)


def run(name, groups, **keywords):
    keywords = {key: dict(value) if key == "state" else value for key, value in keywords.items()}
    advantages, returns = ESTIMATORS.get(name)([np.array(group, dtype=float) for group in groups], **keywords)
    assert len(advantages) == len(returns) == len(groups)
    return advantages


def test_every_estimator_has_a_definition_here():
    assert set(DEFINITIONS) | PER_STEP == set(ESTIMATORS.names())


@pytest.mark.parametrize("name", DEFINITIONS)
def test_it_equals_its_definition(name):
    @few
    @given(problems(name))
    def check(problem):
        groups, keywords = problem
        for got, expected in zip(run(name, groups, **keywords), DEFINITIONS[name](groups, **keywords), strict=True):
            assert got.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)

    check()


@pytest.mark.parametrize("name", DEFINITIONS)
def test_it_returns_float64_in_the_shape_of_the_rewards_and_leaves_them_alone(name):
    @few
    @given(problems(name))
    def check(problem):
        groups, keywords = problem
        rewards = [np.array(group, dtype=np.float32) for group in groups]
        keywords = {key: dict(value) if key == "state" else value for key, value in keywords.items()}
        advantages, _ = ESTIMATORS.get(name)(rewards, **keywords)
        assert [a.shape for a in advantages] == [r.shape for r in rewards]
        assert all(a.dtype == np.float64 for a in advantages)
        assert all(r.tolist() == group for r, group in zip(rewards, groups, strict=True))

    check()


@pytest.mark.parametrize("name", DEFINITIONS)
def test_the_order_within_a_group_does_not_matter(name):
    """With its needs reordered alike, each trajectory keeps its advantage."""

    @few
    @given(problems(name), st.randoms(use_true_random=False))
    def check(problem, random):
        groups, keywords = problem
        orders = [random.sample(range(len(group)), len(group)) for group in groups]

        def reorder(nested):
            return [[group[i] for i in order] for group, order in zip(nested, orders, strict=True)]

        def moved(value):
            if isinstance(value, dict):
                return {key: moved(item) for key, item in value.items()}
            return reorder(value) if isinstance(value, list) else value

        moved_keywords = {key: moved(value) for key, value in keywords.items()}
        for expected, got in zip(reorder(run(name, groups, **keywords)), run(name, reorder(groups), **moved_keywords), strict=True):
            if name == "grpo_passk":  # of two best ones, one is first; both have a lead of 0
                expected, got = sorted(expected), sorted(got)
            assert list(got) == pytest.approx(expected, rel=1e-9, abs=1e-9)

    check()


@pytest.mark.parametrize("name", [name for name in DEFINITIONS if ESTIMATORS.get(name).scope in ("group", "trajectory")])
def test_what_is_declared_of_group_scope_gives_each_group_the_same_alone(name):
    @few
    @given(problems(name))
    def check(problem):
        groups, keywords = problem
        together = run(name, groups, **keywords)
        for index, group in enumerate(groups):
            own = {key: [value[index]] for key, value in keywords.items()}
            assert run(name, [group], **own)[0].tolist() == together[index].tolist()

    check()


@pytest.mark.parametrize("name", [name for name in DEFINITIONS if ESTIMATORS.get(name).scope == "trajectory"])
def test_what_is_declared_of_trajectory_scope_gives_each_trajectory_the_same_alone(name):
    @few
    @given(problems(name))
    def check(problem):
        groups, keywords = problem
        for index, (group, advantages) in enumerate(zip(groups, run(name, groups, **keywords), strict=True)):
            for i, reward in enumerate(group):
                own = {key: [[value[index][i]]] for key, value in keywords.items()}
                assert run(name, [[reward]], **own)[0][0] == advantages[i]

    check()


SHIFT_INVARIANT = {
    "grpo_trl",
    "grpo_nemo",
    "dr_grpo",
    "grpo_batch_std",
    "prpo",
    "reinforce_plus_plus",
    "opo",
    "gpg",
    "grpo_passk",
    "pass_at_k",
}


@pytest.mark.parametrize("name", sorted(SHIFT_INVARIANT))
def test_adding_a_constant_to_all_rewards_changes_nothing(name):
    @few
    @given(problems(name), st.integers(-80, 80).map(lambda i: i / 8))
    def check(problem, shift):
        groups, keywords = problem
        for a, b in zip(run(name, groups, **keywords), run(name, [[r + shift for r in g] for g in groups], **keywords), strict=True):
            assert a == pytest.approx(b, rel=1e-9, abs=1e-9)

    check()


PROPORTIONAL = {"reinforce", "rloo", "dr_grpo", "opo", "gpg", "pass_at_k"}


@pytest.mark.parametrize("name", sorted(PROPORTIONAL))
def test_without_a_scale_advantages_are_proportional_to_the_rewards(name):
    @few
    @given(problems(name), st.sampled_from([4.0, 2.0**900, 2.0**-900]))
    def check(problem, factor):
        groups, keywords = problem
        for a, b in zip(run(name, groups, **keywords), run(name, [[factor * r for r in g] for g in groups], **keywords), strict=True):
            assert (factor * a).tolist() == b.tolist()

    check()


@pytest.mark.parametrize("name", ["grpo", "grpo_trl", "grpo_verl", "grpo_batch_std", "median_mad"])
def test_without_epsilon_the_scale_of_the_rewards_does_not_matter(name):
    @few
    @given(problems(name), st.sampled_from([2.0**-40, 0.25, 2.0**30, 2.0**900, 2.0**-900]))
    def check(problem, factor):
        groups, _ = problem
        options = {"epsilon": 0, "singleton": "zero"}
        small, large = run(name, groups, **options), run(name, [[r * factor for r in g] for g in groups], **options)
        for a, b in zip(small, large, strict=True):
            assert a == pytest.approx(b, rel=1e-9, abs=1e-9)

    check()


@pytest.mark.parametrize("name", sorted(set(DEFINITIONS) - {"reinforce", "remax", "rae", "gdpo"}))
def test_a_batch_of_equal_rewards_has_advantages_of_exactly_0(name):
    """Groups of two or more; 0.1 + 0.2 and 0.3 count as equal."""

    @few
    @given(problems(name), st.sampled_from([0.3, 0.7, 1e9 / 3]))
    def check(problem, reward):
        groups, keywords = problem
        assume(all(len(group) != 1 for group in groups))
        residue = [[reward * (1 + 2**-52) if i % 2 else reward for i in range(len(group))] for group in groups]
        assert all(a == 0 for of_group in run(name, residue, **keywords) for a in of_group)

    check()


@pytest.mark.parametrize("name", DEFINITIONS)
def test_finite_rewards_give_finite_advantages(name):
    extremes = st.one_of(
        st.floats(allow_nan=False, allow_infinity=False), st.sampled_from([0.0, 1.0, 5e-324, -5e-324, 1.7e308, -1.7e308, 1e-160, 1e160])
    )

    @few
    @given(st.data(), st.lists(st.lists(extremes, max_size=5), max_size=4))
    def check(data, groups):
        if name in NEEDS_TWO:
            groups = [group for group in groups if len(group) != 1]
        if name in NOT_NEGATIVE:
            groups = [[abs(r) for r in group] for group in groups]
        keywords = keywords_of(data.draw, name, groups)
        with np.errstate(all="raise", under="ignore"):
            advantages = run(name, groups, **keywords)
        assert all(np.isfinite(of_group).all() for of_group in advantages)

    check()


# ------------------------------------------------------------------------------------------------ per step and token

step_rewards = st.lists(
    st.lists(st.lists(st.integers(-8, 8).map(lambda i: i / 8), min_size=1, max_size=4), min_size=1, max_size=4), max_size=3
)
token_numbers = st.lists(
    st.lists(st.lists(st.lists(st.integers(-8, 8).map(lambda i: i / 8), max_size=3), min_size=1, max_size=3), min_size=1, max_size=3),
    max_size=3,
)


def to_go(rewards, gamma):
    return [sum(gamma ** (j - k) * rewards[j] for j in range(k, len(rewards))) for k in range(len(rewards))]


def grpo_among(values, value, singleton=lone):
    """The GRPO advantage of one value among several."""
    if len(values) == 1:
        return singleton(value)
    spread = std(values)
    return (value - fmean(values)) / (spread + 1e-6) if spread > 1e-12 else 0.0


def same(got, expected):
    assert np.shape(got) == np.shape(expected)
    assert np.ravel(got) == pytest.approx(np.ravel(expected), rel=1e-9, abs=1e-9)


@few
@given(step_rewards, st.sampled_from([0.0, 0.5, 1.0]))
def test_turn_level_equals_its_definition(steps, gamma):
    advantages = run("turn_level", [[sum(t) for t in group] for group in steps], step_rewards=steps, gamma=gamma)
    for group, got in zip(steps, advantages, strict=True):
        returns = [to_go(t, gamma) for t in group]
        for own, of_trajectory in zip(returns, got, strict=True):
            same(of_trajectory, [grpo_among([r[k] for r in returns if len(r) > k], own[k]) for k in range(len(own))])


@few
@given(step_rewards, st.sampled_from([0.0, 0.5, 1.0]), st.data())
def test_gigpo_equals_its_definition(steps, gamma, data):
    keys = [[[data.draw(st.sampled_from("ab")) for _ in t] for t in group] for group in steps]
    rewards = [[sum(t) for t in group] for group in steps]
    advantages = run("gigpo", rewards, step_rewards=steps, state_keys=keys, gamma=gamma, omega=0.5)
    for group, of_keys, of_rewards, got in zip(steps, keys, rewards, advantages, strict=True):
        met = {"a": [], "b": []}
        for t, key in zip(group, of_keys, strict=True):
            for state, value in zip(key, to_go(t, gamma), strict=True):
                met[state].append(value)
        for t, key, reward, of_trajectory in zip(group, of_keys, of_rewards, got, strict=True):
            episode = grpo_among(of_rewards, reward)
            among = [grpo_among(met[state], value, zero) for state, value in zip(key, to_go(t, gamma), strict=True)]
            same(of_trajectory, [episode + 0.5 * a for a in among])


@few
@given(token_numbers, st.sampled_from([0.5, 1.0]), st.sampled_from([0.0, 0.5, 1.0]))
def test_gae_equals_its_definition(values, gamma, lam):
    rewards = [[float(i) for i in range(len(group))] for group in values]
    advantages = run("gae", rewards, values=values, gamma=gamma, lam=lam)
    for group, of_rewards, got in zip(values, rewards, advantages, strict=True):
        for steps, reward, of_trajectory in zip(group, of_rewards, got, strict=True):
            v = [*(x for step in steps for x in step), 0.0]
            r = [0.0] * (len(v) - 2) + [reward]
            delta = [r[t] + gamma * v[t + 1] - v[t] for t in range(len(v) - 1)]
            expected = [sum((gamma * lam) ** (j - t) * delta[j] for j in range(t, len(delta))) for t in range(len(delta))]
            assert [len(step) for step in of_trajectory] == [len(step) for step in steps]
            same(np.concatenate(of_trajectory), expected)


@few
@given(token_numbers, st.sampled_from([0.0, 0.5, 1.0]), st.data())
def test_distill_equals_its_definition(student, gamma, data):
    teacher = [[[[data.draw(st.sampled_from([-1.0, 0.5])) for _ in step] for step in t] for t in group] for group in student]
    advantages = run("distill", [[0.0] * len(group) for group in student], logprobs=student, teacher_logprobs=teacher, gamma=gamma)
    for s_group, t_group, got in zip(student, teacher, advantages, strict=True):
        for s_steps, t_steps, of_trajectory in zip(s_group, t_group, got, strict=True):
            gaps = [t - s for s_step, t_step in zip(s_steps, t_steps, strict=True) for s, t in zip(s_step, t_step, strict=True)]
            same(np.concatenate(of_trajectory), to_go(gaps, gamma))
