"""`shardnet node`: run a node in the foreground."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import runpy
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

from shardnet import __version__
from shardnet.api.server.settings import Listening
from shardnet.cluster.machine import kernels
from shardnet.cluster.machine.addresses import LOOPBACK_HOST
from shardnet.cluster.machine.folders import cache_dir, runtime_dir
from shardnet.cluster.machine.local_nodes import LocalNodes
from shardnet.cluster.placement.words import size
from shardnet.cluster.store.model_cache import ModelCache
from shardnet.errors import ConfigurationError
from shardnet.installation import ENDS_WITH_STDIN, EXIT_UPDATE, KEEPER_VARIABLE, KeeperFolder
from shardnet.windows import library

from ..finding.target import import_node
from ..flags.http_options import HttpOptions
from ..flags.lazy_group import examples
from ..flags.node_options import NodeOptions
from ..flags.options import (
    Access,
    Json,
    LogFormat,
    is_loopback,
    keep_model_folders,
    keep_offline,
    mdns_interfaces,
    take_log_format,
    takes_groups,
)
from ..output.columns import warn_of_cache
from ..output.exit_codes import run_command, say, write_out

if TYPE_CHECKING:  # it imports torch
    from shardnet.cluster.discovery.discovery import Discovery
    from shardnet.cluster.machine.profile import Device, MemoryBudget
    from shardnet.cluster.node.node import Node
    from shardnet.cluster.node.pressure import NodeDrain
    from shardnet.cluster.node.settings import NodeSettings
    from shardnet.transport.identity import Identity
    from shardnet.wire.messages.household import HouseholdModel

REGISTER_S = 2.0
"""Interval of the looks at whether the node's entry in the register of this machine is right."""
CONSOLE_END_S: Final = 5.0
"""How long a process may live on when its console on Windows is closed."""
_CTRL_BREAK: Final = 1
_CONSOLE_ENDS: Final = (2, 5, 6)
"""Closed, its user leaves, the system shuts down (CTRL_CLOSE_EVENT and others)."""
_CONSOLE_HANDLERS: Final[list[object]] = []
"""What Windows may call at any time must not be collected."""
DRAIN_S = 30.0
"""How long a node that is told to stop may take to give away what requests need of it."""


@examples(
    "shardnet node",
    "shardnet node --name attic --memory 8GiB",
    "shardnet node --peer 192.168.1.12:7433 --no-mdns",
)
@takes_groups
def node(
    *,
    options: NodeOptions,
    access: Access,
    http_options: HttpOptions,
    log_format: LogFormat = "",
    as_json: Json = False,
    until_stdin_closes: Annotated[bool, typer.Option("--until-stdin-closes", hidden=True)] = False,
) -> None:
    """Run a node in the foreground; Ctrl-C ends it.

    Prints one line when it is ready. A node keeps its layers of a model loaded between requests.
    While requests need it, Ctrl-C gives its layers to other nodes first; the second one does not.
    """
    options.check()
    if options.allow_update and KEEPER_VARIABLE not in os.environ:
        _have_it_kept()
    take_log_format(log_format)
    keep_offline(options.offline)
    keep_model_folders(options.model_folder)
    name = "" if options.no_mdns else options.name or socket.gethostname()
    http = None
    if options.http:
        http = http_options.listening(*options.http_address(), access, name)
    run_command(
        _run(
            options,
            access,
            http,
            # Where programs say how long models stay, the HTTP server counts.
            idle_unload_s=None if http else http_options.idle_unload_s(),
            household=http_options.household_models(),
            as_json=as_json,
            until_stdin_closes=until_stdin_closes,
        )
    )


def _have_it_kept() -> NoReturn:
    """Go on as the keeper of this command line, which runs it as its child."""
    keeper = "shardnet_cli.services.keeper"
    if sys.platform == "win32":  # where a program in the place of another is nobody's child
        runpy.run_module(keeper, run_name="__main__")
        raise AssertionError("a keeper exits")
    os.execv(sys.executable, [sys.executable, "-P", "-m", keeper, *sys.argv[1:]])


async def _run(
    options: NodeOptions,
    access: Access,
    http: Listening | None,
    *,
    idle_unload_s: float | None,
    household: Sequence[HouseholdModel],
    as_json: bool,
    until_stdin_closes: bool,
) -> None:
    identity = access.identity()
    host = _host(options.host, access, identity is not None)
    import_node()
    from shardnet.cluster.machine.profile import MemoryBudget, find_devices, make_node_id
    from shardnet.cluster.node.node import listening
    from shardnet.cluster.node.settings import NodeSettings
    from shardnet.runtime.processors.alertness import work_at_full_speed

    work_at_full_speed()
    devices = find_devices(options.device, say)
    local_nodes = LocalNodes(runtime_dir(os.environ))
    settings = NodeSettings(
        node=make_node_id(),
        name=options.name or socket.gethostname(),
        budget=MemoryBudget(
            device=devices[0], others=devices[1:], asked_bytes=options.memory_bytes()
        ),
        tensor_parallel=options.n_shards(),
        threads=options.threads,
        peers=options.peers(),
        local_nodes=local_nodes,
        cache=cache_dir(os.environ),
        models=ModelCache(cache_dir(os.environ), options.cache_limit_bytes()),
        share_rate=options.share_bytes_per_s(),
        prefix_cache_bytes=options.prefix_cache_bytes(),
        spins=not options.no_spin,
        log=say,
        identity=identity,
        idle_unload_s=idle_unload_s,
        yields=options.yields,
        audit_share=options.audit / 100,
        power_command=options.power_words(),
        serves_http=http is not None,
        keeper=KeeperFolder(Path(os.environ[KEEPER_VARIABLE])) if options.allow_update else None,
        sleeps=options.sleeps(),
        tailnet=options.tailnet and not until_stdin_closes,
        remembers=not until_stdin_closes,
        discovery=None if options.no_mdns else _discovery(identity),
    )
    _warn_of_tailnet(settings, access)
    warn_of_cache()
    _warn_of_devices(devices)
    _warn_of_memory(settings.budget)
    stopping = stop_signal(until_stdin_closes)
    async with contextlib.AsyncExitStack() as stack:
        node = await stack.enter_async_context(listening(settings, host, options.port))
        if not until_stdin_closes:
            await stack.enter_async_context(_registered(local_nodes, node, settings.name))
        if household:
            await _name_models(node, identity, household)
        url = await stack.enter_async_context(_http(http, node, identity))
        _say_ready(node, url, as_json=as_json, has_threads=bool(options.threads))
        await _until_it_leaves(node.drain, stopping, drains=not until_stdin_closes)
    if not as_json:
        say("node stopped")
    if node.updates.is_ordered:
        raise typer.Exit(EXIT_UPDATE)


async def _until_it_leaves(drain: NodeDrain, stopping: asyncio.Event, *, drains: bool) -> None:
    """Wait until the node was drained, or was told to stop: once, and it is drained first."""
    async with asyncio.TaskGroup() as tasks:
        waiting: list[asyncio.Task[Any]] = [
            tasks.create_task(drain.is_over.wait()),
            tasks.create_task(stopping.wait()),
        ]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if drains and not drain.is_over.is_set() and drain.is_needed:
            say(f"giving the layers of this node away, for {DRAIN_S:g} s at most; Ctrl-C ends it")
            stopping.clear()
            waiting.append(tasks.create_task(drain.drain(DRAIN_S)))
            waiting.append(tasks.create_task(stopping.wait()))
            await asyncio.wait(waiting[-2:], return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()


@contextlib.asynccontextmanager
async def _registered(local_nodes: LocalNodes, node: Node, name: str) -> AsyncIterator[None]:
    """Have commands of this machine find the node, wherever its address moves meanwhile."""
    try:
        entry = local_nodes.add(node=node.node, name=name, address=node.address, pid=os.getpid())
    except OSError as error:
        say(
            f"warning: this node cannot be registered in {runtime_dir(os.environ)} "
            f"({error.strerror}): commands of this machine find it with --nodes "
            f"{node.address}, or name another folder with SHARDNET_RUNTIME_DIR"
        )
        yield
        return

    async def keep() -> None:
        nonlocal entry
        while True:
            await asyncio.sleep(REGISTER_S)
            with contextlib.suppress(OSError, ConfigurationError):  # a full disk, for a while
                entry = local_nodes.keep(entry, node.address)

    keeping = asyncio.create_task(keep())
    try:
        yield
    finally:
        keeping.cancel()
        local_nodes.remove(entry)


def _discovery(identity: Identity | None) -> Discovery:
    from shardnet.cluster.discovery.discovery import Discovery

    fingerprint = identity.fingerprint if identity else ""
    return Discovery(fingerprint=fingerprint, interfaces=mdns_interfaces(os.environ), log=say)


def _warn_of_tailnet(settings: NodeSettings, access: Access) -> None:
    """Warn of a --tailnet that finds nobody."""
    if settings.tailnet and settings.identity is None and not access.insecure:
        say("warning: --tailnet: without a cluster key this node serves this machine alone")


def _warn_of_devices(devices: Sequence[Device]) -> None:
    """Warn of groups that share a core, where each waits for the other, and of lacking kernels."""
    if any(device.isa == kernels.NONE for device in devices):
        say(f"warning: no compiled kernels here: {kernels.SLOWER}; {kernels.REMEDY}")
    groups = [device.cores for device in devices]
    named = [core for cores in groups for core in cores]
    if len(set(named)) < len(named):
        say(
            f"warning: --device: {len(named)} groups share {len(set(named))} cores: name one for "
            "each core at most"
        )


def _warn_of_memory(budget: MemoryBudget) -> None:
    """Warn of a --memory that is more than the container of this process may use."""
    asked_bytes, most_bytes = budget.asked_bytes, budget.total_bytes(used_bytes=0, n_nodes_here=1)
    if asked_bytes is not None and most_bytes < asked_bytes:
        say(
            f"warning: --memory {size(asked_bytes)} is more than this container may use: the node "
            f"takes {size(most_bytes)}; raise the container's limit for more"
        )


def _host(host: str, access: Access, has_key: bool) -> str:
    """Return the host to listen on, "" for all interfaces.

    Raises ConfigurationError for an address beyond loopback without a key or --insecure.
    """
    if has_key:
        return host
    host = host or LOOPBACK_HOST
    if access.insecure:
        say(
            f"warning: --insecure: links are neither encrypted nor authenticated, and whoever "
            f"reaches {host} can use this node and read what it computes"
        )
    elif not is_loopback(host):
        raise ConfigurationError(
            f"--host {host} is not loopback, and this machine holds no cluster key",
            remedy="run `shardnet key new` or `shardnet key join`, or add --insecure if everyone "
            "on that network may use this node",
        )
    return host


async def _name_models(
    node: Node, identity: Identity | None, household: Sequence[HouseholdModel]
) -> None:
    """Have the node lead the household, or whoever leads it take these models."""
    from shardnet.api.client import open_client

    async with open_client(await node.client(), identity) as client:
        await client.name_models(household)


@asynccontextmanager
async def _http(
    wanted: Listening | None, node: Node, identity: Identity | None
) -> AsyncIterator[str]:
    """Serve HTTP if that is wanted, by a client of this very node; yield the URL, "" without."""
    if wanted is None:
        yield ""
        return
    from shardnet.api.client import open_client
    from shardnet.api.serve.server import serving

    name = node.info().name
    async with (
        open_client(await node.client(), identity, node_name=name, redial=node.client) as client,
        serving(
            client,
            wanted,
            current=lambda: node.head.choice,
            on_server=lambda has: setattr(node.sleep, "has_readers", has),
        ) as url,
    ):
        yield url


def _say_ready(node: Node, url: str, *, as_json: bool, has_threads: bool) -> None:
    info = node.info()
    host, _, port = info.address.rpartition(":")
    if as_json:
        ready = {
            "event": "ready",
            "node": info.node,
            "name": info.name,
            "host": host,
            "port": int(port),
            "pid": os.getpid(),
            "version": __version__,
            "cluster": node.cluster,
        }
        if url:
            ready["http"] = url
        write_out(json.dumps(ready))
    else:
        where = f"cluster {node.cluster}" if node.cluster else "no cluster key"
        share = "as given" if has_threads else "this machine's cores shared among its nodes"
        line = f"node {info.name} ready on {info.address} ({where}), threads: {info.threads}"
        write_out(f"{line} ({share}){', HTTP at ' + url if url else ''}")


def stop_signal(until_stdin_closes: bool) -> asyncio.Event:
    """Return an event that is set by a termination signal or, if wanted, by the end of stdin.

    SIGHUP, which comes when the terminal is closed, is such a signal except under nohup. Windows
    tells that, and Ctrl-Break, to a handler of its consoles.
    """
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()
    for name in ("SIGTERM", "SIGINT", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is None or (name == "SIGHUP" and signal.getsignal(number) is signal.SIG_IGN):
            continue
        _at_signal(number, loop, stopping.set)
    if sys.platform == "win32":
        _at_console_end(_from_a_thread(loop, stopping.set))
    if until_stdin_closes or ENDS_WITH_STDIN in os.environ:
        _at_end_of_stdin(loop, stopping.set)
    return stopping


def _at_signal(
    number: signal.Signals, loop: asyncio.AbstractEventLoop, act: Callable[[], None]
) -> None:
    try:
        loop.add_signal_handler(number, act)
    except NotImplementedError:  # Windows
        act = _from_a_thread(loop, act)
        signal.signal(number, lambda number, frame: act())


def _from_a_thread(loop: asyncio.AbstractEventLoop, act: Callable[[], None]) -> Callable[[], None]:
    """Return what has the loop call `act`, if it is still open."""

    def call() -> None:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(act)

    return call


def _at_console_end(act: Callable[[], None]) -> None:
    """Call `act` at Ctrl-Break, and when a console of Windows is closed or its user leaves.

    Of the end of a console Python learns nothing: Windows ends the process when the handler
    returns, or after CONSOLE_END_S. That its user leaves it tells only who has no user32.dll.
    """

    def handle(kind: int) -> int:
        if kind != _CTRL_BREAK and kind not in _CONSOLE_ENDS:
            return 0
        act()
        if kind != _CTRL_BREAK:
            time.sleep(CONSOLE_END_S)
        return 1

    windows: Any = ctypes  # of which other systems' Pythons lack a part
    handler = windows.WINFUNCTYPE(ctypes.c_int, ctypes.c_uint32)(handle)
    if library("kernel32").SetConsoleCtrlHandler(handler, 1):
        _CONSOLE_HANDLERS.append(handler)


def _at_end_of_stdin(loop: asyncio.AbstractEventLoop, act: Callable[[], None]) -> None:
    stdin = sys.stdin.fileno()

    def read() -> None:
        if not os.read(stdin, 4096):
            loop.remove_reader(stdin)
            act()

    def read_all() -> None:
        while os.read(stdin, 4096):
            pass
        _from_a_thread(loop, act)()

    try:
        loop.add_reader(stdin, read)
    except NotImplementedError:  # Windows
        threading.Thread(target=read_all, name="stdin", daemon=True).start()
