"""Where in a response the answer stands, and whether it is the right one. Plain functions of text."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from typing import Any, Literal

Extract = Literal["response", "last_line", "last_number", "answer_tags"]

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
# A sign counts where no operand stands before it, a comma between groups of three digits; "x2" and "v1.2.3" hold no number.
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(rf"(?<![\w.])(?:(?<![)\]])[-+−])?(?:{_DIGITS})(?:[eE][-+]?\d+)?(?:\s*/\s*(?:{_DIGITS}))?")


def extract_answer(response: str, extract: Extract) -> str | None:
    """The answer in a response, without surrounding whitespace; None where there is none.

    `"response"`: all of it. `"last_line"`: the last line that is not blank. `"last_number"`: the last number, as it is written.
    `"answer_tags"`: what stands between the last `<answer>` and `</answer>`.
    """
    if extract == "last_number":
        numbers = [match.group() for match in _NUMBER.finditer(response)]
        return numbers[-1] if numbers else None
    if extract == "answer_tags":
        found = _TAGGED.findall(response)
        return found[-1].strip() if found else None
    text = response.strip()
    if extract == "last_line" and text:
        return text.splitlines()[-1].strip()
    return text


def present_answer(answer: str, extract: Extract) -> str:
    """A response whose extracted answer is `answer`.

    Raises:
        ValueError: there is none, as for an answer of several lines under `"last_line"`.
    """
    response = f"<answer>{answer}</answer>" if extract == "answer_tags" else answer
    if extract_answer(response, extract) != answer.strip():
        raise ValueError(f"task.extract: {extract} cannot carry the answer {answer!r:.80}; choose another")
    return response


def answer_text(task: dict[str, Any]) -> str:
    """The task's `answer`: text as it is, anything else as JSON."""
    answer = task["answer"]
    return answer if isinstance(answer, str) else json.dumps(answer)


def exact_match(response: str, answer: str) -> bool:
    """Whether both texts are the same but for case, kinds of whitespace and Unicode's compatible forms."""
    return _normal(response) == _normal(answer)


def _normal(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def last_number(text: str) -> float | None:
    """The last number in a text, None where there is none.

    Understands signs, decimals, exponents, thousands separators (`1,234.5`) and fractions (`3/4`); units and signs around it
    do not matter (`$72`, `72%`, `72kg.`).
    """
    for match in reversed(list(_NUMBER.finditer(text))):
        numerator, _, denominator = match.group().replace(",", "").replace("−", "-").partition("/")
        if not denominator:
            return float(numerator)
        if float(denominator):
            return float(numerator) / float(denominator)
    return None


def numeric_match(response: str, answer: str, tolerance: float) -> bool:
    """Whether the last numbers x in the response and y in the answer agree: |x - y| <= tolerance · max(1, |y|)."""
    x, y = last_number(response), last_number(answer)
    return x is not None and y is not None and math.isfinite(y) and abs(x - y) <= tolerance * max(1.0, abs(y))


def choice_of(text: str, letters: str) -> str | None:
    """The letter of `letters` (capitals) that a multiple-choice answer names; None where it names none.

    The text may be the letter alone, in either case. Else the last one that is marked counts: in brackets, in `\\boxed{}`, or as in
    "answer is B" and "answer: B". Else the last capital that stands alone, but no "A" or "I" with a word behind it.
    """
    if alone := re.fullmatch(rf"\W*([{letters}])\W*", text, re.IGNORECASE):
        return alone[1].upper()
    one = f"[{letters}{letters.lower()}]"
    marked = rf"(?<!\w)[(\[]({one})[)\]]|\\boxed\{{(?:\\text\{{)?\W?({one})\b|[Aa]nswer(?: is)?:?\W*([{letters}])\b(?! [a-z])"
    if found := list(re.finditer(marked, text)):
        return next(filter(None, found[-1].groups())).upper()
    capitals = re.findall(rf"(?<![\w'])(?![AI] [a-z])([{letters}])(?![\w'])", text)
    return capitals[-1] if capitals else None
