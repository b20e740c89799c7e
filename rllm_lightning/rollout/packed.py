"""The fast decoder: packed tokens, a prompt computed once for all its samples, caches written in place.

    prompt ──prefill──> line of the pool ──copied where it has more samples than a line has seats
    sample: a row of the batch, a seat of its prompt's line; its tokens go behind the prompt, one a step

Every forward pass is one flat list of tokens (see `packed_attention`): one token of every row, and the prompts that join. A line
goes with its last row, and the last line moves there.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from rllm_lightning.rollout.decoding import PlainDecoder
from rllm_lightning.rollout.kept_states import KeptStates
from rllm_lightning.rollout.kv_pool import SEATS, KVPool
from rllm_lightning.rollout.packed_attention import Joined, Packed, UnsupportedModel, decode, prefill, use_packed_attention
from rllm_lightning.rollout.packed_llama import PackedLlama
from rllm_lightning.rollout.packed_support import cache_shape, compare, probe
from rllm_lightning.rollout.weights import SamplingModel

PREFILL_TOKENS = 8192  # of one forward pass, padding of its attention included; bounds the memory of activations and masks
ROOM = 32 * SEATS  # places reserved behind a prompt, so that the pool does not grow at once


@dataclass(eq=False)
class _Line:
    """A prompt with up to `SEATS` samples, those that have left included."""

    number: int  # in the pool
    prompt: list[int]
    first_logits_V: Tensor  # of the first sampled token
    num_places: int  # taken, by the prompt and by the tokens of samples
    num_seats: int = 0  # taken
    num_rows: int = 0  # samples that have not left


@dataclass(eq=False)
class _Row:
    """A sample; its number in the batch is its place in the decoder's list."""

    line: _Line
    seat: int
    tokens: list[int] = field(default_factory=list)  # sampled, and fed back
    places: list[int] = field(default_factory=list)  # of those tokens in the line


class _Pass(NamedTuple):
    """A part of a forward pass; of its tokens those at `ends` are followed by one that is to be sampled."""

    tokens: Sequence[int]
    positions: Sequence[int]
    ends: Sequence[int]
    packed: Packed


class PackedDecoder:
    """See the module.

    Args:
        model: computed by `PackedLlama` where it is built like Llama and on a CPU, else from here on with the attention of
            `packed_attention`.
        kept: where the states of rows go that leave.

    Raises:
        UnsupportedModel: the model's layers keep something else than all keys and values, or compute attention in a way of their
            own; found out by comparing a few logits with those of the plain decoder.
    """

    def __init__(self, model: SamplingModel, kept: KeptStates):
        self._model = model
        self._kept = kept
        self._pool = KVPool(*cache_shape(model))
        self._lines: list[_Line] = []
        self._rows: list[_Row] = []
        self._prefill_tokens = 0
        causal_lm = model.causal_lm
        expected = probe(PlainDecoder(model), causal_lm)
        self._llama = PackedLlama.of(model)
        if self._llama is not None:
            try:
                compare(probe(self, causal_lm), expected)
                model.drop_prepacked()
                return
            except UnsupportedModel:  # only its names are Llama's
                self._llama = None
        own_attention = causal_lm.config._attn_implementation
        use_packed_attention(causal_lm)
        try:
            compare(probe(self, causal_lm), expected)
        except Exception as error:  # whatever the model's code makes of an attention function that is not its own
            causal_lm.set_attn_implementation(own_attention)
            if isinstance(error, UnsupportedModel):
                raise
            raise UnsupportedModel(f"with another attention function its code fails ({type(error).__name__}: {error})") from error

    def advance(self, tokens: Sequence[int], prompts: Sequence[list[int]]) -> Tensor:
        counts = Counter(map(tuple, prompts))
        known = {tuple(line.prompt) for line in self._lines}
        self._append(tokens)
        self._make_room(counts)
        first, *further = [*_chunks(sorted((list(prompt) for prompt in counts if prompt not in known), key=len))] or [[]]
        logits_BV = self._forward(tokens, first)
        for chunk in further:
            self._forward([], chunk)
        lines_of: dict[tuple[int, ...], list[_Line]] = defaultdict(list)
        for line in self._lines:
            lines_of[tuple(line.prompt)].append(line)
        new = [self._seat(lines_of[tuple(prompt)]) for prompt in prompts]
        self._rows += new
        return torch.cat([logits_BV, *(row.line.first_logits_V[None] for row in new)]) if new else logits_BV

    def drop(self, rows: Sequence[int]) -> list[int]:
        gone = set(rows)
        for row in (self._rows[i] for i in gone):
            self._kept.keep([*row.line.prompt, *row.tokens], partial(self._state, row))
            row.line.num_rows -= 1
        left = [i for i in range(len(self._rows)) if i not in gone]
        self._rows = [self._rows[i] for i in left]
        self._close_gaps()
        return left

    def rest(self) -> None:
        self._pool.trim()

    def clear(self) -> None:
        self._lines, self._rows = [], []
        self._pool.reset()
        self._kept.clear()

    def pop_metrics(self) -> dict[str, float]:
        counts = {"prefill_tokens": float(self._prefill_tokens)}
        self._prefill_tokens = 0
        return counts

    def _append(self, tokens: Sequence[int]) -> None:
        for row, token in zip(self._rows, tokens, strict=True):
            row.tokens.append(token)
            row.places.append(row.line.num_places)
            row.line.num_places += 1

    def _make_room(self, counts: Counter[tuple[int, ...]]) -> None:
        """For the tokens that were appended, and for new samples of these prompts."""
        num_lines = len(self._lines) + sum(-(-count // SEATS) for count in counts.values())
        places = [line.num_places for line in self._lines] + [len(prompt) + ROOM for prompt in counts]
        self._pool.reserve(num_lines, max(places))

    def _forward(self, tokens: Sequence[int], prompts: list[list[int]]) -> Tensor:
        """One pass over a token of every row (or of none) and over new prompts, which become lines; the rows' logits."""
        passes = [self._decode_pass(tokens)] if tokens else []
        passes += [self._prefill_pass(prompts)] if prompts else []
        ids: list[int] = []
        positions: list[int] = []
        ends: list[int] = []
        for part in passes:
            ends += [len(ids) + end for end in part.ends]
            ids += part.tokens
            positions += part.positions
        device = self._pool.device
        ids_N, positions_N, ends_X = (torch.tensor(numbers, device=device) for numbers in (ids, positions, ends))
        packed = Joined([part.packed for part in passes]) if len(passes) > 1 else passes[0].packed
        if self._llama is not None:
            logits_XV = self._llama(ids_N, positions_N, ends_X, packed)
        else:
            inputs = {"input_ids": ids_N[None], "position_ids": positions_N[None], "logits_to_keep": ends_X}
            logits_XV = self._model.forward(**inputs, use_cache=False, packed=packed).logits[0]
        for prompt, logits_V in zip(prompts, logits_XV[len(tokens) :].clone(), strict=True):
            self._lines.append(_Line(len(self._lines), prompt, logits_V, len(prompt)))
        return logits_XV[: len(tokens)]

    def _decode_pass(self, tokens: Sequence[int]) -> _Pass:
        lines, seats, places = zip(*((row.line.number, row.seat, row.places[-1]) for row in self._rows), strict=True)
        positions = [len(row.line.prompt) + len(row.tokens) - 1 for row in self._rows]
        return _Pass(tokens, positions, range(len(tokens)), decode(self._pool, lines, seats, places))

    def _prefill_pass(self, prompts: list[list[int]]) -> _Pass:
        """The prompts, but for what is kept of them, on the lines that come next."""
        first_line, lengths, starts = len(self._lines), [len(prompt) for prompt in prompts], []
        for line, prompt in enumerate(prompts, first_line):
            state = self._kept.longest(prompt)
            starts.append(0 if state is None else state.shape[3])
            if state is not None:
                self._pool.kv[:, :, line, :, : starts[-1]] = state
        self._pool.open_lines(range(first_line, first_line + len(prompts)), lengths)
        spans = [range(start, length) for start, length in zip(starts, lengths, strict=True)]
        positions = [place for span in spans for place in span]
        tokens = [token for prompt, span in zip(prompts, spans, strict=True) for token in prompt[span.start :]]
        self._prefill_tokens += len(tokens)
        ends = [end - 1 for end in accumulate(map(len, spans))]
        return _Pass(tokens, positions, ends, prefill(self._pool, first_line, spans))

    def _seat(self, lines: list[_Line]) -> _Row:
        """A sample on one of its prompt's lines, or on a copy where all seats are taken."""
        line = lines[-1]
        if line.num_seats == SEATS:
            length = len(line.prompt)
            line = _Line(len(self._lines), line.prompt, line.first_logits_V, length)
            self._pool.copy([lines[-1].number], [line.number], length)
            self._pool.open_lines([line.number], [length])
            self._lines.append(line)
            lines.append(line)
        row = _Row(line, line.num_seats)
        line.num_seats += 1
        line.num_rows += 1
        return row

    def _state(self, row: _Row) -> Tensor:
        """What was computed for a row: its prompt and the tokens that were fed back, which is all but the last."""
        places = torch.tensor([*range(len(row.line.prompt)), *row.places], device=self._pool.device)
        return self._pool.kv[:, :, row.line.number].index_select(3, places)

    def _close_gaps(self) -> None:
        """Lines without samples go, the last ones move to where they were."""
        left = sum(line.num_rows > 0 for line in self._lines)
        moved = [line for line in self._lines[left:] if line.num_rows]
        gaps = [line.number for line in self._lines[:left] if not line.num_rows]
        self._pool.copy([line.number for line in moved], gaps, max((line.num_places for line in moved), default=0))
        for line, gap in zip(moved, gaps, strict=True):
            self._lines[gap] = line
            line.number = gap
        del self._lines[left:]


def _chunks(prompts: list[list[int]]) -> Iterator[list[list[int]]]:
    """Prompts of rising length, cut so that each part stays within `PREFILL_TOKENS` (or is one prompt)."""
    chunk: list[list[int]] = []
    for prompt in prompts:
        if chunk and (len(chunk) + 1) * len(prompt) > PREFILL_TOKENS:
            yield chunk
            chunk = []
        chunk.append(prompt)
    if chunk:
        yield chunk
