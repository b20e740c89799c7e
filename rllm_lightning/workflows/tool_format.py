"""How a model is told of tools, and how it calls them: as its own chat template writes it, else in a common form.

    chat template --a made-up call, written by it--> ToolFormat --read--> the calls in a reply

A template that knows tools writes a call as JSON with a name and arguments, mostly behind some marker:

    Qwen, Hermes   <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
    Llama 3        {"name": "add", "parameters": {"a": 1}}
    Mistral        [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]

Letting it write one shows which. Where it knows no tools, or writes calls in another way, a system message describes the tools and the
first of these forms. Replies are read by a JSON parser and never evaluated.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

logger = logging.getLogger(__name__)

ARGUMENTS = ("arguments", "parameters")  # where a call's arguments stand
_DECODER = json.JSONDecoder()

# What no template writes of its own accord.
_NAME, _KEY, _VALUE, _TEXT = "probe_name", "probe_key", "probe_value", "probe_text"


@dataclass(frozen=True)
class ToolCall:
    """What the model wants to be called; `problem` says why it cannot be read."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True)
class ToolFormat:
    """Attributes:
    marker: what stands before each call's JSON ("": a reply that is JSON throughout is a call).
    native: whether the chat template itself tells the model of the tools.
    """

    marker: str = "<tool_call>"
    native: bool = False

    def read(self, reply: str) -> list[ToolCall]:
        """The calls in a reply, in their order; none where it is an ordinary answer."""
        if self.marker:
            starts = [match.end() for match in re.finditer(re.escape(self.marker), reply)]
            return [call for start in starts for call in _read_at(reply, start)]
        text = reply.strip()
        calls = _read_at(text, 0) if text[:1] in ("{", "[") else []
        return [] if any(call.problem for call in calls) else calls

    def system_text(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        """What to tell the model of the tools, where its template does not."""
        described = "\n".join(json.dumps(schema["function"]) for schema in schemas)
        example = json.dumps({"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}})
        return f"You may call these functions:\n{described}\nTo call one, write: {self.marker}{example}</tool_call>"

    def result(self, name: str, text: str) -> dict[str, Any]:
        """The message that tells the model what came of its call."""
        if self.native:
            return {"role": "tool", "name": name, "content": text}
        return {"role": "user", "content": f"<tool_response>{text}</tool_response>"}


def _read_at(text: str, start: int) -> list[ToolCall]:
    """The call, or list of calls, whose JSON begins at `start` but for white space."""
    try:
        found, _ = _DECODER.raw_decode(text[start:].lstrip())
    except (json.JSONDecodeError, RecursionError) as error:
        return [ToolCall(problem=f"the call is not valid JSON ({error})")]
    return [_as_call(item) for item in (found if isinstance(found, list) else [found])]


def _as_call(found: Any) -> ToolCall:
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return ToolCall(problem='a call must be a JSON object with "name" and "arguments"')
    arguments: Any = next((found[key] for key in ARGUMENTS if key in found), {})
    if isinstance(arguments, str):  # as in the APIs that send them as text
        try:
            arguments = json.loads(arguments)
        except (json.JSONDecodeError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        return ToolCall(found["name"], problem=f"the arguments of {found['name']} must be a JSON object")
    return ToolCall(found["name"], arguments)


# ------------------------------------------------------------------------------------------------ what the template writes


@lru_cache(maxsize=16)
def tool_format_of(tokenizer: Any) -> ToolFormat:
    """The format of a tokenizer's chat template; the common one for None, and for templates without tools."""
    if getattr(tokenizer, "chat_template", None) is None:
        return ToolFormat()
    asked: list[dict[str, Any]] = [{"role": "user", "content": "question"}]
    tell = {"name": _NAME, "description": "", "parameters": {"type": "object", "properties": {}}}
    told = _render(tokenizer, asked, tools=[{"type": "function", "function": tell}])
    if told is None or _NAME not in told:
        return ToolFormat()
    call = {"type": "function", "id": "call00000", "function": {"name": _NAME, "arguments": {_KEY: _VALUE}}}
    answered = [*asked, {"role": "assistant", "content": _TEXT, "tool_calls": [call]}]
    prompt, written = _render(tokenizer, asked, add_generation_prompt=True), _render(tokenizer, answered)
    marker = None if prompt is None or written is None else _marker(prompt, written, tokenizer)
    if marker is None:
        logger.warning("the chat template writes tool calls in a way that is not read here; a system message asks for JSON instead")
        return ToolFormat()
    return ToolFormat(marker, native=True)


def _render(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> str | None:
    """None where the template refuses, as some do with tools or roles that they do not know."""
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except (TemplateError, TypeError, ValueError):
        return None


def _marker(prompt: str, written: str, tokenizer: Any) -> str | None:
    """What the template puts between the message's text, or the prompt, and the call's JSON; None without JSON.

    Special tokens do not count: the text of a sampled reply lacks them.
    """
    end = max(written.find(f'"{_NAME}"'), 0)
    for match in reversed(list(re.finditer(r"\{", written[:end]))):
        if any(call.name == _NAME and call.arguments == {_KEY: _VALUE} for call in _read_at(written, match.start())):
            break
    else:
        return None
    before = written[: match.start()].rstrip().removesuffix("[")
    before = before.rpartition(_TEXT)[2] if _TEXT in before else before[_num_common(prompt, before) :]
    for special in sorted(tokenizer.all_special_tokens, key=len, reverse=True):
        before = before.replace(special, "")
    return before.strip()


def _num_common(a: str, b: str) -> int:
    """How many characters both begin with."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
