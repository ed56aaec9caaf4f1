"""Nodes that are searched where no multicast passes, and what becomes of those found otherwise."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from unittest.mock import Mock

from shardnet.cluster.peers.address_search import AddressSearch
from shardnet.cluster.peers.peer_table import NAMED
from shardnet.errors import PeerUnreachableError
from shardnet.types import NodeId

ATTIC = NodeId("1" * 32)


def test_a_node_that_is_linked_to_during_a_search_stays_reported() -> None:
    """As one that --peer names: a search of remembered addresses takes seconds."""
    linked: list[SimpleNamespace] = []
    peers = Mock(known=lambda: linked)

    async def probe(address: str) -> None:
        linked.append(SimpleNamespace(node=ATTIC, is_linked=True, address="x:1", addresses=()))
        raise PeerUnreachableError(f"{address}: nothing listens there")

    search = AddressSearch(
        peers=peers,
        probe=probe,  # type: ignore[arg-type]
        on_disk=Mock(),
        remembered=None,
        tailnet=False,
        named=(),
        log=Mock(),
    )
    asyncio.run(search._try(["192.0.2.1:7433"], source=NAMED))
    assert linked
    peers.withdraw_others.assert_called_once_with({ATTIC}, source=NAMED)
