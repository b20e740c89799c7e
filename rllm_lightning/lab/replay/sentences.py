"""What a replay says in words: what was looked at, how alike the estimators are, and what to beware of.

To add a caveat: a generator of sentences in `CAVEATS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from rllm_lightning.lab.replay.results import Estimate, GradientReport, PairResult, Replay
from rllm_lightning.lab.replay.words import estimate, number, percent, steps_text
from rllm_lightning.lab.words import listed

NEARLY, SIMILAR = 0.99, 0.9  # correlations from which two estimators are called so
EXACT = 1e-9  # relative; what differs less is the same
REPRODUCED = 1e-6  # relative; float32 log-probs that went through JSON may move an advantage by this much
LARGE_DRIFT = 1e-3  # KL a token from sampler to trainer; in one precision it is far below


def headline(replay: Replay) -> str:
    """What was looked at, in one line."""
    batches = f"{len(replay.steps)} batch{'es' * (len(replay.steps) != 1)}"
    where = f" ({steps_text(replay.steps)})" if replay.steps else ""
    return (
        f"{replay.path.name}: {batches}{where}, {replay.num_groups:,} groups, {replay.num_trajectories:,} trajectories · "
        f"trained with {replay.own}, loss {replay.loss}"
    )


def conclusions(replay: Replay) -> list[str]:
    """All of them: pairs, then estimators and gradients."""
    return pair_conclusions(replay) + other_conclusions(replay)


def pair_conclusions(replay: Replay) -> list[str]:
    """A sentence a pair, the most different first."""
    pairs = sorted(replay.pairs, key=lambda pair: (math.isnan(value := pair.mean("pearson").value), value))
    return [_of_pair(replay, pair) for pair in pairs] if replay.steps else []


def other_conclusions(replay: Replay) -> list[str]:
    """How many trajectories carry each estimator's update, and how noisy the gradients are."""
    if not replay.steps:
        return ["there is nothing to compare: no batch had anything to train on"]
    return [*_of_weights(replay), *_of_noise(replay)]


def relation(pair: PairResult) -> str:
    """`none` (nothing to compare), `same`, `factor` (one is a multiple of the other in every batch), `nearly`, `similar`, `different`."""
    cosines = pair.values("cosine")
    if not cosines:
        return "none"
    if min(cosines) >= 1 - EXACT:
        return "same" if all(abs(factor - 1) <= EXACT for factor in pair.values("factor")) else "factor"
    correlation = pair.mean("pearson").value
    if math.isnan(correlation):
        return "none"
    return "nearly" if correlation >= NEARLY else "similar" if correlation >= SIMILAR else "different"


def _of_pair(replay: Replay, pair: PairResult) -> str:
    names, kind = f"{pair.a} and {pair.b}", relation(pair)
    if kind == "none":
        return f"{names} cannot be compared: in no batch do both have advantages that differ between trajectories"
    if kind == "same":
        return f"{names} are the same on these rollouts"
    if kind == "factor":
        low, high = min(pair.values("factor")), max(pair.values("factor"))
        factor = number(low) if high - low <= EXACT * high else f"{number(low)} to {number(high)}, by batch"
        return f"{pair.a} is {pair.b} times {factor}: the same direction, another size of step"
    flips = pair.mean("flips").value
    words = {"nearly": "are nearly the same", "similar": "are similar", "different": "differ clearly"}[kind]
    sentence = f"{names} {words}: correlation {estimate(pair.mean('pearson'))} (of ranks {estimate(pair.mean('spearman'))}), " + (
        "no sign flips" if flips == 0 else f"signs flip in {percent(flips)} of the trajectories"
    )
    if (alone := pair.mean("one_sided").value) >= 0.0005:
        sentence += f", only one of them pushes {percent(alone)}"
    if replay.gradients is not None:
        sentence += f"; cosine of their gradients {estimate(gradient_cosine(replay.gradients, pair))}"
    return sentence


def gradient_cosine(report: GradientReport, pair: PairResult, name: str = "cosine") -> Estimate:
    """Of the trained gradients (or `signal_cosine`)."""
    return report.estimate(name, report.labels.index(pair.a), report.labels.index(pair.b))


def _of_weights(replay: Replay) -> Iterator[str]:
    shares = {result.label: result.summary("effective").value for result in replay.estimators}
    if shares:
        yield "effective sample size: " + listed(f"{label} {percent(share)}" for label, share in shares.items()) + " of the trajectories"
    for result in replay.estimators:
        if all(share == 1 for share in result.zero if math.isfinite(share)):
            yield f"{result.label} pushes nothing: all its advantages are 0"


def _of_noise(replay: Replay) -> Iterator[str]:
    if (report := replay.gradients) is None:
        return
    ratios = [f"{label} {estimate(report.estimate('signal_to_noise', index))}" for index, label in enumerate(report.labels)]
    where = f"at step {report.step} on {steps_text(report.steps)} ({report.num_prompts} prompts)"
    yield f"signal to noise of the gradient {where}: {listed(ratios)}"


# ---------------------------------------------------------------------------------------------------------------------- caveats


def caveats(replay: Replay) -> list[str]:
    return [sentence for caveat in CAVEATS for sentence in caveat(replay)]


def _left_out(replay: Replay) -> Iterator[str]:
    for label, reason in replay.failures.items():
        yield f"{label} is left out: {reason}"


def _not_reproduced(replay: Replay) -> Iterator[str]:
    found = replay.reproduction
    if found.problem:
        yield f"it could not be checked that the run's own advantages come out again: {found.problem}"
    elif not found.num_steps:
        yield "the run wrote down no advantages that could be checked against"
    elif found.worst > REPRODUCED:
        yield (
            f"the run's own advantages do not come out again (relative difference up to {number(found.worst)}): its code, or how it groups "
            "trajectories, is not what is here now"
        )


def _batches(replay: Replay) -> Iterator[str]:
    if replay.unusable:
        problem = next(iter(replay.unusable.values()))
        yield f"{steps_text(list(replay.unusable))} cannot be replayed: {problem}"
    if replay.empty:
        yield f"{steps_text(replay.empty)} left nothing to train on, and are not counted"
    if len(replay.steps) == 1:
        yield "one batch only: nothing tells how far these numbers vary from batch to batch"
    yield from replay.remarks


def _episodes(replay: Replay) -> Iterator[str]:
    if replay.num_failed:
        yield f"{replay.num_failed:,} of {replay.num_episodes:,} episodes ended in an error or a time-out; they are treated as in training"
    if replay.num_single:
        yield f"{replay.num_single:,} of {replay.num_groups:,} groups hold one trajectory only, which has nothing to be compared with"
    if replay.num_groups and replay.num_uniform > replay.num_groups / 2:
        yield f"{replay.num_uniform:,} of {replay.num_groups:,} groups have equal rewards: what compares within groups ignores them"


def _gradients(replay: Replay) -> Iterator[str]:
    if (report := replay.gradients) is None:
        return
    if not report.on_policy:
        how = (
            "without log-probs of the sampler they count as if they were" if math.isnan(report.drift) else "they are weighted by the ratio"
        )
        kl = "" if math.isnan(report.drift) else f" (KL {number(report.drift)} a token)"
        yield f"the rollouts of {steps_text(report.steps)} were not drawn from the weights of step {report.step}{kl}; {how}"
        if used := [step for step in report.steps if step <= report.step]:
            yield f"those weights were trained on {steps_text(used)} already: some of what there was to learn is gone"
    elif report.drift > LARGE_DRIFT:
        yield f"sampler and trainer disagree on the log-probs of the rollouts (KL {number(report.drift)} a token)"
    weak = [
        label
        for label, signal, error in zip(report.labels, report.values.signal, report.errors.signal, strict=True)
        if not signal > 2 * error
    ]
    if weak:
        yield (
            f"{report.num_prompts} prompts are too few to tell the signal in the gradient of {listed(weak)} from 0; "
            "take more batches (--gradient-steps) before believing its noise scale"
        )
    if not report.exact_sums:
        yield f"the gradients are too large to be kept: their products come from sketches, ± {percent(report.relative_error)} of the norms"


def _training(replay: Replay) -> Iterator[str]:
    if (report := replay.training) is None:
        return
    if off_policy := {trained.label: trained.off_policy for trained in report.trained if trained.off_policy}:
        steps = sorted({step for of_label in off_policy.values() for step in of_label})
        yield (
            f"when {listed(off_policy)} trained on, the rollouts of {steps_text(steps)} were another policy's; they are weighted by the "
            f"ratio, cut at its cap. Only those of {steps_text(report.steps[:1])} are what the estimator would have met"
        )


CAVEATS: list[Callable[[Replay], Iterator[str]]] = [_left_out, _not_reproduced, _batches, _episodes, _gradients, _training]
