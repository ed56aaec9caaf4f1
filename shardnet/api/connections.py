"""Opens clients: of a node at an address, of one in this process, of nodes started for this run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from shardnet.api import client as by_link
from shardnet.api.client import Client, open_client
from shardnet.api.requests import name_model
from shardnet.assets import DEFAULT_MODEL_NAME
from shardnet.cluster.machine.folders import HeldKey, default_key_path, load_key, runtime_dir
from shardnet.cluster.machine.local_nodes import LocalNodes, share_of_cores
from shardnet.cluster.machine.profile import available_cores
from shardnet.errors import ConfigurationError, PeerFailedError, UsageError
from shardnet.files import expanded
from shardnet.guard.children import OWN_SESSION, end_with_this_process
from shardnet.wire.messages.plans import ModelChoice

if TYPE_CHECKING:
    from shardnet.runtime.stage.compute import ComputePlugin
    from shardnet.transport.identity import Identity


START_S = 60.0
"""Deadline for a node process to print its ready line."""

STOP_S = 5.0
"""Deadline for a node process to exit by itself."""


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
        end_with_this_process(process.pid)
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
                *("--memory", "", "--http", ""),  # before this machine's own, in its configuration
                *arguments,
                *("--no-mdns", "--until-stdin-closes"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={key: value for key, value in os.environ.items() if key not in _NOT_INHERITED},
                **OWN_SESSION,
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
    f"SHARDNET_{name}"
    for name in ("HOST", "PORT", "NAME", "PEER", "NO_MDNS", "TAILNET", "INSECURE")
)
"""Settings of this machine's own node, which the nodes of a run must not inherit."""


THIS_PROCESS = "this process"


def key_path(key_file: str) -> Path:
    """Return the path of the cluster key: `key_file`, or the default for ""."""
    return expanded(key_file) if key_file else default_key_path(os.environ)


def load_identity(key_file: str = "", *, insecure: bool = False) -> Identity | None:
    """Load the cluster key and make an identity; None without a key or if `insecure`.

    Raises ConfigurationError if `key_file` is given and does not exist, or the key is unusable.
    """
    if insecure:
        return None
    path = key_path(key_file)
    key = load_key(path)
    if key is not None:
        from shardnet.transport.identity import make_identity

        identity = make_identity(key.secret, key.old)
        identity.until_s, identity.keeper = key.until_s, HeldKey(path, key, identity)
        return identity
    if key_file:
        raise ConfigurationError(
            f"there is no key file {path}",
            remedy="run `shardnet key new` on the first machine and `shardnet key join` on the "
            "others",
        )
    return None


@asynccontextmanager
async def connect(
    address: str,
    *,
    model: str | ModelChoice = DEFAULT_MODEL_NAME,
    key_file: str = "",
    insecure: bool = False,
) -> AsyncIterator[Client]:
    """Connect to the node at `address` (host:port), with this machine's cluster key if it has one.

    `model` is the default of the client's calls. Raises UsageError unless `address` is host:port,
    LinkError when no node answers there, AuthenticationError when that node holds another key,
    ConfigurationError when our key cannot be used.
    """
    async with by_link.connect(address, load_identity(key_file, insecure=insecure)) as client:
        client.choice = _choice(model)
        yield client


@asynccontextmanager
async def in_process(
    *,
    model: str | ModelChoice = DEFAULT_MODEL_NAME,
    threads: int = 0,
    device: str | ComputePlugin = "auto",
) -> AsyncIterator[Client]:
    """Run a node inside this process, without a socket, and yield its client.

    It computes with `threads` threads, 0 for one per core, on a `device` as `shardnet node
    --device` takes it, or by a plug-in. Raises ConfigurationError for a device that is not here.
    """
    async with node_in_process(threads, None, device) as client:
        client.choice = _choice(model)
        yield client


@asynccontextmanager
async def local_ring(
    n_nodes: int, *, model: str | ModelChoice = DEFAULT_MODEL_NAME, threads: int = 0
) -> AsyncIterator[Client]:
    """Start `n_nodes` node processes on loopback, one stage each; yield a client of the first.

    They end with the context. Each computes with `threads` threads, 0 for its share of the cores.
    Raises UsageError for more nodes than the model has layers, PeerFailedError when one does not
    start.
    """
    check_local(n_nodes, _choice(model))
    async with (
        start_nodes(n_nodes, threads, ["--insecure"]) as addresses,
        by_link.connect(addresses[0]) as client,
    ):
        client.choice = replace(_choice(model), nodes=addresses)
        yield client


def check_local(n_nodes: int, choice: ModelChoice) -> None:
    """Raise UsageError if `n_nodes` does not match `choice.layers` or exceeds the model's layers.

    The layers are counted only if the model is on this machine. Raises CheckpointError for a
    checkpoint that cannot be read.
    """
    if choice.layers and len(choice.layers) != n_nodes:
        raise UsageError(
            f"--layers has {len(choice.layers)} ranges and --local starts {n_nodes} nodes",
            remedy=f"give one range for each, or --local {len(choice.layers)}",
        )
    from shardnet.checkpoint.checkpoint import Checkpoint  # not every client opens one
    from shardnet.runtime.loading.model_facts import find_folder

    folder = find_folder(choice.model) if n_nodes > 1 else None
    if folder is None:
        return
    n_layers = Checkpoint.open(folder, ignore_unknown_config=True).config.n_layers
    if n_nodes > n_layers:
        raise UsageError(
            f"--local {n_nodes}: {choice.model} has {n_layers} layers and every node needs one",
            remedy=f"give --local {n_layers} or less",
        )


@asynccontextmanager
async def node_in_process(
    threads: int,
    identity: Identity | None,
    device: str | ComputePlugin = "auto",
    prefix_cache_bytes: int = 0,
) -> AsyncIterator[Client]:
    """Run a node inside this process; `identity` authenticates its links to other nodes.

    It keeps at most `prefix_cache_bytes` of finished prompts on disk, 0 for none.
    """
    from shardnet.cluster.machine.folders import cache_dir
    from shardnet.cluster.machine.profile import Device, MemoryBudget, find_devices, make_node_id
    from shardnet.cluster.node.node import running
    from shardnet.cluster.node.settings import NodeSettings
    from shardnet.cluster.store.model_cache import ModelCache

    found = find_devices(device) if isinstance(device, str) else (Device.of_plugin(device),)
    settings = NodeSettings(
        node=make_node_id(),
        name=THIS_PROCESS,
        budget=MemoryBudget(device=found[0], others=found[1:], asked_bytes=None),
        threads=threads,
        peers=(),
        local_nodes=LocalNodes(runtime_dir(os.environ)),
        cache=cache_dir(os.environ),
        models=ModelCache(cache_dir(os.environ)),
        log=lambda line: None,
        identity=identity,
        prefix_cache_bytes=prefix_cache_bytes,
    )
    async with (
        running(settings) as node,
        open_client(await node.client(), identity, node_name=THIS_PROCESS) as client,
    ):
        yield client


def _choice(model: str | ModelChoice) -> ModelChoice:
    return ModelChoice(model=name_model(model)) if isinstance(model, str) else model
