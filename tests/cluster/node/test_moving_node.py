"""A node whose machine gets another address, as from DHCP."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from support.cluster.small_node import small_settings

from shardnet.cluster.discovery.discovery import Discovery
from shardnet.cluster.machine.addresses import Interface
from shardnet.cluster.node import node as node_module
from shardnet.cluster.node.node import listening
from shardnet.cluster.peers import advertisement


def test_a_new_address_is_advertised_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system is asked again and again, whether or not its list can be read."""
    monkeypatch.setattr(node_module, "ADDRESSES_S", 0.0)
    lists: list[str] = []
    discovery = Discovery(fingerprint="", log=lambda line: None)

    async def discover(own: object, found: object) -> None:
        await asyncio.Event().wait()

    def read() -> tuple[Interface, ...]:
        if lists:
            lists.pop()
            raise OSError("too many open files")
        return (Interface(name="eth0", is_up=True, addresses=("10.0.0.51/24",)),)

    async def main() -> None:
        settings = replace(small_settings(tmp_path), discovery=discovery)
        async with listening(settings, "127.0.0.1", 0) as node:
            assert node.address.startswith("127.0.0.1:")
            moved = asyncio.Event()
            monkeypatch.setattr(discovery, "announce", moved.set)
            port = node.address.rpartition(":")[2]
            lists.append("unread")
            monkeypatch.setattr(advertisement, "read_interfaces", read)
            node.links.advertisement._bound = f"0.0.0.0:{port}"
            async with asyncio.timeout(60):
                await moved.wait()
            assert node.info().address == node.address == f"10.0.0.51:{port}"

    monkeypatch.setattr(discovery, "run", discover)
    asyncio.run(main())
