"""Connections that wait for a request: for how long, and which must go for others.

Knows uvicorn's protocol. Must not know what is asked.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

from shardnet.transport.admission import host_name

HEADERS_S: Final = 10.0
"""A connection may wait so long for the whole headers of a request."""
MOST_WAITING: Final = 256
MOST_OF_HOST: Final = 64
"""Connections that may wait at one time, in all and of one host: the oldest makes room."""
LOG_EVERY_S: Final = 60.0


@dataclass(slots=True)
class Waiting:
    """The connections that wait, oldest first, and how many were closed since the last line.

    `log` takes a line, once in LOG_EVERY_S at most.
    """

    log: Callable[[str], None]
    _hosts: dict[WaitingProtocol, str] = field(default_factory=dict)
    _n_of_host: Counter[str] = field(default_factory=Counter)
    _closed: Counter[str] = field(default_factory=Counter)
    _logged_s: float = -LOG_EVERY_S

    def begin(self, connection: WaitingProtocol, host: str) -> None:
        """Count a connection that waits from now on; close another where there are too many."""
        self.end(connection)
        self._hosts[connection] = host
        self._n_of_host[host] += 1
        if self._n_of_host[host] > MOST_OF_HOST:
            self._close_oldest(host)
        elif len(self._hosts) > MOST_WAITING:
            [(most, _)] = self._n_of_host.most_common(1)
            self._close_oldest(most)

    def end(self, connection: WaitingProtocol) -> None:
        """Count one no more that has asked or is gone."""
        host = self._hosts.pop(connection, None)
        if host is not None:
            self._n_of_host[host] -= 1
            if not self._n_of_host[host]:
                del self._n_of_host[host]

    def close(self, connection: WaitingProtocol) -> None:
        """Close one that has waited too long, or that makes room."""
        if connection not in self._hosts:
            return
        self._closed[self._hosts[connection]] += 1
        self.end(connection)
        connection.transport.abort()
        now_s = time.monotonic()
        if now_s - self._logged_s >= LOG_EVERY_S:
            [(host, _)] = self._closed.most_common(1)
            n_closed = self._closed.total()
            self.log(f"HTTP: closed {n_closed} connections without a whole request, as of {host}")
            self._closed.clear()
            self._logged_s = now_s

    def _close_oldest(self, host: str) -> None:
        self.close(next(one for one, of in self._hosts.items() if of == host))


class WaitingProtocol(H11Protocol):
    """A connection that is closed when no whole request comes in time."""

    def __init__(self, *arguments: Any, waiting: Waiting, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._waiting = waiting
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Read a request, or more of one. Waiting ends with its headers."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._wait_no_more()

    def on_response_complete(self) -> None:
        """Wait for the next request, unless it has come already."""
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._wait_no_more()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._wait_no_more()
        self._waiting.begin(self, host_name(self.client[0]) if self.client else "")
        self._timer = self.loop.call_later(HEADERS_S, self._waiting.close, self)

    def _wait_no_more(self) -> None:
        self._waiting.end(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
