"""The memory of conversations' states: longest prefix, budget, least recently used first."""

import pytest
import torch

from rllm_lightning.rollout.kept_states import KeptStates

BYTES = 2 * 2 * 3 * 4 * 4  # of a token: 2 layers, keys and values, 3 heads, 4 numbers of 4 bytes


def state(length):
    return torch.zeros(2, 2, 3, length, 4)


@pytest.fixture
def kept():
    """Room for ten tokens, and states are wanted: a prompt has gone on from an earlier sequence."""
    kept = KeptStates(10 * BYTES)
    kept.keep([0], lambda: state(1))
    kept.longest([0, 1])
    kept.clear()
    return kept


def test_the_longest_kept_beginning_is_found(kept):
    kept.keep([1, 2], lambda: state(2))
    kept.keep([1, 2, 3, 4], lambda: state(4))
    assert kept.longest([1, 2, 3, 4, 5]).shape[3] == 4
    assert kept.longest([1, 2, 3, 4]).shape[3] == 2  # one token at least is left to compute
    assert kept.longest([1, 2, 9]).shape[3] == 2
    assert kept.longest([1, 2]) is None
    assert kept.longest([2, 1, 2, 3]) is None


def test_the_least_recently_used_state_goes_when_the_budget_is_spent(kept):
    kept.keep([1] * 4, lambda: state(4))
    kept.keep([2] * 4, lambda: state(4))
    assert kept.longest([1] * 5) is not None  # used
    kept.keep([3] * 4, lambda: state(4))
    assert kept.longest([2] * 5) is None
    assert kept.longest([1] * 5) is not None
    assert kept.longest([3] * 5) is not None


def test_a_state_beyond_the_budget_is_not_kept(kept):
    kept.keep([1] * 11, lambda: state(11))
    assert kept.longest([1] * 12) is None


def test_keeping_a_sequence_again_replaces_it(kept):
    for _ in range(5):
        kept.keep([1] * 8, lambda: state(8))
    assert kept.longest([1] * 9) is not None
    assert kept._num_bytes == 8 * BYTES


def test_nothing_is_computed_before_a_prompt_has_gone_on_from_an_earlier_one():
    kept, asked = KeptStates(10 * BYTES), []

    def make():
        asked.append(True)
        return state(2)

    kept.keep([1, 2], make)
    assert kept.longest([5, 6, 7]) is None
    kept.keep([3, 4], make)
    assert not asked
    assert kept.longest([1, 2, 3]) is None  # it would have been of use
    kept.keep([1, 2], make)
    assert asked
    assert kept.longest([1, 2, 3]) is not None


def test_no_budget_keeps_nothing():
    kept = KeptStates(0)
    for _ in range(2):
        kept.keep([1, 2], lambda: state(2))
        assert kept.longest([1, 2, 3]) is None


def test_clearing_forgets_all_states(kept):
    kept.keep([1, 2], lambda: state(2))
    kept.clear()
    assert kept.longest([1, 2, 3]) is None
