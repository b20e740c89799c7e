"""What is done with the package `math_verify`, in a process of its own (`worker.py`): SymPy may compute for ever.

Imported there alone, so that the package is loaded before a time limit begins to count.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits, which need signals, are off

PROSE = re.compile(r"\$|\\boxed|\\\(|\\\[|(?<!\S)[A-Za-z]{2,}(?![^\s.,:;])")  # marks for mathematics, or words


def is_equal(given: str, answer: str) -> bool:
    """Whether two texts hold the same mathematics (numbers, expressions, sets, equations; LaTeX or plain).

    Raises:
        ValueError: there is none in `answer`.
    """
    gold = _parse(answer)
    if not gold:
        raise ValueError(f"there is no mathematics in the answer {answer!r:.80}")
    return verify(gold, _parse(given), timeout_seconds=None)


@lru_cache(maxsize=1000)
def _parse(text: str) -> list[Any]:
    """What is found in a text. One that is no prose is a formula as a whole: of a bare `\\{1, 2\\}` the package would find the last
    number alone."""
    readings = [text, f"${text}$"] if PROSE.search(text) else [f"${text}$", text]
    return parse(readings[0], parsing_timeout=None) or parse(readings[1], parsing_timeout=None)
