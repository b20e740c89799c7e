"""Things that belong to one event loop: locks, connections. An engine may outlive the loop it was first used in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class OfLoop(Generic[T]):
    """One `make()` for each event loop in turn; what another loop left is dropped."""

    def __init__(self, make: Callable[[], T]):
        self._make = make
        self._held: tuple[asyncio.AbstractEventLoop, T] | None = None

    def get(self) -> T:
        """The running loop's, made on the first call."""
        loop = asyncio.get_running_loop()
        if self._held is None or self._held[0] is not loop:
            self._held = loop, self._make()
        return self._held[1]

    def pop(self) -> T | None:
        """The running loop's, which is forgotten; None where there is none."""
        held, self._held = self._held, None
        return held[1] if held is not None and held[0] is asyncio.get_running_loop() else None
