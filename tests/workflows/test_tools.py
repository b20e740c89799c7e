"""Functions that a model calls: how it is told of them, how its calls are read, and what it is told of the outcome."""

import asyncio
import copy
import json
import threading
import time
from typing import Any, Literal

import pytest

from rllm_lightning.models.tiny import tiny_tokenizer
from rllm_lightning.rollout.chat import Chat
from rllm_lightning.workflows.multi_turn import MultiTurnWorkflow
from rllm_lightning.workflows.tool_format import ToolFormat, tool_format_of
from rllm_lightning.workflows.tools import ToolBox, load_tool

TASK = {"id": "t", "question": "2+2?", "answer": "4", "data_source": "sums"}


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


def size_of(kind: Literal["small", "large"], weights: list[float]) -> dict:
    """Sizes.

    Args:
        kind: which.
        weights: some.
    """
    return {"kind": kind, "total": sum(weights)}


def fail(how: str) -> str:
    """Fail.

    Args:
        how: in which way.
    """
    raise {"value": ValueError("bad value"), "stop": StopIteration(), "exit": SystemExit(3), "time": TimeoutError("own limit")}[how]


def wait(seconds: float) -> str:
    """Wait.

    Args:
        seconds: how long.
    """
    time.sleep(seconds)
    return "waited"


async def greet(name: str) -> str:
    """Greet.

    Args:
        name: whom.
    """
    await asyncio.sleep(0)
    return f"hello {name}"


async def wait_async(seconds: float) -> str:
    """Wait.

    Args:
        seconds: how long.
    """
    await asyncio.sleep(seconds)
    return "waited"


def call(function, timeout=10.0, **arguments):
    return asyncio.run(ToolBox([function], timeout).call(function.__name__, arguments))


# -------------------------------------------------------------------------------------------------------------------- calls


@pytest.mark.parametrize(
    ("function", "arguments", "text"),
    [
        (add, {"a": 2, "b": 3}, "5"),
        (add, {"a": 2}, "3"),
        (add, {"a": "2", "b": 3.0}, "5"),  # what models often send
        (size_of, {"kind": "small", "weights": [1, 2]}, '{"kind": "small", "total": 3.0}'),
        (greet, {"name": "Ada"}, "hello Ada"),
    ],
)
def test_a_result_is_told_as_text(function, arguments, text):
    assert call(function, **arguments) == text


@pytest.mark.parametrize(
    ("function", "arguments", "text"),
    [
        (add, {"a": "two"}, "Error: ValueError: a: expected a whole number, got 'two'"),
        (add, {"a": 2.5}, "Error: ValueError: a: expected a whole number, got 2.5"),
        (add, {}, "Error: TypeError: missing a required argument: 'a'"),
        (add, {"a": 1, "c": 1}, "Error: TypeError: got an unexpected keyword argument 'c'"),
        (fail, {"how": "value"}, "Error: ValueError: bad value"),
        (fail, {"how": "stop"}, "Error: RuntimeError: StopIteration"),
        (fail, {"how": "exit"}, "Error: RuntimeError: SystemExit: 3"),
        (fail, {"how": "time"}, "Error: TimeoutError: own limit"),
        (fail, {"how": "else"}, "Error: KeyError: 'else'"),
    ],
)
def test_what_goes_wrong_is_told_as_text(function, arguments, text):
    assert call(function, **arguments) == text


@pytest.mark.parametrize("function", [wait, wait_async])
def test_a_call_has_a_time_limit_and_holds_up_nobody(function):
    start = time.monotonic()
    assert call(function, timeout=0.1, seconds=20) == f"Error: {function.__name__} took longer than 0.1 s"
    assert time.monotonic() - start < 15
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "tool wait")  # the process can end


def test_an_unknown_tool_is_told_with_the_known_ones():
    assert asyncio.run(ToolBox([add, greet], 1.0).call("ad", {})) == "Error: there is no tool 'ad'; there are: add, greet"


# ------------------------------------------------------------------------------------------------------------------- loading


def test_a_tool_is_found_by_its_import_path(tmp_path, monkeypatch):
    (tmp_path / "my_tools.py").write_text('def now() -> str:\n    """The time."""\n    return "noon"\n')
    monkeypatch.chdir(tmp_path)
    assert asyncio.run(ToolBox(["my_tools:now"], 1.0).call("now", {})) == "noon"
    assert load_tool("my_tools.now").name == "now"


def test_the_schema_comes_from_hints_and_docstring():
    function = load_tool(add).schema["function"]
    assert (function["name"], function["description"]) == ("add", "Add two numbers.")
    assert function["parameters"]["properties"]["a"] == {"type": "integer", "description": "the first."}
    assert function["parameters"]["required"] == ["a"]


def undescribed(a: int) -> int:
    """Nothing about a."""


def unhinted(a):
    """Unhinted.

    Args:
        a: something.
    """


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([undescribed], "tools: undescribed: .*under Args:"),
        ([unhinted], "tools: unhinted: .*type hint"),
        (["json:no_such"], "cannot import 'json:no_such'"),
        (["nowhere_at_all:f"], "cannot import 'nowhere_at_all:f'"),
        (["add"], "no import path"),
        ([3], "is no function"),
        (["string:digits"], "is no function"),
        ("json:loads", "expected a list"),
        ([add, add], "two tools have the same name"),
    ],
)
def test_what_cannot_be_a_tool_is_refused_by_name(tools, message):
    with pytest.raises(ValueError, match=message):
        ToolBox(tools, 1.0)


def test_the_time_limit_must_be_positive():
    with pytest.raises(ValueError, match="tool_timeout: must be above 0"):
        ToolBox([add], 0.0)


# -------------------------------------------------------------------------------------------------------- forms of templates

HEADER = "{{ '<|user|>' if m.role != 'assistant' else '<|assistant|>' }}"
TOLD = "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
ASKS = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
NAME, ARGUMENTS = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"
QWEN = (
    TOLD
    + "{% for m in messages %}"
    + HEADER
    + "{{ m.content }}{% for c in m.tool_calls %}\n<tool_call>\n"
    + f'{{"name": "{NAME}", "arguments": {ARGUMENTS}}}'
    + "\n</tool_call>{% endfor %}<|end|>{% endfor %}"
    + ASKS
)
LLAMA = (
    TOLD
    + "{% for m in messages %}"
    + HEADER
    + "{% if m.tool_calls %}{% for c in m.tool_calls %}"
    + f'{{"name": "{NAME}", "parameters": {ARGUMENTS}}}'
    + "{% endfor %}{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
    + ASKS
)
MISTRAL = (
    TOLD
    + "{% for m in messages %}"
    + HEADER
    + "{% if m.tool_calls %}[CALLS] [{% for c in m.tool_calls %}"
    + f'{{"name": "{NAME}", "arguments": {ARGUMENTS}, "id": "{{{{ c.id }}}}"}}'
    + "{% endfor %}]{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
    + ASKS
)
TAGGED = QWEN.replace(f'{{"name": "{NAME}", "arguments": {ARGUMENTS}}}', f"<function={NAME}>{ARGUMENTS}</function>")
REFUSING = "{{ raise_exception('no tools here') if tools else '' }}" + QWEN.removeprefix(TOLD)


def tokenizer_with(template, special=()):
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = template
    tokenizer.add_special_tokens({"extra_special_tokens": [*tokenizer.extra_special_tokens, *special]})
    return tokenizer


@pytest.mark.parametrize(
    ("template", "special", "expected"),
    [
        (QWEN, (), ToolFormat("<tool_call>", native=True)),
        (LLAMA, (), ToolFormat("", native=True)),
        (MISTRAL, (), ToolFormat("[CALLS]", native=True)),
        (MISTRAL, ("[CALLS]",), ToolFormat("", native=True)),  # a decoded reply lacks special tokens
        (TAGGED, (), ToolFormat("<tool_call>", native=False)),  # not JSON: asked for in words
        (REFUSING, (), ToolFormat("<tool_call>", native=False)),
        (tiny_tokenizer().chat_template, (), ToolFormat("<tool_call>", native=False)),
        (None, (), ToolFormat("<tool_call>", native=False)),
    ],
)
def test_the_form_of_a_call_is_the_templates_own(template, special, expected):
    assert tool_format_of(tokenizer_with(template, special)) == expected


@pytest.mark.parametrize(("template", "special"), [(QWEN, ()), (LLAMA, ()), (MISTRAL, ()), (MISTRAL, ("[CALLS]",))])
def test_what_a_template_writes_is_read_back(template, special):
    """Whatever the template writes for a call, the reply that a model trained on it samples, is read as that call."""
    tokenizer = tokenizer_with(template, special)
    asked = [{"role": "user", "content": "q"}]
    calls = [{"type": "function", "id": "call12345", "function": {"name": "add", "arguments": {"a": 1, "b": {"c": ["}", '"']}}}}]
    chat = Chat(tokenizer)
    whole = chat.render([*asked, {"role": "assistant", "content": "", "tool_calls": calls}], for_answer=False)
    reply = chat.decode(chat.encode(whole.removeprefix(chat.render(asked))))
    (found,) = tool_format_of(tokenizer).read(reply)
    assert (found.name, found.arguments, found.problem) == ("add", {"a": 1, "b": {"c": ["}", '"']}}, "")


@pytest.mark.parametrize(
    ("marker", "reply", "found"),
    [
        (
            "<tool_call>",
            'so <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call> and <tool_call> {"name": "g"}',
            [("f", {"a": 1}), ("g", {})],
        ),
        ("<tool_call>", '{"name": "f", "arguments": {}}', []),
        ("<tool_call>", "4", []),
        ("<tool_call>", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', [("f", {"a": 1})]),
        ("[CALLS]", '[CALLS][{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]', [("f", {}), ("g", {})]),
        ("", ' {"name": "f", "parameters": {"a": 1}}', [("f", {"a": 1})]),
        ("", '{"answer": 4}', []),
        ("", "[1, 2]", []),
        ("", "{4}", []),
        ("", 'the answer is {"name": "f"}', []),
    ],
)
def test_calls_are_read_from_a_reply(marker, reply, found):
    assert [(call.name, call.arguments) for call in ToolFormat(marker).read(reply)] == found


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        ("<tool_call>add(1, 2)</tool_call>", "not valid JSON"),
        ('<tool_call>{"name": "f", "arguments": ', "not valid JSON"),
        ('<tool_call>{"arguments": {}}', '"name" and "arguments"'),
        ("<tool_call>7", '"name" and "arguments"'),
        ('<tool_call>{"name": "f", "arguments": [1]}', "arguments of f must be a JSON object"),
        ('<tool_call>{"name": "f", "arguments": "{"}', "arguments of f must be a JSON object"),
        ("<tool_call>" + "[" * 100_000, "not valid JSON"),
    ],
)
def test_a_call_that_cannot_be_read_says_why(reply, problem):
    (call,) = ToolFormat().read(reply)
    assert problem in call.problem


# --------------------------------------------------------------------------------------------------------------- in a workflow


def called(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.fixture
def ask(play):
    def run(replies, **arguments):
        def right(task, response):
            return float(response == task["answer"])

        return play(MultiTurnWorkflow, replies, TASK, environment="retry", reward_function=right, **{"tools": [add, fail], **arguments})

    return run


def test_results_are_told_and_the_answer_comes_after_them(ask):
    episode = ask([called("add", a=2, b=2), "4"])
    first, second = episode.trajectories[0].steps
    assert (first.reward, second.reward, first.done, second.done) == (0.0, 1.0, False, True)
    assert first.action == [{"name": "add", "arguments": {"a": 2, "b": 2}}]
    assert second.observation == "<tool_response>4</tool_response>"
    assert episode.metrics == {
        "agent_acc": 1.0,
        "num_turns": 2.0,
        "num_tool_calls": 1.0,
        "num_tool_errors": 0.0,
        "first_answer_acc": 1.0,
    }


def test_the_model_is_told_of_the_tools(ask):
    system = ask(["4"], system_prompt="be brief").trajectories[0].steps[0].chat_completions[0]
    assert system["role"] == "system"
    assert system["content"].startswith("be brief")
    assert '"name": "add"' in system["content"]
    assert "<tool_call>" in system["content"]


def test_errors_are_told_and_counted(ask):
    replies = [called("fail", how="value") + called("ad") + "<tool_call>add(1)", called("add", a=1), "4"]
    episode = ask(replies)
    told = [m["content"] for m in episode.trajectories[0].steps[1].chat_completions if "Error" in m["content"]]
    assert [text.removeprefix("<tool_response>").split(":")[0] for text in told] == ["Error"] * 3
    assert (episode.metrics["num_tool_calls"], episode.metrics["num_tool_errors"]) == (4.0, 3.0)
    assert episode.is_correct


def test_calls_count_as_turns(ask):
    episode = ask([called("add", a=1)] * 3, max_turns=3)
    assert episode.termination_reason == "max_turns_exceeded"
    assert episode.trajectories[0].reward == 0.0
    assert not episode.is_correct


def test_a_cut_call_is_not_made(ask):
    episode = ask([called("add", a=1)], max_tokens=20)
    assert episode.metrics["num_tool_calls"] == 0.0
    assert episode.termination_reason == "max_response_length_exceeded"


def test_a_state_holds_what_tools_said_since_the_last_observation(ask):
    one, other = (ask([called("add", a=a), "5", "4"]).trajectories[0].steps for a in (1, 2))
    keys = [[step.info["state_key"] for step in steps] for steps in (one, other)]
    assert keys[0][0] == keys[1][0]
    assert keys[0][1] != keys[1][1]
    assert keys[0][2] == keys[1][2]  # both have answered 5


def test_a_template_that_knows_tools_gets_them_and_the_raw_reply(executor):
    """B24: the call goes back as it was sampled, not as the template would write it; so the tokens before it stay."""
    from rllm_lightning.rollout.conversations import Conversations, Span
    from rllm_lightning.rollout.engine import EngineSetup
    from rllm_lightning.rollout.scripted import ScriptedEngine
    from rllm_lightning.types import ModelOutput

    tokenizer = tokenizer_with(QWEN)
    chat = Chat(tokenizer)
    conversations = Conversations(chat)
    replies = iter(['<tool_call>{"arguments": {"b":2, "a":2},  "name": "add"}', "4"])  # in an order and spacing of its own
    seen: list[Any] = []

    class Engine(ScriptedEngine):
        async def get_model_response(self, messages, *, tools=None, **overrides):
            seen.append(tools)
            prompt, text = conversations.prompt("run", messages, tools), next(replies)
            ids = [*chat.encode(text), tokenizer.eos_token_id]
            conversations.remember("run", prompt, Span(f"{text}<|end|>", ids))
            return ModelOutput(text=text, prompt_ids=prompt.ids, completion_ids=ids, finish_reason="stop")

    engine = Engine(EngineSetup(tokenizer=tokenizer), answers=["-"])
    workflow = MultiTurnWorkflow(engine, executor, reward_function=lambda task, response: float(response == "4"), tools=[add])
    episode = asyncio.run(workflow.run_with_termination_handling(TASK, "t:0"))
    first, second = episode.trajectories[0].steps
    assert episode.is_correct
    assert seen == [[load_tool(add).schema]] * 2
    assert chat.decode(first.prompt_ids, special=True).startswith("<|system|>[")
    assert first.chat_completions[0] == {"role": "user", "content": TASK["question"]}  # the template tells, no message of ours
    assert second.chat_completions[2] == {"role": "tool", "name": "add", "content": "4"}
    assert second.prompt_ids == first.prompt_ids + first.response_ids + chat.encode("<|user|>4<|end|><|assistant|>")


def test_the_models_own_engine_hands_the_tools_to_the_template():
    from rllm_lightning.models.tiny import tiny_model
    from rllm_lightning.rollout.engine import EngineSetup, SamplingParams
    from rllm_lightning.rollout.hf import HFEngine

    engine = HFEngine(EngineSetup(tiny_model(0)[0], tokenizer_with(QWEN), SamplingParams(max_tokens=2)))
    schemas = [load_tool(add).schema]

    async def ask():
        messages = [{"role": "user", "content": "hi"}]
        outputs = [await engine.get_model_response(messages, tools=tools) for tools in (schemas, None)]
        await engine.shutdown()
        return [engine._chat.decode(output.prompt_ids, special=True) for output in outputs]

    with_tools, without = asyncio.run(ask())
    assert without == "<|user|>hi<|end|><|assistant|>"
    assert with_tools.endswith(f"<|end|>{without}")
    assert '"name": "add"' in with_tools
