"""The open requests of one event loop, decoded together: who waits, who is a row of the batch, and one step of all rows."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field

import numpy as np
import torch

from rllm_lightning.rollout.decoding import Decoder
from rllm_lightning.rollout.engine import SamplingParams
from rllm_lightning.rollout.sampling import BatchSampling, sample
from rllm_lightning.rollout.weights import exact_inference


@dataclass(eq=False)
class Request:
    """An open request. `done` is resolved when `tokens` is complete; whoever cancels it takes the request out of the batch."""

    prompt: list[int]
    params: SamplingParams
    uniforms: np.ndarray  # float64, one for each token that may be sampled
    done: asyncio.Future[None]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class Batch:
    """Requests and the decoder that holds their state.

    Args:
        stop_ids: tokens that end a response; they belong to it.
        max_rows: requests decoded at once; more wait.
    """

    def __init__(self, decoder: Decoder, device: torch.device, stop_ids: frozenset[int], max_rows: int):
        self._decoder = decoder
        self._device = device
        self._stop_ids = stop_ids
        self._max_rows = max_rows
        self._waiting: list[Request] = []
        self._rows: list[Request] = []
        self._counts = {"requests": 0, "tokens": 0, "prompt_tokens": 0, "steps": 0}

    @property
    def num_open(self) -> int:
        """Requests that somebody still waits for."""
        return sum(not request.done.done() for request in (*self._rows, *self._waiting))

    @property
    def has_work(self) -> bool:
        return bool(self._rows or self._waiting)

    def add(self, request: Request) -> None:
        self._waiting.append(request)

    def step(self) -> None:
        """Finished rows leave, waiting requests join, and every row samples one token.

        Raises:
            FloatingPointError: logits that are not numbers.
        """
        with exact_inference(self._device):
            self._drop_finished()
            new = self._take_waiting()
            if not self._rows and not new:
                self._decoder.rest()
                return
            logits_BV = self._decoder.advance([request.tokens[-1] for request in self._rows], [request.prompt for request in new])
            self._rows += new
            uniforms_B = torch.tensor([r.uniforms[len(r.tokens)] for r in self._rows], dtype=torch.float64, device=self._device)
            drawn = sample(logits_BV, uniforms_B, BatchSampling.of([r.params for r in self._rows], self._device))
            tokens, logprobs = torch.stack([part.double() for part in drawn]).tolist()  # the step's one wait for the device
        self._counts["steps"] += 1
        for request, token, logprob in zip(self._rows, tokens, logprobs, strict=True):
            if not math.isfinite(logprob):
                raise FloatingPointError(f"the model's logits are not numbers (sampled log-prob {logprob}); the policy has diverged")
            self._append(request, int(token), logprob)

    def close(self, error: BaseException | None = None) -> None:
        """Reject every open request with `error`; without one, or with what is no `Exception`, cancel it."""
        for request in (*self._rows, *self._waiting):
            if request.done.done() or request.done.get_loop().is_closed():
                continue
            if isinstance(error, Exception):
                request.done.set_exception(error)
            else:
                request.done.cancel()
        self._waiting = []
        self.forget()

    def forget(self) -> None:
        """Drop all rows and what was computed with the present weights."""
        self._rows = []
        self._decoder.clear()

    def pop_metrics(self) -> dict[str, float]:
        """Counts since the last call, see `HFEngine.pop_metrics`."""
        counts = {**{name: float(count) for name, count in self._counts.items()}, **self._decoder.pop_metrics()}
        self._counts = dict.fromkeys(self._counts, 0)
        return counts

    def _drop_finished(self) -> None:
        if gone := [i for i, request in enumerate(self._rows) if request.done.done()]:
            self._rows = [self._rows[i] for i in self._decoder.drop(gone)]

    def _take_waiting(self) -> list[Request]:
        """The requests that join now; they are rows only when the decoder has them."""
        waiting = [request for request in self._waiting if not request.done.done()]
        room = self._max_rows - len(self._rows)
        new, self._waiting = waiting[:room], waiting[room:]
        self._counts["requests"] += len(new)
        self._counts["prompt_tokens"] += sum(len(request.prompt) for request in new)
        return new

    def _append(self, request: Request, token: int, logprob: float) -> None:
        request.tokens.append(token)
        request.logprobs.append(logprob)
        self._counts["tokens"] += 1
        complete = token in self._stop_ids or len(request.tokens) == request.params.max_tokens
        if complete and not request.done.done():
            request.done.set_result(None)
