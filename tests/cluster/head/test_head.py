"""The head while it loads a model: others are told so at once, who asked can end it, what breaks is
heard, and what can be refused is refused before anything is freed.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shardnet.cluster.head import head as head_module
from shardnet.cluster.head.head import Head, Neighbourhood
from shardnet.errors import BusyError, CheckpointError, ShardnetError
from shardnet.wire.messages.plans import ModelChoice

MODEL = "/models/large"


class Nobody:
    """A neighbourhood of one node that has every model."""

    def __init__(self) -> None:
        self.n_freed = 0
        self.tokenizer: object = SimpleNamespace(eos_ids=(0,))

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

    async def load_tokenizer(self, folder: object) -> object:
        """Give the tokenizer, or raise why there is none."""
        if isinstance(self.tokenizer, ShardnetError):
            raise self.tokenizer
        return self.tokenizer


class EndlessRing:
    """A ring whose weights never come to an end."""

    begun: asyncio.Event
    causes: list[str]

    name = "r"
    spec = SimpleNamespace(model=MODEL)

    def __init__(self, *_: object) -> None:
        pass

    def lost(self, cause: str) -> None:
        """Take note."""
        self.causes.append(cause)

    async def build(self, on_progress: object) -> float:
        """Load until it is cancelled."""
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # stages of other nodes are freed
            self.causes.append("freed")
        return 0.0


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> type[EndlessRing]:
    """Have every head plan for itself alone, and build a ring without an end."""
    facts = SimpleNamespace(model_id="x", path="/x")
    plan = SimpleNamespace(choice=ModelChoice(model=MODEL), nodes=(), facts=facts, chunk_s=None)

    async def planned(*_: object, **__: object) -> Any:
        return plan

    monkeypatch.setattr(Head, "plan", planned)
    monkeypatch.setattr(head_module, "Ring", EndlessRing)
    monkeypatch.setattr(head_module, "_spec", lambda plan: None)
    return EndlessRing


async def ask(head: Head) -> None:
    choice = ModelChoice(model=MODEL)
    async with head.lead(choice, on_plan=lambda _: None, on_progress=lambda *_: None):
        raise AssertionError("the ring stands")


def test_unloading_is_refused_at_once_while_a_model_is_loaded(endless: type[EndlessRing]) -> None:
    async def main() -> None:
        endless.begun, endless.causes = asyncio.Event(), []
        nobody = Nobody()
        head = Head(cast(Neighbourhood, nobody))
        asking = asyncio.create_task(ask(head))
        await endless.begun.wait()
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


def test_a_head_that_leaves_waits_until_what_it_was_building_is_freed(
    endless: type[EndlessRing],
) -> None:
    async def main() -> None:
        endless.begun, endless.causes = asyncio.Event(), []
        head = Head(cast(Neighbourhood, Nobody()))
        asking = asyncio.create_task(ask(head))
        await endless.begun.wait()
        asking.cancel()  # the client is told, and hangs up
        await head.close()
        assert endless.causes == ["freed"]
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(main())


def test_what_breaks_a_ring_that_is_being_built_is_heard(endless: type[EndlessRing]) -> None:
    async def main() -> None:
        endless.begun, endless.causes = asyncio.Event(), []
        head = Head(cast(Neighbourhood, Nobody()))
        asking = asyncio.create_task(ask(head))
        await endless.begun.wait()
        head.ring_broken("another", CheckpointError("x"))
        head.ring_broken("r", CheckpointError("its place was given away"))
        assert endless.causes == ["the ring broke: its place was given away"]
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(main())


def test_a_tokenizer_that_cannot_be_read_is_refused_before_anything_is_loaded(
    endless: type[EndlessRing],
) -> None:
    async def main() -> None:
        endless.begun = asyncio.Event()
        nobody = Nobody()
        nobody.tokenizer = CheckpointError("/x/tokenizer.json is damaged")
        with pytest.raises(CheckpointError, match="is damaged"):
            async with asyncio.timeout(60):
                await ask(Head(cast(Neighbourhood, nobody)))
        assert not endless.begun.is_set()

    asyncio.run(main())
