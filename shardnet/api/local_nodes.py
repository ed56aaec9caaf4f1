"""Node processes on loopback for one run: `--local N`.

Knows how to start them, read their ready lines and stop them in every case. Must not know what runs
on them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from shardnet.cluster.machine.local_nodes import share_of_cores
from shardnet.cluster.machine.profile import available_cores
from shardnet.errors import PeerFailedError

START_S = 60.0
"""Deadline for a node process to print its ready line."""

STOP_S = 5.0
"""Deadline for a node process to exit by itself."""

_OWN_GROUP = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
"""On Windows, what a new session is elsewhere: Ctrl-C is not for the process."""


@asynccontextmanager
async def start_nodes(
    n_nodes: int, threads: int, arguments: Sequence[str]
) -> AsyncIterator[list[str]]:
    """Start `n_nodes` node processes with `arguments`; yield their addresses in rank order.

    `threads` 0 gives each its share of the cores. They end with the context and, even if this
    process is killed, when their standard input closes. Raises PeerFailedError when one does not
    start, with the last line of its standard error.
    """
    threads = threads or share_of_cores(available_cores(), n_nodes)
    nodes: list[_NodeProcess] = []
    try:
        for rank in range(n_nodes):
            nodes.append(await _NodeProcess.start(f"local-{rank}", threads, arguments))
        yield [await node.address() for node in nodes]
    finally:
        await asyncio.gather(*(node.stop() for node in nodes))


class _NodeProcess:
    """One `shardnet node` process."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self._name = name
        self._process = process
        self._is_ready = False
        self._last_lines: deque[str] = deque(maxlen=1)
        self._listening = asyncio.create_task(self._keep_last_line())

    @classmethod
    async def start(cls, name: str, threads: int, arguments: Sequence[str]) -> _NodeProcess:
        """Start the process in a session of its own: it exits when stdin closes, not on Ctrl-C."""
        starting = asyncio.create_task(
            asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "shardnet_cli"),  # blind to the current folder
                *("node", "--json", "--host", "127.0.0.1"),
                *("--port", "0", "--name", name, "--threads", str(threads)),
                *arguments,
                *("--no-mdns", "--until-stdin-closes"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={key: value for key, value in os.environ.items() if key not in _NOT_INHERITED},
                start_new_session=True,
                creationflags=_OWN_GROUP,
            )
        )
        try:
            return cls(name, await asyncio.shield(starting))
        except asyncio.CancelledError:  # nobody else would stop a half-started process
            await cls(name, await starting).stop()
            raise

    async def address(self) -> str:
        """Wait for the ready line; return host:port. Raises PeerFailedError."""
        assert self._process.stdout is not None
        line = b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                line = await self._process.stdout.readline()
        if not line:
            await self.stop()
            reason = self._last_lines[0] if self._last_lines else "it printed no error"
            raise PeerFailedError(f"node {self._name} did not start: {reason}")
        self._is_ready = True
        ready = json.loads(line)
        return f"{ready['host']}:{ready['port']}"

    async def stop(self) -> None:
        """Close its standard input, wait STOP_S for it to exit, then kill it.

        A process that is not ready is killed at once: it would notice only after its imports.
        """
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(STOP_S if self._is_ready else 0):
                await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        await self._listening

    async def _keep_last_line(self) -> None:
        assert self._process.stderr is not None
        while line := await self._process.stderr.readline():
            self._last_lines.append(line.decode(errors="replace").strip())


_NOT_INHERITED = frozenset(
    f"SHARDNET_{name}" for name in ("HOST", "PORT", "NAME", "PEER", "NO_MDNS", "MEMORY", "INSECURE")
)
"""Settings of this machine's own node, which the nodes of a run must not inherit."""
