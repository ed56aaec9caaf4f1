"""Which drafter a head holds, where it is loaded, and what becomes of the one before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace
from support.rings.stage_forms import FORM

from shardnet.cluster.head import drafters as module
from shardnet.cluster.head.drafters import Drafters, name_of
from shardnet.cluster.head.lent_drafters import DrafterLoader, FarDrafter, OnBytes
from shardnet.cluster.placement.draft_places import DraftPlace
from shardnet.errors import CapacityError, CheckpointError, ShardnetError, VersionMismatchError
from shardnet.runtime.engine.model_drafts import DraftHost
from shardnet.types import NodeId
from shardnet.wire.messages.drafting import LoadDrafter

ORDER = LoadDrafter(request=0, drafter="small", form=FORM, vocab_size=320)


class Far(FarDrafter):
    """A drafter on a node that says how long a draft takes, or fails."""

    async def load(self, on_progress: OnBytes) -> None:
        found = cast(Any, self.control).loads()
        if isinstance(found, Exception):
            raise found
        self.draft_s = found


class Town:
    """A head, anna, and the nodes that it is linked to, all of them fakes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *places: str) -> None:
        self.lines: list[str] = []
        self.loads: list[str] = []
        self.on_load: Callable[[str], object] = lambda name: None
        self.controls = {place: self.control(place, 0.001) for place in places if place != "anna"}
        found = [
            DraftPlace(node=NodeId(place), name=place, cost_s=1e-3, why="") for place in places
        ]
        monkeypatch.setattr(module, "draft_places", lambda *args, **more: found)
        monkeypatch.setattr(module, "FarDrafter", Far)
        links = SimpleNamespace(
            linked=lambda: list(self.controls.values()),
            link_of=self.controls.get,
            latest=lambda control: self.controls[control.link.peer.name],
            rtt_s=lambda node: None,
        )
        fakes: dict[str, Any] = {
            "own_info": lambda: SimpleNamespace(node="anna", name="anna"),
            "loader": SimpleNamespace(disk=SimpleNamespace(run=self.run), load=self.load),
            "peers": SimpleNamespace(links=links),
            "directory": SimpleNamespace(listed=self.listed),
        }
        self.drafters = Drafters(plan=lambda: None, log=self.lines.append, **fakes)

    @staticmethod
    def control(name: str, loads: float | ShardnetError) -> Any:
        link = SimpleNamespace(peer=SimpleNamespace(name=name))
        return SimpleNamespace(link=link, peer_name=name, loads=lambda: loads)

    async def run(self, place: object, job: Callable[[], object]) -> object:
        return job()

    async def listed(self) -> list[object]:
        return []

    async def load(self, order: LoadDrafter, on_progress: OnBytes) -> DraftHost:
        self.loads.append(order.drafter)
        self.on_load(order.drafter)
        return DraftHost()

    async def held(self, name: str) -> DraftHost | None:
        _, host = await self.drafters.load(replace(ORDER, drafter=name), lambda done, total: None)
        return host


@contextmanager
def raising(town: Town, *errors: ShardnetError) -> Iterator[None]:
    """Let the next loads fail so, and those behind them not."""
    left = list(errors)

    def fail(name: str) -> None:
        if left:
            raise left.pop(0)

    town.on_load = fail
    yield
    assert not left


def test_the_one_before_stays_until_another_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        town = Town(monkeypatch, "anna")
        first = await town.held("small")
        with raising(town, CheckpointError("no such")), pytest.raises(CheckpointError):
            await town.held("smal")
        assert first is await town.held("small")
        assert first is not None
        assert not first.is_closed
        with raising(town, CapacityError("no room for both")):
            second = await town.held("other")
        assert first.is_closed
        assert second is not None
        assert not second.is_closed
        assert town.loads == ["small", "smal", "other", "other"]

    asyncio.run(main())


def test_what_has_drafted_fails_no_text_and_is_not_tried_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        town = Town(monkeypatch, "anna")
        for again_s in (3600.0, 0.0):
            monkeypatch.setattr(module, "AGAIN_S", again_s)
            for form in (FORM, replace(FORM, context=77)):  # a ring that took another's place
                town.drafters._again_s.clear()
                _, host = await town.drafters.load(
                    replace(ORDER, form=form), lambda done, total: None
                )
                assert host is not None
                host.close()
                with raising(town, CheckpointError("it is gone")):
                    assert await town.held("small") is None
                assert (await town.held("small") is None) == bool(again_s)
        other = replace(ORDER, form=replace(FORM, model="another"))
        with raising(town, CheckpointError("for another model")), pytest.raises(CheckpointError):
            await town.drafters.load(other, lambda done, total: None)

    asyncio.run(main())


def test_what_is_closed_while_it_is_loaded_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        town = Town(monkeypatch, "anna")
        town.on_load = lambda name: town.drafters.close()
        assert await town.held("small") is None
        town.on_load = lambda name: None
        assert await town.held("small") is not None

    asyncio.run(main())


def test_a_slow_one_drafts_where_no_other_can(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        town = Town(monkeypatch, "bert", "carl")
        town.controls["bert"] = town.control("bert", 1.0)
        town.controls["carl"] = town.control("carl", CapacityError("full"))
        slow = await town.held("small")
        assert slow is not None
        assert not slow.is_closed
        assert town.drafters.places_by_name["small"].name == "bert"
        town.controls["carl"] = town.control("carl", 0.001)
        assert await town.held("small") is slow
        await town.held("other")
        assert slow.is_closed
        assert town.drafters.places_by_name["small"].name == "bert"
        assert town.drafters.places_by_name["other"].name == "carl"

    asyncio.run(main())


def test_a_node_of_a_release_that_does_not_understand_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        town = Town(monkeypatch, "bert", "anna")
        refused = VersionMismatchError("shardnet 0.2.0 does not understand LoadDrafter")
        town.controls["bert"] = town.control("bert", refused)
        assert await town.held("small") is not None
        assert "small cannot draft on bert: shardnet 0.2.0 does not" in town.lines[0]

    asyncio.run(main())


def test_a_link_that_was_replaced_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        town = Town(monkeypatch, "bert")
        first = await town.held("small")
        assert first is await town.held("small")
        town.controls["bert"] = town.control("bert", 0.001)
        second = await town.held("small")
        assert isinstance(second, FarDrafter)
        assert second.control is town.controls["bert"]
        assert first is not None
        assert first.is_closed

    asyncio.run(main())


def test_a_number_behind_an_at_sign_is_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        town = Town(monkeypatch, "anna")
        await town.held("small@4")
        assert town.loads == ["small@4"]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("drafter", "name"),
    [
        ("lab/small", "small"),
        ("/models/small", "small"),
        ("/models/ngram", "drafter ngram"),
        ("forced", "drafter forced"),
        ("/", "drafter"),
    ],
)
def test_no_name_is_that_of_another_kind(drafter: str, name: str) -> None:
    assert name_of(drafter) == name


def test_no_drafter_is_loaded_while_memory_is_short() -> None:
    async def main() -> None:
        orders: Any = SimpleNamespace()
        nothing: Any = None
        loader = DrafterLoader(disk=nothing, planner=nothing, orders=orders)
        loader.pause()
        with pytest.raises(CapacityError, match="memory is short"):
            await loader.load(ORDER, lambda done, total: None)

    asyncio.run(main())
