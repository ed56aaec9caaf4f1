"""The nodes of a stage that spans several, as one of them sees it: who opens which link.

Knows that the shard with the larger number dials. Must not know what is computed, nor the ring.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from msgspec import UNSET

from shardnet.errors import PeerFailedError, UsageError
from shardnet.runtime.ring.shard_links import ShardLinks
from shardnet.transport.link import Link
from shardnet.types import Epoch
from shardnet.wire.messages.handshake import Hello
from shardnet.wire.messages.stages import LoadStage


@dataclass(frozen=True, slots=True, kw_only=True)
class DataEnd:
    """This node's end of a data link; `shard` for one between the nodes of its stage."""

    ring: str
    epoch: Epoch
    rank: int
    shard: int | None = None


DialData = Callable[[str, DataEnd], Awaitable[Link]]
"""Opens a data link to an address."""


class StageSpan:
    """Shard `shard` of a stage that spans the nodes at `addresses`, of which each has one.

    `end` is this node's end of its links to the others.
    """

    def __init__(self, *, shard: int, addresses: tuple[str, ...], end: DataEnd) -> None:
        self.shard = shard
        self._addresses = addresses
        self._end = end
        self._links: dict[int, Link] = {}
        self._accepted: dict[int, asyncio.Future[Link]] = {
            other: asyncio.get_running_loop().create_future()
            for other in range(shard + 1, len(addresses))
        }

    @property
    def links(self) -> list[Link]:
        """The links that are open, to be ended with the ring."""
        done = [f.result() for f in self._accepted.values() if f.done() and not f.cancelled()]
        return [*self._links.values(), *(link for link in done if link not in self._links.values())]

    def check_hello(self, hello: Hello) -> None:
        """Raise UsageError unless `hello` is that of a shard of this stage, the first time."""
        end = self._end
        expected = (hello.ring, hello.epoch, hello.rank) == (end.ring, end.epoch, end.rank)
        waiting = None if hello.shard is UNSET else self._accepted.get(hello.shard)
        if not expected or waiting is None or waiting.done():
            raise UsageError(
                f"shard {hello.shard} of rank {hello.rank} of ring {hello.ring} epoch "
                f"{hello.epoch} opened a data link here, expected each shard from "
                f"{self.shard + 1} to {len(self._addresses) - 1} of rank {end.rank} of ring "
                f"{end.ring} epoch {end.epoch}, once"
            )

    def accept(self, link: Link) -> None:
        """Take the link of a shard. Raises UsageError as `check_hello`."""
        self.check_hello(link.peer)
        assert link.peer.shard is not UNSET
        self._accepted[link.peer.shard].set_result(link)

    async def connect(self, dial: DialData, within_s: float) -> ShardLinks:
        """Open the links to all other shards.

        Raises what dialing raises, and PeerFailedError for a shard that opens none in time.
        """
        for other in range(self.shard):
            self._links[other] = await dial(self._addresses[other], self._end)
        if self._accepted:
            await asyncio.wait(self._accepted.values(), timeout=within_s)
        for other, accepted in self._accepted.items():
            if not accepted.done():
                raise PeerFailedError(
                    f"{self._addresses[other]} did not open its data link to shard {self.shard} of "
                    f"its stage within {within_s:.0f} s",
                    remedy=f"check that it can reach {self._addresses[self.shard]}",
                )
            if accepted.cancelled():
                raise PeerFailedError("this node has left the ring", remedy="ask again")
            self._links[other] = accepted.result()
        return ShardLinks(shard=self.shard, links=self._links, epoch=self._end.epoch)

    def cancel(self) -> None:
        """Wait for no link any more."""
        for accepted in self._accepted.values():
            accepted.cancel()


def span_of(message: LoadStage) -> StageSpan | None:
    """Return the nodes of the stage that `message` orders, None for this one alone."""
    if not message.shard_nodes:
        return None
    return StageSpan(
        shard=message.shard,
        addresses=tuple(message.shard_nodes),
        end=DataEnd(
            ring=message.ring,
            epoch=Epoch(message.epoch),
            rank=message.rank,
            shard=message.shard,
        ),
    )
