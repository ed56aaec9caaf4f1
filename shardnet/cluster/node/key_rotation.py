"""Takes new cluster keys, hands them on, and replaces links that were opened with the one before.

Every node that has taken a key hands it to each peer and client that has not, whoever of them
comes: docs/adr/0094 says why that is enough, and safe. Must not know files nor certificates.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final
from weakref import WeakKeyDictionary

from msgspec.structs import replace

from shardnet.cluster.peers.control_link import ControlLink, MessageHandlers
from shardnet.cluster.peers.peers import Peers
from shardnet.cluster.store.disk_jobs import DiskJobs
from shardnet.errors import AuthenticationError, LinkError, ShardnetError, UsageError
from shardnet.transport.identity import Identity
from shardnet.transport.link import Link
from shardnet.transport.loop import at_most
from shardnet.types import NodeId
from shardnet.wire.messages.handshake import Capability, PeerRole
from shardnet.wire.messages.membership import MAX_GRACE_S, KeyTaken, TakeKey

LOOK_S: Final = 1.0
"""Interval of the looks at the links."""
ANSWER_S: Final = 5.0
"""How long a peer may take to store a key, or to answer when it is dialled."""
AGAIN_S: Final = 30.0
"""When a link is looked after again that could not be replaced."""
RENEWED_S: Final = 12.0
"""How long links are replaced before the old key is forgotten at once."""


@dataclass(kw_only=True, eq=False, repr=False)
class KeyRotation:
    """The cluster keys of a node. `clients` returns the links of its clients.

    `on_changed` is called when the names of the cluster are others.
    """

    node: NodeId
    identity: Identity | None
    peers: Peers
    clients: Callable[[], Iterable[ControlLink]]
    disk: DiskJobs
    on_changed: Callable[[], None]
    log: Callable[[str], None]

    def __post_init__(self) -> None:
        self._changing, self._renewing = asyncio.Lock(), asyncio.Lock()
        self._tried: WeakKeyDictionary[ControlLink, float] = WeakKeyDictionary()

    def register(self, handlers: MessageHandlers) -> None:
        """Register the message that is answered here."""
        handlers.register(TakeKey, self._take)

    def check(self, link: Link) -> None:
        """Raise AuthenticationError for a link whose peer has shown a key that is forgotten."""
        if self.identity is not None and not self.identity.accepts(link):
            raise AuthenticationError(
                "the cluster has another key by now", remedy="run the command again"
            )

    async def run(self) -> None:
        """Hand the present key on while another one counts too, and forget that in time."""
        identity = self.identity
        if identity is None or identity.keeper is None:
            return
        while True:
            await asyncio.sleep(LOOK_S)
            if identity.old:
                with contextlib.suppress(ShardnetError):  # a full disk, for a while
                    await self._change(identity, identity.keeper.forget_if_due)
                await self._renew_links(identity)
            await self._end_refused(identity)

    async def _take(self, control: ControlLink, message: TakeKey) -> None:
        """Take a key, or have a peer take it, and then answer.

        Raises UsageError without a key, LinkError for a node that has no link to this one, and what
        KeyKeeper.take raises.
        """
        identity = self.identity
        if identity is None or identity.keeper is None:
            raise UsageError("this node has no cluster key", remedy="run `shardnet key join` there")
        if message.node not in ("", self.node):
            peer = self.peers.links.link_of(NodeId(message.node))
            if peer is None:
                raise LinkError("this node has no link to it any more")
            peer.link.peer.require(Capability.KEYS)
            answer = await peer.ask(replace(message, node=""), KeyTaken)
            control.send(replace(answer, request=message.request))
        else:
            if not message.grace_s and identity.old:
                async with at_most(RENEWED_S):
                    await self._renew_links(identity)
            take = partial(identity.keeper.take, message.key, message.grace_s, message.after)
            await self._change(identity, take)
            control.send(KeyTaken(request=message.request, old_s=_left_s(identity)))

    async def _change(self, identity: Identity, change: Callable[[], None]) -> None:
        """Change the keys on disk, then in use. Raises what `change` raises."""
        async with self._changing:
            before = identity.fingerprints
            await self.disk.run("the cluster key", change)
            if identity.fingerprints == before:
                return
        names = " and the one before, of ".join(identity.fingerprints)
        self.log(f"the cluster key of {names} counts from now on, and no other")
        self.on_changed()

    # --- links

    async def _renew_links(self, identity: Identity) -> None:
        """Hand the key to those that have shown the one before, and open links to nodes again."""
        async with self._renewing:
            now = asyncio.get_running_loop().time()
            found = [
                control
                for control in (*self.peers.links.linked(), *self.clients())
                if not identity.is_present(control.link)
                and now - self._tried.get(control, float("-inf")) > AGAIN_S
            ]
            await asyncio.gather(*(self._renew(control, identity, now) for control in found))

    async def _renew(self, control: ControlLink, identity: Identity, now: float) -> None:
        peer, signers, is_first = (
            control.link.peer,
            control.link.signers,
            control not in self._tried,
        )
        assert signers is not None
        self._tried[control] = now
        try:
            if signers.peer != identity.signer:
                peer.require(Capability.KEYS)
                told = TakeKey(
                    request=0,
                    key=identity.secret,
                    grace_s=_left_s(identity),
                    after=identity.signers[-1],
                )
                async with asyncio.timeout(ANSWER_S):
                    await control.ask(told, KeyTaken)
            if peer.role is PeerRole.NODE:
                async with asyncio.timeout(ANSWER_S):
                    await self.peers.links.dial_again(NodeId(peer.node))
        except (ShardnetError, TimeoutError) as error:
            if peer.role is PeerRole.NODE and is_first:
                why = str(error) or "it does not answer"
                self.log(f"{control.peer_name} has not the new cluster key yet: {why}")

    async def _end_refused(self, identity: Identity) -> None:
        """Close links of peers that have shown a forgotten key alone.

        A client's goes on until its requests have ended.
        """
        idle = [control for control in self.clients() if control.is_idle]
        for control in (*self.peers.links.linked(), *idle):
            if not identity.accepts(control.link):
                await control.link.close()


def _left_s(identity: Identity) -> int:
    """Return how long (s) the old key still counts, at least 1; 0 where there is none."""
    left_s = round(identity.until_s - time.time())
    return min(MAX_GRACE_S, max(1, left_s)) if identity.old else 0
