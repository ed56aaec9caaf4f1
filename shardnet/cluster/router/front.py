"""Several rings behind this head: opened together, chosen among for each request.

Knows which of them takes requests. Must not know links, nor what clients send.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Final

from shardnet.cluster.peers.control_link import ControlLink
from shardnet.cluster.peers.supervision import SupervisedJobs
from shardnet.cluster.planning.plan import Plan
from shardnet.cluster.ring.ring_spec import RingUse
from shardnet.cluster.router.choosing import choose
from shardnet.cluster.router.kept_ring import KeptRing, OnProgress
from shardnet.errors import PeerFailedError, ShardnetError
from shardnet.wire.messages.plans import ModelChoice, NodeProgress

GRACE_S: Final = 10.0
"""How long requests wait for the other rings when the first one is there."""

Reach = Callable[[Plan], Awaitable[ControlLink]]
"""Gives the control link to the head of a ring with this plan."""

Tried = Collection[tuple[KeptRing, int]]
"""Rings that have failed a request, with `n_times` of each then."""


@dataclass(eq=False, repr=False)
class Front:
    """The rings of one plan, kept until `close`. The first is that of this node.

    `choice` is what a client asked for. Jobs run in `jobs`.
    """

    choice: ModelChoice
    plan: Plan
    reach: Reach
    jobs: SupervisedJobs
    log: Callable[[str], None]

    def __post_init__(self) -> None:
        self.rings = [
            KeptRing(ring, partial(self.reach, ring), self._changed, self.log)
            for ring in self.plan.rings
        ]
        self._change = asyncio.Event()
        self._closed: ShardnetError | None = None
        """What requests end with that still wait for a ring, None while rings are kept."""
        self._listeners: set[OnProgress] = set()
        self.use = RingUse()
        """How requests use it: each does so while it waits or runs."""
        self._open_at_s: float | None = None
        """When requests begin in any case, by the loop's clock; None before the first ring."""
        self._keeping = [
            self.jobs.begin(
                partial(ring.keep, partial(self._progressed, ring)), "a ring behind a head"
            )
            for ring in self.rings
        ]

    @property
    def is_over(self) -> bool:
        """Whether no ring is there, nor can be built now."""
        return not any(ring.is_whole or ring.is_hopeful for ring in self.rings)

    def suits(self, choice: ModelChoice) -> bool:
        """Say whether it is what `choice` asks for; see Lead.suits."""
        return (
            self.plan.computes(choice)
            and not choice.nodes
            and not choice.layers
            and choice.stream_layers in (0, "auto")
            and choice.wire_dtype == self.choice.wire_dtype
        )

    async def opened(self, on_progress: OnProgress) -> None:
        """Wait until each ring was whole once, or cannot be built now.

        When the first is whole the others have GRACE_S: they may have to fetch their weights.
        Raises as `abandon` says.
        """
        self._listeners.add(on_progress)
        try:
            async with asyncio.timeout_at(self._open_at_s) as patience:
                while any(ring.is_hopeful and not ring.n_times for ring in self.rings):
                    self._check_kept()
                    await self._change.wait()
                    patience.reschedule(self._open_at_s)
        except TimeoutError:
            pass
        finally:
            self._listeners.discard(on_progress)

    async def ring_for(self, prompt: bytes, tried: Tried = ()) -> KeptRing:
        """Choose the ring for a request, none of those that it has tried in vain.

        Waits where one is built or recovers. Raises what was wrong with the last if none is, and as
        `abandon` says.
        """
        while True:
            self._check_kept()
            fresh = [ring for ring in self.rings if (ring, ring.n_times) not in tried]
            whole = [ring for ring in fresh if ring.is_whole]
            if whole:
                return whole[choose([ring.view(prompt) for ring in whole])]
            if not any(ring.is_hopeful and not ring.is_whole for ring in self.rings):
                raise self._error()
            await self._change.wait()

    def others_than(self, ring: KeptRing) -> bool:
        """Say whether another ring takes requests."""
        return any(other.is_whole for other in self.rings if other is not ring)

    def abandon(self, error: ShardnetError) -> None:
        """End all requests with this error, those that wait for a ring too."""
        self._closed = error
        self._wake()
        for ring in self.rings:
            ring.give_up(error)

    async def close(self) -> None:
        """Keep the rings no more. They are not freed by that; nobody waits for them any more."""
        self._closed = self._closed or PeerFailedError(
            "the rings behind this head were left", remedy="ask again"
        )
        for job in self._keeping:
            job.cancel()
        await asyncio.wait(self._keeping)
        self._wake()

    def _check_kept(self) -> None:
        """Raise what has ended the keeping of rings."""
        if self._closed is not None:
            raise self._closed

    def _error(self) -> ShardnetError:
        [error, *_] = [ring.error for ring in self.rings if not ring.is_whole] or [
            PeerFailedError("every ring behind this head has failed this request")
        ]
        return error

    def _changed(self, _: KeptRing) -> None:
        """Have requests of rings that take none go on where they can."""
        if self._open_at_s is None and any(ring.is_whole for ring in self.rings):
            self._open_at_s = asyncio.get_running_loop().time() + GRACE_S
        for ring in self.rings:
            if not ring.is_whole and self.others_than(ring):
                ring.give_up(ring.error)
        self._wake()

    def _wake(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    def _progressed(self, ring: KeptRing, progress: NodeProgress) -> None:
        if ring is self.rings[0]:
            for listener in [*self._listeners]:
                listener(progress)
