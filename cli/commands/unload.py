"""`shardnet unload`: free the model on every node of its ring."""

from __future__ import annotations

import contextlib

from ..finding.target import named_or_here
from ..flags.cluster_access import Access
from ..flags.option_groups import takes_groups
from ..flags.options import Nodes, Peer, check_addresses, split_nodes
from ..output.exit_codes import run_command, say


@takes_groups
def unload(*, nodes: Nodes = "", peer: Peer = None, access: Access) -> None:
    """Free the model of the ring that the node of this machine, or a named node, is part of."""
    run_command(_run([*split_nodes(nodes), *check_addresses(peer)], access))


async def _run(addresses: list[str], access: Access) -> None:
    had_any = False
    async with contextlib.AsyncExitStack() as stack:
        for client in await named_or_here(stack, addresses, access):
            had_any |= (await client.status(with_peers=False)).node.stage is not None
            await client.unload()
    say("the model is unloaded" if had_any else "no model was loaded")
