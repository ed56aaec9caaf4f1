"""`shardnet drain`: empty a node without losing a request, and end it."""

from __future__ import annotations

from typing import Annotated

import typer

from shardnet.api.client import connect
from shardnet.errors import UsageError
from shardnet.transport.address import split_address
from shardnet.wire.messages.membership import NodeInfo

from ..flags.cluster_access import Access
from ..flags.help_sections import examples
from ..flags.option_groups import takes_groups
from ..flags.options import NoMdns, Peer, check_addresses
from ..output.exit_codes import run_command, say
from .nodes import gather_nodes

DEADLINE_S = 60.0
LONGEST_S = 86_400.0


@examples("shardnet drain attic", "shardnet drain 192.168.1.12:7433 --deadline 300")
@takes_groups
def drain(
    *,
    node: Annotated[str, typer.Argument(metavar="NODE", help="Name, address or id of the node.")],
    deadline: Annotated[
        float,
        typer.Option(
            "--deadline",
            metavar="SECONDS",
            min=0.0,
            max=LONGEST_S,
            help="After so long the node ends, empty or not.",
        ),
    ] = DEADLINE_S,
    peer: Peer = None,
    no_mdns: NoMdns = False,
    access: Access,
) -> None:
    """Have a node give its layers to others without losing a request, and end.

    Requests go on over the other nodes. A node that leads the requests of others ends with them.
    """
    run_command(_run(node, deadline, check_addresses(peer), access, not no_mdns))


async def _run(node: str, deadline_s: float, peers: list[str], access: Access, mdns: bool) -> None:
    address = await _find(node, peers, access, mdns)
    async with connect(address, access.identity()) as client:
        say(f"draining {client.node_name} ({address})")
        await client.drain(deadline_s)
        say(f"{client.node_name} is empty, and ends")


async def _find(node: str, peers: list[str], access: Access, mdns: bool) -> str:
    """Return the address of a node. Raises UsageError unless exactly one is called so."""
    if _is_address(node):
        return node
    infos = await gather_nodes(peers, access, mdns)
    found = [info for info in infos if _is_called(info, node)]
    if len(found) == 1:
        return found[0].address
    names = ", ".join(f"{info.name} ({info.address})" for info in found or infos)
    raise UsageError(
        f"{len(found) or 'no'} nodes are called {node!r}" + (f": {names}" if found else ""),
        remedy=f"name one of {names} by its address" if names else "name it by its address",
    )


def _is_called(info: NodeInfo, node: str) -> bool:
    return info.name == node or (len(node) >= 6 and info.node.startswith(node))  # ids are long


def _is_address(node: str) -> bool:
    try:
        split_address(node)
    except UsageError:
        return False
    return True
