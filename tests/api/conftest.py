"""What the tests of the client share."""

from __future__ import annotations

import asyncio

import pytest

from shardnet.transport.loop import run


@pytest.fixture(scope="session", autouse=True)
def _loop_before_all_tests() -> None:
    """Have libuv open the pipe for signals that it keeps as long as the process lives."""
    run(asyncio.sleep(0))
