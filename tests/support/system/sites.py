"""Sites: a few machines that can find each other, in network namespaces or on loopback."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.system.netns import Host, NotPermittedError, open_network
from support.system.nodes import Machine, NodeProcess


class Site:
    """Machines of their own with at most one node each."""

    def __init__(self, machines: list[Machine], hosts: list[Host]) -> None:
        self.machines = machines
        self.hosts = hosts

    def start(self, number: int, name: str, *arguments: str) -> NodeProcess:
        """Start the node of a machine."""
        [node] = self.machines[number].start_nodes(name, arguments=arguments)
        return node

    def nodes_with(self, number: int, *names: str, arguments: Sequence[str] = ()) -> dict[str, Any]:
        """What `shardnet nodes` lists on a machine, by name, once these are listed."""
        return self.machines[number].nodes_with(*names, arguments=arguments)


@contextlib.contextmanager
def open_site(
    kind: str, n_machines: int, folder: Path, *, with_key: bool = True, **environment: str
) -> Iterator[Site]:
    """Give a site in namespaces or on loopback, where the key keeps other nodes out.

    Skips where namespaces are not permitted.
    """
    with contextlib.ExitStack() as stack:
        hosts: list[Host] = []
        if kind == "namespaces":
            try:
                hosts = stack.enter_context(open_network(n_machines)).hosts
            except NotPermittedError as error:
                pytest.skip(f"network namespaces cannot be made here: {error}")
        else:
            loopback = {"SHARDNET_MDNS_INTERFACES": "127.0.0.1", "SHARDNET_HOST": "127.0.0.1"}
            environment = {**loopback, **environment}
        if with_key:
            environment = {"SHARDNET_KEY_FILE": str(folder / "cluster.key"), **environment}
        machines = []
        for number in range(n_machines):
            prefix = hosts[number].prefix if hosts else ()
            machines.append(
                stack.enter_context(_connection(folder / f"machine-{number}", prefix, environment))
            )
        if with_key:
            assert machines[0].run("key", "new").code == 0
        yield Site(machines, hosts)


@contextlib.contextmanager
def _connection(
    folder: Path, prefix: tuple[str, ...], environment: Mapping[str, str]
) -> Iterator[Machine]:
    folder.mkdir()
    machine = Machine(folder, prefix=prefix, environment=environment)
    try:
        yield machine
    finally:
        machine.close()


def address(site: Site, number: int, node: NodeProcess) -> str:
    """Where a node can be dialled from another machine of the site."""
    host = site.hosts[number].address if site.hosts else node.ready["host"]
    return f"{host}:{node.ready['port']}"


def meet(*nodes: NodeProcess) -> None:
    """Wait until each of the nodes has seen each other."""
    for node in nodes:
        for other in nodes:
            if other is not node:
                here(node, other.ready["name"])


def here(node: NodeProcess, name: str, *, after: int = 0) -> None:
    """Wait until `node` says, after so many characters, that another one is here.

    Of a stranger with the same name it says that it is left out.
    """
    line = re.compile(rf"node {name} \(\S+\) is here")
    node.stderr.wait_for(line, after=after)


def gone(node: NodeProcess, name: str, *, after: int) -> None:
    """Wait until `node` says, after so many characters, that another one is gone."""
    node.stderr.wait_for(f"node {name} is gone", after=after)
