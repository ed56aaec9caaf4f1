"""What other nodes know of a head that may be lost, of who goes on for it, and of kept answers.

Knows how long their words are waited for. Must not know how a ring is taken over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from msgspec import structs

from shardnet.cluster.member.ring_membership import RingMembership
from shardnet.cluster.peers.control_link import ControlLink
from shardnet.cluster.peers.peer_links import PeerLinks
from shardnet.errors import ShardnetError
from shardnet.types import NodeId
from shardnet.wire.messages.deputies import AnswerFound, FindAnswer, FindNode, NodeFound

ASK_S: Final = 1.0
"""How long a node may take to answer, or to notice what another one has noticed."""
AGAIN_S: Final = 0.1
SEEN_S: Final = 6.0
"""How long others may still see a head that is lost, or be out of reach themselves."""
ALONE_S: Final = 1.0
"""How long a head is waited for where there is nobody else to ask."""
STAND_IN_S: Final = 20.0
"""How long a deputy tries to take over."""

Found = TypeVar("Found", NodeFound, AnswerFound)
LinkOf = Callable[[NodeId], ControlLink | None]


async def is_lost(head: NodeId, others: Sequence[NodeId], link_of: LinkOf) -> bool:
    """Say whether `head` is lost to all nodes of its ring, not to this one alone."""
    began_s = time.monotonic()
    while link_of(head) is None:
        asked = FindNode(request=0, node=head)
        found = await asyncio.gather(*(_found(link_of(node), asked, NodeFound) for node in others))
        seen = [one.is_linked for one in found if one is not None]
        if seen and not any(seen):
            return True
        if time.monotonic() - began_s > (SEEN_S if others else ALONE_S):
            return not any(seen)
        await asyncio.sleep(AGAIN_S)
    return False


def former_head(membership: RingMembership | None, node: NodeId) -> NodeId | None:
    """Return the other node that led the ring which ended here, if no other ring has this one."""
    if membership is None or not membership.is_over or membership.owner == node:
        return None
    return NodeId(membership.owner)


async def until_succeeded(head: NodeId, links: PeerLinks, is_former: Callable[[], bool]) -> None:
    """Wait while another node may take over from `head`, whose ring has ended here.

    That is so while `is_former` and that node has copies of requests that run there. A head that is
    linked to either lives, or its end is not noticed yet: it is waited for a moment only.
    """
    began_s = time.monotonic()
    while is_former():
        asked, linked = FindNode(request=0, node=head), links.linked()
        found = await asyncio.gather(*(_found(control, asked, NodeFound) for control in linked))
        standing_by = [one for one in found if one is not None and one.stands_by]
        is_seen = links.link_of(head) is not None or any(one.is_linked for one in standing_by)
        waited_s = time.monotonic() - began_s
        if not standing_by or waited_s > (ASK_S if is_seen else STAND_IN_S):
            return
        await asyncio.sleep(AGAIN_S)


async def keeper_of(key: str, links: PeerLinks) -> NodeId | None:
    """Ask all nodes which of them has the answer to a request with `key`; None where none has."""
    asked, linked = FindAnswer(request=0, key=key), links.linked()
    found = await asyncio.gather(*(_found(control, asked, AnswerFound) for control in linked))
    for control, one in zip(linked, found, strict=True):
        if one is not None and one.is_kept:
            return NodeId(control.link.peer.node)
    return None


async def _found(
    control: ControlLink | None, message: FindNode | FindAnswer, expected: type[Found]
) -> Found | None:
    """Ask a node; None where it does not answer."""
    if control is None:
        return None
    try:
        async with asyncio.timeout(ASK_S):
            asked = structs.replace(message, request=control.next_request())
            return await control.ask(asked, expected)
    except (ShardnetError, TimeoutError):
        return None
