"""Nodes that find each other, and lose each other, as real processes.

Every scenario runs on hosts of its own, in network namespaces, where these are permitted, and on
the loopback of this machine, which always works. What needs a real network has its twin where it is
named.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from netns import Host, NotPermittedError, open_network
from nodes import Machine, NodeProcess

FIND_S = 30.0
"""How long nodes may take to find each other, many times what they do take."""

KILLED_S, FROZEN_S, STOPPED_S = 5.0, 10.0, 1.0
"""After how long a node that went in such a way is gone from all others."""

TOLERANCE = 3.0
"""Test machines are slow: deadlines count times this."""


class Site:
    """Machines of their own with at most one node each."""

    def __init__(self, machines: list[Machine], arguments: list[str], hosts: list[Host]) -> None:
        self.machines = machines
        self.hosts = hosts
        self._arguments = arguments

    def start(self, number: int, name: str, *arguments: str) -> NodeProcess:
        """Start the node of a machine."""
        [node] = self.machines[number].start_nodes(name, arguments=[*self._arguments, *arguments])
        return node

    def nodes(self, number: int, *arguments: str) -> dict[str, Any]:
        """What `shardnet nodes` lists on a machine, by name."""
        found = self.machines[number].run("nodes", "--json", *arguments).json
        return {node["name"]: node for node in found}


@contextlib.contextmanager
def open_site(kind: str, n_machines: int, folder: Path, **environment: str) -> Iterator[Site]:
    """Give a site in namespaces or on loopback. Skips where namespaces are not permitted."""
    with contextlib.ExitStack() as stack:
        hosts: list[Host] = []
        arguments: list[str] = []
        if kind == "namespaces":
            try:
                hosts = stack.enter_context(open_network(n_machines)).hosts
            except NotPermittedError as error:
                pytest.skip(f"network namespaces cannot be made here: {error}")
            arguments = ["--host", "0.0.0.0", "--insecure"]
        else:
            environment = {"SHARDNET_MDNS_INTERFACES": "127.0.0.1", **environment}
        machines = []
        for number in range(n_machines):
            prefix = hosts[number].prefix if hosts else ()
            machines.append(
                stack.enter_context(_machine(folder / f"machine-{number}", prefix, environment))
            )
        yield Site(machines, arguments, hosts)


@contextlib.contextmanager
def _machine(
    folder: Path, prefix: tuple[str, ...], environment: Mapping[str, str]
) -> Iterator[Machine]:
    folder.mkdir()
    machine = Machine(folder, prefix=prefix, environment=environment)
    try:
        yield machine
    finally:
        machine.close()


@pytest.fixture(params=["namespaces", "loopback"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    """Three machines."""
    with open_site(request.param, 3, tmp_path) as site:
        yield site


def meet(*nodes: NodeProcess) -> None:
    """Wait until each of the nodes has seen each other."""
    for node in nodes:
        for other in nodes:
            if other is not node:
                node.stderr.wait_for(f"node {other.ready['name']} (", deadline_s=FIND_S)


def here(node: NodeProcess, name: str, *, after: int = 0) -> None:
    """Wait until `node` says, after so many characters, that another one is here."""
    node.stderr.wait_for(f"node {name} (", after=after, deadline_s=FIND_S)


def gone(node: NodeProcess, name: str, *, after: int, deadline_s: float) -> None:
    """Wait until `node` says, after so many characters, that another one is gone."""
    node.stderr.wait_for(f"node {name} is gone", after=after, deadline_s=deadline_s * TOLERANCE)


def test_nodes_find_each_other_and_whoever_leaves_is_gone(site: Site) -> None:
    """No address is named anywhere. A machine without a node finds them too, and joins late.

    Then one stops, one freezes and wakes up, and one is killed.
    """
    anna, bert = site.start(0, "anna"), site.start(1, "bert")
    meet(anna, bert)
    assert {"anna", "bert"} <= site.nodes(2).keys()
    assert site.nodes(2, "--no-mdns") == {}
    if site.hosts:  # on loopback there may be strangers
        plan = site.machines[2].run("plan", "--json")
        assert "asking the nearest node" in plan.stderr
        assert plan.json["stages"][0]["node"] in (anna.ready["node"], bert.ready["node"])

    cleo = site.start(2, "cleo")
    nodes = (anna, bert, cleo)
    meet(*nodes)
    for number, node in enumerate(nodes):
        listed = site.nodes(number)
        assert {"anna", "bert", "cleo"} <= listed.keys()
        assert listed[node.ready["name"]]["node"] == node.ready["node"]
        if site.hosts:
            addresses = {address(site, n, other) for n, other in enumerate(nodes)}
            assert {node["address"] for node in listed.values()} == addresses

    seen = [len(node.log) for node in (anna, bert)]
    cleo.tell_to_leave()
    for node, after in zip((anna, bert), seen, strict=True):
        gone(node, "cleo", after=after, deadline_s=STOPPED_S)
    assert "cleo" not in site.nodes(0)
    cleo.stop()

    after = len(anna.log)
    bert.freeze()
    gone(anna, "bert", after=after, deadline_s=FROZEN_S)
    assert "bert" not in site.nodes(0)
    after = len(anna.log)
    bert.thaw()
    here(anna, "bert", after=after)
    assert "bert" in site.nodes(0)

    after = len(anna.log)
    bert.kill()
    gone(anna, "bert", after=after, deadline_s=KILLED_S)
    assert "bert" not in site.nodes(0)


def test_a_node_named_to_one_other_finds_all_without_mdns(tmp_path: Path) -> None:
    """One is named with --peer, one in the configuration file."""
    with open_site("loopback", 3, tmp_path, SHARDNET_NO_MDNS="1") as site:
        anna = site.start(0, "anna")
        bert = site.start(1, "bert", "--peer", address(site, 0, anna))
        site.machines[2].config_path.write_text(f'peers = ["{address(site, 1, bert)}"]\n')
        cleo = site.start(2, "cleo")
        meet(anna, bert, cleo)
        assert site.nodes(0).keys() == {"anna", "bert", "cleo"}
        assert site.nodes(2).keys() == {"anna", "bert", "cleo"}


def test_misleading_bridges_and_a_pulled_cable(tmp_path: Path) -> None:
    """Every host has the same address on a bridge that is known by its name, and on one that only
    shows when it is dialled. Then one host is unplugged and plugged in again.

    Twins in tests/cluster/test_peers.py: test_of_several_addresses_the_fastest_is_used,
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
        for number, others in enumerate((("bert", "cleo"), ("anna", "cleo"), ("anna", "bert"))):
            listed = site.nodes(number)
            assert all(listed[name]["address"].startswith("10.77.0.") for name in others)
        arguments = ("It is", "--layers", "0-2,2-4,4-8", "--max-tokens", "4", "--json")
        text = site.machines[0].run("generate", *arguments).json
        assert {stage["node"] for stage in text["stages"]} == {
            node.ready["node"] for node in (anna, bert, cleo)
        }
        assert len(text["token_ids"]) == 4

        seen = [len(node.log) for node in (anna, bert, cleo)]
        site.hosts[2].unplug()
        gone(anna, "cleo", after=seen[0], deadline_s=FROZEN_S)
        gone(bert, "cleo", after=seen[1], deadline_s=FROZEN_S)
        gone(cleo, "anna", after=seen[2], deadline_s=FROZEN_S)
        assert site.nodes(0).keys() == {"anna", "bert"}
        seen = [len(node.log) for node in (anna, bert, cleo)]
        site.hosts[2].plug_in()
        here(anna, "cleo", after=seen[0])
        here(bert, "cleo", after=seen[1])
        here(cleo, "anna", after=seen[2])
        assert site.nodes(2).keys() == {"anna", "bert", "cleo"}


def address(site: Site, number: int, node: NodeProcess) -> str:
    """Where a node can be dialled from another machine of the site."""
    host = site.hosts[number].address if site.hosts else node.ready["host"]
    return f"{host}:{node.ready['port']}"
