"""Requests in lockstep wait here for the others of their set, so that they begin together.

Knows how many a set has, and which of them are ready or gone. Must not know rings or prompts.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from shardnet.cluster.peers.control_link import ControlLink
from shardnet.wire.messages.generation import Generate

PATIENCE_S: Final = 5.0
"""How long the ready requests of a set wait for one more of it, before they begin without."""


@dataclass(slots=True, kw_only=True)
class _Set:
    size: int
    n_here: int = 0
    n_settled: int = 0
    """How many are ready, or have ended before."""
    waiting: dict[int, asyncio.Future[None]] = field(default_factory=dict)
    """The ready ones by the number of their request."""
    is_begun: bool = False

    def settle(self) -> None:
        """Note that one more need not be waited for."""
        self.n_settled += 1
        if self.n_settled >= self.size:  # the last one is about to wait like the others
            asyncio.get_running_loop().call_soon(self.begin)

    def begin(self) -> None:
        """Let all that are ready begin, in the order in which they were sent."""
        self.is_begun = True
        for number in sorted(self.waiting):
            if not self.waiting[number].done():
                self.waiting[number].set_result(None)


@dataclass(slots=True, kw_only=True)
class Member:
    """One request of a set, of none where it is None."""

    number: int
    of: _Set | None
    is_settled: bool = False

    @property
    def waits(self) -> bool:
        """Whether it has others to wait for."""
        return self.of is not None and not self.of.is_begun

    async def begin(self) -> None:
        """Wait until every other of the set is ready too, or gone; PATIENCE_S for each at most.

        Those that wait go on in one turn of the event loop, in the order in which they were sent.
        """
        one = self.of
        if one is None or not self.waits:
            return
        begun = one.waiting[self.number] = asyncio.get_running_loop().create_future()
        self.is_settled = True
        one.settle()
        while not begun.done():
            n_settled = one.n_settled
            await asyncio.wait([begun], timeout=PATIENCE_S)
            if n_settled == one.n_settled and not begun.done():
                one.begin()


class LockstepSets:
    """The sets of all clients. A client numbers its own."""

    def __init__(self) -> None:
        self._sets: dict[tuple[ControlLink, int], _Set] = {}

    @contextlib.contextmanager
    def member(self, control: ControlLink, message: Generate) -> Iterator[Member]:
        """Count a request to its set within the context; one that leaves is waited for no more."""
        if not message.lockstep or message.lockstep_size < 2:
            yield Member(number=message.request, of=None)
            return
        key = (control, message.lockstep_set)
        one = self._sets.setdefault(key, _Set(size=message.lockstep_size))
        one.n_here += 1
        member = Member(number=message.request, of=one)
        try:
            yield member
        finally:
            one.n_here -= 1
            one.waiting.pop(member.number, None)
            if not member.is_settled:
                one.settle()
            if not one.n_here:
                del self._sets[key]
