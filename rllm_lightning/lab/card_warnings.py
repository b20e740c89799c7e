"""What a card warns of, in plain words: each rule reads the measured numbers of a card and says one thing, or nothing.

To add a warning: a generator function of a card, and its name in `RULES` (which is their order on the card).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from rllm_lightning.lab.card import Card
from rllm_lightning.lab.exact import PASS_RATES, SIZES, GradientRow
from rllm_lightning.lab.objectives import IN_WORDS

BIAS = 1e-9  # below: rounding
STRAIGHT = 1e-9  # 1 - cosine below: the direction is exact
SLIGHT = 1.0  # degrees; below, a bias is one of length first
NOISY = 0.9  # signal-to-noise relative to RLOO's
TILTED = 1.25  # weight of hard or easy prompts relative to that of half-solved ones, either way
STEEP = 4.0  # growth of an advantage while the group grows eightfold; the root of 8 is 2.8
HUGE = 1e3  # an advantage, for rewards of order 1

LOW, MIDDLE, HIGH = (PASS_RATES.index(p) for p in (0.05, 0.5, 0.95))


def warnings_of(card: Card) -> list[str]:
    return [text for rule in RULES for text in rule(card)]


# ------------------------------------------------------------------------------------------------------------- failures


def failures(card: Card) -> Iterator[str]:
    """What it raises or returns where it should give numbers."""
    by_problem: dict[str, list[str]] = {}
    for behaviour in card.behaviours:
        if behaviour.problem:
            by_problem.setdefault(behaviour.problem, []).append(behaviour.name)
    for problem, names in by_problem.items():
        yield f"{problem} (on: {', '.join(names)}); a run would stop there"
    mixed = card.checks["mixed_sizes"].problem
    if mixed and not card.behaviour("a group of one").problem:
        yield f"a batch with groups of different sizes fails: {mixed}"
    for row in card.gradients:
        if row.prompt == "all" and row.variance is None and row.problem not in by_problem:
            yield f"no gradient for n={row.n}, {row.rewards} rewards: {row.problem}"


def careless(card: Card) -> Iterator[str]:
    if card.input_left_alone is False:
        yield "it changes the array of rewards that it is given, or hands it out as advantages"
    if card.checks["repeatable"].verdict == "no":
        yield "the same rewards get other advantages on a second call: it draws random numbers, or keeps a state outside of `state`"
        yield "the exact numbers of this card hold for one draw only"
    if card.checks["order"].verdict == "no":
        yield "the order of the trajectories within a group matters"
    if card.checks["monotone"].verdict == "no":
        yield "a better reward may get a smaller advantage than a worse one in the same group"


def scope(card: Card) -> Iterator[str]:
    sizes = ("trajectory", "group", "role-batch")
    if card.measured_scope is None or card.measured_scope == card.declared_scope:
        return
    if sizes.index(card.measured_scope) > sizes.index(card.declared_scope):
        yield f"declared to look at one {card.declared_scope} at a time, but more matters: register it with scope={card.measured_scope!r}"
    elif not card.state:
        narrower = card.measured_scope
        yield f"declared to look at a whole {card.declared_scope}, but only the {narrower} matters: scope={narrower!r} would do"


# ------------------------------------------------------------------------------------------------------------ behaviour


def lone_trajectory(card: Card) -> Iterator[str]:
    group = card.behaviour("a group of one")
    if group.problem or card.measured_scope == "trajectory":
        return
    if group.advantages is None:
        yield "a group of one is dropped: it is not trained on"
    elif abs(advantage := _mean(group.advantages[0])) < 1e-9:
        yield "a group of one teaches nothing: its advantage is 0"
    elif abs(advantage - group.rewards[0]) < 1e-3:
        yield "a group of one gets its raw reward"


def equal_rewards(card: Card) -> Iterator[str]:
    group = card.behaviour("all right")
    if ignores_rewards(card):
        yield "right and wrong answers get the same advantage: rewards play no part"
    elif group.advantages and not group.problem and abs(advantage := _mean(group.advantages[0])) > 1e-9:
        yield f"a group of equal rewards still pushes: where all are right, each gets {advantage:+.3g}"


def ignores_rewards(card: Card) -> bool:
    """Whether every canonical group, and all together, has one and the same advantage."""
    advantages = [advantage for group in card.behaviours for advantage in group.advantages or []]
    return bool(advantages) and all(advantage == advantages[0] for advantage in advantages)


def reward_scale(card: Card) -> Iterator[str]:
    if card.state or ignores_rewards(card):  # a state would follow the rewards, given time
        return
    verdicts = {name: card.checks[name].verdict for name in ("prompt_scale_ignored", "scale_kept", "scale_ignored", "offset")}
    if verdicts["prompt_scale_ignored"] == "no":
        yield "not comparable across prompts of different reward scale: the prompt with larger rewards weighs more"
    elif verdicts["prompt_scale_ignored"] in ("yes", "nearly") and card.measured_scope == "group":
        small = "0.50 and 0.51" if verdicts["offset"] == "yes" else "0 and 0.01"
        yield f"blind to the size of differences: a group with rewards {small} pushes as hard as one with 0 and 1"
    if verdicts["scale_kept"] == verdicts["scale_ignored"] == "no":
        yield "multiplying all rewards by 10 multiplies the advantages neither by 10 nor by 1"
    if verdicts["offset"] == "no":
        yield "a constant added to all rewards changes the advantages"


def large_offset(card: Card) -> Iterator[str]:
    plain, moved = card.behaviour("1 of 8 right"), card.behaviour("large offset")
    if card.checks["offset"].verdict not in ("yes", "nearly") or not (plain.advantages and moved.advantages):
        return
    lost = max(abs(_mean(a) - _mean(b)) for a, b in zip(plain.advantages, moved.advantages, strict=True))
    if lost > 1e-6 * max(abs(_mean(a)) for a in plain.advantages):
        yield f"digits are lost where all rewards share a large offset (1e7): advantages are off by {lost:.2g}"


def blows_up(card: Card) -> Iterator[str]:
    sizes = [odd.n for odd in card.odd_one_out]
    for what, edge, advantages in (
        ("right", 0, [odd.only_right for odd in card.odd_one_out]),
        ("wrong", 1, [odd.only_wrong for odd in card.odd_one_out]),
    ):
        if any(before and after and abs(after / before) > STEEP for before, after in itertools.pairwise(advantages)):
            pushes = ", ".join(
                f"{advantage:+.3g} among {n}" for n, advantage in zip(sizes, advantages, strict=True) if advantage is not None
            )
            yield f"blows up at p near {edge}: the only {what} answer gets {pushes}"
    huge = {}
    for group in card.behaviours:
        largest = max((abs(value) for row in group.advantages or [] for value in row), default=0.0)
        if not group.problem and largest > HUGE * max(1.0, *map(abs, group.rewards)):
            huge[group.name] = largest
    if huge:
        yield f"blows up: an advantage of up to {max(huge.values()):.3g} (on: {', '.join(huge)})"


# ------------------------------------------------------------------------------------------------------ exact gradients


def aim(card: Card) -> Iterator[str]:
    if card.objective != "mean_reward":
        yield f"it climbs {IN_WORDS[card.objective]}, not the mean reward; its bias is measured against that"
    if card.objective in ("pass_at_k", "pass_at_n"):
        yield "its advantages are shares of the group's result, n times smaller than others': the learning rate must make up for it"
    for row in card.gradients:
        if row.problem and row.variance is not None and row.prompt == "all" and row.n == SIZES[-1]:
            yield f"no bias for {row.rewards} rewards: {row.problem}"


def bias(card: Card) -> Iterator[str]:
    rows = [row for row in card.gradients if row.prompt == "all" and row.bias is not None and row.cosine is not None]
    if not rows or all((row.bias or 0) < BIAS for row in rows):
        return
    factors = ", ".join(f"{row.scale:.3g} (n={row.n})" for row in rows if row.rewards == rows[0].rewards)
    angles = {row.rewards: degrees(row) for row in rows if row.n == SIZES[-1]}
    off = " and ".join(f"{angle:.2g}° with {kind} rewards" for kind, angle in angles.items()) + f" at n={SIZES[-1]}"
    if all(1 - (row.cosine or 0) < STRAIGHT for row in rows):
        yield f"biased in length only: its expected gradient is the true one times {factors}"
    elif angles and max(angles.values()) < SLIGHT:
        yield f"biased mostly in length, times {factors}; in direction it is off by {off}"
    elif angles:
        yield f"biased in direction: its expected gradient is off by {off}"
    for row in card.gradients:
        if row.scale is not None and row.scale < 0 and row.prompt != "all":
            yield f"it pushes the wrong way on the {row.prompt} prompt ({row.rewards} rewards, n={row.n})"


def noise(card: Card) -> Iterator[str]:
    row = card.row("binary", SIZES[-1], "all")
    if card.objective == "mean_reward" and row.signal_over_rloo is not None and row.signal_over_rloo < NOISY:
        yield f"noisy: at n={row.n} its signal-to-noise ratio is {row.signal_over_rloo:.2f} times that of RLOO"


def difficulty(card: Card) -> Iterator[str]:
    curve = card.weights[-1]
    low, middle, high = curve.weights[LOW], curve.weights[MIDDLE], curve.weights[HIGH]
    if low is None or middle is None or high is None or middle <= 0 or ignores_rewards(card):
        return
    tilted = [
        f"{name} ({PASS_RATES[index]:.0%} solved) {value / middle:.2f}"
        for name, index, value in (("hard ones", LOW, low), ("easy ones", HIGH, high))
        if not 1 / TILTED < value / middle < TILTED
    ]
    if tilted:
        yield f"where a prompt that is solved half of the time weighs 1, {' and '.join(tilted)} (n={curve.n})"


def company(card: Card) -> Iterator[str]:
    if card.measured_scope == "role-batch":
        yield "what a prompt gets depends on the other prompts in the batch"
    if card.state:
        yield f"keeps a state from batch to batch; this card was made with {card.state}"


RULES = (
    failures, careless, scope, lone_trajectory, equal_rewards, reward_scale, large_offset, blows_up, aim, bias, noise, difficulty, company
)  # fmt: skip


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def degrees(row: GradientRow) -> float:
    """Angle between the expected gradient and the objective's."""
    return math.degrees(math.acos(max(-1.0, min(1.0, row.cosine or 0.0))))
