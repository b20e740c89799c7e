"""What is kept of answered requests, so that a conversation's next turn computes only what it adds."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

TOKEN_BYTES = 4  # of a token id in a key


class KeptStates:
    """Keys and values of token sequences, within a memory budget; what was used least recently goes first.

    States are asked for only when a prompt has gone on from a sequence that came by earlier: a workflow of one turn pays nothing,
    one of several turns computes one of its prompts in full, once.

    A state is [layers, 2, heads, length, dim], of the weights it was computed with: `clear` when they change.

    Args:
        max_bytes: of all states together; 0 keeps nothing.
    """

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._wanted = False
        self._states: OrderedDict[bytes, Tensor | None] = OrderedDict()
        self._lengths: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._states)

    def keep(self, tokens: Sequence[int], state: Callable[[], Tensor]) -> None:
        """Remember `tokens`, and their state, one place a token, if states are wanted."""
        self._forget(_key(tokens))
        kept = state() if self._wanted and self._max_bytes else None
        self._states[_key(tokens)] = kept
        self._lengths[len(tokens)] += 1
        self._num_bytes += 0 if kept is None else kept.nbytes
        while self._num_bytes > self._max_bytes:
            self._forget(next(iter(self._states)))

    def longest(self, prompt: Sequence[int]) -> Tensor | None:
        """The state of the longest kept sequence that `prompt` goes on from (it is longer by a token at least)."""
        key = _key(prompt)
        for length in sorted(self._lengths, reverse=True):
            if length < len(prompt) and (start := key[: length * TOKEN_BYTES]) in self._states:
                self._wanted = True
                self._states.move_to_end(start)
                return self._states[start]
        return None

    def clear(self) -> None:
        self._states.clear()
        self._lengths.clear()
        self._num_bytes = 0

    def _forget(self, key: bytes) -> None:
        if key in self._states:
            state = self._states.pop(key)
            self._num_bytes -= 0 if state is None else state.nbytes
            length = len(key) // TOKEN_BYTES
            self._lengths[length] -= 1
            if not self._lengths[length]:
                del self._lengths[length]


def _key(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, dtype=np.int32).tobytes()
