"""Ask the nodes of a ring whether its head is lost, or only out of this one's reach.

Knows the question and how long to go on asking. Must not know what follows from the answer.

A node that was frozen or cut off has lost all its links at once: that nobody answers says nothing
of the head. So a head is lost at once where a node that answers has no link to it either; where
none answers, only when it has not been reached for longer than links take to come back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final

from shardnet.cluster.peers.control_link import ControlLink
from shardnet.errors import ShardnetError
from shardnet.types import NodeId
from shardnet.wire.messages.deputies import FindNode, NodeFound

SEEN_S: Final = 6.0
"""How long others may still see a head that is lost, or be out of reach themselves."""
ALONE_S: Final = 1.0
"""How long a head is waited for where there is nobody else to ask."""
ASK_S: Final = 1.0
AGAIN_S: Final = 0.1

LinkOf = Callable[[NodeId], ControlLink | None]


async def is_lost(head: NodeId, others: Sequence[NodeId], link_of: LinkOf) -> bool:
    """Say whether `head` is lost to all nodes of its ring, not to this one alone."""
    began_s = time.monotonic()
    while link_of(head) is None:
        seen = await asyncio.gather(*(_sees(node, head, link_of) for node in others))
        if False in seen and True not in seen:
            return True
        if time.monotonic() - began_s > (SEEN_S if others else ALONE_S):
            return True not in seen
        await asyncio.sleep(AGAIN_S)
    return False


async def _sees(node: NodeId, head: NodeId, link_of: LinkOf) -> bool | None:
    """Ask a node whether it has a link to the head; None where it does not answer."""
    control = link_of(node)
    if control is None:
        return None
    try:
        async with asyncio.timeout(ASK_S):
            asked = FindNode(request=control.next_request(), node=head)
            return (await control.ask(asked, NodeFound)).is_linked
    except (ShardnetError, TimeoutError):
        return None
