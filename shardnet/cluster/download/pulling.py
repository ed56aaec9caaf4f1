"""Pull a model from the Hub on a thread beside the event loop, for a model that no node has.

Knows how progress is reported and the download cancelled. Must not know plans or stages.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

from shardnet.checkpoint.hub_cache import HubName
from shardnet.errors import CancelledRequestError
from shardnet.threads import DaemonThreads

REPORT_EVERY_S = 0.2

OnBytes = Callable[[int, int], None]
"""Takes (bytes done, bytes in all); called on the loop."""


async def pull_beside(
    name: HubName, on_bytes: OnBytes, log: Callable[[str], None], tokenizer_for: str = ""
) -> None:
    """Pull a model, reporting progress to `on_bytes` and lines for people to `log`.

    Cancelling stops at the next piece; a later pull resumes there. `tokenizer_for` and errors as
    hub.pull.
    """
    from shardnet.cluster.download import hub

    loop = asyncio.get_running_loop()
    is_cancelled, reported_s = False, 0.0

    def report(file: str, done: int, total: int) -> None:
        """Pass progress to the loop; runs on the thread."""
        nonlocal reported_s
        if is_cancelled:
            raise CancelledRequestError(f"pulling {name} was cancelled")
        if done == total or time.monotonic() - reported_s > REPORT_EVERY_S:
            reported_s = time.monotonic()
            loop.call_soon_threadsafe(on_bytes, done, total)

    log(f"pulling {name} from the Hub")
    pull = partial(hub.pull, name, report, tokenizer_for=tokenizer_for)
    pulling = asyncio.wrap_future(DaemonThreads(1, "shardnet-pull").submit(pull))
    try:
        pulled = await asyncio.shield(pulling)
    except asyncio.CancelledError:
        is_cancelled = True
        pulling.add_done_callback(lambda done: done.cancelled() or done.exception())
        raise
    log(f"pulled {name}: {pulled.n_new_bytes / 2**20:.0f} MiB into {pulled.folder}")
