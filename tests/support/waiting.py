"""Waiting for what no event tells of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(is_so: Callable[[], bool]) -> None:
    """Let others go on until something is so."""
    while not is_so():  # noqa: ASYNC110
        await asyncio.sleep(0.001)
