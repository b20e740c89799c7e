"""How the ranks of a run hear of each other's signals, failures and deaths.

    every rank <--one connection--> the first rank, which passes on what it hears

A collective operation cannot be interrupted, and a process that was killed says nothing. So each rank keeps a connection to the
first one beside the collectives: a signal that one rank got reaches all; the first failure is told to all; a connection that
breaks without a farewell is a death. Whoever learns of a failure stops in its own way (a rollout is cancelled, a collective
breaks); a process that has not ended `GRACE_S` seconds later is ended from here.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rllm_lightning.trainer.ranks import Ranks

logger = logging.getLogger(__name__)

GRACE_S = 12.0  # for an orderly end after another rank's failure; everything is over within 30 seconds
CLOSING_S = 6.0  # for `emergency`, after that
NEWS_S = 1.0  # how long a rank that fails waits to hear who failed first
CONNECT_S = 60.0
MAX_MESSAGE = 4096  # characters of an error's text

Message = dict[str, Any]


class RankFailed(RuntimeError):
    """Another rank of the run failed or died; `spoken` says whether it could show the error itself."""

    def __init__(self, rank: int, reason: str, spoken: bool):
        super().__init__(f"rank {rank} {reason}")
        self.rank, self.spoken = rank, spoken


@dataclass
class RankWatch:
    """The connection of this rank.

    Args:
        rank: of this process.
        on_signal: called with a signal's number that another rank got.
        emergency: called once where this process did not end in time, before it is ended.
    """

    rank: int
    on_signal: Callable[[int], None]
    emergency: Callable[[], None] = lambda: None
    failure: RankFailed | None = None
    _heard: threading.Event = field(default_factory=threading.Event)
    _closing: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _server: socket.socket | None = None
    _peers: dict[int, socket.socket] = field(default_factory=dict)  # on the first rank all others, elsewhere the first

    @classmethod
    def start(cls, ranks: Ranks, address: str, on_signal: Callable[[int], None], emergency: Callable[[], None]) -> RankWatch:
        """Connect all ranks (a collective call). `address`: of the first rank's machine, as the others reach it."""
        watch = cls(ranks.rank, on_signal, emergency)
        if ranks.world_size == 1:
            return watch
        token = secrets.token_hex(16) if ranks.is_first else ""
        if ranks.is_first:
            family = socket.getaddrinfo(address, 0)[0][0]
            watch._server = socket.create_server((address, 0), family=family, backlog=ranks.world_size)
            watch._server.settimeout(CONNECT_S)
        port, token = ranks.broadcast((watch._server.getsockname()[1] if watch._server else 0, token))
        if ranks.is_first:
            watch._accept(ranks.world_size - 1, token)
        else:
            connection = socket.create_connection((address, port), timeout=CONNECT_S)
            connection.settimeout(None)
            _send(connection, {"token": token, "rank": ranks.rank})
            watch._peers[0] = connection
        for peer, connection in watch._peers.items():
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            threading.Thread(target=watch._listen, args=(peer, connection), name=f"rank-watch-{peer}", daemon=True).start()
        return watch

    # ------------------------------------------------------------------------------------------------------ telling

    def tell_signal(self, signum: int) -> None:
        """This rank got a signal. Takes no lock: it is called by signal handlers."""
        self._tell({"signum": signum})

    def first_failure(self, error: BaseException) -> RankFailed | None:
        """This rank failed: tell the others, unless one of them failed before; that one's failure is returned. Which of several
        was first is for the first rank to say."""
        if not self._peers:
            return None
        if not self._heard.wait(NEWS_S if _may_follow_from_another(error) else 0.0):
            text = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_MESSAGE]
            own = Message(rank=self.rank, reason=f"failed: {text}", spoken=True)
            if self.rank != 0:
                self._tell(own)
                self._heard.wait(NEWS_S)
            self._fail(own)
        return self.failure if self.failure is not None and self.failure.rank != self.rank else None

    def close(self) -> None:
        """This rank is done. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._tell({"bye": True})
        for connection in self._peers.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
        if self._server is not None:
            self._server.close()

    # ---------------------------------------------------------------------------------------------------- listening

    def _accept(self, count: int, token: str) -> None:
        assert self._server is not None
        while len(self._peers) < count:
            connection, _ = self._server.accept()
            connection.settimeout(CONNECT_S)
            hello = _read(connection.makefile("rb"))
            if hello is None or not hmac.compare_digest(str(hello.get("token")), token):
                connection.close()  # none of ours
                continue
            connection.settimeout(None)
            self._peers[int(hello["rank"])] = connection

    def _listen(self, peer: int, connection: socket.socket) -> None:
        stream, farewell = connection.makefile("rb"), False
        with contextlib.suppress(OSError):
            while (message := _read(stream)) is not None:
                if "bye" in message:
                    farewell = True
                elif "signum" in message:
                    self.on_signal(message["signum"])
                    self._pass_on(message, peer)
                else:
                    self._fail(message)
        if not farewell and not self._closing.is_set():
            self._fail(Message(rank=peer, reason="ended without a word; was it killed, or did it run out of memory?", spoken=False))

    def _fail(self, message: Message) -> None:
        """Note the first failure, pass it on, and see to it that this process ends."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = RankFailed(message["rank"], message["reason"], message["spoken"])
        self._heard.set()
        self._pass_on(message, None)
        if message["rank"] != self.rank:
            threading.Thread(target=self._end_in_time, name="rank-watch-end", daemon=True).start()

    def _pass_on(self, message: Message, source: int | None) -> None:
        if self.rank == 0 or source is None:
            self._tell(message, but=source)

    def _tell(self, message: Message, but: int | None = None) -> None:
        for peer, connection in self._peers.items():
            if peer != but:
                with contextlib.suppress(OSError):
                    _send(connection, message)

    def _end_in_time(self) -> None:
        time.sleep(GRACE_S)
        logger.error("%s; this process waited for it and is ended", self.failure)
        closing = threading.Thread(target=self.emergency, daemon=True)
        closing.start()
        closing.join(CLOSING_S)
        os._exit(1)


def _may_follow_from_another(error: BaseException) -> bool:
    """Whether a failure looks like that of a collective whose other end is gone; its cause is then about to be told."""
    return isinstance(error, RuntimeError | OSError | EOFError) or "distributed" in type(error).__module__


def _send(connection: socket.socket, message: Message) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _read(stream: Any) -> Message | None:
    line = stream.readline()
    return json.loads(line) if line.endswith(b"\n") else None
