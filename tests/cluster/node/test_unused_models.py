"""A model that nobody uses is freed when its time is over, or when its memory is wanted."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shardnet.cluster.node.unused_models import UnusedModels
from shardnet.errors import BusyError
from shardnet.wire.messages.generation import Unload


class Around:
    """A node with a loaded model, in a ring that it leads or, without `unused_s`, another node.

    It is its own head, host and link to the other head.
    """

    def __init__(self, unused_s: float | None) -> None:
        self.loaded = SimpleNamespace(order=SimpleNamespace(model="m"))
        self.membership = SimpleNamespace(is_over=False, owner="b")
        self.idle_s = unused_s
        self.unloaded: list[float] = []
        self.asked: list[Unload] = []
        self.is_busy = False
        self.log: list[str] = []

    async def unload(self, *, idle_s: float) -> None:
        """Count."""
        self.unloaded.append(idle_s)

    def next_request(self) -> int:
        """Number a request."""
        return 1

    async def ask(self, message: Unload, answer: object) -> None:
        """Count, or refuse as a head that has just been used."""
        self.asked.append(message)
        if self.is_busy:
            raise BusyError("used just now")

    def models(self, idle_s: float | None = None) -> UnusedModels:
        """Look after it."""
        return UnusedModels(
            router=cast(Any, self),
            host=cast(Any, self),
            link_of=lambda node: cast(Any, self if node == "b" else None),
            idle_s=idle_s,
            log=self.log.append,
        )


def look(models: UnusedModels, times: int) -> None:
    async def main() -> None:
        for _ in range(times):
            await models.look()

    asyncio.run(main())


def test_its_time_is_over() -> None:
    around = Around(unused_s=59.0)
    models = around.models(idle_s=60.0)
    look(models, 1)
    assert around.unloaded == []
    around.idle_s = 60.0
    look(models, 1)
    assert around.unloaded == [60.0]
    assert around.log == ["m was freed: no request used it for 60 s"]
    look(around.models(), 5)
    assert around.unloaded == [60.0]


@pytest.mark.parametrize("unused_s", [30.0, None])
def test_it_is_freed_for_others_by_its_head_unless_it_is_used(unused_s: float | None) -> None:
    """The ring is freed by its head, whichever node runs short."""
    around = Around(unused_s)
    models = around.models()
    around.is_busy = True
    if unused_s is None:
        assert not asyncio.run(models.free(30.0, "memory is short"))
        assert (len(around.asked), around.log) == (1, [])
    else:
        assert not asyncio.run(models.free(30.1, "memory is short"))
        assert around.unloaded == []
    around.is_busy = False
    assert asyncio.run(models.free(30.0, "memory is short"))
    assert around.unloaded == ([] if unused_s is None else [30.0])
    assert all(one.idle_s == 30.0 for one in around.asked)
    assert around.log == ["m was freed: memory is short"]
