"""The checks of `conformance.py`. Each takes the subject and the reference, raises `Failure` where the contract does not hold,
and returns what it measured, in words.

To add one: a function with `@check("what holds", needs=...)`; `needs` names the promises without which it is not asked.
"""

from __future__ import annotations

import asyncio
import copy
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rllm_lightning.rollout.conformance_subject import PROMPTS, Failure, Reference, Subject, answered, ask, message, question
from rllm_lightning.rollout.engine import REQUEST, RequestContext, RolloutEngine
from rllm_lightning.types import ModelOutput, TerminationEvent, TerminationReason

UNLIKELY = 1e-5  # probability below which a deviation of frequencies is a failure: one right engine in 100,000 fails
EXPECTED = 5.0  # draws that a cell of a chi-square test must expect
HOT = 5.0  # temperature
TAKE = 32  # tokens of a longer answer


@dataclass(frozen=True)
class Check:
    function: Callable[[Subject, Reference], str]
    needs: tuple[str, ...]


CHECKS: dict[str, Check] = {}


def check(name: str, *needs: str) -> Callable[[Callable[[Subject, Reference], str]], Callable[[Subject, Reference], str]]:
    def register(function: Callable[[Subject, Reference], str]) -> Callable[[Subject, Reference], str]:
        CHECKS[name] = Check(function, needs)
        return function

    return register


def expect(holds: bool, message: str) -> None:
    if not holds:
        raise Failure(message)


# ------------------------------------------------------------------------------------------------------------ one answer


@check("an answer has text, lengths and a finish reason")
def _(subject: Subject, reference: Reference) -> str:
    answers = subject.answers(PROMPTS)
    for answer, content in zip(answers, PROMPTS, strict=True):
        expect(isinstance(answer.text, str) and answer.content is not None, f"text {answer.text!r}, content {answer.content!r}")
        expect(answer.finish_reason in ("stop", "length"), f"finish reason {answer.finish_reason!r}; it is stop or length")
        expect(1 <= answer.completion_length <= 16, f"completion_length {answer.completion_length} at a limit of 16 tokens")
        expected = len(subject.prompt(content))
        expect(answer.prompt_length == expected, f"prompt_length {answer.prompt_length}, the chat template makes {expected} tokens")
    return f"{len(answers)} answers, {sum(a.finish_reason == 'stop' for a in answers)} stopped"


@check("token ids go in and out as they are", "gives_tokens")
def _(subject: Subject, reference: Reference) -> str:
    special = [token for token in subject.tokenizer.all_special_tokens if isinstance(token, str)][:3]
    contents = [*PROMPTS, *(f"a{token}b" for token in special)]
    for answer, content in zip(subject.answers(contents), contents, strict=True):
        expect(answer.prompt_ids == subject.prompt(content), f"the prompt's tokens for {content!r} are not those of the chat template")
        ids, logprobs = answer.completion_ids or [], answer.logprobs or []
        expect(len(ids) == len(logprobs) == answer.completion_length, f"{len(ids)} tokens, {len(logprobs)} log-probs")
        text = subject.chat.decode(ids[:-1] if answer.finish_reason == "stop" else ids)
        expect(answer.text == text, f"text {answer.text!r}, but its tokens read {text!r}")
    return f"{len(contents)} prompts, {len(special)} with special tokens in their text"


@check("log-probs are the model's", "gives_tokens")
def _(subject: Subject, reference: Reference) -> str:
    return _compare_logprobs(subject, reference, subject.answers(PROMPTS * 2, max_tokens=TAKE), 1.0)


@check("log-probs are those of the temperature", "gives_tokens")
def _(subject: Subject, reference: Reference) -> str:
    temperature = telling(subject, reference)
    return _compare_logprobs(subject, reference, subject.answers(PROMPTS * 2, temperature=temperature), temperature)


@check("log-probs at temperature 0 are the model's", "gives_tokens")
def _(subject: Subject, reference: Reference) -> str:
    return _compare_logprobs(subject, reference, subject.answers(PROMPTS, temperature=0.0), 1.0)


def _compare_logprobs(subject: Subject, reference: Reference, answers: Sequence[ModelOutput], temperature: float) -> str:
    errors = torch.cat([(torch.tensor(a.logprobs).double() - reference.logprobs(a, temperature).double()).abs() for a in answers])
    numbers = f"{len(errors)} tokens at temperature {temperature:.3g}: largest difference {errors.max():.2g}, mean {errors.mean():.2g}"
    expect(bool(errors.max() <= subject.tolerance), f"{numbers}; tolerance {subject.tolerance:g}")
    return numbers


# --------------------------------------------------------------------------------------------------------- distributions


@check("tokens are as frequent as the model has them")
def _(subject: Subject, reference: Reference) -> str:
    return _compare_frequencies(subject, reference, {})


@check("tokens are as frequent as the temperature has them")
def _(subject: Subject, reference: Reference) -> str:
    return _compare_frequencies(subject, reference, {"temperature": telling(subject, reference)})


@check("no token is cut off")
def _(subject: Subject, reference: Reference) -> str:
    """At a temperature where unlikely tokens have their share, so that a top-k or top-p by default shows."""
    return _compare_frequencies(subject, reference, {"temperature": HOT})


@check("top_k keeps the k most likely tokens", "gives_tokens")
def _(subject: Subject, reference: Reference) -> str:
    return _compare_frequencies(subject, reference, {"top_k": 3})


@check("top_p keeps the smallest set with that probability", "gives_tokens")
def _(subject: Subject, reference: Reference) -> str:
    return _compare_frequencies(subject, reference, {"top_p": 0.5})


def _compare_frequencies(subject: Subject, reference: Reference, sampling: dict[str, Any]) -> str:
    """A chi-square test of first tokens, told apart by their text (which every engine gives)."""
    content = PROMPTS[2]
    probs_V = cut(reference.logits(subject.prompt(content))[0], **sampling)
    expected: defaultdict[str, float] = defaultdict(float)
    for token in probs_V.nonzero()[:, 0].tolist():
        expected[subject.chat.decode([token])] += float(probs_V[token])
    answers = subject.answers([content] * subject.draws, max_tokens=1, **sampling)
    drawn = Counter(answer.text or "" for answer in answers)
    described = ", ".join(f"{name} {value:.3g}" for name, value in sampling.items()) or "neutral"
    strangers = sum(count for text, count in drawn.items() if text not in expected)
    expect(not strangers, f"{described}: {strangers} of {subject.draws} draws are tokens that cannot be")

    observed, wanted = [0], [0.0]
    for text, prob in sorted(expected.items(), key=lambda item: -item[1]):  # rare ones share a cell
        if wanted[-1] >= EXPECTED:
            observed.append(0)
            wanted.append(0.0)
        observed[-1] += drawn[text]
        wanted[-1] += prob * subject.draws
    if len(wanted) > 1 and wanted[-1] < EXPECTED:
        rest, more = wanted.pop(), observed.pop()
        wanted[-1], observed[-1] = wanted[-1] + rest, observed[-1] + more
    statistic = sum((o - w) ** 2 / w for o, w in zip(observed, wanted, strict=True))
    freedom = len(wanted) - 1
    p = float(torch.special.gammaincc(torch.tensor(freedom / 2, dtype=torch.float64), torch.tensor(statistic / 2, dtype=torch.float64)))
    numbers = f"{described}: {subject.draws} draws, chi-square {statistic:.1f} over {freedom}, p = {p:.2g}"
    expect(freedom == 0 or p >= UNLIKELY, f"{numbers}; a right engine is above {UNLIKELY:g}")
    return numbers


def cut(logits_V: torch.Tensor, temperature: float = 1.0, top_k: float = 0, top_p: float = 1.0) -> torch.Tensor:
    """The probabilities that `SamplingParams` asks for."""
    p_V = torch.softmax(logits_V.double() / temperature, -1)
    order = p_V.argsort(descending=True, stable=True)
    kept = order[: int(top_k)] if top_k else order
    mass = p_V[kept].cumsum(0)
    kept = kept[: int((mass - p_V[kept] < top_p * mass[-1]).sum())]
    result = torch.zeros_like(p_V)
    result[kept] = p_V[kept] / p_V[kept].sum()
    return result


def telling(subject: Subject, reference: Reference) -> float:
    """A temperature that changes the first token's distribution much: there its most likely token has probability .9, or, where
    it has more than .6 at temperature 1, .4. So even a model of random weights shows what temperature was drawn at."""
    logits = reference.logits(subject.prompt(PROMPTS[2]))[0].double()
    target = 0.9 if float(torch.softmax(logits, -1).max()) < 0.6 else 0.4
    low, high = 1e-3, 1e3
    for _ in range(40):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if float(torch.softmax(logits / middle, -1).max()) > target else (low, middle)
    return low


@check("temperature 0 takes the most likely token, every time")
def _(subject: Subject, reference: Reference) -> str:
    first, again = (subject.answers(PROMPTS, temperature=0.0) for _ in range(2))
    certain = 0
    for one, other, content in zip(first, again, PROMPTS, strict=True):
        expect(one.text == other.text, f"{content!r}: {one.text!r}, then {other.text!r}")
        ends = subject.ends()
        ids = reference.greedy(subject.prompt(content), one.completion_length, ends, 10 * subject.tolerance)
        text = subject.chat.decode([token for token in ids if token not in ends])
        expect((one.text or "").startswith(text), f"{content!r}: {one.text!r}, the most likely answer begins {text!r}")
        certain += len(ids)
    return f"{len(PROMPTS)} prompts, {certain} tokens that rounding cannot change"


# ------------------------------------------------------------------------------------------------------- limits and ends


@check("the limit of tokens holds to the token")
def _(subject: Subject, reference: Reference) -> str:
    for limit in (1, 2, 7):
        for answer in subject.answers(PROMPTS, max_tokens=limit):
            expect(1 <= answer.completion_length <= limit, f"{answer.completion_length} tokens at a limit of {limit}")
            full = answer.completion_length == limit
            expect(full or answer.finish_reason == "stop", f"{answer.completion_length} of {limit} tokens, finish reason length")
    return "limits of 1, 2 and 7"


@check("a limit of 0 tokens is refused")
def _(subject: Subject, reference: Reference) -> str:
    async def body(engine: RolloutEngine) -> object:
        try:
            return await engine.get_model_response(message("a"), max_tokens=0)
        except ValueError as error:
            return error

    got = subject.run(body)
    expect(isinstance(got, ValueError), f"max_tokens=0 gave {got!r}; a ValueError was expected")
    return ""


@check("every end token ends an answer, and nothing else", "gives_tokens")
def _(subject: Subject, reference: Reference) -> str:
    """The most likely answer is asked for again with one of its own tokens as an end token of the checkpoint."""
    content = PROMPTS[2]
    (plain,) = subject.answers([content], temperature=0.0)
    ids = plain.completion_ids or []
    place = next((i for i in range(1, len(ids)) if ids[i] not in ids[:i] and ids[i] not in subject.ends()), 0)
    config, end = subject.model.generation_config, ids[place]
    before = config.eos_token_id
    config.eos_token_id = [*subject.ends(), end]
    try:
        (answer,) = subject.answers([content], temperature=0.0)
    finally:
        config.eos_token_id = before
    expect(answer.completion_ids == ids[: place + 1], f"{answer.completion_ids}, to end at the first {end} of {ids}")
    expect(answer.finish_reason == "stop", f"finish reason {answer.finish_reason!r} at an end token")
    expect(answer.text == subject.chat.decode(ids[:place]), f"the end token shows in the text {answer.text!r}")
    return f"stopped after {place + 1} of {len(ids)} tokens"


@check("an end token at the very limit is a stop", "gives_tokens")
def _(subject: Subject, reference: Reference) -> str:
    content = PROMPTS[2]
    (plain,) = subject.answers([content], temperature=0.0)
    config, end = subject.model.generation_config, (plain.completion_ids or [])[0]
    before = config.eos_token_id
    config.eos_token_id = [*subject.ends(), end]
    try:
        (answer,) = subject.answers([content], temperature=0.0, max_tokens=1)
    finally:
        config.eos_token_id = before
    expect((answer.completion_ids, answer.finish_reason) == ([end], "stop"), f"{answer.completion_ids}, {answer.finish_reason!r}")
    return ""


@check("a prompt of one token is answered", "gives_tokens")
def _(subject: Subject, reference: Reference) -> str:
    bare = copy.deepcopy(subject.tokenizer)
    bare.chat_template = "{{ messages[0]['content'] }}"
    engine = subject.engine(tokenizer=bare)
    (answer,) = subject.answers(["a"], engine=engine)
    expect(answer.prompt_length == 1, f"prompt_length {answer.prompt_length}")
    return _compare_logprobs(subject, reference, [answer], 1.0)


@check("a prompt over the limit ends its episode, and is never cut")
def _(subject: Subject, reference: Reference) -> str:
    length = len(subject.prompt(PROMPTS[3]))
    (answer,) = subject.answers([PROMPTS[3]], engine=subject.engine(max_prompt_length=length))
    expect(answer.prompt_length == length, f"prompt_length {answer.prompt_length} of {length}")
    engine = subject.engine(max_prompt_length=length - 1)
    short, long = subject.run(lambda engine: ask(engine, [PROMPTS[1], PROMPTS[3]]), engine=engine)
    expect(isinstance(short, ModelOutput), f"a short prompt beside a long one got {short!r}")
    refused = isinstance(long, TerminationEvent) and long.reason is TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED
    expect(refused, f"{length} tokens at a limit of {length - 1} gave {long!r}")
    return f"limits of {length} and {length - 1} tokens"


# ------------------------------------------------------------------------------------------------------- many requests


@check("requests together get their own answers")
def _(subject: Subject, reference: Reference) -> str:
    contents = PROMPTS * 4
    together = subject.answers(contents, temperature=0.0)
    apart = subject.answers(PROMPTS, temperature=0.0, together=False)
    for answer, alone in zip(together, apart * 4, strict=True):
        expect(answer.prompt_length == alone.prompt_length, "an answer came to another's question")
        if subject.repeatable:
            expect(answer.text == alone.text, f"{answer.text!r} together with others, {alone.text!r} alone")
    return f"{len(contents)} at once"


@check("tokens do not depend on what else is asked", "repeatable")
def _(subject: Subject, reference: Reference) -> str:
    together, apart = (subject.answers(PROMPTS, together=together) for together in (True, False))
    for one, other in zip(together, apart, strict=True):
        expect(one.completion_ids == other.completion_ids, f"{one.text!r} together, {other.text!r} one by one")
    return f"{sum(len(a.completion_ids or []) for a in together)} tokens, together and one by one"


@check("each request has a random stream of its own")
def _(subject: Subject, reference: Reference) -> str:
    answers = subject.answers([PROMPTS[2]] * 8)
    different = len({answer.text for answer in answers})
    likely = float(cut(reference.logits(subject.prompt(PROMPTS[2]))[0]).max())
    expect(different > 1 or likely > 0.9, "eight rollouts of one prompt are all the same")
    return f"{different} different answers of 8"


@check("a cancelled request leaves the others alone")
def _(subject: Subject, reference: Reference) -> str:
    async def body(engine: RolloutEngine) -> list[ModelOutput | BaseException]:
        calls = [asyncio.create_task(question(engine, content, str(i))) for i, content in enumerate(PROMPTS)]
        await asyncio.sleep(0.01)
        calls[0].cancel()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        return [*answers[1:], *await ask(engine, PROMPTS[:1])]

    return f"{len(answered(subject.run(body)))} answers beside and after it"


# ------------------------------------------------------------------------------------------------------- turns and weights


@check("a later turn begins with the very tokens of the turn before", "gives_tokens")
def _(subject: Subject, reference: Reference) -> str:
    """Where an answer's text shows all of its tokens; special ones leave no trace in it, and then the chat is encoded anew."""

    async def two_turns(engine: RolloutEngine, index: int) -> tuple[ModelOutput, ModelOutput]:
        REQUEST.set(RequestContext(seed=1, task_id=str(index)))
        first = await engine.get_model_response(message(PROMPTS[1]))
        history = [*message(PROMPTS[1]), {"role": "assistant", "content": first.content}, *message(PROMPTS[2])]
        return first, await engine.get_model_response(history)

    async def body(engine: RolloutEngine) -> list[tuple[ModelOutput, ModelOutput]]:
        return await asyncio.gather(*[asyncio.create_task(two_turns(engine, index)) for index in range(8)])

    num_visible = 0
    for first, second in subject.run(body):
        ids = first.completion_ids or []
        visible = subject.chat.decode(ids[:-1] if first.finish_reason == "stop" else ids, special=True) == first.text
        begun = (first.prompt_ids or []) + ids
        num_visible += visible
        expect(not visible or (second.prompt_ids or [])[: len(begun)] == begun, f"turn 2 after {first.text!r} begins with other tokens")
    return f"{num_visible} of 8 conversations"


@check("after an update answers come from the new weights", "gives_tokens")
def _(subject: Subject, reference: Reference) -> str:
    head = subject.model.get_output_embeddings().weight

    async def body(engine: RolloutEngine) -> list[ModelOutput]:
        before = answered(await ask(engine, PROMPTS))
        expect({a.weight_version for a in before} == {0}, f"weight versions {[a.weight_version for a in before]} before any update")
        with torch.no_grad():
            head.mul_(1.5)
        engine.on_weights_updated(7)
        return answered(await ask(engine, PROMPTS))

    kept = head.detach().clone()
    try:
        answers = subject.run(body)
        numbers = _compare_logprobs(subject, reference, answers, 1.0)
    finally:
        with torch.no_grad():
            head.copy_(kept)
    expect({a.weight_version for a in answers} == {7}, f"weight versions {[a.weight_version for a in answers]} after update 7")
    return numbers


@check("resting and shutting down twice do no harm")
def _(subject: Subject, reference: Reference) -> str:
    async def body(engine: RolloutEngine) -> list[ModelOutput | BaseException]:
        await engine.rest()
        await engine.rest()
        answers = await ask(engine, PROMPTS)
        await engine.rest()
        answers += await ask(engine, PROMPTS)
        await engine.shutdown()
        return answers

    return f"{len(answered(subject.run(body)))} answers after resting"
