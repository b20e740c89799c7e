"""A later turn begins with the very tokens of the turns before it, or anew."""

import asyncio
import copy

import pytest

from rllm_lightning.rollout import conversations
from rllm_lightning.rollout.chat import Chat
from rllm_lightning.rollout.conversations import Conversations, Span
from rllm_lightning.rollout.engine import REQUEST, RequestContext

QUESTION = {"role": "user", "content": "hi"}
FOLLOW_UP = {"role": "user", "content": "more"}


@pytest.fixture
def chat(tokenizer):
    """As the tiny tokenizer, but `ab` is a token of its own, which encoding prefers to `a`, `b`."""
    merging = copy.deepcopy(tokenizer)
    merging.add_tokens(["ab"])
    return Chat(merging)


def odd_answer(chat):
    """`xab` in pieces that encoding would not choose, with the end token."""
    tokenizer = chat.tokenizer
    ids = [*tokenizer.convert_tokens_to_ids(["x", "a", "b"]), tokenizer.eos_token_id]
    assert tokenizer.decode(ids[:-1]) == "xab"
    assert chat.encode("xab") != ids[:-1]
    return Span("xab<|end|>", ids)


def turn(content):
    return [QUESTION, {"role": "assistant", "content": content}, FOLLOW_UP]


def test_the_next_prompt_starts_with_prompt_and_response_unchanged(chat):
    """B24: one word in two odd pieces, then another message."""
    memory, answer = Conversations(chat), odd_answer(chat)
    first = memory.prompt("run", [QUESTION])
    memory.remember("run", first, answer)
    second = memory.prompt("run", turn("xab"))
    assert second.ids == first.ids + answer.ids + chat.encode("<|user|>more<|end|><|assistant|>")
    assert chat.decode(second.ids, special=True) == second.text

    memory.remember("run", second, answer)
    third = memory.prompt("run", [*turn("xab"), {"role": "assistant", "content": "xab"}, FOLLOW_UP])
    assert third.ids[: len(second.ids) + len(answer.ids)] == second.ids + answer.ids


def test_an_answer_cut_at_the_limit_goes_on_too(chat):
    """No end token was sampled: the template's own closes the message."""
    memory, answer = Conversations(chat), odd_answer(chat)
    first = memory.prompt("run", [QUESTION])
    memory.remember("run", first, Span("xab", answer.ids[:-1]))
    second = memory.prompt("run", turn("xab"))
    assert second.ids == first.ids + answer.ids[:-1] + chat.encode("<|end|><|user|>more<|end|><|assistant|>")


@pytest.mark.parametrize("content", ["xa", "xabc", " xab", "other"])
def test_changed_history_is_encoded_anew(chat, content):
    """B24: otherwise a new segment starts; the prompt is what the messages say."""
    memory = Conversations(chat)
    memory.remember("run", memory.prompt("run", [QUESTION]), odd_answer(chat))
    assert memory.prompt("run", turn(content)).ids == chat.encode(chat.render(turn(content)))


def test_a_template_that_strips_history_begins_anew(chat):
    stripping = copy.deepcopy(chat.tokenizer)
    stripping.chat_template = stripping.chat_template.replace("message['content']", "message['content'] | trim")
    memory = Conversations(Chat(stripping))
    memory.remember("run", memory.prompt("run", [QUESTION]), Span(" x<|end|>", [9, 9, 9]))
    assert 9 not in memory.prompt("run", turn(" x")).ids


def test_runs_do_not_share_their_tokens(chat):
    memory = Conversations(chat)
    memory.remember("run", memory.prompt("run", [QUESTION]), odd_answer(chat))
    assert memory.prompt("other", turn("xab")).ids == chat.encode(chat.render(turn("xab")))


def test_memory_is_bounded(chat, monkeypatch):
    monkeypatch.setattr(conversations, "MAX_RUNS", 2)
    memory = Conversations(chat)
    for run in ("a", "b", "a", "c"):
        memory.remember(run, memory.prompt(run, [QUESTION]), odd_answer(chat))
    assert list(memory._turns) == ["a", "c"]


def test_conversations_that_have_ended_are_not_kept_from_step_to_step(make_engine):
    """A run of many steps held the last 4,096 conversations, each turn with all before it."""

    async def rollout(step):
        REQUEST.set(RequestContext(seed=1, task_id="a", global_step=step))
        await engine.get_model_response([QUESTION])
        assert len(engine._conversations._turns) == 1
        await engine.rest()

    engine = make_engine(max_tokens=3)
    for step in range(3):
        asyncio.run(rollout(step))
    assert not engine._conversations._turns


def test_an_engines_turns_go_on_from_the_sampled_tokens(make_engine):
    """B24, through the engine: three turns of sampled text, with and without an end token."""

    async def run():
        REQUEST.set(RequestContext(seed=1, task_id="a"))
        messages, outputs = [QUESTION], []
        for _ in range(3):
            outputs.append(await engine.get_model_response(messages))
            messages = [*messages, {"role": "assistant", "content": outputs[-1].content}, FOLLOW_UP]
        return outputs

    for max_tokens in (3, 30):
        engine = make_engine(max_tokens=max_tokens)
        first, second, third = asyncio.run(run())
        for earlier, later in ((first, second), (second, third)):
            before = earlier.prompt_ids + earlier.completion_ids
            assert later.prompt_ids[: len(before)] == before
