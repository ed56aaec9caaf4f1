"""A model that nobody uses is freed when its time is over, or when memory is short."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shardnet.cluster.node.unused_models import N_SHORT, SHORT_IDLE_S, ShortMemory, UnusedModels
from shardnet.errors import BusyError
from shardnet.wire.messages.generation import Unload

GIB = 1 << 30


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
        self.memory = (10 * GIB, 16 * GIB)
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
            head=cast(Any, self),
            host=cast(Any, self),
            link_of=lambda node: cast(Any, self if node == "b" else None),
            memory=lambda: self.memory,
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


@pytest.mark.parametrize("unused_s", [SHORT_IDLE_S, None])
def test_memory_is_short(unused_s: float | None) -> None:
    """For a while: the ring is freed by its head, whichever node runs short."""
    around = Around(unused_s)
    models = around.models()
    look(models, 5)
    around.memory = (GIB // 8, 16 * GIB)
    look(models, N_SHORT - 1)
    assert (around.unloaded, around.asked) == ([], [])
    around.is_busy = True
    look(models, 1)
    around.is_busy = False
    if unused_s is None:
        assert around.log == []
        look(models, 1)
        assert [one.idle_s for one in around.asked] == [SHORT_IDLE_S] * 2
    else:
        assert around.unloaded == [SHORT_IDLE_S]
    assert around.log == ["m was freed: memory is short"]


def test_a_model_that_was_just_used_or_fills_the_machine_on_purpose_stays() -> None:
    around = Around(unused_s=SHORT_IDLE_S - 1)
    models = around.models()
    look(models, 1)
    around.memory = (0, 16 * GIB)
    look(models, 2 * N_SHORT)
    assert around.unloaded == []
    filled = ShortMemory()
    assert not any(filled.is_short(GIB // 8, 16 * GIB) for _ in range(10))
    assert [filled.is_short(GIB // 32, 16 * GIB) for _ in range(N_SHORT)][-1]
