"""The listener: who is heard where, whatever else is on the network."""

from __future__ import annotations

import asyncio
from ipaddress import ip_interface

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cluster.watchers import Watcher, new_record, running
from support.waiting import until

from shardnet.cluster.discovery import discovery
from shardnet.cluster.discovery.discovery import MAX_HEARD, Discovery, MdnsListener
from shardnet.cluster.discovery.service_browser import SERVICE_TYPE
from shardnet.cluster.machine.addresses import LocalAddress, Verdict, rank, read_interfaces
from shardnet.types import NodeId


def answer(name: str, *, is_response: bool = True) -> bytes:
    """An mDNS answer with one PTR record of our service type that points to `name`."""

    def labels(text: str) -> bytes:
        parts = [part.encode() for part in text.strip(".").split(".")]
        return b"".join(bytes([len(part)]) + part for part in parts) + b"\0"

    header = bytes.fromhex(
        "0000 8400 0000 0001 0000 0000" if is_response else "0000 0000 0000 0001 0000 0000"
    )
    target = labels(f"{name}.{SERVICE_TYPE}")
    body = bytes.fromhex("000c 0001 00000078") + len(target).to_bytes(2, "big") + target
    return header + labels(SERVICE_TYPE) + body


def test_a_node_is_noted_with_the_interface_it_was_heard_on() -> None:
    listener = MdnsListener(SERVICE_TYPE)
    listener.take(answer("a" * 32), "eth0")
    listener.take(answer("a" * 32), "wlan0")
    listener.take(answer("b" * 32, is_response=False), "eth0")
    heard = [(heard.node, heard.interface) for heard in listener.heard()]
    assert heard == [(NodeId("a" * 32), "eth0"), (NodeId("a" * 32), "wlan0")]
    assert all(heard.at >= listener.since for heard in listener.heard())


def test_the_room_for_names_is_bounded_and_those_heard_lately_stay() -> None:
    """A node has a new id whenever it is started again."""
    listener = MdnsListener(SERVICE_TYPE)
    for number in range(MAX_HEARD + 50):
        listener.take(answer(f"node-{number}"), "eth0")
        listener.take(answer("steady"), "eth0")
    heard = [heard.node for heard in listener.heard()]
    assert len(heard) == MAX_HEARD
    assert heard[-2:] == [f"node-{MAX_HEARD + 49}", "steady"]
    assert "node-0" not in heard


@given(st.binary(max_size=200) | st.binary(max_size=60).map(lambda b: answer("a")[:40] + b))
def test_nonsense_is_nothing(datagram: bytes) -> None:
    MdnsListener(SERVICE_TYPE).take(datagram, "eth0")


def test_an_announcement_is_heard_on_loopback_and_a_deaf_ear_says_so() -> None:
    async def main() -> None:
        anna, bert = Watcher(new_record("anna")), Watcher(new_record("bert"))
        listener = anna._discovery.listener
        assert listener.interfaces == ()
        async with running(anna), running(bert):
            await until(lambda: bert.record.node in {heard.node for heard in listener.heard()})
        assert listener.interfaces == ()

    asyncio.run(main())


def test_discovery_tells_on_what_it_speaks_and_why_it_does_not() -> None:
    async def main() -> None:
        anna, bert = Watcher(new_record("anna")), Watcher(new_record("bert"))
        async with running(anna, bert):
            await anna.sees(bert.record)
            discovery: Discovery = anna._discovery
            assert discovery.hosts == ("127.0.0.1",)
            assert discovery.records[bert.record.node] == bert.record
        nowhere = Watcher(new_record("cleo"), interfaces=["203.0.113.7"])
        async with running(nowhere):
            await nowhere.says("mDNS does not work here")
            assert "203.0.113.7" in nowhere._discovery.failure
            assert nowhere._discovery.hosts == ()

    asyncio.run(main())


def test_interfaces_have_the_size_of_their_packets() -> None:
    assert any(address.mtu >= 1280 for address in rank(read_interfaces()))


def test_windows_binds_no_socket_to_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    address = LocalAddress(
        interface="Ethernet 2",
        host="fe80::1%12",
        net=ip_interface("fe80::1/64"),
        verdict=Verdict.LINK_LOCAL,
        speed_mbit=1000,
    )
    assert discovery._bound(discovery.GROUP_V4) == discovery.GROUP_V4
    monkeypatch.setattr("sys.platform", "win32")
    assert discovery._bound(discovery.GROUP_V4) == ""
    assert discovery._index_of(address) == 12
