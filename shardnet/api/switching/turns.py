"""Whose turn it is: the ring has one model at a time, and requests for several come.

Pure: times come in, in seconds of any clock. Knows who may run and when the next model is due.
Must not know how a model is loaded.

A model keeps its turn as long as no other one is asked for. When another one is, requests that came
after that wait behind it, but for those within the first seconds of a turn: as long as loading
took, within LEAST_TURN_S and MOST_TURN_S, so that programs which take turns do not spend most of
the time loading. The next turn is that of the model that was asked for first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

LINGER_S: Final = 1.0
"""A turn's model waits so long for its program's next request, before another one is loaded."""
LEAST_TURN_S: Final = 5.0
MOST_TURN_S: Final = 120.0


@dataclass(slots=True, eq=False, kw_only=True)
class Ticket:
    """The place of one request. `arrived_s` is when it, or the one it repeats, came."""

    model: str
    arrived_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Promise:
    """The place of a client that was sent away, until it asks again."""

    arrived_s: float
    until_s: float


class Turns:
    """Orders requests. After each call `take` says who may run now.

    `model` is the one whose turn it is, "" for none; `is_open` says whether the ring has it.
    """

    def __init__(self) -> None:
        self.model = ""
        self.is_open = False
        self._running: set[Ticket] = set()
        self._waiting: list[Ticket] = []
        self._promises: dict[str, _Promise] = {}
        self._stays_until_s = math.inf
        self._idle_since_s = 0.0

    @property
    def is_wanted(self) -> bool:
        """Whether any request runs or waits, or is promised to come again."""
        return bool(self._running or self._waiting or self._promises)

    def arrive(self, model: str, now_s: float) -> Ticket:
        """Add a request for `model`. It has the place that was promised for that model, if any."""
        promise = self._promises.pop(model, None)
        is_kept = promise is not None and promise.until_s > now_s
        ticket = Ticket(model=model, arrived_s=promise.arrived_s if promise and is_kept else now_s)
        self._waiting.append(ticket)
        return ticket

    def leave(self, ticket: Ticket, now_s: float, *, promise_s: float = 0.0) -> None:
        """Remove a request. One that waits may have its place promised for `promise_s` seconds."""
        if ticket in self._running:
            self._running.discard(ticket)
            self._idle_since_s = now_s
        elif ticket in self._waiting:
            self._waiting.remove(ticket)
            if promise_s:
                had = self._promises.get(ticket.model)
                arrived_s = min(ticket.arrived_s, had.arrived_s if had else ticket.arrived_s)
                until_s = now_s + promise_s
                self._promises[ticket.model] = _Promise(arrived_s=arrived_s, until_s=until_s)

    def opened(self, now_s: float, took_s: float) -> None:
        """Note that the ring has the model, and how long that took."""
        self.is_open = True
        self._stays_until_s = now_s + min(MOST_TURN_S, max(LEAST_TURN_S, took_s))
        self._idle_since_s = now_s

    def reopen(self) -> None:
        """Note that the ring has lost the model, which is loaded again."""
        self.is_open = False
        self._stays_until_s = math.inf

    def end(self) -> list[Ticket]:
        """End the turn, as the model cannot be had. Return who waited for it, and is gone now."""
        gone = [ticket for ticket in self._waiting if ticket.model == self.model]
        self._waiting = [ticket for ticket in self._waiting if ticket.model != self.model]
        self._promises.pop(self.model, None)
        self.model, self.is_open = "", False
        return gone

    def take(self, now_s: float) -> list[Ticket]:
        """Return who may run from now on. If the turn is over the next model's begins, not open."""
        for model, promise in [*self._promises.items()]:
            if promise.until_s <= now_s:
                del self._promises[model]
        if self._is_over(now_s):
            self.model, self.is_open = self._next_model(), False
            self._stays_until_s = math.inf
        if not self.is_open:
            return []
        latest_s = self._latest_s(now_s)
        granted: list[Ticket] = []
        waiting: list[Ticket] = []
        for ticket in self._waiting:
            may_run = ticket.model == self.model and ticket.arrived_s <= latest_s
            (granted if may_run else waiting).append(ticket)
        self._waiting = waiting
        self._running.update(granted)
        return granted

    def due_s(self, now_s: float) -> float | None:
        """Return after how many seconds `take` is to be called though nothing happens, or None."""
        times = [promise.until_s for promise in self._promises.values()]
        if self.is_open and not self._running and self._oldest_other() is not None:
            times.append(self._end_s())
        return min((at_s - now_s for at_s in times if at_s > now_s), default=None)

    def n_ahead(self, ticket: Ticket) -> int:
        """Return how many requests run now that one which waits has to wait for."""
        return 0 if ticket.model == self.model else len(self._running)

    def _is_over(self, now_s: float) -> bool:
        if not self.model:
            return True
        if self._running or self._oldest_other() is None:
            return False
        own = [ticket.arrived_s for ticket in self._waiting if ticket.model == self.model]
        if self.model in self._promises:
            own.append(self._promises[self.model].arrived_s)
        if own and min(own) <= self._latest_s(now_s):
            return False
        return not self.is_open or now_s >= self._end_s()

    def _end_s(self) -> float:
        """When a turn ends whose model nobody uses while another one is wanted."""
        return min(self._idle_since_s + LINGER_S, self._stays_until_s)

    def _latest_s(self, now_s: float) -> float:
        """Return when a request of this turn's model must have come to run in this turn."""
        oldest_s = self._oldest_other()
        return math.inf if oldest_s is None or now_s < self._stays_until_s else oldest_s

    def _oldest_other(self) -> float | None:
        """Return since when another model is wanted."""
        return min((at_s for at_s, model in self._wanted() if model != self.model), default=None)

    def _next_model(self) -> str:
        return min(self._wanted(), default=(0.0, ""))[1]

    def _wanted(self) -> list[tuple[float, str]]:
        waiting = [(ticket.arrived_s, ticket.model) for ticket in self._waiting]
        return waiting + [(one.arrived_s, model) for model, one in self._promises.items()]
