"""The in-process engine on both its paths: exact log-probs, tokens that no batching changes, honest ends, errors that reach
the asker."""

import asyncio
import copy
import logging
import math
import random

import pytest
import torch

from rllm_lightning.registry import ENGINES
from rllm_lightning.rollout import batch
from rllm_lightning.rollout.engine import REQUEST, EngineSetup, RequestContext, SamplingParams
from rllm_lightning.rollout.hf import HFEngine
from rllm_lightning.rollout.sampling import sample
from rllm_lightning.types import TerminationEvent, TerminationReason

# ------------------------------------------------------------------------------------------------- right log-probs


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
def test_log_probs_equal_a_full_forward_pass(make_engine, model, ask, reference, mixed_prompts, temperature):
    """B12, B17: mixed lengths, the pad token is EOS, and the same temperature on both sides (greedy: 1)."""
    answers = ask(make_engine(sampling={"temperature": temperature}, max_tokens=24), mixed_prompts)
    assert {answer.finish_reason for answer in answers} == {"stop", "length"} or temperature == 0
    assert len({answer.prompt_length for answer in answers}) == 6
    for answer in answers:
        expected = reference(model, answer, temperature or 1.0)
        torch.testing.assert_close(torch.tensor(answer.logprobs), expected, rtol=0, atol=2e-5)


def test_responses_of_one_token_and_prompts_of_one_token(make_engine, model, tokenizer, ask, reference):
    """B15: the first response token is scored by the last prompt position."""
    one_token = copy.deepcopy(tokenizer)
    one_token.chat_template = "{{ messages[0]['content'] }}"
    for answer in ask(make_engine(max_tokens=1, chat=one_token), ["a", "b", "longer"]):
        assert answer.completion_length == len(answer.completion_ids) == len(answer.logprobs) == 1
        torch.testing.assert_close(torch.tensor(answer.logprobs), reference(model, answer), rtol=0, atol=2e-5)
    assert ask(make_engine(max_tokens=1, chat=one_token), ["a"])[0].prompt_length == 1


def test_a_checkpoints_generation_config_has_no_influence_on_sampling(make_engine, model, ask, same_answers, mixed_prompts):
    """B20: a repetition penalty of 1.3 and top_k 50 in the checkpoint change nothing."""
    plain = ask(make_engine(), mixed_prompts)
    opinionated = copy.deepcopy(model)
    opinionated.generation_config.update(repetition_penalty=1.3, top_k=2, temperature=0.1, do_sample=False, max_new_tokens=1)
    same_answers(plain, ask(make_engine(opinionated), mixed_prompts))


def test_no_score_of_a_large_vocabulary_is_cut_off(make_engine, make_model, ask, reference, monkeypatch):
    """B20: 49,152 tokens, a checkpoint that asks for a repetition penalty of 1.3 and top-k 50: at the first token all scores are
    finite, they are the model's logits, and the log-prob is of those over the temperature."""
    model = make_model(vocab_size=49_152)
    model.generation_config.update(repetition_penalty=1.3, top_k=50)
    seen = []

    def spy(logits_BV, uniforms_B, sampling):
        seen.append((logits_BV.clone(), sampling))
        return sample(logits_BV, uniforms_B, sampling)

    monkeypatch.setattr(batch, "sample", spy)
    (answer,) = ask(make_engine(model, max_tokens=1, sampling={"temperature": 0.7}), ["say a a a"])
    ((scores, sampling),) = seen
    assert scores.shape == (1, 49_152)
    assert scores.isfinite().all()
    assert (sampling.truncation, sampling.temperature_B.tolist()) == (None, [pytest.approx(0.7)])
    with torch.no_grad():
        logits = model(torch.tensor([answer.prompt_ids])).logits[:, -1]
    torch.testing.assert_close(scores, logits, rtol=0, atol=1e-4)
    torch.testing.assert_close(torch.tensor(answer.logprobs), reference(model, answer, 0.7), rtol=0, atol=1e-4)


def test_every_token_of_the_vocabulary_can_be_sampled(make_engine, make_model, ask, tokenizer):
    """B20: with a flat distribution 300 draws see well over the 50 tokens of a top-k default."""
    flat = make_model(spread=1e-3)
    answers = ask(make_engine(flat, max_tokens=30), [""] * 40)
    assert len({token for answer in answers for token in answer.completion_ids}) > 0.9 * len(tokenizer)


# --------------------------------------------------------------------------------- own random stream, whatever the batch


def test_tokens_do_not_depend_on_batching_or_order_of_arrival(make_engine, ask, same_answers, mixed_prompts):
    """64 requests together, one by one, in random order, in small batches."""
    contents = mixed_prompts * 8
    together = ask(make_engine(), contents)
    order = random.Random(0).sample(range(64), 64)
    same_answers(together, ask(make_engine(), contents, order=order))
    same_answers(together, ask(make_engine(), contents, order=order, together=False))
    same_answers(together, ask(make_engine(max_batch_size=5), contents, order=order))


def test_group_members_and_seeds_and_steps_differ_and_a_rerun_is_the_same(make_engine, ask):
    """B22: one shared prompt; rollouts, tasks, seeds, steps, modes draw from different streams, a rerun from the same."""
    streams = [{}, {"rollout_idx": "1"}, {"seed": 42}, {"global_step": 1}, {"mode": "val"}, {"task_id": "other"}]
    answers = [tuple(ask(make_engine(max_tokens=32), ["hello"], **stream)[0].completion_ids) for stream in streams]
    assert len(set(answers)) == len(streams)
    assert answers == [tuple(ask(make_engine(max_tokens=32), ["hello"], **stream)[0].completion_ids) for stream in streams]


def test_calls_of_one_run_differ(make_engine):
    """The context counts its calls: two equal questions in one workflow run get different answers, in order."""

    async def run():
        REQUEST.set(RequestContext(seed=1, task_id="a"))
        messages = [{"role": "user", "content": "hello"}]
        engine = make_engine(max_tokens=32)
        return [(await engine.get_model_response(messages)).completion_ids for _ in range(2)]

    first = asyncio.run(run())
    assert first[0] != first[1]
    assert first == asyncio.run(run())


def test_one_request_is_one_row(make_engine, ask):
    """B21: 12 requests, 12 answers, 12 rows; nothing is multiplied inside."""
    engine = make_engine()
    answers = ask(engine, ["a", "b", "c"] * 4)
    assert len(answers) == 12
    metrics = engine.pop_metrics()
    assert metrics["rollout/requests"] == 12
    assert metrics["rollout/tokens"] == sum(answer.completion_length for answer in answers)
    assert metrics["rollout/prompt_tokens"] == sum(answer.prompt_length for answer in answers)
    assert metrics["rollout/steps"] == max(answer.completion_length for answer in answers)
    assert set(engine.pop_metrics().values()) == {0.0}


def test_a_request_joins_while_others_are_being_answered(make_engine, ask, same_answers):
    async def late():
        async def one(i, delay):
            REQUEST.set(RequestContext(seed=1, task_id=str(i)))
            for _ in range(delay):
                await asyncio.sleep(0)
            return await engine.get_model_response([{"role": "user", "content": "x" * i}])

        return await asyncio.gather(*[one(i, 3 * i) for i in range(6)])

    engine = make_engine()
    joined = asyncio.run(late())
    steps = engine.pop_metrics()["rollout/steps"]
    assert steps < sum(answer.completion_length for answer in joined)
    same_answers(joined, ask(engine, ["x" * i for i in range(6)], together=False))


# ------------------------------------------------------------------------------------------------------------ honest ends


def test_finish_reason_and_text_and_the_end_token(make_engine, tokenizer, ask, mixed_prompts):
    """B26: `stop` iff an end token was sampled, which stays in completion_ids but not in the text; `length` at the limit."""
    for answer in ask(make_engine(max_tokens=10), mixed_prompts * 3):
        stopped = answer.completion_ids[-1] == tokenizer.eos_token_id
        assert answer.finish_reason == ("stop" if stopped else "length")
        assert stopped or answer.completion_length == 10
        assert tokenizer.eos_token_id not in answer.completion_ids[:-1]
        assert answer.text == tokenizer.decode(answer.completion_ids, skip_special_tokens=True)


def test_an_end_token_at_the_very_limit_is_a_stop(make_engine, ask):
    full = next(
        a for a in ask(make_engine(max_tokens=30), ["a", "b", "c", "d"] * 8) if a.finish_reason == "stop" and a.completion_length > 1
    )
    contents = ["a", "b", "c", "d"] * 8
    index = [a.completion_ids for a in ask(make_engine(max_tokens=30), contents)].index(full.completion_ids)
    at_limit = ask(make_engine(max_tokens=full.completion_length), contents)[index]
    below = ask(make_engine(max_tokens=full.completion_length - 1), contents)[index]
    assert (at_limit.completion_ids, at_limit.finish_reason) == (full.completion_ids, "stop")
    assert (below.completion_ids, below.finish_reason) == (full.completion_ids[:-1], "length")


def test_every_end_id_of_the_checkpoint_and_the_tokenizer_stops(make_engine, make_model, tokenizer, ask):
    """B26: ids 50 and 60 from the generation config, and the tokenizer's own."""
    model = make_model(spread=1e-3)
    model.generation_config.eos_token_id = [50, 60]
    ends = {50, 60, tokenizer.eos_token_id}
    answers = ask(make_engine(model, max_tokens=200), ["a"] * 30)
    assert {a.completion_ids[-1] for a in answers if a.finish_reason == "stop"} == ends
    assert not any(ends & set(a.completion_ids[:-1]) for a in answers)


def test_a_prompt_over_the_limit_ends_the_episode_and_is_never_cut(make_engine, ask):
    """B26: limit 8, prompts of 8 and 9 tokens (three of the template)."""
    engine = make_engine(max_prompt_length=8)
    assert ask(engine, ["12345"])[0].prompt_length == 8
    with pytest.raises(TerminationEvent) as event:
        ask(engine, ["123456"])
    assert event.value.reason is TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED


def test_more_positions_than_the_model_has_is_an_error_at_the_request(make_engine, make_model, ask):
    model = make_model(max_position_embeddings=20)
    assert ask(make_engine(model, max_tokens=15), ["12"])[0].prompt_length == 5
    with pytest.raises(ValueError, match="max_position_embeddings"):
        ask(make_engine(model, max_tokens=15), ["123"])


def test_the_sampling_parameters_follow_the_mode(model, tokenizer, ask):
    params = {"train": SamplingParams(max_tokens=3), "val": SamplingParams(max_tokens=2, temperature=0.0)}
    engine = HFEngine(EngineSetup(model, tokenizer, **params))
    assert ask(engine, ["aa"], mode="train")[0].completion_length == 3
    assert ask(engine, ["aa"], mode="val")[0].completion_length == 2
    greedy = ask(engine, ["aa", "aa"], mode="greedy")
    assert greedy[0].completion_ids == greedy[1].completion_ids
    assert greedy[0].completion_ids[:2] == ask(engine, ["aa"], mode="val")[0].completion_ids
    assert ask(engine, ["aa"], overrides={"max_tokens": 1})[0].completion_length == 1


def test_a_cut_off_distribution_is_warned_of_once(make_engine, ask, caplog):
    """B20: top-k and top-p break the equality with the trainer's log-probs; greedy does not."""
    with caplog.at_level(logging.WARNING, logger="rllm_lightning"):
        ask(make_engine(sampling={"temperature": 0.0, "top_k": 1}), ["a"])
        assert not caplog.records
        engine = make_engine(sampling={"top_k": 5})
        ask(engine, ["a", "b"])
        ask(engine, ["a", "b"])
    assert [record.message for record in caplog.records if "top_k=5" in record.message] == [caplog.records[0].message]


# ------------------------------------------------------------------------------------------------------ modes and weights


class _Dropout(torch.nn.Module):
    """Drops half of a layer's output, and notes the mode it ran in."""

    def __init__(self, inner, modes):
        super().__init__()
        self.inner = inner
        self.modes = modes

    def forward(self, *args):
        self.modes.append(self.training)
        return torch.nn.functional.dropout(self.inner(*args), 0.5, self.training)


def test_sampling_runs_in_eval_mode_and_leaves_the_policys_modes_alone(make_engine, model, ask, same_answers, mixed_prompts):
    """B23: dropout .5 and the policy in train mode, but for one part that the user froze in eval mode."""
    expected = ask(make_engine(), mixed_prompts)
    modes = []
    dropping = copy.deepcopy(model)
    dropping.model.layers[0].mlp.down_proj = _Dropout(dropping.model.layers[0].mlp.down_proj, modes)
    dropping.train()
    dropping.model.layers[1].eval()
    before = [module.training for module in dropping.modules()]
    engine = make_engine(dropping)
    noted = engine._the_sampler().model.causal_lm.model.layers[0].mlp.down_proj.modes
    same_answers(expected, ask(engine, mixed_prompts))
    assert noted
    assert not any(noted)
    assert [module.training for module in dropping.modules()] == before


def test_new_weights_are_sampled_from_after_an_update(make_engine, model, ask, same_answers, mixed_prompts):
    for dtype in (None, "bfloat16"):
        policy, changed = copy.deepcopy(model), copy.deepcopy(model)
        engine = make_engine(policy, dtype=dtype)
        before = ask(engine, mixed_prompts)
        with torch.no_grad():
            for parameters in (policy.parameters(), changed.parameters()):
                for parameter in parameters:
                    parameter.mul_(1.5)
        engine.on_weights_updated(7)
        after = ask(engine, mixed_prompts)
        assert [a.completion_ids for a in after] != [a.completion_ids for a in before]
        assert {a.weight_version for a in before} == {0}
        assert {a.weight_version for a in after} == {7}
        same_answers(after, ask(make_engine(changed, dtype=dtype), mixed_prompts))


def test_a_low_precision_copy_leaves_the_policy_untouched(make_engine, model, ask, reference, mixed_prompts):
    before = copy.deepcopy(model.state_dict())
    engine = make_engine(dtype="bfloat16")
    answers = ask(engine, mixed_prompts)
    copied = engine._the_sampler().model.causal_lm
    assert {p.dtype for p in copied.parameters()} == {torch.bfloat16}
    assert copied.model.rotary_emb.inv_freq.dtype == torch.float32
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
    errors = torch.cat([torch.tensor(a.logprobs) - reference(model, a) for a in answers])
    assert 1e-5 < errors.abs().mean() < 0.1


def test_sampling_ignores_the_trainers_autocast_and_makes_no_gradients(make_engine, model, ask, reference):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        answer = ask(make_engine(), ["hello"])[0]
    torch.testing.assert_close(torch.tensor(answer.logprobs), reference(model, answer), rtol=0, atol=2e-5)
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


def test_low_rank_adapters_take_part(make_engine, model, ask, reference):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    answer = ask(make_engine(adapted), ["hello"])[0]
    torch.testing.assert_close(torch.tensor(answer.logprobs), reference(adapted, answer), rtol=0, atol=2e-5)
    assert not torch.allclose(reference(adapted, answer), reference(model, answer), atol=1e-2)


# --------------------------------------------------------------------------------------------------- errors and shutdown


class _Fragile(torch.nn.Module):
    broken = False  # of all copies

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden):
        if _Fragile.broken:
            raise MemoryError("out of memory in a layer")
        return self.inner(hidden)


def test_a_failing_step_rejects_every_open_request_with_the_real_exception(make_engine, model, ask, monkeypatch):
    fragile = copy.deepcopy(model)
    fragile.lm_head = _Fragile(fragile.lm_head)
    engine = make_engine(fragile, max_batch_size=4)

    async def run():
        calls = [asyncio.create_task(engine.get_model_response([{"role": "user", "content": "hello"}])) for _ in range(8)]
        for _ in range(4):
            await asyncio.sleep(0)
        monkeypatch.setattr(_Fragile, "broken", True)
        return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 30)

    errors = asyncio.run(run())
    assert [str(error) for error in errors] == ["out of memory in a layer"] * 8
    monkeypatch.undo()
    assert ask(engine, ["works again"])[0].completion_length > 0


def test_a_diverged_policy_is_an_error(make_engine, model, ask):
    with torch.no_grad():
        model.lm_head.weight.fill_(math.nan)
    with pytest.raises(FloatingPointError, match="diverged"):
        ask(make_engine(), ["a"])


def test_a_cancelled_request_leaves_the_batch_and_the_others_are_answered(make_engine, ask, same_answers):
    engine = make_engine(max_tokens=60)
    contents = ["x" * i for i in range(6)]
    alone = ask(engine, contents)

    async def run():
        async def one(i):
            REQUEST.set(RequestContext(seed=1, task_id=str(i)))
            return await engine.get_model_response([{"role": "user", "content": contents[i]}])

        tasks = [asyncio.create_task(one(i)) for i in range(6)]
        for _ in range(4):
            await asyncio.sleep(0)
        tasks[0].cancel()
        tasks[3].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    answers = asyncio.run(run())
    assert [type(a).__name__ for i, a in enumerate(answers) if i in (0, 3)] == ["CancelledError"] * 2
    same_answers([alone[i] for i in (1, 2, 4, 5)], [answers[i] for i in (1, 2, 4, 5)])
    assert not engine._the_sampler().batch.has_work


def test_weights_may_change_when_only_cancelled_requests_are_left(make_engine):
    engine = make_engine(max_tokens=60)

    async def run():
        task = asyncio.create_task(engine.get_model_response([{"role": "user", "content": "a"}]))
        for _ in range(4):
            await asyncio.sleep(0)
        with pytest.raises(AssertionError, match="1 requests"):
            engine.on_weights_updated(1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        engine.on_weights_updated(1)
        return await engine.get_model_response([{"role": "user", "content": "a"}])

    assert asyncio.run(run()).weight_version == 1


def test_an_engine_outlives_an_event_loop_that_was_interrupted(make_engine, ask):
    engine = make_engine(max_tokens=60)

    async def interrupted():
        left_open = asyncio.create_task(engine.get_model_response([{"role": "user", "content": "a"}]))
        for _ in range(4):
            await asyncio.sleep(0)
        assert not left_open.done()

    expected = ask(make_engine(max_tokens=60), ["hello"])[0].completion_ids
    asyncio.run(interrupted())
    assert ask(engine, ["hello"])[0].completion_ids == expected

    loop = asyncio.new_event_loop()  # closed without its tasks being cancelled
    loop.run_until_complete(interrupted())
    loop.close()
    assert ask(engine, ["hello"])[0].completion_ids == expected


def test_shutdown_ends_open_requests_and_may_be_repeated(make_engine):
    engine = make_engine(max_tokens=60)

    async def run():
        task = asyncio.create_task(engine.get_model_response([{"role": "user", "content": "a"}]))
        for _ in range(4):
            await asyncio.sleep(0)
        await engine.shutdown()
        await engine.shutdown()
        return await asyncio.gather(task, return_exceptions=True)

    assert isinstance(asyncio.run(asyncio.wait_for(run(), 30))[0], asyncio.CancelledError)
    asyncio.run(engine.shutdown())


def test_mistakes_in_the_setup_are_named(model, tokenizer, make_engine):
    assert ENGINES.get("hf") is HFEngine
    with pytest.raises(ValueError, match=r"EngineSetup\.model"):
        HFEngine(EngineSetup())
    with pytest.raises(ValueError, match=r"rollout_engine\.dtype.*'half'"):
        make_engine(dtype="half")
    with pytest.raises(ValueError, match=r"rollout_engine\.max_batch_size"):
        make_engine(max_batch_size=0)
    with pytest.raises(ValueError, match=r"rollout_engine\.kept_state_mb"):
        make_engine(kept_state_mb=-1)
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    with pytest.raises(ValueError, match="chat template"):
        make_engine(chat=bare)
