"""`shardnet top`: what the nodes and the ring do now, as long as somebody looks."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from typing import TYPE_CHECKING

from ..finding.target import named_or_here
from ..flags.options import Access, Json, Nodes, flag, split_nodes, takes_groups
from ..output.columns import terminal_width
from ..output.exit_codes import write_json, write_out

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from rich.text import Text

    from shardnet.api.client import Client

    from ..output.top_view import TopView

EVERY_S = 1.0
LEAST_S = 0.1


@takes_groups
async def top(
    *,
    nodes: Nodes = "",
    every: float = flag(EVERY_S, "--every S", "Seconds between two looks.", min=LEAST_S),
    count: int | None = flag(
        None,
        "--count N",
        "End after so many looks; 0 for none. Default: 0, and 1 where nobody could watch "
        "(but for --json).",
        min=0,
    ),
    access: Access,
    as_json: Json = False,
) -> None:
    """Show nodes, ring and requests as they change: memory, tokens/s, compute and wire per stage.

    Asks the node of this machine, or the first of --nodes, for its whole cluster. With --json one
    object a line. Ctrl-C ends it.
    """
    is_live = sys.stdout.isatty() and not as_json
    if count is None:
        count = 0 if is_live or as_json else 1
    async with contextlib.AsyncExitStack() as stack:
        client = (await named_or_here(stack, split_nodes(nodes)[:1], access.identity()))[0]
        looks = await stack.enter_async_context(contextlib.aclosing(views(client, every, count)))
        if is_live:
            await _show(looks)
            return
        async for view in looks:
            if as_json:
                write_json(view)
            else:
                for _, line in _lines(view):
                    write_out(line)


async def views(client: Client, every_s: float, count: int) -> AsyncGenerator[TopView, None]:
    """Look at the cluster of a node every so many seconds, `count` times, 0 for ever."""
    from shardnet.api.dashboard.board import Watcher

    from ..output.top_view import TopView

    watcher = Watcher(client, fresh_s=0)
    n_looks = 0
    while True:
        await watcher.look()
        yield TopView(
            at=time.time(),
            asked=watcher.asked_name or None,
            answers=not watcher.failure,
            failure=watcher.failure or None,
            nodes=watcher.nodes.nodes(watcher.clock()),
            ring=watcher.ring.ring(),
            loading=watcher.ring.loading(),
            rates=watcher.ring.rates(),
            requests=watcher.ring.requests(),
        )
        n_looks += 1
        if n_looks == count:
            return
        await asyncio.sleep(every_s)


def _lines(view: TopView) -> list[tuple[str, str]]:
    from ..output.top_view import top_lines

    return top_lines(view, terminal_width())


async def _show(looks: AsyncGenerator[TopView, None]) -> None:
    from rich.live import Live

    with Live(auto_refresh=False, screen=True, vertical_overflow="crop") as live:
        async for view in looks:
            live.update(_text(view), refresh=True)


def _text(view: TopView) -> Text:
    from rich.text import Text

    return Text("\n").join(Text(line, style=style) for style, line in _lines(view))
