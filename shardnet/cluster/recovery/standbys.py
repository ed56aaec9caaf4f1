"""Keep nodes ready to go on in the place of others, and have them do so when one is lost.

Knows the order: load a neighbour's layers beside, let keys and values follow while the ring goes
on, and at a loss go on from there. Who stands by for whom is in the plan. Must not know how rows
travel, nor what to do when no standby can help (recovery.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from msgspec.structs import replace

from shardnet.cluster.head.head import Head
from shardnet.cluster.head.lead import Lead
from shardnet.cluster.placement.standbys import Standby
from shardnet.cluster.planning.plan import Plan
from shardnet.cluster.ring.ring import Ring
from shardnet.cluster.ring.ring_moves import RingMoves
from shardnet.cluster.ring.stage_port import StagePort
from shardnet.errors import CapacityError, PeerSilentError, ShardnetError, UsageError
from shardnet.runtime.scheduling.sequences import ComputedSequence
from shardnet.transport.loop import at_most
from shardnet.types import BLOCK_POSITIONS, NodeId, SequenceId

LOOK_S: Final = 0.5
"""Interval of the looks at the ring while nothing runs on it."""
FOLLOW_S: Final = 0.2
"""How long after a round of bringing what was computed meanwhile the next one begins. What was
computed since is computed again at a loss; more rounds would take time from steps."""
LEAST_ROWS: Final = 16
"""Fewer rows of a sequence are not brought: they are soon computed again."""
LEAST_WITHOUT_WEIGHTS: Final = BLOCK_POSITIONS
"""Nor is a sequence of fewer rows where layers have to be loaded first."""
AGAIN_S: Final = 10.0
"""When a node that could not stand by is asked again, or one that could not be reached; twice as
much later each further time in turn."""
MOST_AGAIN_S: Final = 320.0
"""But no later than that: what it lacks may have come."""
ANSWER_S: Final = 1.0
"""How long nodes may take to say that they are there, once a ring is lost: one whose process has
ended is known to be gone at once."""
TAKE_OVER_S: Final = 5.0
"""How long a standby may take to go on, before another ring is planned instead."""


@dataclass(slots=True, kw_only=True)
class Ready:
    """A node that stands by in `former`, and the ring that goes on with it, not built yet.

    `rank` is that of the node there. It has brought what is `followed` of each sequence. One that
    was `refused` when it had so many positions is tried again when it has LEAST_ROWS more, or twice
    as many where nothing was brought: what was brought before a refusal stays.
    """

    standby: Standby
    lost: NodeId
    name: str
    former: Ring
    plan: Plan
    ring: Ring
    rank: int
    moves: RingMoves
    is_loaded: bool = False
    not_before_s: float = 0.0
    n_failed: int = 0
    followed: dict[SequenceId, ComputedSequence] = field(default_factory=dict)
    refused: dict[SequenceId, int] = field(default_factory=dict)

    @property
    def holds_weights(self) -> bool:
        """Whether the node has the layers in memory already."""
        return self.standby.weight_bytes > 0

    async def make(self) -> None:
        """Have the node load its layers, or only be ready to bring what sequences have there."""
        order = replace(
            self.ring.order(self.rank),
            beside=True,
            stands_for=self.name,
            kv_only=not self.holds_weights,
        )
        await self.ring.ports[self.rank].load(order, lambda *_: None)
        self.is_loaded = True

    def worth_following(self, computed: Sequence[ComputedSequence]) -> list[ComputedSequence]:
        """Return what takes long enough to compute again."""
        least = LEAST_ROWS if self.holds_weights else LEAST_WITHOUT_WEIGHTS
        return [one for one in computed if len(one.token_ids) >= least]

    async def follow(self, computed: Sequence[ComputedSequence]) -> None:
        """Have the node bring what has been computed since the last time. Raises ShardnetError.

        First what it lacks most of.
        """
        here = {one.sequence_id for one in computed}
        for sequence_id in [*(self.followed.keys() | self.refused.keys()) - here]:
            await self._forget(sequence_id)
        for one in sorted(computed, key=lambda one: self._n_known(one) - len(one.token_ids)):
            known, n_positions = self._n_known(one), len(one.token_ids)
            refused = self.refused.get(one.sequence_id, 0)
            if n_positions < known:  # it was paused, and begins again
                await self._forget(one.sequence_id)
            elif n_positions < (max(known, refused) + LEAST_ROWS if known else 2 * refused):
                continue
            try:
                await self.moves.follow(self.rank, self.standby.rank, one)
            except (UsageError, CapacityError):  # it or its stage has ended, or it is too much
                self.refused[one.sequence_id] = n_positions
            else:
                self.followed[one.sequence_id] = one
                self.refused.pop(one.sequence_id, None)

    def _n_known(self, one: ComputedSequence) -> int:
        known = self.followed.get(one.sequence_id)
        return 0 if known is None else len(known.token_ids)

    def lose(self) -> None:
        """Note that the node has nothing ready any more."""
        self.is_loaded = False
        self.followed.clear()
        self.refused.clear()

    async def _forget(self, sequence_id: SequenceId) -> None:
        self.followed.pop(sequence_id, None)
        self.refused.pop(sequence_id, None)
        await self.moves.forget(self.rank, sequence_id)

    def brought(self, computed: Sequence[ComputedSequence]) -> list[ComputedSequence]:
        """Return what can go on, as far as the node has brought it."""
        return [
            one.cut(len(known.token_ids), known.state)
            for one in computed
            if (known := self.followed.get(one.sequence_id)) is not None
            and len(known.token_ids) <= len(one.token_ids)
        ]


class Standbys:
    """The nodes that stand by in the ring that `head` leads."""

    def __init__(self, *, head: Head, log: Callable[[str], None]) -> None:
        self._head = head
        self._log = log
        self._ring: Ring | None = None
        self._ready: list[Ready] = []
        self._not_before_s = 0.0
        self._n_short = 0
        self.is_ready = asyncio.Event()
        """Set while every node that should stand by does, and has followed what runs."""

    async def run(self) -> None:
        """Keep them ready, until cancelled."""
        while True:
            ring = self._ring if self._ready else None
            if ring is None or (ring.is_in_use and not ring.is_busy):
                await asyncio.sleep(LOOK_S)
            elif ring.is_busy:
                await asyncio.sleep(FOLLOW_S)
            else:
                async with at_most(LOOK_S):
                    await ring.wait_until_used()
            await self.look()

    async def look(self) -> None:
        """Have nodes stand by where they do not yet, and bring what was computed meanwhile."""
        lead = self._head.latest
        if lead is None or lead.is_given_up:
            await self._put([], None)
        if lead is None or lead.is_recovering or lead.ring.broken is not None:
            self.is_ready.clear()
            return
        if lead.is_replacing:  # a node makes one stage ready at a time, and the next ring's is due
            self.is_ready.clear()
            for ready in self._ready:
                ready.lose()
            return
        is_time = time.monotonic() >= self._not_before_s
        is_short = [one.standby for one in self._ready] != [*lead.plan.standbys]
        if lead.ring is not self._ring or (is_short and is_time):
            await self._choose(lead)
        known = [one.state for ready in self._ready for one in ready.followed.values()]
        states = {state for state in known if state is not None}
        computed = lead.ring.engine.to_follow(states)
        await asyncio.gather(*(self._keep(ready, computed) for ready in self._ready))
        running = lead.ring.engine.computed()
        if self._ready and all(
            one.is_loaded
            and not one.n_failed
            and one.followed.keys() >= {each.sequence_id for each in one.worth_following(running)}
            for one in self._ready
        ):
            self.is_ready.set()

    async def _choose(self, lead: Lead) -> None:
        """Make the rings that would go on in the place of a lead's present one.

        Those that are made already are kept. A node that cannot be reached keeps no other one from
        standing by: it may have left since the plan was made.
        """
        self._n_short = self._n_short + 1 if lead.ring is self._ring else 0
        self._not_before_s = time.monotonic() + _again_s(self._n_short)
        try:
            async with self._head.led.changing(lead):
                ring, plan, found = lead.ring, lead.plan, []
                known = self._ready if ring is self._ring else []
                for standby in plan.standbys:
                    ready = next((one for one in known if one.standby == standby), None)
                    try:
                        found.append(ready or await self._made(lead, plan, standby))
                    except ShardnetError as error:
                        if ring.broken is not None:  # another one has to be built
                            raise
                        name = plan.nodes[standby.rank].name
                        self._log(f"no node stands by for {name} yet: {error}")
        except ShardnetError:  # the ring was unloaded
            return
        if lead.ring is ring:
            await self._put(found, ring)

    async def _put(self, ready: list[Ready], ring: Ring | None) -> None:
        """Keep these ready, and let nodes that are not among them free what they had loaded."""
        self.is_ready.clear()
        before, self._ready, self._ring = self._ready, ready, ring
        kept = {one.standby.node for one in ready}
        for one in before:
            if one.standby.node not in kept and one.ring is not ring:
                with contextlib.suppress(ShardnetError):  # it is gone, or in another ring
                    await one.ring.ports[one.rank].unload(one.ring.name)

    async def _made(self, lead: Lead, plan: Plan, standby: Standby) -> Ready:
        instead = plan.without_stage(standby)
        lost, former = plan.nodes[standby.rank], lead.ring
        ring = await self._head.led.ring_instead(lead, instead)
        return Ready(
            standby=standby,
            lost=NodeId(lost.node),
            name=lost.name,
            former=former,
            plan=instead,
            ring=ring,
            rank=[node.node for node in instead.nodes].index(standby.node),
            moves=RingMoves(former, ring, {former.spec.addresses[standby.rank]}),
        )

    async def _keep(self, ready: Ready, computed: Sequence[ComputedSequence]) -> None:
        """Have one node loaded and up to date; when it cannot, have it begin anew later.

        Until then it counts with what it has brought: maybe the node that it follows was just lost.
        """
        if time.monotonic() < ready.not_before_s:
            return
        try:
            if ready.n_failed:
                ready.lose()
            if not ready.is_loaded:
                await ready.make()
            if ready.former.spec.config.has_movable_slots:
                await ready.follow(ready.worth_following(computed))
            ready.n_failed = 0
        except ShardnetError as error:
            ready.not_before_s = time.monotonic() + _again_s(ready.n_failed)
            ready.n_failed += 1
            if ready.former.broken is None:
                name = ready.ring.ports[ready.rank].node_name
                self._log(f"{name} does not stand by for {ready.name} now: {error}")

    async def ready_for(self, ring: Ring) -> Ready | None:
        """Return who goes on in the place of the one node that was lost with `ring`, None if none.

        Takes at most ANSWER_S: who does not say that it is there is lost. Without weights only one
        that has followed something does: other nodes together may load faster.
        """
        waiting = [
            ready
            for ready in self._ready
            if ready.former is ring and ready.is_loaded and (ready.holds_weights or ready.followed)
        ]
        if not waiting:
            return None
        ports = {port.node: port for ready in waiting for port in (*ring.ports, *ready.ring.ports)}
        asked = [port for node, port in ports.items() if node not in ring.blamed]
        answers = await asyncio.gather(*(_is_there(port) for port in asked))
        gone = {port.node for port, is_there in zip(asked, answers, strict=True) if not is_there}
        gone |= ring.blamed.keys()
        lost = gone & {port.node for port in ring.ports}
        found = [one for one in waiting if {one.lost} == lost and one.standby.node not in gone]
        return found[0] if found else None

    async def take_over(
        self, lead: Lead, ready: Ready, computed: Sequence[ComputedSequence]
    ) -> dict[SequenceId, int]:
        """Have the requests of a lead go on, from what was computed of them; `ready` is built.

        Must be called within `Head.changing`. Returns how many positions of each need not be
        computed again. Raises what loading and building raises, PeerSilentError after TAKE_OVER_S.
        """
        engine, moved = lead.ring.engine, {}
        try:
            async with asyncio.timeout(TAKE_OVER_S if ready.holds_weights else None) as deadline:
                await ready.moves.prepare()  # loading takes as long as nodes report progress
                if not ready.holds_weights:
                    deadline.reschedule(asyncio.get_running_loop().time() + TAKE_OVER_S)
                moved = await ready.moves.bring(ready.brought(computed), is_last=True)
                engine.moved(moved)
                await self._head.led.put_instead(lead, ready.plan, ready.ring)
        except TimeoutError:
            engine.moved({})
            raise PeerSilentError(
                f"the standby of {ready.name} did not go on within {TAKE_OVER_S:g} s"
            ) from None
        except ShardnetError:
            engine.moved({})
            raise
        return moved


def _again_s(n_failed: int) -> float:
    """Return how long to wait before what has failed so often before is tried again."""
    return min(AGAIN_S * 2.0 ** min(n_failed, 16), MOST_AGAIN_S)


async def _is_there(port: StagePort) -> bool:
    """Say whether a node answers in time."""
    try:
        async with asyncio.timeout(ANSWER_S):
            await port.compare_clock()
    except (ShardnetError, TimeoutError):
        return False
    return True
