"""The fast path: equal to the plain one, and each shared thing computed once."""

import asyncio
import copy

import pytest
import torch

from rllm_lightning.rollout import kv_pool, packed
from rllm_lightning.rollout.engine import REQUEST, RequestContext
from rllm_lightning.rollout.packed_attention import IMPLEMENTATION

pytestmark = pytest.mark.parametrize("path", ["fast", "own layers"], indirect=True)


def prefilled(engine):
    return engine.pop_metrics()["rollout/prefill_tokens"]


def test_fast_equals_plain(make_engine, ask, same_answers, mixed_prompts):
    """Seven samples of each of six prompts: lines that are full, half full and emptied at different times."""
    contents = mixed_prompts * 7
    same_answers(ask(make_engine(max_tokens=40, fast=False), contents), ask(make_engine(max_tokens=40), contents))


def test_fast_equals_plain_at_every_place_where_it_could_be_cut(make_engine, ask, same_answers, mixed_prompts, monkeypatch):
    """A pool that must grow, prompts that are computed in several passes, memory given back whenever no row is left."""
    expected = ask(make_engine(max_tokens=60, fast=False), mixed_prompts * 3)
    monkeypatch.setattr(packed, "ROOM", 1)
    monkeypatch.setattr(packed, "PREFILL_TOKENS", 30)
    monkeypatch.setattr(kv_pool, "LITTLE", 0)
    monkeypatch.setattr(kv_pool, "HUGE", 1)
    engine = make_engine(max_tokens=60)
    same_answers(expected, ask(engine, mixed_prompts * 3))
    same_answers(expected, ask(engine, mixed_prompts * 3, together=False))


def test_a_prompt_shared_by_many_rollouts_is_computed_once(make_engine, ask):
    """B21: lengths 8 and 6 (three tokens of the template), 9 and 2 samples."""
    engine = make_engine()
    ask(engine, ["12345"] * 9 + ["123"] * 2)
    assert prefilled(engine) == 8 + 6
    ask(engine, ["12345"])
    assert prefilled(engine) == 8


def test_a_sample_that_joins_a_prompt_in_progress_costs_no_prefill(make_engine, ask, same_answers):
    """It takes a seat behind others, or a line copied from theirs, and sees nothing of what stands behind the prompt."""

    async def staggered(engine):
        async def one(i):
            REQUEST.set(RequestContext(seed=1, task_id=str(i)))
            for _ in range(5 * i):
                await asyncio.sleep(0)
            return await engine.get_model_response([{"role": "user", "content": "hello"}])

        return await asyncio.gather(*[one(i) for i in range(12)])

    engine = make_engine(max_tokens=30)
    answers = asyncio.run(staggered(engine))
    metrics = engine.pop_metrics()
    assert metrics["rollout/prefill_tokens"] == answers[0].prompt_length
    assert metrics["rollout/steps"] < sum(answer.completion_length for answer in answers)
    same_answers(answers, ask(engine, ["hello"] * 12, together=False))


def test_the_trainers_model_keeps_its_own_attention(make_engine, model, ask, path):
    engine = make_engine()
    ask(engine, ["hello"])
    assert model.config._attn_implementation == "sdpa"
    ours = engine._the_sampler().model.causal_lm.config._attn_implementation
    assert ours == ("sdpa" if path == "fast" else IMPLEMENTATION)
    assert all(ours is theirs for ours, theirs in zip(engine._the_sampler().model.module.parameters(), model.parameters(), strict=True))


# ------------------------------------------------------------------------------------------------------- several turns


def converse(engine, num_agents=3, num_turns=3, **context):
    """Each agent asks, is answered, and asks on; all their answers, turn by turn."""

    async def agent(i):
        REQUEST.set(RequestContext(**{"seed": 1, "task_id": str(i), **context}))
        messages, outputs = [{"role": "user", "content": "agent" * i}], []
        for turn in range(num_turns):
            outputs.append(await engine.get_model_response(messages))
            messages = [*messages, {"role": "assistant", "content": outputs[-1].content}, {"role": "user", "content": f"more {turn}"}]
        return outputs

    async def all_agents():
        return await asyncio.gather(*[asyncio.create_task(agent(i)) for i in range(num_agents)])

    return [output for outputs in asyncio.run(all_agents()) for output in outputs]


def test_a_later_turn_computes_only_what_is_new(make_engine, same_answers):
    """New are the last sampled token of the turn before (it was never fed back) and what follows it."""
    engine = make_engine()
    converse(engine, num_agents=1, num_turns=2)  # the first time, it is learnt that turns go on
    engine.pop_metrics()
    first, second, third = converse(engine, num_agents=1, global_step=1)
    new = [later.prompt_length - (turn.prompt_length + turn.completion_length - 1) for turn, later in ((first, second), (second, third))]
    assert prefilled(engine) == first.prompt_length + sum(new)


def test_kept_states_change_no_answer(make_engine, same_answers):
    engine = make_engine()
    converse(engine)
    kept, without = converse(engine, global_step=1), converse(make_engine(kept_state_mb=0), global_step=1)
    same_answers(kept, without)
    same_answers(kept, converse(make_engine(fast=False), global_step=1))


def test_kept_states_are_of_the_present_weights(make_engine, model, same_answers):
    """A turn after an update recomputes the conversation."""
    changed, engine = copy.deepcopy(model), make_engine()
    converse(engine)

    async def second_turn(engine, update):
        REQUEST.set(RequestContext(seed=1, global_step=1, task_id="a"))
        messages = [{"role": "user", "content": "hello"}]
        answer = await engine.get_model_response(messages)
        for _ in range(3):
            await asyncio.sleep(0)  # its state is kept by now
        update()
        messages = [*messages, {"role": "assistant", "content": answer.content}, {"role": "user", "content": "more"}]
        return await engine.get_model_response(messages)

    def update():
        with torch.no_grad():
            for policy in (model, changed):
                for parameter in policy.parameters():
                    parameter.mul_(1.3)
        engine.on_weights_updated(1)

    after = asyncio.run(second_turn(engine, update))
    ids = torch.tensor([after.prompt_ids + after.completion_ids])
    with torch.no_grad():
        logits_TV = changed(ids).logits[0, after.prompt_length - 1 : -1]
    expected = torch.log_softmax(logits_TV, -1).gather(-1, ids[0, after.prompt_length :, None])[:, 0]
    torch.testing.assert_close(torch.tensor(after.logprobs), expected, rtol=0, atol=2e-5)


def test_large_memory_is_given_back_when_nobody_waits_any_more_and_not_between_turns(make_engine, monkeypatch):
    """All agents end a turn at the same step, so that no row is left until they ask again."""
    monkeypatch.setattr(kv_pool, "LITTLE", 0)
    sizes = []
    resize = kv_pool.KVPool._resize
    monkeypatch.setattr(kv_pool.KVPool, "_resize", lambda pool, *size: (sizes.append(size), resize(pool, *size)))
    engine = make_engine(max_tokens=1)
    converse(engine, num_agents=2, num_turns=3)
    assert sizes[-1] == (0, 0)
    assert sizes.count((0, 0)) == 2  # once after the engine tried the model


def test_workflows_of_one_turn_keep_no_states(make_engine, ask, mixed_prompts):
    engine = make_engine()
    ask(engine, mixed_prompts)
    assert engine._the_sampler().batch._decoder._kept._num_bytes == 0
