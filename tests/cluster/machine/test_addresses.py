"""Made-up machines: which of their addresses are used, in which order, and why not the others."""

from __future__ import annotations

from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardnet.cluster.machine.addresses import (
    Interface,
    LocalAddress,
    Verdict,
    dial_order,
    is_loopback,
    is_scoped,
    multicast_hosts,
    rank,
    reachable_hosts,
    read_interfaces,
    usable,
)


def interface(name: str, *addresses: str, up: bool = True, speed: int = 0) -> Interface:
    return Interface(name=name, is_up=up, speed_mbit=speed, addresses=addresses)


LO = interface("lo", "127.0.0.1/8", "::1/128")
SERVER = (
    LO,
    interface("docker0", "172.17.0.1/16"),
    interface("br-0a1b2c3d4e5f", "172.18.0.1/16"),
    interface("veth12ab", "fe80::1%veth12ab/64"),
    interface("tailscale0", "100.101.1.2/32"),
    interface("wlan0", "192.168.1.20/24"),
    interface("eth0", "192.168.1.10/24", "fd00::10/64", "fe80::10%eth0/64", speed=1000),
    interface("eth1", "10.9.9.9/24", up=False, speed=10000),
)


def hosts(addresses: tuple[LocalAddress, ...]) -> list[str]:
    return [address.host for address in addresses]


def test_the_fast_wired_network_comes_first_and_only_real_networks_are_used() -> None:
    assert hosts(usable(rank(SERVER))) == ["192.168.1.10", "fd00::10", "192.168.1.20"]


def test_every_address_keeps_its_verdict() -> None:
    verdicts = {address.host: address.verdict for address in rank(SERVER)}
    assert verdicts == {
        "127.0.0.1": Verdict.LOOPBACK,
        "::1": Verdict.LOOPBACK,
        "172.17.0.1": Verdict.BRIDGE,
        "172.18.0.1": Verdict.BRIDGE,
        "fe80::1%veth12ab": Verdict.BRIDGE,
        "100.101.1.2": Verdict.TUNNEL,
        "192.168.1.20": Verdict.LAN,
        "192.168.1.10": Verdict.LAN,
        "fd00::10": Verdict.LAN,
        "fe80::10%eth0": Verdict.LINK_LOCAL,
        "10.9.9.9": Verdict.DOWN,
    }
    assert all(verdict.value for verdict in Verdict)


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        *((name, Verdict.LAN) for name in ("eth0", "enp3s0", "wlp2s0", "en0", "br0", "vmbr0")),
        *((name, Verdict.LAN) for name in ("bond0", "bridge0", "Ethernet", "Wi-Fi", "eth0.10")),
        *((name, Verdict.BRIDGE) for name in ("docker0", "docker_gwbridge", "br-1234567890ab")),
        *((name, Verdict.BRIDGE) for name in ("veth0", "vethab12", "cni0", "cni-podman0")),
        *((name, Verdict.BRIDGE) for name in ("podman1", "virbr0", "lxcbr0", "lxdbr0", "cali1")),
        *((name, Verdict.BRIDGE) for name in ("bridge100", "vEthernet (WSL)", "flannel.1")),
        *((name, Verdict.TUNNEL) for name in ("tun0", "tap0", "wg0", "wg-home", "tailscale0")),
        *((name, Verdict.TUNNEL) for name in ("ztabcdef12", "utun3", "ppp0", "ipsec0")),
    ],
)
def test_names_of_interfaces(name: str, verdict: Verdict) -> None:
    [address] = rank([interface(name, "10.1.2.3/24")])
    assert address.verdict is verdict


def test_what_the_name_does_not_say() -> None:
    point = Interface(name="x0", is_up=True, is_point_to_point=True, addresses=("10.1.2.3/32",))
    odd = interface("eth0", "100.64.3.4/10", "0.0.0.0/0", "224.0.0.1/4")
    verdicts = {address.host: address.verdict for address in rank([point, odd])}
    assert verdicts == {
        "10.1.2.3": Verdict.TUNNEL,
        "100.64.3.4": Verdict.TUNNEL,
        "0.0.0.0": Verdict.UNUSABLE,
        "224.0.0.1": Verdict.UNUSABLE,
    }


def test_without_a_real_network_link_local_and_vpn_addresses_count() -> None:
    cable = interface("eth0", "169.254.7.7/16")
    vpn = interface("wg0", "10.8.0.2/24")
    assert hosts(usable(rank([LO, vpn, cable]))) == ["169.254.7.7", "10.8.0.2"]
    assert usable(rank([LO, interface("docker0", "172.17.0.1/16")])) == ()


def test_where_a_listener_can_be_reached() -> None:
    local = rank(SERVER)
    assert reachable_hosts("0.0.0.0", local) == ("192.168.1.10", "192.168.1.20")
    assert reachable_hosts("::", local) == ("192.168.1.10", "fd00::10", "192.168.1.20")
    assert reachable_hosts("127.0.0.1", local) == ("127.0.0.1",)
    assert reachable_hosts("172.17.0.1", local) == ("172.17.0.1",)  # as the person wants it
    assert reachable_hosts("0.0.0.0", rank([LO])) == ("127.0.0.1",)


def test_multicast_goes_once_over_each_interface() -> None:
    local = rank(SERVER)
    everything = reachable_hosts("::", local)
    assert multicast_hosts(everything, local) == ("192.168.1.10", "192.168.1.20")
    assert multicast_hosts(("fd00::10",), local) == ("fd00::10",)
    assert multicast_hosts(("127.0.0.1",), local) == ("127.0.0.1",)


def test_another_nodes_addresses_are_tried_nearest_first() -> None:
    theirs = ["172.17.0.1", "fe80::9%eth0", "100.99.0.1", "8.8.8.8", "nas.lan", "192.168.1.77"]
    order = ["192.168.1.77", "nas.lan", "8.8.8.8", "fe80::9%eth0", "100.99.0.1", "172.17.0.1"]
    assert list(dial_order(theirs, rank(SERVER))) == order


@given(st.permutations(["10.0.0.1", "10.0.0.2", "fd00::1", "nas", "172.17.0.1", "127.0.0.1"]))
def test_the_order_does_not_depend_on_the_order_told(theirs: list[str]) -> None:
    assert dial_order(theirs, rank(SERVER)) == dial_order(sorted(theirs), rank(SERVER))


@given(st.permutations(SERVER))
def test_the_ranking_does_not_depend_on_the_order_of_interfaces(machine: list[Interface]) -> None:
    assert rank(machine) == rank(SERVER)


@pytest.mark.parametrize("host", ["127.9.9.9", "::1", "localhost", "::ffff:127.0.0.1", "0.0.0.0"])
def test_hosts_that_lead_back_to_whoever_dials(host: str) -> None:
    assert is_loopback(host)
    assert not is_loopback("10.0.0.1")
    assert not is_loopback("nas.lan")


@pytest.mark.parametrize("host", ["fe80::1%eth0", "fe80::1", "169.254.1.1"])
def test_hosts_that_mean_something_on_one_link_only(host: str) -> None:
    assert is_scoped(host)
    assert not is_scoped("fd00::1")
    assert not is_scoped("nas.lan")


def test_this_machine_is_read() -> None:
    addresses = rank(read_interfaces())
    assert Verdict.LOOPBACK in {address.verdict for address in addresses}
    assert all("/" not in address.host for address in addresses)


def test_interfaces_that_the_system_does_not_tell_are_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> NoReturn:
        raise OSError(22, "Invalid function")

    monkeypatch.setattr("psutil.net_if_stats", fail)
    assert read_interfaces() == ()
