"""`shardnet unload`: free the model on every node of its ring."""

from __future__ import annotations

import contextlib

from shardnet.api.client import connect
from shardnet.errors import PeerUnreachableError

from .access import Access
from .options import Insecure, KeyFile, Nodes, Peer, split_nodes
from .run import run_command, say
from .target import connect_here


def unload(
    nodes: Nodes = "", peer: Peer = None, key_file: KeyFile = "", insecure: Insecure = False
) -> None:
    """Free the model of the ring that the node of this machine, or a named node, is part of."""
    access = Access(key_file=key_file, insecure=insecure)
    run_command(_run([*split_nodes(nodes), *(peer or [])], access))


async def _run(addresses: list[str], access: Access) -> None:
    identity = access.identity()
    async with contextlib.AsyncExitStack() as stack:
        if addresses:
            clients = [await stack.enter_async_context(connect(a, identity)) for a in addresses]
        else:
            here = await connect_here(stack, identity)
            if here is None:
                raise PeerUnreachableError(
                    "no node runs on this machine: name one with --nodes HOST:PORT"
                )
            clients = [here]
        for client in clients:
            await client.unload()
    say("the model is unloaded")
