"""Text on its way to a terminal or a log: no secret, no character that steers a terminal, no line that only looks like one of ours.

What models, tasks and servers say may stand in a message; here it becomes harmless, whatever it is.
"""

from __future__ import annotations

import logging
import re
import sys
import traceback
from types import TracebackType

from rllm_lightning.tracking.secrets import scrub_message

# C0 and C1 controls but for tab and newline, and what reorders or hides text: marks of direction, separators of lines, surrogates
_STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def harmless(text: str) -> str:
    """`text` with what could steer a terminal written as escapes (`\\x1b`); its lines stay."""
    return _STEERING.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """`harmless` text on one line, its line ends written as `\\n`."""
    return harmless(text).replace("\n", "\\n")


class LogFormatter(logging.Formatter):
    """`LEVEL: message`, a line for each record, and below it the traceback where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{record.levelname}: {one_line(scrub_message(record.getMessage()))}"
        if record.exc_info:
            line += f"\n{harmless(scrub_message(self.formatException(record.exc_info)))}"
        return line


def say(message: object) -> None:
    """Write what went wrong to stderr, each of its lines behind `error:`."""
    for line in scrub_message(str(message)).split("\n"):
        sys.stderr.write(f"error: {one_line(line)}\n")


def show_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """`sys.excepthook`: the traceback as Python prints it, made harmless."""
    sys.stderr.write(harmless(scrub_message("".join(traceback.format_exception(kind, error, trace)))))
