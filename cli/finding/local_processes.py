"""`--local N`: node processes on loopback for one run, with the command's own access."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shardnet.api.local_nodes import start_nodes
from shardnet.cluster.machine.local_nodes import share_of_cores
from shardnet.cluster.machine.profile import available_cores

from ..flags.cluster_access import Access
from ..output.cache_folder import warn_of_cache
from ..output.exit_codes import counted, say


@asynccontextmanager
async def local_processes(
    n_nodes: int, threads: int, access: Access, prefix_cache_bytes: int = 0
) -> AsyncIterator[list[str]]:
    """Start `n_nodes` node processes and yield their addresses; see `start_nodes`.

    `threads` 0 gives each its share of the cores. Together they keep at most `prefix_cache_bytes`.
    """
    threads = threads or share_of_cores(available_cores(), n_nodes)
    say(f"starting {counted(n_nodes, 'node')} on this machine, threads each: {threads}")
    warn_of_cache()
    arguments = access.node_arguments()
    if prefix_cache_bytes:  # their folder is one, and each sees what the others take
        arguments += ["--prefix-cache", str(prefix_cache_bytes)]
    async with start_nodes(n_nodes, threads, arguments) as addresses:
        yield addresses
