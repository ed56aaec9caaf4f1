"""The packet that wakes a machine, and where it goes."""

from __future__ import annotations

import socket

import pytest

from shardnet.cluster.machine.addresses import Interface, rank
from shardnet.cluster.machine.wake_on_lan import (
    check_wake_at,
    how_to_wake,
    magic_packet,
    send_magic,
)
from shardnet.errors import UsageError
from shardnet.wire.messages.membership import Asleep

MAC = "00:1b:44:11:3a:b7"
LAN = Interface(name="eth0", is_up=True, mac=MAC, addresses=("192.168.1.7/24", "fd00::7/64"))
DOCKER = Interface(
    name="docker0", is_up=True, mac="02:42:00:00:00:01", addresses=("172.17.0.1/16",)
)
LOOPBACK = Interface(name="lo", is_up=True, mac="00:00:00:00:00:00", addresses=("127.0.0.1/8",))


def test_the_packet_is_the_one_that_interfaces_wait_for() -> None:
    """AMD's white paper 20213: a synchronisation stream, then sixteen times the address."""
    packet = magic_packet(MAC)
    assert len(packet) == 102
    assert packet[:6] == bytes([255] * 6)
    assert packet[6:] == bytes.fromhex("001b44113ab7") * 16


def test_a_machine_tells_the_addresses_of_its_real_networks_alone() -> None:
    infiniband = Interface(name="ib0", is_up=True, mac="80:00" * 10, addresses=("10.1.0.7/24",))
    asleep = how_to_wake(rank([LOOPBACK, DOCKER, LAN, infiniband]), "")
    assert asleep == Asleep(macs=[MAC], networks=["192.168.1.7/24"])
    assert how_to_wake(rank([LOOPBACK]), "").macs == [], "nobody can wake it"


def test_it_goes_to_private_addresses_alone() -> None:
    """Else any member of a cluster could have the others send to whom it likes."""
    assert check_wake_at("192.168.2.255:9") == ("192.168.2.255", 9)
    assert check_wake_at("[fd00::7]:7") == ("fd00::7", 7)
    for address in ("8.8.8.8:9", "example.org:9"):
        with pytest.raises(UsageError, match="private"):
            check_wake_at(address)
        with pytest.raises(UsageError, match="private"):
            send_magic(Asleep(macs=[MAC], wake_at=address), rank([LAN]))


def test_it_is_sent_for_each_interface_to_the_named_place() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as card:
        card.bind(("127.0.0.1", 0))
        card.settimeout(10)
        other = "02:42:00:00:00:01"
        at = f"127.0.0.1:{card.getsockname()[1]}"
        send_magic(Asleep(macs=[MAC, other], wake_at=at), ())
        assert [card.recv(200), card.recv(200)] == [magic_packet(MAC), magic_packet(other)]


def test_who_is_in_no_network_of_the_machine_is_told_so_by_name() -> None:
    for asleep in (Asleep(macs=[MAC], networks=["192.168.9.7/24"]), Asleep()):
        with pytest.raises(UsageError, match="in none of this machine's networks"):
            send_magic(asleep, rank([LAN]))
