"""Conversations keep their tokens: a later turn begins with the very tokens of the turns before it.

A workflow hands over messages, text. Encoding an answer's text again may give other tokens than the model sampled (one word in
two odd pieces, a stripped newline), and the trainer would see tokens that never were. So the engine remembers, for each
workflow run, the text of what it was asked and answered together with the tokens. Where a new prompt's text begins with a
remembered one, its tokens are taken over and only the rest is encoded. Where it does not (the template rewrites history, the
workflow changed a message) the whole prompt is encoded: a new beginning, and no false continuation.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from rllm_lightning.rollout.chat import Chat

MAX_RUNS = 4096  # workflow runs remembered; far more than are ever open at once
MAX_TURNS = 64  # of one run


@dataclass(frozen=True)
class Span:
    """A piece of rendered chat and its tokens."""

    text: str
    ids: list[int]


class Conversations:
    """What was asked and answered, by workflow run."""

    def __init__(self, chat: Chat):
        self._chat = chat
        self._turns: OrderedDict[Hashable, deque[Span]] = OrderedDict()

    def prompt(self, run: Hashable, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None) -> Span:
        """The prompt that asks for the next message; `tools` are JSON schemas of functions that it tells of."""
        text = self._chat.render(messages, tools=tools)
        known = max((turn for turn in self._turns.get(run, ()) if text.startswith(turn.text)), key=_length, default=Span("", []))
        return Span(text, known.ids + self._chat.encode(text[len(known.text) :]))

    def remember(self, run: Hashable, prompt: Span, answer: Span) -> None:
        """The turn that `run` had; the answer's text with the end token's, where one was sampled."""
        turns = self._turns.setdefault(run, deque(maxlen=MAX_TURNS))
        turns.append(Span(prompt.text + answer.text, prompt.ids + answer.ids))
        self._turns.move_to_end(run)
        if len(self._turns) > MAX_RUNS:
            self._turns.popitem(last=False)

    def forget(self) -> None:
        """All runs have ended."""
        self._turns.clear()


def _length(turn: Span) -> int:
    return len(turn.text)
