"""The head while it loads a model: others are told so at once, and who asked can end it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shardnet.cluster import head as head_module
from shardnet.cluster.head import Head, Neighbourhood
from shardnet.errors import BusyError
from shardnet.wire.plans import ModelChoice

MODEL = "/models/large"


class Nobody:
    """A neighbourhood of one node that has every model."""

    def __init__(self) -> None:
        self.n_freed = 0

    def head_elsewhere(self) -> None:
        """No node leads another ring."""

    async def provide(self, *_: object) -> None:
        """Nothing has to be pulled."""

    async def free_stage(self) -> None:
        """Count."""
        self.n_freed += 1

    async def port(self, node: object) -> None:
        """No port is asked for anything: the ring is not a real one."""

    async def holders(self, *_: object) -> list[object]:
        """Nobody else has the model."""
        return []


class EndlessRing:
    """A ring whose weights never come to an end."""

    begun: asyncio.Event

    def __init__(self, *_: object) -> None:
        pass

    async def build(self, on_progress: object) -> float:
        """Load until it is cancelled."""
        self.begun.set()
        await asyncio.Event().wait()
        return 0.0


def test_unloading_is_refused_at_once_while_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choice = ModelChoice(model=MODEL)
    plan = SimpleNamespace(choice=choice, nodes=(), facts=SimpleNamespace(model_id="x"))

    async def planned(*_: object, **__: object) -> Any:
        return plan

    monkeypatch.setattr(Head, "plan", planned)
    monkeypatch.setattr(head_module, "Ring", EndlessRing)
    monkeypatch.setattr(head_module, "_spec", lambda plan: None)

    async def main() -> None:
        EndlessRing.begun = asyncio.Event()
        nobody = Nobody()
        head = Head(cast(Neighbourhood, nobody))

        async def ask() -> None:
            async with head.lead(choice, on_plan=lambda _: None, on_progress=lambda *_: None):
                raise AssertionError("the ring stands")

        asking = asyncio.create_task(ask())
        await EndlessRing.begun.wait()
        async with asyncio.timeout(60):
            with pytest.raises(BusyError, match=f"is loading {MODEL}: stop the command"):
                await head.unload()
        assert not asking.done()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await head.unload()
        assert nobody.n_freed == 1

    asyncio.run(main())
