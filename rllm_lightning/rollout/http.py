"""JSON requests to a server: a limit on how many are open, retries with growing pauses, errors that say what the server said.

Asking again is safe: a completion changes nothing on the server. A key never reaches a message: what is shown of URL and
answer is masked first.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rllm_lightning.rollout.loops import OfLoop

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger(__name__)

RETRIED = {408, 409, 425, 429, 500, 502, 503, 504, 529}  # status codes that may pass
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds
CONNECT_TIMEOUT = 10.0  # seconds
SHOWN = 300  # characters of a server's answer in a message


class ServerError(RuntimeError):
    """A request that was not answered, after all retries. `status` is the HTTP status, None where none came."""

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status


def url_problems(name: str, url: str | None) -> list[str]:
    """What is wrong with a base URL under the config key `name`. Its credentials are not repeated."""
    parts = urlsplit(url or "")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return [f"{name}: expected a URL such as http://127.0.0.1:8000/v1"]
    if parts.username or parts.password or parts.query:
        return [f"{name}: must hold no user, password or query; a key comes from an environment variable"]
    return []


def secret_problems(name: str, variable: str | None) -> list[str]:
    """What is wrong with the name of an environment variable that holds a secret. What cannot be a name is not repeated: it may
    be the secret itself."""
    if variable is None:
        return []
    if not re.fullmatch(r"[A-Z][A-Z0-9_]{0,63}", variable):
        return [f"{name}: expected the name of an environment variable, in capitals, that holds the key; not the key itself"]
    return [] if os.environ.get(variable) else [f"{name}: the environment variable {variable} is not set"]


class JsonClient:
    """Requests to one server, from whatever event loop runs.

    Args:
        base_url: with scheme; paths are put behind it.
        key: sent as a bearer token.
        timeout: seconds for one try.
        max_retries: tries beyond the first.
        max_open: requests open at once; more wait.
    """

    def __init__(self, base_url: str, key: str | None, *, timeout: float, max_retries: int, max_open: int):
        self.base_url = base_url.rstrip("/")
        self._key = key
        self._timeout, self._max_retries, self._max_open = timeout, max_retries, max_open
        self._jitter = random.Random()  # of its own: pauses leave the program's random state alone
        self._connections = OfLoop(self._connect)
        self._slots = OfLoop(lambda: asyncio.Semaphore(max_open))

    async def post(self, url: str, body: dict[str, Any]) -> Any:
        """The JSON answer to a POST of JSON (None for an empty one). `url` is a path behind the base URL, or whole.

        Raises:
            ServerError: no answer after all retries, a status that will not pass, or an answer that is no JSON.
        """
        url = url if "://" in url else f"{self.base_url}{url}"
        client = self._connections.get()
        async with self._slots.get():
            for attempt in range(self._max_retries + 1):
                failure, pause = await self._try(client, url, body)
                if not isinstance(failure, ServerError):
                    return failure
                if pause is None or attempt == self._max_retries:
                    raise failure
                pause = min(LONGEST_PAUSE, max(pause, FIRST_PAUSE * 2**attempt * self._jitter.uniform(0.5, 1.0)))
                logger.warning("%s; trying again in %.1f s (%d of %d)", failure, pause, attempt + 1, self._max_retries)
                await asyncio.sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    async def close(self) -> None:
        """End all connections. Idempotent."""
        client = self._connections.pop()
        if client is not None:
            await client.aclose()

    async def _try(self, client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> tuple[Any, float | None]:
        """One try: the answer, or a `ServerError` and the least pause before another try (None: another would fail, too)."""
        import httpx

        try:
            response = await client.post(url, json=body)
        except httpx.TimeoutException:
            return ServerError(f"{url}: no answer within {self._timeout:g} seconds (rollout_engine.timeout)"), 0.0
        except httpx.TransportError as error:
            return ServerError(f"{url}: {type(error).__name__}: {self._masked(str(error)) or 'the connection failed'}"), 0.0
        said = self._masked(response.text[: 4 * SHOWN])
        said = said if len(said) <= SHOWN else f"{said[:SHOWN]}..."
        if response.status_code >= 400:
            refusal = ServerError(f"{url}: status {response.status_code}: {said}", response.status_code)
            return refusal, _asked_pause(response) if response.status_code in RETRIED else None
        if not response.content.strip():
            return None, None
        try:
            return response.json(), None
        except json.JSONDecodeError:
            return ServerError(f"{url}: status {response.status_code}, but no JSON: {said}", response.status_code), None

    def _masked(self, text: str) -> str:
        text = " ".join(text.split())
        return text.replace(self._key, "***") if self._key else text

    def _connect(self) -> httpx.AsyncClient:
        import httpx

        return httpx.AsyncClient(
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            timeout=httpx.Timeout(self._timeout, connect=min(CONNECT_TIMEOUT, self._timeout), pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=self._max_open),
        )


def _asked_pause(response: httpx.Response) -> float:
    """Seconds that the server asks to wait; 0 where it does not say."""
    try:
        return max(0.0, float(response.headers.get("retry-after", 0)))
    except ValueError:  # a date
        return 0.0
