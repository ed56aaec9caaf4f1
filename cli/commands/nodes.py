"""`shardnet nodes`, `drain`, `wake` and `unload`: who is here, less of them, more, none loaded."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from shardnet.api.client import connect
from shardnet.cluster.machine.folders import runtime_dir
from shardnet.cluster.machine.local_nodes import LocalNodes
from shardnet.errors import ShardnetError, UsageError
from shardnet.transport.address import split_address
from shardnet.types import LayerRange
from shardnet.wire.messages.membership import NodeInfo

from ..finding.target import find_nearest, named_or_here
from ..flags import options
from ..flags.lazy_group import examples
from ..output.columns import columns, terminal_width
from ..output.exit_codes import picked, say, write_json, write_out

if TYPE_CHECKING:  # not every command needs the library behind it
    from shardnet.transport.identity import Identity

REFRESH_S = 1.0
ANSWER_S = 1.2
"""Deadline for a node's status and its peers."""
FOUND_S = 0.5
"""Deadline for a node that mDNS found to answer."""
DEADLINE_S = 60.0
LONGEST_S = 86_400.0


def seconds(default: float, spelled: str, help: str) -> float:
    """Make a flag that takes seconds."""
    return options.flag(default, spelled, help, min=0.0, max=LONGEST_S)


@options.takes_groups
async def nodes(
    *,
    nodes: options.Nodes = "",
    peer: options.Peer = None,
    search: options.Search,
    watch: bool = options.flag(False, "--watch", "Keep the list up to date."),
    access: options.Access,
    as_json: options.Json = False,
) -> None:
    """List the nodes of this machine, those they know, and those that are named.

    If there are none, the network is searched by mDNS, and with --tailnet the tailnet.
    """
    if watch and as_json:
        raise typer.BadParameter("choose one of --watch and --json; `shardnet top --json` has both")
    named = [*options.split_nodes(nodes), *options.check_addresses(peer)]
    if not watch:
        infos = await gather(named, access, search)
        if as_json:
            write_json([_as_json(info) for info in infos])
        elif infos:
            for line in node_lines(infos, terminal_width()):
                write_out(line)
        else:
            write_out("no nodes found: start one with `shardnet node`, or name one with --peer")
        return
    looks = _looks(named, access, search)
    if not sys.stdout.isatty():  # what is live shows nothing there before it ends
        async for lines in looks:
            write_out("\n".join([*lines, ""]))
        return
    from rich.live import Live
    from rich.text import Text

    with Live(auto_refresh=False) as live:
        async for lines in looks:
            live.update(Text("\n".join(lines)), refresh=True)


async def _looks(
    named: Sequence[str], access: options.Access, search: options.Search
) -> AsyncGenerator[list[str], None]:
    """Describe the nodes every REFRESH_S seconds."""
    while True:
        yield node_lines(await gather(named, access, search), terminal_width())
        await asyncio.sleep(REFRESH_S)


async def gather(
    named: Sequence[str], access: options.Access, search: options.Search
) -> list[NodeInfo]:
    """Ask the nodes of this machine and the named ones for themselves and their peers.

    If there are none, ask those that are found as `search` allows.
    """
    identity = access.identity()
    here = [node.address for node in LocalNodes(runtime_dir(os.environ)).list()]
    addresses = list(dict.fromkeys([*named, *here]))
    if not addresses and search.is_allowed:
        found = await find_nearest(identity, search, insecure=access.insecure, answer_s=FOUND_S)
        addresses = [answer.address for answer in found]
    answers = await asyncio.gather(*(_ask(address, identity) for address in addresses))
    known = {info.node: info for infos in answers for info in infos}
    known |= {infos[0].node: infos[0] for infos in answers if infos}  # each knows itself best
    return sorted(known.values(), key=lambda info: (info.name, info.address))


async def _ask(address: str, identity: Identity | None) -> list[NodeInfo]:
    """Return a node and its peers; warn and return [] where it does not answer."""
    try:
        async with asyncio.timeout(ANSWER_S), connect(address, identity) as client:
            status = await client.status(with_peers=True)
            return [status.node, *status.peers]
    except ShardnetError as error:
        say(f"warning: {error}")
    except TimeoutError:
        say(f"warning: {address} did not answer within {ANSWER_S:g} s; it may be frozen")
    return []


def _as_json(info: NodeInfo) -> dict[str, Any]:
    return {
        **picked(info, "node", "name", "address", "version"),
        "uptime_s": round(info.uptime_s, 3),
        "device": info.device,
        "devices": [device.name for device in info.devices] or [info.device],
        **picked(info, "memory_bytes", "memory_free_bytes", "threads"),
        "draining": info.is_draining,
        "rests": info.rests or None,
        "power": [msgspec.structs.asdict(meter) for meter in info.meters],
        "asleep": info.asleep and picked(info.asleep, "wake_s", "since_s"),
        "stage": info.stage and picked(info.stage, "model", "layers", "rank"),
    }


def node_lines(infos: Sequence[NodeInfo], width: int | None) -> list[str]:
    """Describe nodes in columns of at most `width`, None for no limit."""
    from shardnet.cluster.diagnosis.facts import age
    from shardnet.cluster.peers.sleepers import words

    rows = [("name", "address", "device", "memory free", "version", "up", "stage")]
    for info in infos:
        kind, _, board = info.device.partition(" ")  # a board's name is long
        loaded = [board.strip("()")] if board else []
        if info.is_draining:
            loaded.append("draining")
        if info.rests:
            loaded.append("resting")
        if info.asleep is not None:
            loaded.append(words(info).removeprefix(f"{info.name} "))
        if info.stage is not None:
            layers = LayerRange(*info.stage.layers).words
            where = "in no ring" if info.stage.rank is None else f"rank {info.stage.rank}"
            loaded.append(f"{where}, {layers} of {info.stage.model}")
        free = f"{info.memory_free_bytes / 2**30:.1f} of {info.memory_bytes / 2**30:.1f} GiB"
        rows.append(
            (
                *(info.name, info.address, kind, free, info.version, age(info.uptime_s)),
                "; ".join(loaded) or "-",
            )
        )
    return columns(rows, width)


@examples("shardnet drain attic", "shardnet drain 192.168.1.12:7433 --deadline 300")
@options.takes_groups
async def drain(
    *,
    node: Annotated[str, typer.Argument(metavar="NODE", help="Name, address or id of the node.")],
    deadline: float = seconds(
        DEADLINE_S, "--deadline SECONDS", "After so long the node ends, empty or not."
    ),
    peer: options.Peer = None,
    search: options.Search,
    access: options.Access,
) -> None:
    """Have a node give its layers to others without losing a request, and end.

    Requests go on over the other nodes. A node that leads the requests of others ends
    with them, unless its deputy goes on with them.
    """
    address = await _find(node, options.check_addresses(peer), access, search)
    async with connect(address, access.identity()) as client:
        say(f"draining {client.node_name} ({address})")
        await client.drain(deadline)
        say(f"{client.node_name} is empty, and ends")


@examples("shardnet wake attic")
@options.takes_groups
async def wake(
    *,
    node: Annotated[str, typer.Argument(metavar="NODE", help="Name or id of the node.")],
    peer: options.Peer = None,
    access: options.Access,
) -> None:
    """Wake a machine whose node sleeps, as --sleep-after has it do.

    The node of this machine, or a named one, is asked to: it knows how.
    """
    async with contextlib.AsyncExitStack() as stack:
        for client in await named_or_here(stack, options.check_addresses(peer), access.identity()):
            for info in (await client.status(with_peers=True)).peers:
                if info.asleep is not None and _is_called(info, node):
                    say(f"waking {info.name}, from {client.node_name}")
                    await client.wake(info.node)
                    say(f"{info.name} is awake")
                    return
    raise UsageError(
        f"no node is known to sleep that is called {node!r}",
        remedy="`shardnet nodes` lists those that sleep",
    )


async def _find(node: str, peers: list[str], access: options.Access, search: options.Search) -> str:
    """Return the address of a node. Raises UsageError unless exactly one is called so."""
    if _is_address(node):
        return node
    infos = await gather(peers, access, search)
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


@options.takes_groups
async def unload(
    *,
    model: Annotated[
        str, typer.Argument(metavar="NAME", help="A model of the household, by its name there.")
    ] = "",
    nodes: options.Nodes = "",
    peer: options.Peer = None,
    access: options.Access,
) -> None:
    """Free the model of the ring that the node of this machine, or a named node, is part of.

    With a NAME a model of the household is freed, until it is asked for again.
    """
    addresses, had_any = [*options.split_nodes(nodes), *options.check_addresses(peer)], False
    async with contextlib.AsyncExitStack() as stack:
        for client in await named_or_here(stack, addresses, access.identity()):
            if model and model not in [one.model.name for one in await client.household()]:
                raise UsageError(
                    f"the household has no model called {model}",
                    remedy="`shardnet household` lists them",
                )
            stage = (await client.status(with_peers=False)).node.stage
            had_any |= bool(model) or stage is not None
            await client.unload(model=model)
    say(f"{model or 'the model'} is unloaded" if had_any else "no model was loaded")
