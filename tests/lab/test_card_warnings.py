"""The plain words of a card follow from its numbers."""

from functools import cache

import numpy as np
import pytest

from rllm_lightning.lab.card import make_card
from rllm_lightning.lab.card_warnings import warnings_of


@cache
def words(name):
    return "\n".join(warnings_of(make_card(name, max_batches=300)))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("rloo", "a group of one gets its raw reward"),
        ("rloo", "not comparable across prompts of different reward scale"),
        ("dr_grpo", "a group of one teaches nothing: its advantage is 0"),
        ("dr_grpo", "biased in length only: its expected gradient is the true one times 0.5 (n=2), 0.75 (n=4), 0.875 (n=8)"),
        ("grpo", "rewards 0.50 and 0.51 pushes as hard as one with 0 and 1"),
        ("grpo", "biased in direction: its expected gradient is off by 5.4° with binary rewards and 13° with graded rewards at n=8"),
        ("grpo", "hard ones (5% solved) 1.33 and easy ones (95% solved) 1.33 (n=8)"),
        ("reinforce", "where all are right, each gets +1"),
        ("reinforce", "a constant added to all rewards changes the advantages"),
        ("reinforce", "noisy: at n=8 its signal-to-noise ratio is 0.78 times that of RLOO"),
        ("maxrl", "it climbs the log-likelihood of a right answer"),
        ("maxrl", "blows up at p near 0: the only right answer gets +7 among 8, +63 among 64, +511 among 512"),
        ("maxrl", "where a prompt that is solved half of the time weighs 1, hard ones (5% solved) 3.04 and easy ones (95% solved) 0.53"),
        ("pass_at_k", "its advantages are shares of the group's result, n times smaller than others'"),
        ("median_mad", "blows up: an advantage of up to 1e+06 (on: 1 of 8 right, 7 of 8 right)"),
        ("distill", "right and wrong answers get the same advantage: rewards play no part"),
        ("grpo_batch_std", "what a prompt gets depends on the other prompts in the batch"),
        ("rae", "keeps a state from batch to batch; this card was made with {'baseline': 0.497"),
    ],
)
def test_a_card_says(name, said):
    assert said in words(name)


@pytest.mark.parametrize(
    ("name", "not_said"),
    [
        ("rloo", "biased"),
        ("rloo", "noisy"),
        ("reinforce", "biased"),
        ("reinforce", "a group of one"),  # it never looks at a group
        ("grpo", "blows up"),
        ("grpo", "not comparable"),
        ("gae", "biased"),
        ("maxrl", "biased"),
        ("pass_at_k", "biased"),
        ("rae", "scope"),
    ],
)
def test_a_card_does_not_say(name, not_said):
    assert not_said not in words(name)


def test_a_scope_that_is_declared_too_small_is_found(register):
    def pooled(rewards):
        return [r - np.concatenate(rewards).mean() for r in rewards], rewards

    found = warnings_of(make_card(register(pooled, scope="group"), max_batches=64))
    assert "declared to look at one group at a time, but more matters: register it with scope='role-batch'" in found


def test_a_scope_that_is_declared_too_large_is_found(register):
    def centred(rewards):
        return [r - r.mean() for r in rewards], rewards

    found = warnings_of(make_card(register(centred), max_batches=64))
    assert "declared to look at a whole role-batch, but only the group matters: scope='group' would do" in found


def test_a_push_the_wrong_way_is_found(register):
    def upside_down(rewards):
        return [r.mean() - r for r in rewards], rewards

    found = "\n".join(warnings_of(make_card(register(upside_down, scope="group"), max_batches=64)))
    assert "it pushes the wrong way on the hard prompt (binary rewards, n=2)" in found
    assert "a better reward may get a smaller advantage" in found


def test_digits_lost_at_a_large_offset_are_found(register):
    def single_precision(rewards):
        return [(r32 := r.astype(np.float32)) - (r32.sum(dtype=np.float32) / len(r)) for r in rewards], rewards

    found = "\n".join(warnings_of(make_card(register(single_precision, scope="group"), max_batches=64)))
    assert "digits are lost where all rewards share a large offset" in found


def test_a_carefully_written_function_has_few_words(register):
    def good(rewards):
        return [(r - r.mean()) * len(r) / max(len(r) - 1, 1) for r in rewards], rewards

    assert warnings_of(make_card(register(good, scope="group"), max_batches=64)) == [
        "a group of one teaches nothing: its advantage is 0",
        "not comparable across prompts of different reward scale: the prompt with larger rewards weighs more",
    ]
