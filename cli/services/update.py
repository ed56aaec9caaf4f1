"""`shardnet update`: another version for all nodes, one after the other, while requests go on."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from shardnet.errors import PeerFailedError, ShardnetError, UsageError

from ..commands.nodes import gather, seconds
from ..flags import options
from ..flags.lazy_group import examples
from ..output.bars import DownloadBars
from ..output.columns import columns, terminal_width
from ..output.exit_codes import counted, picked, say, write_json, write_out

if TYPE_CHECKING:
    from shardnet.api.updating import Due, Updater

DEADLINE_S: Final = 600.0
WITHIN_S: Final = 180.0


@examples(
    "shardnet update --dry-run dist/shardnet-0.2.0-py3-none-linux_x86_64.whl",
    "shardnet update --version 0.2.0",
    "shardnet update *.whl",
)
@options.takes_groups
async def update(
    *,
    wheels: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="WHEEL", help="One for each platform of the nodes.", show_default=False
        ),
    ] = None,
    version: str = options.flag("", "--version X", "Download this version. Default: the latest."),
    index: str = options.flag("", "--index URL", "Download from this index."),
    dry_run: bool = options.flag(False, "--dry-run", "Say what would be done, and do nothing."),
    allow_pause: bool = options.flag(
        False, "--allow-pause", "Also where requests then wait for a node."
    ),
    deadline: float = seconds(
        DEADLINE_S, "--deadline SECONDS", "A node that is not empty by then goes on as it is."
    ),
    within: float = seconds(
        WITHIN_S, "--within SECONDS", "A node that is not back by then gets its version back."
    ),
    peer: options.Peer = None,
    search: options.Search,
    access: options.Access,
    as_json: options.Json = False,
) -> None:
    """Bring another version to all nodes, one after the other, while requests go on.

    Each is sent its wheel, gives its layers to others, is started again by its keeper, and is
    waited for until it is back in its ring. The first that does not come back runs its former
    version again, and ends the command. Only nodes that were started with --allow-update take a
    version; what to do at the others is said.
    """
    from shardnet.api.updating import Updater, Wheel, download, in_order, with_wheels

    if wheels and (version or index):
        raise typer.BadParameter("name wheels, or --version and --index")
    access.key()
    identity = access.identity()
    if identity is None:
        raise typer.BadParameter("only holders of the cluster key update", param_hint="--insecure")
    updater = Updater(
        identity=identity, deadline_s=deadline, within_s=within, may_pause=allow_pause, say=say
    )
    infos = await gather(options.check_addresses(peer), access, search)
    if not infos:
        raise UsageError("no nodes found", remedy="name one with --peer")
    nodes = in_order(await asyncio.gather(*(updater.look(info) for info in infos)))
    with tempfile.TemporaryDirectory(prefix="shardnet-update-") as folder:
        found = [Wheel.read(path) for path in wheels or ()]
        if not wheels:
            platforms = sorted({one.platform for one in nodes if not one.refusal})
            found = await asyncio.to_thread(download, version, index, platforms, Path(folder))
        nodes = with_wheels(nodes, found)
        for wheel in found:
            say(f"{wheel.path.name}: SHA-256 {wheel.sha256}")
        for line in () if as_json else columns(_rows(nodes), terminal_width()):
            (write_out if dry_run else say)(line)
        if not dry_run:
            await _update(updater, nodes)
    if as_json:
        write_json([_as_json(one, is_done=not dry_run) for one in nodes])


async def _update(updater: Updater, nodes: Sequence[Due]) -> None:
    """Update the nodes that are due. Raises PeerFailedError where some are not, at the end."""
    due = [one for one in nodes if one.wheel is not None]
    if (pauses := [f"{one.name}: {one.pause}" for one in due if one.pause]) and not (
        updater.may_pause
    ):
        raise UsageError("; ".join(pauses), remedy="add --allow-pause if requests may wait")
    with DownloadBars() as bars:
        for one in due:
            await updater.send(one, partial(bars.update, one.name))
    for n_done, one in enumerate(due):
        try:
            await updater.update(one)
        except BaseException as error:
            left = ", ".join(other.name for other in due[n_done + 1 :])
            say(f"{counted(n_done, 'node')} updated; not begun: {left or 'none'}")
            if not isinstance(error, ShardnetError):
                say(
                    f"{one.name}, if it has ended for it, goes back to {one.info.version} by itself"
                )
            raise
    by_hand = [f"{one.name}: {one.refusal}: {one.remedy}" for one in nodes if one.refusal]
    if by_hand:
        raise PeerFailedError(f"{counted(len(by_hand), 'node')} not updated: {'; '.join(by_hand)}")


def _rows(nodes: Sequence[Due]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("node", "address", "version", "to", "how")]
    for one in nodes:
        to, how = "-", f"by hand, {one.refusal}: {one.remedy}" if one.refusal else "has it"
        if one.wheel is not None:
            pause = f", with --allow-pause: {one.pause}" if one.pause else ""
            to, how = one.wheel.version, f"drains, starts again{pause}"
        rows.append((one.info.name, one.info.address, one.info.version, to, how))
    return rows


def _as_json(one: Due, *, is_done: bool) -> dict[str, Any]:
    wheel = one.wheel
    return {
        **picked(one.info, "node", "name", "address", "version"),
        "to": wheel and wheel.version,
        "sha256": wheel and wheel.sha256,
        "does": "by hand" if one.refusal else "nothing" if wheel is None else "update",
        "done": is_done,
        **{name: getattr(one, name) or None for name in ("refusal", "remedy", "pause")},
    }
