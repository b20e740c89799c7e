"""Where a response ends and what is trained of it, against slow references: whatever is sampled, asked for and declared an end."""

import asyncio
import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rllm_lightning.rollout.batch import Batch, Request
from rllm_lightning.rollout.engine import SamplingParams
from rllm_lightning.trainer.batch import Row
from rllm_lightning.trainer.layout import LayoutCost, micro_batches
from rllm_lightning.types import Step

VOCAB = 6
TOKENS = st.integers(0, VOCAB - 1)
CALM = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


# ------------------------------------------------------------------------------------------------- where a response ends


class Script:
    """A decoder that knows what each prompt is answered with; prompt i is `[i]`."""

    def __init__(self, answers):
        self.answers, self.rows = answers, []

    def advance(self, tokens, prompts):
        for (index, said), token in zip(self.rows, tokens, strict=True):
            assert self.answers[index][len(said)] == token  # what was sampled is what comes back
            said.append(token)
        self.rows += [(prompt[0], []) for prompt in prompts]
        logits = torch.full((len(self.rows), VOCAB), -math.inf)
        for row, (index, said) in enumerate(self.rows):
            logits[row, self.answers[index][len(said)]] = 0.0
        return logits

    def drop(self, rows):
        left = [i for i in range(len(self.rows)) if i not in rows]
        self.rows = [self.rows[i] for i in left]
        return left

    def rest(self): ...

    def clear(self):
        self.rows = []

    def pop_metrics(self):
        return {}


def reference_answer(script, stop_ids, max_tokens):
    said = []
    for token in script:
        said.append(token)
        if token in stop_ids or len(said) == max_tokens:
            break
    return said


@settings(max_examples=150, suppress_health_check=CALM)
@given(
    st.lists(st.tuples(st.lists(TOKENS, min_size=6, max_size=6), st.integers(1, 6), st.integers(0, 4)), min_size=1, max_size=6),
    st.frozensets(TOKENS),
    st.integers(1, 4),
)
def test_a_response_ends_at_its_first_stop_token_or_its_own_limit(requests, stop_ids, max_rows):
    """No stop token, several, one at the very limit, one as the first token; requests that come at different steps."""

    async def all_of_them():
        batch = Batch(Script([script for script, _, _ in requests]), torch.device("cpu"), stop_ids, max_rows)
        made = [
            Request([i], SamplingParams(max_tokens=limit), np.full(limit, 0.5), asyncio.get_running_loop().create_future())
            for i, (_, limit, _) in enumerate(requests)
        ]
        for time in range(60):
            for request, (_, _, arrival) in zip(made, requests, strict=True):
                if arrival == time:
                    batch.add(request)
            batch.step()
        assert not batch.has_work
        return made

    for request, (script, limit, _) in zip(asyncio.run(all_of_them()), requests, strict=True):
        assert request.tokens == reference_answer(script, stop_ids, limit)
        assert request.logprobs == [0.0] * len(request.tokens)
        assert request.done.done()


@settings(max_examples=12, suppress_health_check=CALM)
@given(
    st.lists(st.tuples(st.lists(st.integers(4, 40), min_size=1, max_size=4), st.integers(1, 7)), min_size=1, max_size=5),
    st.lists(st.integers(4, 60), min_size=1, max_size=30, unique=True),
    st.sampled_from([1.0, 0.7]),
    st.integers(1, 3),
)
def test_the_engine_samples_what_a_slow_loop_samples(model, make_engine, requests, stop_ids, temperature, max_rows):
    """Prompts of one token and up, stop tokens that stand in prompts, limits of one token: token by token from full forward passes."""
    engine = make_engine(max_tokens=7, max_batch_size=max_rows)
    engine._stop_ids = frozenset(stop_ids)

    async def ask():
        params = [SamplingParams(temperature=temperature, max_tokens=limit) for _, limit in requests]
        calls = [
            engine.sample(prompt, p, np.random.default_rng(i)) for i, ((prompt, _), p) in enumerate(zip(requests, params, strict=True))
        ]
        return await asyncio.gather(*calls)

    for i, ((prompt, limit), sampled) in enumerate(zip(requests, asyncio.run(ask()), strict=True)):
        said, logprobs, uniforms = [], [], np.random.default_rng(i).random(limit)
        for u in uniforms:
            with torch.no_grad():
                logp_V = torch.log_softmax(model(torch.tensor([prompt + said])).logits[0, -1].double() / temperature, -1)
            said.append(int((logp_V.exp().cumsum(0) <= u).sum()))
            logprobs.append(float(logp_V[said[-1]]))
            if said[-1] in stop_ids:
                break
        assert sampled.tokens == said
        assert sampled.logprobs == pytest.approx(logprobs, abs=2e-5)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_response_of_no_tokens_cannot_be_asked_for(limit, make_engine, ask):
    with pytest.raises(ValueError, match="max_tokens"):
        ask(make_engine(), ["hello"], overrides={"max_tokens": limit})


def test_the_stop_token_belongs_to_the_response_and_not_to_its_text(make_engine, ask, tokenizer):
    """Whatever is sampled first is declared an end: an answer of one token, with no text."""
    engine = make_engine()
    engine._stop_ids = frozenset(range(len(tokenizer)))
    answer = ask(engine, ["hello"])[0]
    assert (answer.text, answer.completion_length, answer.finish_reason) == ("", 1, "stop")
    engine = make_engine()
    engine._stop_ids = frozenset()
    answer = ask(engine, ["hello"])[0]
    assert (answer.completion_length, answer.finish_reason) == (16, "length")


# ------------------------------------------------------------------------------------------------------ what is trained


def conversations():
    """Trajectories as lists of turns (prompt, response): each later prompt mostly goes on from the turn before."""
    turn = st.tuples(st.lists(TOKENS, min_size=1, max_size=3), st.lists(TOKENS, min_size=1, max_size=3), st.booleans())
    return st.lists(st.lists(turn, min_size=1, max_size=3), min_size=1, max_size=5)


def rows_of(trajectories):
    rows = []
    for sequence, turns in enumerate(trajectories):
        before = []
        for new, response, goes_on in turns:
            prompt = before + new if goes_on else new
            rows.append(Row(Step(prompt_ids=prompt, response_ids=response), sequence, 0, "solver", None))
            before = prompt + response
    return rows


def seen_by(batch, sequence, column):
    """The tokens that stand before and at a place of a sequence, as its attention sees them, in the order of their positions."""
    mask = batch.attention_mask
    visible = mask[sequence, 0, column].bool() if mask.dim() == 4 else mask[sequence].bool() & (torch.arange(mask.shape[1]) <= column)
    places = sorted((int(batch.position_ids[sequence, c]), int(batch.input_ids[sequence, c])) for c in visible.nonzero()[:, 0])
    assert [position for position, _ in places] == list(range(len(places)))
    return [token for _, token in places]


@settings(max_examples=150, suppress_health_check=CALM)
@given(conversations(), st.integers(1, 40), st.sampled_from([None, LayoutCost(1.0, 0.0), LayoutCost(1.0, 0.1)]))
def test_every_response_token_is_predicted_once_from_exactly_what_stood_before_it(trajectories, max_tokens, cost):
    """Rows, chains of turns and prefix trees: the mask has a 1 for each response token and nothing else, and no token sees another row."""
    rows, trained = rows_of(trajectories), []
    for batch in micro_batches(rows, max_tokens, tree_cost=cost):
        places = iter(zip(batch.sequences_N.tolist(), batch.columns_N.tolist(), batch.targets_N.tolist(), strict=True))
        for row, mask in zip(batch.rows, batch.mask_BT.tolist(), strict=True):
            assert mask == [1.0] * len(row.response_ids) + [0.0] * (len(mask) - len(row.response_ids))
            for index, token in enumerate(row.response_ids):
                sequence, column, target = next(places)
                assert target == token
                assert seen_by(batch, sequence, column) == row.prompt_ids + row.response_ids[:index]
        assert next(places, None) is None
        trained += batch.rows
    assert sorted(map(id, trained)) == sorted(map(id, rows))
