"""A node's tasks have an owner: what fails is said in one line and ends nothing else."""

from __future__ import annotations

import asyncio

import pytest

from shardnet.cluster.peers.supervision import kept_running, supervised


class Panic(BaseException):
    """What a Rust library raises when it panics: no Exception."""


@pytest.mark.parametrize(
    "error", [KeyError("x"), Panic("x"), MemoryError(), ExceptionGroup("g", [ValueError("x")])]
)
def test_a_task_that_fails_is_named_and_ends_alone(error: BaseException) -> None:
    said: list[str] = []

    async def fail() -> None:
        raise error

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            failing = tasks.create_task(supervised(fail, "the link of 10.0.0.1:7", said.append))
            other = tasks.create_task(asyncio.sleep(0, "went on"))
        assert not failing.result()
        assert other.result() == "went on"

    asyncio.run(main())
    [line] = said
    assert line.startswith("the link of 10.0.0.1:7 failed: ")
    assert "\n" not in line


def test_a_part_that_failed_is_started_again_until_it_ends() -> None:
    said: list[str] = []
    n_starts = 0

    async def work() -> None:
        nonlocal n_starts
        n_starts += 1
        if n_starts < 3:
            raise OSError(n_starts)

    asyncio.run(kept_running(work, "discovery", said.append, restart_s=0))
    assert n_starts == 3
    assert [line.split(" in ")[0] for line in said] == [
        "discovery failed: OSError(1)",
        "discovery failed: OSError(2)",
    ]


def test_a_cancelled_part_ends() -> None:
    async def main() -> None:
        part = asyncio.create_task(kept_running(asyncio.Event().wait, "peers", pytest.fail))
        await asyncio.sleep(0)
        part.cancel()
        with pytest.raises(asyncio.CancelledError):
            await part

    asyncio.run(main())
