"""What programs have the cluster keep between requests: in memory, on this node and on one more.

Knows names, ages and bounds. Must not know what values mean, nor HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Final, TypeVar

from msgspec.structs import replace

from shardnet.cluster.peers.control_link import ControlLink, MessageHandlers
from shardnet.errors import ShardnetError
from shardnet.wire.messages.control import Done
from shardnet.wire.messages.deputies import (
    MAX_LISTED_BYTES,
    MAX_LISTED_VALUE,
    MAX_VALUES_LISTED,
    DropValue,
    FindValue,
    KeepValue,
    ListedValue,
    ListValues,
    ValueFound,
    ValuesListed,
)
from shardnet.wire.messages.handshake import PeerRole

MOST_VALUES: Final = 4096
MOST_BYTES: Final = 128 << 20
"""In the memory of one node."""
PEER_S: Final = 3.0
"""How long another node may take."""

Answer = TypeVar("Answer", Done, ValueFound, ValuesListed)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    value: bytes
    came_s: float


@dataclass(eq=False)
class KeptValues:
    """Values by owner and name; the least recently used make room. `linked` are other nodes."""

    linked: Callable[[], Sequence[ControlLink]]
    _: KW_ONLY
    clock: Callable[[], float] = time.monotonic
    most: int = MOST_VALUES
    most_bytes: int = MOST_BYTES

    def __post_init__(self) -> None:
        self._n_bytes = 0
        self._held: OrderedDict[tuple[str, str], _Held] = OrderedDict()

    def register(self, handlers: MessageHandlers) -> None:
        """Register the messages about values."""
        handlers.register(KeepValue, self.keep)
        handlers.register(FindValue, self.find)
        handlers.register(ListValues, self.list_values)
        handlers.register(DropValue, self.drop)

    async def keep(self, control: ControlLink, message: KeepValue) -> None:
        """Keep a value; one of a client on another node too, if there is one that answers."""
        self._take(message)
        for peer in self._others(control):
            if await _asked(peer, message, Done) is not None:
                break
        control.send(Done(request=message.request))

    async def find(self, control: ControlLink, message: FindValue) -> None:
        """Answer with a value; where this node has none, with another's."""
        place = (message.of.owner, message.of.name)
        held = self._held.get(place)
        if held is not None:
            self._held.move_to_end(place)
            control.send(ValueFound(request=message.request, value=held.value))
            return
        found = await _all_asked(self._others(control), message, ValueFound)
        value = next((one.value for one in found if one.value is not None), None)
        control.send(ValueFound(request=message.request, value=value))

    async def list_values(self, control: ControlLink, message: ListValues) -> None:
        """Answer with an owner's small values, of each name the latest."""
        others = await _all_asked(self._others(control), message, ValuesListed)
        now_s = self.clock()  # after theirs, so that an older one of ours never looks younger
        own = [
            ListedValue(name, now_s - held.came_s, held.value)
            for (owner, name), held in self._held.items()
            if owner == message.of.owner and name.startswith(message.of.name)
        ]
        values = [*own, *(value for answer in others for value in answer.values)]
        control.send(ValuesListed(request=message.request, values=_latest(values)))

    async def drop(self, control: ControlLink, message: DropValue) -> None:
        """Keep a value no longer, nor on any other node that answers."""
        self._forget((message.of.owner, message.of.name))
        await _all_asked(self._others(control), message, Done)
        control.send(Done(request=message.request))

    def _others(self, control: ControlLink) -> Sequence[ControlLink]:
        """Return the nodes to ask, too: none for what another node asks."""
        return self.linked() if control.link.peer.role is PeerRole.CLIENT else ()

    def _take(self, message: KeepValue) -> None:
        place = (message.of.owner, message.of.name)
        self._forget(place)
        self._held[place] = _Held(value=message.value, came_s=self.clock())
        self._n_bytes += len(message.value)
        while len(self._held) > self.most or self._n_bytes > self.most_bytes:
            self._forget(next(iter(self._held)))

    def _forget(self, place: tuple[str, str]) -> None:
        gone = self._held.pop(place, None)
        self._n_bytes -= len(gone.value) if gone is not None else 0


def _latest(values: Iterable[ListedValue]) -> list[ListedValue]:
    """Return the latest value of each name, the latest first, as many as one answer takes."""
    found: dict[str, ListedValue] = {}
    n_bytes = 0
    for value in sorted(values, key=lambda value: value.age_s):
        if value.name in found or len(value.value) > MAX_LISTED_VALUE:
            continue
        n_bytes += len(value.value)
        if len(found) == MAX_VALUES_LISTED or n_bytes > MAX_LISTED_BYTES:
            break
        found[value.name] = value
    return [*found.values()]


async def _all_asked(
    peers: Iterable[ControlLink],
    message: FindValue | ListValues | DropValue,
    expected: type[Answer],
) -> list[Answer]:
    answers = await asyncio.gather(*(_asked(peer, message, expected) for peer in peers))
    return [answer for answer in answers if answer is not None]


async def _asked(
    peer: ControlLink,
    message: KeepValue | FindValue | ListValues | DropValue,
    expected: type[Answer],
) -> Answer | None:
    """Ask another node; None if it does not answer in time, or not so."""
    try:
        async with asyncio.timeout(PEER_S):
            return await peer.ask(replace(message, request=peer.next_request()), expected)
    except (ShardnetError, TimeoutError):
        return None
