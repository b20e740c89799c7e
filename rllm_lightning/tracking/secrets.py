"""Secrets are masked in whatever a run writes down: `scrub` for plain data, `scrub_text` for text.

Three rules, each blind to the harmless look-alikes (`max_tokens`, `token-mean`, `tokenizer`, `pad_token`):
a value whose key names a secret (`api_key`, `hf_token`, `password`); user and password inside a URL, and secrets in its
query; and, anywhere in text, the value of an environment variable whose name is one of a secret (`WANDB_API_KEY`), or that a
key of the user's own refers to (`task.note=${oc.env:NOTE}`; a folder of this machine is none), and what the config of this process
holds under a key of a secret (`remember_secrets`), also where JSON or Python write it with escapes.
To mask one more kind of key: add its word to `SECRET_WORDS`, or its last two words to `SECRET_PAIRS`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rllm_lightning.config_sources import from_environment

MASK = "***"
CUT = "..."  # where a message leaves out the rest of a value
MIN_LENGTH = 8  # characters; a shorter value of an environment variable is no secret worth the name, and would mask ordinary text

SECRET_WORDS = {"password", "passwd", "passphrase", "secret", "secrets", "credential", "credentials", "apikey", "authorization", "jwt"}
SECRET_ENDINGS = {"token", "pass"}
SECRET_PAIRS = {
    *((kind, "key") for kind in ("api", "access", "private", "secret", "signing", "encryption", "ssh", "account")),
    *((kind, plural) for kind in ("api", "access", "auth", "bearer", "refresh", "session") for plural in ("keys", "tokens")),
}
TEXT_TOKENS = {"pad", "eos", "bos", "unk", "sep", "cls", "mask", "stop", "end", "start", "special", "image", "think", "per", "next", "new"}

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+")
_USER_INFO = re.compile(r"(?<=://)[^/\s:@\"']*:[^/\s\"']*(?=@)|(?<=https://)[^/\s:@\"']+(?=@)")
_PAIR = re.compile(r"""(['"]?)([\w.-]+)\1(\s*:\s*)("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[^\s,{}\[\]]+)""")  # of a mapping written as text
_QUERY = re.compile(r"(?<=[?&])((?:api|access)_?key|(?:access_|auth_)?token|password|secret|signature|sig)=[^&\s\"'#]+", re.IGNORECASE)


def is_secret_key(key: str) -> bool:
    """Whether a config key, or an environment variable's name, says that its value is a secret."""
    words = [word.lower() for word in _WORD.findall(key)]
    if SECRET_WORDS & set(words):
        return True
    before, last = words[-2] if len(words) > 1 else "", words[-1] if words else ""
    return (before, last) in SECRET_PAIRS or (last in SECRET_ENDINGS and before not in TEXT_TOKENS)


_remembered: set[str] = set()


def remember_secrets(value: Any, hidden: bool = False) -> None:
    """Take what a config (plain data) holds under keys of secrets for secrets wherever it stands from now on: a service that was given
    a key may repeat it in its error."""
    if isinstance(value, dict):
        for key, item in value.items():
            remember_secrets(item, hidden or is_secret_key(str(key)))
    elif isinstance(value, list | tuple):
        for item in value:
            remember_secrets(item, hidden)
    elif hidden and isinstance(value, str) and len(value) >= MIN_LENGTH and not Path(value).is_dir():
        _remembered.add(value)


def environment_secrets() -> list[str]:
    """The secret values of the environment and the config, longest first (one may contain another)."""
    values = {value for name, value in os.environ.items() if len(value) >= MIN_LENGTH and is_secret_key(name)}
    values |= set(referred_secrets()) | _remembered
    values |= {
        written for value in values for written in (json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], repr(value)[1:-1])
    }
    return sorted(values, key=len, reverse=True)


def referred_secrets() -> dict[str, str]:
    """The values of environment variables that a config of this process refers to, and the variables' names."""
    found = {os.environ.get(name, ""): name for name in from_environment}
    return {value: name for value, name in found.items() if len(value) >= MIN_LENGTH and not Path(value).is_dir()}


def scrub_text(text: str, secrets: list[str] | None = None) -> str:
    """`text` with passwords in URLs and the environment's secret values (or the given `secrets`) masked."""
    for secret in environment_secrets() if secrets is None else secrets:
        text = text.replace(secret, MASK)
    if "://" not in text:
        return text
    return _QUERY.sub(rf"\1={MASK}", _USER_INFO.sub(MASK, text))


def scrub_message(text: str) -> str:
    """A message of one or more lines, about a config or not, with secrets masked; a value that it shows of a secret key as well, and what
    is left of a secret where the message was cut short ("...")."""
    secrets = environment_secrets()
    return "\n".join(_scrub_line(_scrub_ends(scrub_text(line, secrets), secrets)) for line in text.split("\n"))


def _scrub_ends(line: str, secrets: list[str]) -> str:
    *cut, last = line.split(CUT)
    for index, part in enumerate(cut):
        lengths = [length for secret in secrets for length in range(MIN_LENGTH, len(secret)) if part.endswith(secret[:length])]
        if lengths:
            cut[index] = part[: -max(lengths)] + MASK
    return CUT.join([*cut, last])


def _scrub_line(line: str) -> str:
    key, colon, said = line.partition(": ")
    before, got, _ = said.partition("got ")
    if colon and got and is_secret_key(key):
        return f"{key}: {before}got {MASK}"
    return _scrub_mapping(line) if "{" in line else line


def scrub_arguments(argv: Sequence[str]) -> list[str]:
    """A command line with the values of secret keys, and what `scrub_text` masks, masked.

    A value may stand behind `=`, be the next word after `--key`, or be in a mapping (JSON, YAML or Python's notation).
    """
    scrubbed: list[str] = []
    is_value = False
    for argument in argv:
        key, equals, _ = argument.partition("=")
        if is_value and not argument.startswith("--"):
            scrubbed.append(MASK)
        elif equals and "{" not in key and is_secret_key(key):
            scrubbed.append(f"{key}={MASK}")
        else:
            scrubbed.append(_scrub_mapping(scrub_text(argument)) if "{" in argument else scrub_text(argument))
        is_value = argument.startswith("--") and not equals and is_secret_key(argument)
    return scrubbed


def _scrub_mapping(text: str) -> str:
    def masked(pair: re.Match[str]) -> str:
        quote = pair[4][0] if pair[4][0] in "'\"" else ""
        return f"{pair[1]}{pair[2]}{pair[1]}{pair[3]}{quote}{MASK}{quote}" if is_secret_key(pair[2]) else pair[0]

    return _PAIR.sub(masked, text)


def scrub(value: Any, *, keys: bool = True) -> Any:
    """Plain data (dicts, lists, scalars) with secrets masked.

    Args:
        value: what is to be written down; it is not changed.
        keys: also mask by the names of keys. False for rollouts, where a task may have a `secret` that is no secret of ours.
    """
    return _scrub(value, environment_secrets(), keys, hidden=False)


def _scrub(value: Any, secrets: list[str], keys: bool, hidden: bool) -> Any:
    if isinstance(value, dict):
        return {
            scrub_text(key, secrets) if isinstance(key, str) else key: _scrub(
                item, secrets, keys, hidden or (keys and isinstance(key, str) and is_secret_key(key))
            )
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_scrub(item, secrets, keys, hidden) for item in value]
    if value is None or isinstance(value, bool | float):
        return value
    if hidden and value != "":
        return MASK
    return scrub_text(value, secrets) if isinstance(value, str) else value
