"""Pull a model of the Hub on a thread beside the loop: the head's way to what no node has.

Knows how that is reported and cancelled. Must not know plans or stages.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from shardnet.checkpoint.hub_cache import HubName
from shardnet.errors import CancelledRequestError

REPORT_EVERY_S = 0.2

OnBytes = Callable[[int, int], None]
"""Takes (bytes done, bytes in all), on the loop."""


async def pull_beside(name: HubName, on_bytes: OnBytes, log: Callable[[str], None]) -> None:
    """Pull a model. Cancelling ends it at the next piece; a later pull resumes there.

    Raises what hub.pull raises.
    """
    from shardnet.cluster.download import hub

    loop = asyncio.get_running_loop()
    given_up, told_s = False, 0.0

    def report(file: str, done: int, total: int) -> None:
        """Pass progress to the loop; runs on the thread."""
        nonlocal told_s
        if given_up:
            raise CancelledRequestError(f"pulling {name} was given up")
        if done == total or time.monotonic() - told_s > REPORT_EVERY_S:
            told_s = time.monotonic()
            loop.call_soon_threadsafe(on_bytes, done, total)

    log(f"pulling {name} from the Hub")
    pulling = asyncio.ensure_future(asyncio.to_thread(hub.pull, name, report))
    try:
        pulled = await asyncio.shield(pulling)
    except asyncio.CancelledError:
        given_up = True
        pulling.add_done_callback(lambda done: done.cancelled() or done.exception())
        raise
    log(f"pulled {name}: {pulled.n_new_bytes / 2**20:.0f} MiB into {pulled.folder}")
