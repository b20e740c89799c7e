"""Canned answers with exact log-probs."""

import asyncio
import math
import subprocess
import sys

import pytest

from rllm_lightning.registry import ENGINES
from rllm_lightning.rollout.engine import REQUEST, EngineSetup, RequestContext, SamplingParams
from rllm_lightning.rollout.scripted import END, ScriptedEngine, decode, encode, render
from rllm_lightning.types import TerminationEvent, TerminationReason

ASK = [{"role": "user", "content": "q"}]


def answer(engine, request=None, messages=ASK, **overrides):
    async def ask():
        REQUEST.set(request)
        return await engine.get_model_response(messages, **overrides)

    return asyncio.run(ask())


def scripted(answers, **setup):
    return ScriptedEngine(EngineSetup(**setup), answers=answers)


def test_an_answer_is_its_characters_and_an_end_token():
    output = answer(scripted(["hi"]))
    assert output.completion_ids == [104, 105, END]
    assert (output.text, output.content, output.finish_reason) == ("hi", "hi", "stop")
    assert (output.prompt_length, output.completion_length) == (len(render(ASK)), 3)
    assert output.logprobs == [0.0, 0.0, 0.0]  # the only answer: certain


def test_log_probs_are_those_of_a_uniform_choice_among_the_answers():
    engine = scripted(["ab", "ac", "b", "b"])
    # a: 2 of 4; then b or c: 1 of 2; then the end: certain. b: 2 of 4, end certain.
    expected = {"ab": [0.5, 0.5, 1.0], "ac": [0.5, 0.5, 1.0], "b": [0.5, 1.0]}
    outputs = [answer(engine, RequestContext(seed=seed)) for seed in range(20)]
    assert {output.text for output in outputs} == {"ab", "ac", "b"}
    for output in outputs:
        assert output.logprobs == pytest.approx([math.log(p) for p in expected[output.text]])


def test_an_answer_that_begins_another_ends_with_the_choice_to_end():
    engine = scripted(["a", "ab"])
    outputs = {(output := answer(engine, RequestContext(seed=seed))).text: output.logprobs for seed in range(20)}
    half = math.log(0.5)
    assert outputs == {"a": [0.0, half], "ab": [0.0, half, 0.0]}


def test_the_choice_depends_on_the_request_alone():
    engine = scripted([str(i) for i in range(100)])
    texts = [answer(engine, RequestContext(seed=1, task_id=str(i))).text for i in range(10)]
    again = [answer(engine, RequestContext(seed=1, task_id=str(i))).text for i in reversed(range(10))]
    assert texts == again[::-1]
    assert len(set(texts)) > 5


def test_the_calls_of_one_request_differ():
    engine = scripted([str(i) for i in range(100)])
    request = RequestContext()
    assert len({answer(engine, request).text for _ in range(5)}) > 1


def test_greedy_takes_the_most_frequent_answer_with_certainty():
    output = answer(scripted(["a", "b", "b", "c"]), RequestContext(mode="greedy"))
    assert (output.text, output.logprobs) == ("b", [0.0, 0.0])
    assert answer(scripted(["a", "b"]), temperature=0.0).text == "a"


def test_answers_may_depend_on_the_last_user_message():
    engine = scripted({"q": "one", "r": "two"})
    assert answer(engine).text == "one"
    assert answer(engine, messages=[*ASK, {"role": "assistant", "content": "x"}, {"role": "user", "content": "r"}]).text == "two"
    with pytest.raises(ValueError, match=r"nothing is scripted for 's'; there is: 'q', 'r'"):
        answer(engine, messages=[{"role": "user", "content": "s"}])


def test_answers_may_come_from_a_function():
    async def slow(messages, request):
        await asyncio.sleep(0)
        return [f"{messages[-1]['content']}{request.task_id}"]

    assert answer(scripted(lambda messages, request: f"{request.mode}!")).text == "train!"
    assert answer(scripted(slow), RequestContext(task_id="7")).text == "q7"


def test_an_answer_over_the_limit_is_cut_and_says_so():
    """B26: cap 10, ten characters and no end token: finish reason length."""
    engine = scripted(["0123456789"], train=SamplingParams(max_tokens=10), val=SamplingParams(max_tokens=11))
    cut, whole = answer(engine), answer(engine, RequestContext(mode="val"))
    assert (cut.finish_reason, cut.completion_length, cut.text) == ("length", 10, "0123456789")
    assert (whole.finish_reason, whole.completion_length) == ("stop", 11)


def test_a_prompt_over_the_limit_is_refused_and_never_cut():
    """B26: limit 8, prompt 9."""
    length = len(render(ASK))
    assert answer(scripted(["a"], max_prompt_length=length)).prompt_length == length
    with pytest.raises(TerminationEvent) as event:
        answer(scripted(["a"], max_prompt_length=length - 1))
    assert event.value.reason is TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED


def test_the_next_turns_prompt_begins_with_the_last_prompt_and_answer():
    """B24: what was sampled stands unchanged in the next prompt."""
    first = answer(scripted(["yes"]))
    longer = render([*ASK, {"role": "assistant", "content": first.text}, {"role": "user", "content": "sure?"}])
    assert longer[: first.prompt_length + first.completion_length] == first.prompt_ids + first.completion_ids


def test_the_codec_is_reversible():
    text = "naïve → 数\n"
    assert decode(encode(text)) == text


def test_the_weight_version_is_that_of_the_last_update():
    engine = scripted(["a"])
    engine.on_weights_updated(3)
    assert answer(engine).weight_version == 3


@pytest.mark.parametrize("answers", [[], {}, None, 5, "yes"])
def test_answers_must_be_given(answers):
    with pytest.raises(ValueError, match=r"rollout_engine\.answers: expected a non-empty list"):
        scripted(answers)


def test_it_is_registered_and_its_config_key_is_answers():
    from rllm_lightning.config import RolloutEngineConfig
    from rllm_lightning.schema import build, parameters_of

    assert ENGINES.get("scripted") is ScriptedEngine
    assert list(parameters_of(ScriptedEngine)) == ["answers"]
    problems = []
    section = build(RolloutEngineConfig, {"name": "scripted", "answers": ["7", "on"]}, problems)
    assert (section.args, problems) == ({"answers": ["7", "on"]}, [])  # text stays text


def test_it_needs_no_torch():
    code = "import sys, rllm_lightning.rollout.scripted, rllm_lightning.workflows.single_turn; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
