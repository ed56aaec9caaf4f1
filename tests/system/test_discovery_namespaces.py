"""Nodes that find each other, and lose each other, as real processes.

Every scenario runs on hosts of its own, in network namespaces, where these are permitted, and on
the loopback of this machine, which always works. What needs a real network has its twin where it is
named.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support.soak import cases, is_soak
from support.system.nodes import NodeProcess
from support.system.sites import Site, address, gone, here, meet, open_site


@pytest.fixture(params=cases(["loopback"], ["namespaces"]))
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    """Three machines."""
    with open_site(request.param, 3, tmp_path) as site:
        yield site


def test_nodes_find_each_other_and_whoever_leaves_is_gone(site: Site) -> None:
    """No address is named anywhere. A machine without a node finds them too, and joins late.

    Then its node freezes and wakes up, is killed, is started again, and stops: each time it is gone
    from the lists of all others.
    """
    anna, bert = site.start(0, "anna"), site.start(1, "bert")
    meet(anna, bert)
    site.nodes_with(2, "anna", "bert")
    assert site.nodes_with(2, arguments=["--no-mdns"]) == {}
    if is_soak():  # it measures both nodes
        plan = site.machines[2].run("plan", "--json")
        while "asking the nearest node" not in plan.stderr:  # on a busy machine none answers
            plan = site.machines[2].run("plan", "--json")
        assert plan.json["stages"][0]["node"] in (anna.ready["node"], bert.ready["node"])

    cleo = site.start(2, "cleo")
    nodes = (anna, bert, cleo)
    meet(*nodes)
    for number, node in enumerate(nodes):
        listed = site.nodes_with(number, "anna", "bert", "cleo")
        assert listed[node.ready["name"]]["node"] == node.ready["node"]
        check_addresses(site, number)
    if is_soak():
        heard = f"anna → cleo: heard by multicast on {'eth0' if site.hosts else 'lo'}"
        while heard not in site.machines[2].run("doctor").stdout:  # anna has not answered in time
            pass

    others = (anna, bert)
    with leaves(site, others, "cleo"):
        cleo.freeze()
    seen = [len(node.log) for node in others]
    cleo.thaw()
    for node, after in zip(others, seen, strict=True):
        here(node, "cleo", after=after)
    site.nodes_with(0, "cleo")

    with leaves(site, others, "cleo"):
        cleo.kill()
    seen = [len(node.log) for node in others]
    cleo = site.start(2, "cleo")
    for node, after in zip(others, seen, strict=True):
        here(node, "cleo", after=after)
    with leaves(site, others, "cleo"):
        cleo.tell_to_leave()
    cleo.stop()


@contextlib.contextmanager
def leaves(site: Site, others: Sequence[NodeProcess], name: str) -> Iterator[None]:
    """Check that after what is done here the others lose a node, and list it no more."""
    seen = [len(node.log) for node in others]
    yield
    for node, after in zip(others, seen, strict=True):
        gone(node, name, after=after)
    for number, node in enumerate(others):
        assert name not in site.nodes_with(number, node.ready["name"])


def test_a_node_named_to_one_other_finds_all_without_mdns(tmp_path: Path) -> None:
    """One is named with --peer, one in the configuration file."""
    with open_site("loopback", 3, tmp_path, SHARDNET_NO_MDNS="1") as site:
        anna = site.start(0, "anna")
        bert = site.start(1, "bert", "--peer", address(site, 0, anna))
        site.machines[2].config_path.write_text(f'peers = ["{address(site, 1, bert)}"]\n')
        cleo = site.start(2, "cleo")
        meet(anna, bert, cleo)
        for number in (0, 2):
            listed = site.nodes_with(number, "anna", "bert", "cleo")
            assert listed.keys() == {"anna", "bert", "cleo"}


def test_a_node_with_another_key_is_left_out_with_one_line(tmp_path: Path) -> None:
    """Each says so, and neither shows the other one."""
    with open_site("loopback", 2, tmp_path, with_key=False) as site:
        for machine in site.machines:
            assert machine.run("key", "new").code == 0
        anna, bert = (site.start(n, name) for n, name in enumerate(("anna", "bert")))
        for node, other in ((anna, bert), (bert, anna)):
            named = f"node {other.ready['name']} ({other.address})"
            node.stderr.wait_for(named)
            [line] = [line for line in node.log.splitlines() if named in line]
            assert "another cluster key" in line
        assert site.nodes_with(0, "anna").keys() == {"anna"}
        assert site.nodes_with(1, "bert").keys() == {"bert"}


@pytest.mark.skipif(not is_soak(), reason="scripts/soak runs it; the twins are on loopback")
def test_misleading_bridges_and_a_pulled_cable(tmp_path: Path) -> None:
    """Every host has the same address on a bridge that is known by its name, and on one that only
    shows when it is dialled. Then one host is unplugged and plugged in again.

    Twins in tests/cluster/peers/test_peers.py: test_of_several_addresses_the_fastest_is_used,
    test_a_partition_heals_by_itself.
    """
    with open_site("namespaces", 3, tmp_path) as site:
        for host in site.hosts:
            host.add_bridge("docker0", "172.17.0.1/16")
            host.add_bridge("lab0", "10.1.0.1/16")
        port = ("--port", "7433")
        anna, bert, cleo = (
            site.start(n, name, *port) for n, name in enumerate(("anna", "bert", "cleo"))
        )
        meet(anna, bert, cleo)
        said = site.machines[0].run("doctor").stdout
        while "problem" in said:  # who does not answer in time is one
            said = site.machines[0].run("doctor").stdout
        assert "not 10.1.0.1:7433: another node answers there" in said
        assert "172.17.0.1:7433" not in said
        for number, others in enumerate((("bert", "cleo"), ("anna", "cleo"), ("anna", "bert"))):
            site.nodes_with(number, *others)
            check_addresses(site, number)
        arguments = ("It is", "--layers", "0-2,2-4,4-8", "--max-tokens", "4", "--json")
        text = site.machines[0].run("generate", *arguments).json
        assert {stage["node"] for stage in text["stages"]} == {
            node.ready["node"] for node in (anna, bert, cleo)
        }
        assert len(text["token_ids"]) == 4

        seen = [len(node.log) for node in (anna, bert, cleo)]
        site.hosts[2].unplug()
        gone(anna, "cleo", after=seen[0])
        gone(bert, "cleo", after=seen[1])
        gone(cleo, "anna", after=seen[2])
        assert site.nodes_with(0, "anna", "bert").keys() == {"anna", "bert"}
        seen = [len(node.log) for node in (anna, bert, cleo)]
        site.hosts[2].plug_in()
        here(anna, "cleo", after=seen[0])
        here(bert, "cleo", after=seen[1])
        here(cleo, "anna", after=seen[2])
        site.nodes_with(2, "anna", "bert", "cleo")


def check_addresses(site: Site, number: int) -> None:
    """Check that a machine lists every node at an address of the common network."""
    for found in site.nodes_with(number).values() if site.hosts else ():
        host = site.hosts[("anna", "bert", "cleo").index(found["name"])]
        assert found["address"].rpartition(":")[0].strip("[]") in host.addresses
