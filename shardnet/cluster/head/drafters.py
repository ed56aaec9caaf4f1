"""Drafters beside the rings of this node's requests: where each is loaded, and which is held.

Must not know how drafts are verified, nor how a node computes them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Final

from msgspec import structs

from shardnet.cluster.head.lent_drafters import DrafterLoader, FarDrafter, OnBytes
from shardnet.cluster.peers.node_directory import NodeDirectory
from shardnet.cluster.peers.peers import Peers
from shardnet.cluster.placement.draft_places import DraftPlace, draft_places
from shardnet.cluster.planning.plan import Plan
from shardnet.errors import CapacityError, LinkError, ShardnetError
from shardnet.runtime.engine.model_drafts import DraftHost, stored_bytes
from shardnet.runtime.loading.model_facts import find_folder, stamp
from shardnet.runtime.scheduling.drafting import FORCED, MTP, NGRAM
from shardnet.types import NodeId, remember
from shardnet.wire.messages.drafting import LoadDrafter
from shardnet.wire.messages.membership import NodeInfo

AGAIN_S: Final = 30.0
"""How long texts go on without a drafter that could not be loaded again before that is retried."""
MAX_KNOWN: Final = 64
"""Drafters that are remembered."""


def name_of(drafter: str) -> str:
    """Return the name that a drafter's drafts are counted under."""
    name = Path(drafter).name
    return f"drafter {name}".strip() if name in ("", NGRAM, MTP, FORCED) else name


@dataclass(kw_only=True, eq=False, repr=False)
class Drafters:
    """Holds one drafter at most, that asked for last; requests that run go on without the one
    before.

    `plan` returns that of the ring, None without one; `directory` and `peers` know the other nodes.
    """

    own_info: Callable[[], NodeInfo]
    loader: DrafterLoader
    peers: Peers
    directory: NodeDirectory
    plan: Callable[[], Plan | None]
    log: Callable[[str], None]

    def __post_init__(self) -> None:
        self._changing = asyncio.Lock()
        self._host: DraftHost | None = None
        self._key: tuple[object, ...] = ()
        self._nodes: dict[str, str] = {}
        """The names of nodes that were there, by what stood behind an @."""
        self._again_s: dict[tuple[str, ...], float] = {}
        """When what has drafted, by name, node and model, may be loaded again once it is lost."""
        self._n_closed = 0
        self.places_by_name: dict[str, DraftPlace] = {}
        """Where drafters draft, by the names that drafts are counted under."""

    def close(self) -> None:
        """Unload the one that is held, and what is being loaded."""
        self._n_closed += 1
        self._hold(None)

    def _hold(self, host: DraftHost | None) -> None:
        if self._host is not None:
            self._host.close()
        self._host = host

    async def load(self, order: LoadDrafter, on_progress: OnBytes) -> tuple[str, DraftHost | None]:
        """Return the drafter NAME or NAME@NODE of an order, loaded where it drafts best.

        Before it stands the name that its drafts are counted under. None where it has drafted for
        this model before, and cannot now: texts go on without. Raises what loading it raises, of
        the node that was named or of the last that was tried.
        """
        async with self._changing:
            name, named = await self._split(order.drafter)
            which, now_s, host = (name, named, order.form.model), time.monotonic, None
            again_s = self._again_s.get(which)
            if again_s is None or now_s() >= again_s:
                order = structs.replace(order, drafter=name)
                try:
                    host, again_s = await self._current(order, named, on_progress), 0.0
                except ShardnetError as error:
                    if again_s is None:
                        raise
                    self.log(f"no drafts by {name}: {error}")
                    again_s = now_s() + AGAIN_S
                remember(self._again_s, which, again_s, MAX_KNOWN)
            return name_of(name), host

    async def _current(
        self, order: LoadDrafter, named: str, on_progress: OnBytes
    ) -> DraftHost | None:
        """Return the one that is held if it is that of an order, or load it."""
        disk, name, held = self.loader.disk, order.drafter, self._host
        path = await disk.run(name, partial(find_folder, name))
        stamped = None if path is None else await disk.run(name, partial(stamp, path))
        key = (order, named, stamped)
        if isinstance(held, FarDrafter) and self.peers.links.latest(held.control) != held.control:
            held = None  # another link has replaced its link, which is to be closed
        if held is None or held.is_closed or self._key != key:
            await self._load_somewhere(order, named, key, on_progress)
        return self._host

    async def _split(self, name: str) -> tuple[str, str]:
        """Split NAME@NODE: a node that is linked, by its name, or any by its address."""
        before, _, node = name.rpartition("@")
        own, linked = self.own_info().name, self._linked()
        if before and node not in self._nodes:
            _, colon, port = node.rpartition(":")
            if colon and port.isdecimal():
                control = await self.peers.find(node)
                self._nodes[node] = own if control is None else control.link.peer.name
            elif node in (own, *linked):
                self._nodes[node] = node
        return (before, self._nodes[node]) if node in self._nodes else (name, "")

    def _linked(self) -> list[str]:
        return [control.link.peer.name for control in self.peers.links.linked()]

    async def _load_somewhere(
        self, order: LoadDrafter, named: str, key: tuple[object, ...], on_progress: OnBytes
    ) -> None:
        """Load it on the node that is named, or on the first of the best ones that can.

        What was held goes once another is there. So does one that drafts slowly.
        """
        before, n_closed = self._host, self._n_closed
        places = [place for place in await self.places(order) if named in ("", place.name)]
        for place, other in zip_longest(places, places[1:]):
            try:
                host = await self._load_at(place, order, before, on_progress)
            except ShardnetError as error:
                if other is None and (self._host is None or self._host is before):
                    raise
                self.log(f"{order.drafter} cannot draft on {place.name}: {error}")
                continue
            if self._n_closed != n_closed:
                host.close()
                return
            self._hold(host)
            self._key = key
            remember(self.places_by_name, name_of(order.drafter), place, MAX_KNOWN)
            most_s = other.cost_s if other is not None else None
            if not (isinstance(host, FarDrafter) and most_s and host.draft_s > 2 * most_s):
                return
            self.log(f"{place.name} takes {host.draft_s * 1e3:.1f} ms for a draft: too long")
        if places:
            return
        if named not in (self.own_info().name, *self._linked()):
            raise LinkError(f"{named} is not linked to this node any more")
        raise CapacityError(
            f"--speculate {order.drafter}: {named} takes no drafter now",
            remedy="name another node, or leave that to the plan",
        )

    async def _load_at(
        self, place: DraftPlace, order: LoadDrafter, before: DraftHost | None, on_progress: OnBytes
    ) -> DraftHost:
        """Load it beside what was held `before`, or in its place if there is no room for both."""
        try:
            if place.node == self.own_info().node:
                return await self.loader.load(order, on_progress)
            control = self.peers.links.link_of(place.node)
            if control is None:
                raise LinkError(f"{place.name} is not linked any more")
            far = FarDrafter(control, order)
            await far.load(on_progress)
            return far
        except CapacityError:
            if before is None or before.is_closed or self._host is not before:
                raise
        self._hold(None)
        return await self._load_at(place, order, None, on_progress)

    async def places(self, order: LoadDrafter) -> list[DraftPlace]:
        """List where the drafter of an order may be loaded, the best first; see draft_places."""
        disk = self.loader.disk
        path = await disk.run(order.drafter, partial(find_folder, order.drafter))
        n_bytes = 0 if path is None else await disk.run(order.drafter, partial(stored_bytes, path))
        plan = self.plan()
        stages = plan.placement.stages if plan is not None else ()
        n_layers = sum(len(stage.layers) for stage in stages)
        return draft_places(
            n_bytes,
            [self.own_info(), *await self.directory.listed()],
            layer_bytes=sum(stage.weight_bytes for stage in stages) // max(1, n_layers),
            speeds=plan.measured.speeds if plan is not None else {},
            stages=[NodeId(node.node) for node in plan.members] if plan is not None else [],
            round_trip_s=self.peers.links.rtt_s,
        )
