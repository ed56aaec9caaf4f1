"""`shardnet node`: run a node in the foreground."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Annotated

import typer

from shardnet import __version__
from shardnet.cluster.local_nodes import LocalNodes, runtime_dir
from shardnet.errors import ConfigurationError

from .mdns import told_interfaces
from .options import Json, NoMdns, Peer, parse_size
from .run import run_command, say

DEFAULT_PORT = 7433


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flags:
    host: str
    port: int
    name: str
    device: str
    memory_bytes: int | None
    threads: int
    peers: tuple[str, ...]
    no_mdns: bool
    insecure: bool
    as_json: bool
    until_stdin_closes: bool


def node(
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on.", envvar="SHARDNET_HOST")
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(
            "--port",
            min=0,
            max=65535,
            help="Port to listen on; 0 takes a free one.",
            envvar="SHARDNET_PORT",
        ),
    ] = DEFAULT_PORT,
    name: Annotated[
        str,
        typer.Option(
            "--name",
            help="How people call this node. Default: the host's name.",
            envvar="SHARDNET_NAME",
            show_default=False,
        ),
    ] = "",
    device: Annotated[
        str,
        typer.Option(
            "--device",
            metavar="auto|cpu|cuda",
            help="What computes; auto takes a GPU where there is one.",
            envvar="SHARDNET_DEVICE",
        ),
    ] = "auto",
    memory: Annotated[
        str,
        typer.Option(
            "--memory",
            metavar="8GiB",
            help="Memory for weights and KV cache. Default: most of what is available.",
            envvar="SHARDNET_MEMORY",
            show_default=False,
        ),
    ] = "",
    threads: Annotated[
        int,
        typer.Option(
            "--threads",
            metavar="N",
            min=0,
            help="Compute threads. Default: a share of the cores among the nodes of this machine.",
            envvar="SHARDNET_THREADS",
            show_default=False,
        ),
    ] = 0,
    peer: Peer = None,
    no_mdns: NoMdns = False,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Allow listening beyond loopback although links are neither encrypted nor "
            "authenticated.",
            envvar="SHARDNET_INSECURE",
        ),
    ] = False,
    as_json: Json = False,
    until_stdin_closes: Annotated[bool, typer.Option("--until-stdin-closes", hidden=True)] = False,
) -> None:
    """Run a node in the foreground; Ctrl-C ends it.

    Prints one line when it is ready. A node keeps its part of a model loaded between generations.
    """
    flags = _Flags(
        host=host,
        port=port,
        name=name,
        device=device,
        memory_bytes=parse_size(memory, "--memory") if memory else None,
        threads=threads,
        peers=tuple(peer or ()),
        no_mdns=no_mdns,
        insecure=insecure,
        as_json=as_json,
        until_stdin_closes=until_stdin_closes,
    )
    run_command(_run(flags))


async def _run(flags: _Flags) -> None:
    from shardnet.cluster.discovery import Discovery
    from shardnet.cluster.node import NodeSettings, listening
    from shardnet.cluster.profile import MemoryBudget, find_device, make_node_id

    _check_host(flags)
    local_nodes = LocalNodes(runtime_dir(os.environ))
    settings = NodeSettings(
        node=make_node_id(),
        name=flags.name or socket.gethostname(),
        budget=MemoryBudget(device=find_device(flags.device), asked_bytes=flags.memory_bytes),
        threads=flags.threads,
        peers=flags.peers,
        local_nodes=local_nodes,
        log=say,
        discovery=None
        if flags.no_mdns
        else Discovery(fingerprint="", interfaces=told_interfaces(os.environ), log=say),
    )
    stopping = _stop_signal(flags.until_stdin_closes)
    async with listening(settings, flags.host, flags.port) as node:
        entry = None
        if not flags.until_stdin_closes:
            entry = local_nodes.add(
                node=node.node, name=settings.name, address=node.address, pid=os.getpid()
            )
        try:
            _say_ready(flags, node.node, settings.name, node.address, node.threads)
            await stopping.wait()
        finally:
            if entry is not None:
                local_nodes.remove(entry)
    if not flags.as_json:
        say("node stopped")


def _check_host(flags: _Flags) -> None:
    """Refuse to listen beyond loopback without protection, unless told to."""
    if _is_loopback(flags.host):
        return
    if not flags.insecure:
        raise ConfigurationError(
            f"--host {flags.host} is not loopback, and links are neither encrypted nor "
            "authenticated: add --insecure if everyone on that network may use this node"
        )
    say(
        f"warning: listening on {flags.host} without encryption or authentication: anyone who "
        "reaches this port can use this node"
    )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _say_ready(flags: _Flags, node: str, name: str, address: str, threads: int) -> None:
    host, _, port = address.rpartition(":")
    if flags.as_json:
        ready = {
            "event": "ready",
            "node": node,
            "name": name,
            "host": host,
            "port": int(port),
            "pid": os.getpid(),
            "version": __version__,
        }
        print(json.dumps(ready), flush=True)
    else:
        share = "as told" if flags.threads else "this machine's cores shared among its nodes"
        print(f"node {name} ready on {address}, threads: {threads} ({share})", flush=True)


def _stop_signal(until_stdin_closes: bool) -> asyncio.Event:
    """Return an event that SIGTERM, SIGINT or, if wanted, the end of standard input sets."""
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    if until_stdin_closes:
        stdin = sys.stdin.fileno()

        def read() -> None:
            if not os.read(stdin, 4096):
                loop.remove_reader(stdin)
                stopping.set()

        loop.add_reader(stdin, read)
    return stopping
