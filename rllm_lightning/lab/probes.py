"""What an estimator does, found by trying: canonical groups, invariances, the odd one out, cost.

Nothing here believes what an estimator declares. Each check of `CHECKS` changes a batch of rewards in one way and measures by how
much the advantages differ from what the property asks for; the largest deviation over all trial batches, relative to the largest
advantage, decides the verdict: `yes` (up to rounding), `nearly` (up to a thousandth, as an epsilon does), `no`, or `fails`
(the estimator raised, or returned no finite numbers). To add a check: a function of (subject, batch) and its name in `CHECKS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from rllm_lightning.lab.subject import EstimatorFailure, Rows, Subject, bare_trajectory

Batch = list[list[float]]
Verdict = Literal["yes", "nearly", "no", "fails"]


class Canonical(NamedTuple):
    """A group of rewards; `offset` is added to them, and to what a critic or a greedy answer would have got."""

    rewards: list[float]
    offset: float = 0.0


CANONICAL: dict[str, Canonical] = {
    "1 of 8 right": Canonical([1, 0, 0, 0, 0, 0, 0, 0]),
    "4 of 8 right": Canonical([1, 1, 1, 1, 0, 0, 0, 0]),
    "7 of 8 right": Canonical([1, 1, 1, 1, 1, 1, 1, 0]),
    "all wrong": Canonical([0] * 8),
    "all right": Canonical([1] * 8),
    "all equal": Canonical([0.7] * 8),
    "a group of one": Canonical([0.7]),
    "outlier": Canonical([10, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0]),
    "negative": Canonical([-1, -2, -3, -4, -5, -6, -7, -8]),
    "large offset": Canonical([1, 0, 0, 0, 0, 0, 0, 0], offset=1e7),
}
ODD_ONE_SIZES = (8, 64, 512)
NUM_TIMED = 2048


@dataclass(frozen=True)
class Behaviour:
    """The advantages of one canonical group, alone in its batch; a list a trajectory (one number, or one a step or token).

    `advantages` is None for a group that is dropped, or where `problem` says what went wrong.
    """

    name: str
    rewards: list[float]
    advantages: list[list[float]] | None
    problem: str | None


@dataclass(frozen=True)
class Check:
    """Whether a property holds. `deviation` is the largest one found (None where it fails), `problem` the first failure."""

    verdict: Verdict
    deviation: float | None
    problem: str | None = None


def behaviours(subject: Subject) -> list[Behaviour]:
    """The advantages of every canonical group."""
    return [_behaviour(subject, name, group) for name, group in CANONICAL.items()]


def _behaviour(subject: Subject, name: str, group: Canonical) -> Behaviour:
    rewards = [r + group.offset for r in group.rewards]
    try:
        (rows,) = subject.on_rewards([group.rewards], offset=group.offset)
    except EstimatorFailure as failure:
        return Behaviour(name, rewards, None, str(failure))
    if rows is None:
        return Behaviour(name, rewards, None, None)
    bad = [value for row in rows for value in row if not np.isfinite(value)]
    return Behaviour(name, rewards, [row.tolist() for row in rows], f"returns {bad[0]}" if bad else None)


# ----------------------------------------------------------------------------------------------------------- invariances


def trial_batches() -> list[Batch]:
    """Eight seeded batches of three groups of eight: rewards 0 and 1, then rewards between 0 and 2; one group has no spread."""
    rng = np.random.default_rng(20240521)
    batches = []
    for trial in range(8):
        rewards = rng.integers(0, 2, (3, 8)).astype(float) if trial < 4 else rng.uniform(0, 2, (3, 8))
        rewards[0, :2] = (1, 0)  # the group that is looked at has spread
        rewards[2, :] = rewards[2, 0]
        batches.append(rewards.tolist())
    return batches


def order_within_group(subject: Subject, batch: Batch) -> float:
    order = [3, 0, 7, 5, 1, 2, 6, 4]
    before, after = subject.on_rewards(batch), subject.on_rewards([[batch[0][i] for i in order], *batch[1:]])
    return _deviation(after[0], None if before[0] is None else [before[0][i] for i in order])


def constant_added(subject: Subject, batch: Batch) -> float:
    return _deviation(subject.on_rewards(batch, offset=3.0)[0], subject.on_rewards(batch)[0])


def scale_ignored(subject: Subject, batch: Batch) -> float:
    return _deviation(subject.on_rewards(batch, scale=10.0)[0], subject.on_rewards(batch)[0])


def scale_kept(subject: Subject, batch: Batch) -> float:
    rows = subject.on_rewards(batch)[0]
    return _deviation(subject.on_rewards(batch, scale=10.0)[0], None if rows is None else [10 * row for row in rows])


def prompt_scale_ignored(subject: Subject, batch: Batch) -> float:
    scaled = [[bare_trajectory(r, subject.stepwise, 10.0 if group is batch[0] else 1.0) for r in group] for group in batch]
    return _deviation(subject.on_groups(scaled)[0], subject.on_rewards(batch)[0])


def sign_kept(subject: Subject, batch: Batch) -> float:
    rows = subject.on_rewards(batch)[0]
    return _deviation(subject.on_rewards(batch, scale=-1.0)[0], None if rows is None else [-row for row in rows])


def sums_to_zero(subject: Subject, batch: Batch) -> float:
    values = _flat(subject.on_rewards(batch)[0])
    return _relative(float(abs(values.sum())) / len(values), values)


def better_gets_more(subject: Subject, batch: Batch) -> float:
    rows = subject.on_rewards(batch)[0]
    assert rows is not None
    mean_n = np.array([row.mean() for row in rows])[np.argsort(batch[0], kind="stable")]
    steps = np.diff(mean_n)[np.diff(np.sort(batch[0])) > 0]
    return _relative(float(-steps.min(initial=0.0)), _flat(rows))


def group_size(subject: Subject, batch: Batch) -> float:
    before, after = subject.on_rewards(batch), subject.on_rewards([group + group for group in batch])
    return _deviation(after[0], None if before[0] is None else [*before[0], *before[0]])


def other_groups(subject: Subject, batch: Batch) -> float:
    before = subject.on_rewards(batch)[0]
    replacements = ([batch[0]], [batch[0], batch[0]], [batch[0], [5.0] * 8, [0.0] * 8], [batch[0], [0.0, 4.0] * 4])
    return max(_deviation(subject.on_rewards(changed)[0], before) for changed in replacements)


def other_trajectories(subject: Subject, batch: Batch) -> float:
    first = batch[0][0]
    before = subject.on_rewards(batch)[0]
    replacements = ([first] * 8, [first, *[2.0] * 7], [first, *[0.0] * 7], [first, *[0.0, 4.0, 1.0] * 2, 0.5])
    changed = [subject.on_rewards([group, *batch[1:]])[0] for group in replacements]
    return max(_deviation(rows and rows[:1], before and before[:1]) for rows in changed)


def contents(subject: Subject, batch: Batch) -> float:
    """Other lengths, log-probs, values, components and greedy rewards for the same rewards."""
    groups = [[bare_trajectory(r, subject.stepwise) for r in group] for group in batch]
    before = subject.on_groups(groups)[0]
    for group in groups:
        for position, trajectory in enumerate(group):
            info = {"values": [0.1 * position] * 2, "teacher_logprobs": [-0.1 * position] * 2, "state_key": str(position // 2)}
            step = replace(trajectory.steps[-1], response_ids=[1, 0], logprobs=[-0.9, -0.2], info=info)
            trajectory.steps = [step] * (1 + position % 3)
            trajectory.info = {"rewards": {"first": 0.3 * position, "second": 1.0}, "greedy_reward": 0.1}
    after = subject.on_groups(groups)[0]
    if before is None or after is None:
        return _deviation(after, before)
    return _deviation([np.full(1, row.mean()) for row in after], [np.full(1, row.mean()) for row in before])


def same_again(subject: Subject, batch: Batch) -> float:
    return _deviation(subject.on_rewards(batch)[0], subject.on_rewards(batch)[0])


def other_sizes(subject: Subject, batch: Batch) -> float:
    """Groups of 8, 4 and 1 in one batch: 0 if that gives finite numbers."""
    rows = subject.on_rewards([batch[0], batch[1][:4], batch[2][:1]])
    return _deviation(rows[0], rows[0])


# name -> (what holds if the verdict is yes, the check)
CHECKS: dict[str, tuple[str, Callable[[Subject, Batch], float]]] = {
    "order": ("the order within a group does not matter", order_within_group),
    "offset": ("a constant added to all rewards changes nothing", constant_added),
    "scale_ignored": ("rewards times 10: the same advantages", scale_ignored),
    "scale_kept": ("rewards times 10: advantages times 10", scale_kept),
    "prompt_scale_ignored": ("one prompt's rewards times 10: its advantages stay the same", prompt_scale_ignored),
    "sign": ("negated rewards: negated advantages", sign_kept),
    "zero_sum": ("the advantages of a group sum to 0", sums_to_zero),
    "monotone": ("a better reward never gets less", better_gets_more),
    "size": ("each trajectory twice: the same advantages", group_size),
    "groups_apart": ("other groups of the batch do not matter", other_groups),
    "trajectories_apart": ("other trajectories of the group do not matter", other_trajectories),
    "rewards_only": ("only the rewards matter, not lengths or contents", contents),
    "repeatable": ("the same call gives the same advantages", same_again),
    "mixed_sizes": ("groups of different sizes are possible", other_sizes),
}


def check(subject: Subject, name: str) -> Check:
    """Try one property of `CHECKS` on every trial batch."""
    deviations = []
    for batch in trial_batches():
        try:
            deviations.append(CHECKS[name][1](subject, batch))
        except EstimatorFailure as failure:
            return Check("fails", None, str(failure))
    worst = max(deviations)
    return Check("yes" if worst <= 1e-9 else "nearly" if worst <= 1e-3 else "no", worst)


def leaves_input_alone(subject: Subject) -> bool | None:
    """Whether the arrays of rewards come back unchanged, and are not handed out as advantages; None where the estimator fails."""
    try:
        return subject.leaves_input_alone([[bare_trajectory(r, subject.stepwise) for r in group] for group in trial_batches()[0]])
    except EstimatorFailure:
        return None


def measured_scope(checks: dict[str, Check]) -> str | None:
    """The smallest set of trajectories that the advantages were seen to depend on; None where that could not be tried."""
    if "fails" in (checks["groups_apart"].verdict, checks["trajectories_apart"].verdict):
        return None
    if checks["groups_apart"].verdict != "yes":
        return "role-batch"
    return "group" if checks["trajectories_apart"].verdict != "yes" else "trajectory"


def _deviation(found: Rows, expected: Rows) -> float:
    """Largest difference, relative to the largest expected advantage. A dropped group equals nothing but a dropped group."""
    if found is None or expected is None:
        return 0.0 if found is expected else 1.0
    found_flat, expected_flat = _flat(found), _flat(expected)
    if found_flat.shape != expected_flat.shape:
        return 1.0
    return _relative(float(np.abs(found_flat - expected_flat).max(initial=0.0)), expected_flat)


def _relative(difference: float, values: np.ndarray) -> float:
    largest = float(np.abs(values).max(initial=0.0))
    return difference / largest if largest > 0 else difference


def _flat(rows: Rows) -> np.ndarray:
    values = np.concatenate(rows) if rows else np.zeros(1)
    if not np.isfinite(values).all():
        raise EstimatorFailure(f"returns {values[~np.isfinite(values)][0]}")
    return values


# ------------------------------------------------------------------------------------------------- odd one out, and cost


@dataclass(frozen=True)
class OddOneOut:
    """The advantage of the only right answer, and of the only wrong one, in a group of `n`; None where it fails."""

    n: int
    only_right: float | None
    only_wrong: float | None


def odd_one_out(subject: Subject) -> list[OddOneOut]:
    """How hard a rare success or failure pushes, as groups grow."""
    return [OddOneOut(n, _first(subject, [1.0, *[0.0] * (n - 1)]), _first(subject, [0.0, *[1.0] * (n - 1)])) for n in ODD_ONE_SIZES]


def _first(subject: Subject, rewards: list[float]) -> float | None:
    try:
        (rows,) = subject.on_rewards([rewards])
    except EstimatorFailure:
        return None
    return float(rows[0].mean()) if rows is not None and np.isfinite(rows[0]).all() else None


def seconds_per_million(subject: Subject) -> float | None:
    """Time of the estimator's own call for a million trajectories, from the fastest of three batches of `NUM_TIMED` in groups of 8;
    None where it fails. What it needs is gathered before the clock starts."""
    rewards = np.random.default_rng(0).integers(0, 2, (NUM_TIMED // 8, 8)).astype(float)
    batch = [[bare_trajectory(r, subject.stepwise) for r in group] for group in rewards.tolist()]
    try:
        return min(subject.seconds(batch) for _ in range(3)) * 1e6 / NUM_TIMED
    except EstimatorFailure:
        return None
