"""Nodes that give memory back: to a real ring of two, and the head in the middle of requests."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.cluster.small_node import small_settings
from support.models.checkpoints import make_llama
from support.rings.stage_chain import random_prompt
from support.rings.stage_forms import FORM
from support.waiting import until

from shardnet.api.client import connect
from shardnet.cluster.machine.profile import Device
from shardnet.cluster.node import services
from shardnet.cluster.node.node import Node, listening, running
from shardnet.cluster.node.pressure import UnusedModels
from shardnet.cluster.pressure.policy import Action, MemoryLook, OwnerLook
from shardnet.cluster.store.disk_jobs import DiskJobs
from shardnet.errors import BusyError, CapacityError, PeerFailedError, PlanError
from shardnet.types import NodeId
from shardnet.wire.messages.drafting import LoadDrafter
from shardnet.wire.messages.generation import Unload
from shardnet.wire.messages.plans import ModelChoice

GIB = 1 << 30
DEADLINE_S = 60.0


@dataclass
class Machine:
    """The machine of a node, and its clock."""

    available: float = 8.0
    is_typing: bool = False
    now_s: float = 0.0

    def of(self, node: Node) -> Machine:
        """Let a node see this machine instead of its own."""
        pressure: Any = node.pressure
        pressure.memory = lambda: MemoryLook(
            available_bytes=int(self.available * GIB), total_bytes=16 * GIB
        )
        pressure.owner = lambda: OwnerLook(n_cores=4, has_input=self.is_typing)
        pressure.clock = lambda: self.now_s
        return self

    async def look(self, node: Node, seconds: float = 2.0) -> None:
        """Let the node look again."""
        self.now_s += seconds
        await node.pressure.look()


@pytest.mark.usefixtures("unmeasured")
def test_a_node_gives_caches_then_layers_and_takes_part_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bert, while a request runs that has all its words; then anna, the head, for its owner."""

    monkeypatch.setattr("shardnet.cluster.node.pressure.LOOK_S", 3600.0)
    model = make_llama(tmp_path / "model", max_position_embeddings=4096)
    prompt = random_prompt(40, 300, seed=1)

    async def main() -> None:
        lines: list[str] = []
        async with asyncio.timeout(DEADLINE_S), AsyncExitStack() as stack:
            nodes = []
            for name in ("anna", "bert"):
                settings = small_settings(tmp_path / name)
                settings = replace(settings, node=NodeId(name[0] * 32), name=name, log=lines.append)
                nodes.append(await stack.enter_async_context(listening(settings, "127.0.0.1", 0)))
            anna, bert = nodes
            machine, other = Machine().of(bert), Machine(is_typing=True).of(anna)
            client = await stack.enter_async_context(connect(anna.address))
            choice = ModelChoice(model=str(model), nodes=[node.address for node in nodes])
            made: list[int] = []
            events = client.generate([prompt], model=choice, max_tokens=3000, ignore_eos=True)
            async with aclosing(events):
                async for event in events:
                    assert event.error is None
                    made += event.token_ids
                    if len(made) > 5:
                        break
                await machine.look(bert)
                machine.available = 0.1
                while not bert.info().rests:
                    await machine.look(bert)
                assert bert.info().stage is None
                [record] = anna.planned.records
                assert (record.n_requests, record.n_moved) == (1, 1)
                await until(lambda: bert.node not in anna.links.peers.ready())
                await other.look(anna)
                with pytest.raises(PeerFailedError, match="no ring now: its keyboard or mouse is"):
                    await client.complete([5], model=choice, max_tokens=1)
                assert not anna.info().rests  # its ring may need it yet
                since = len(made)
                async for event in events:
                    assert event.error is None
                    made += event.token_ids
                    if len(made) > since + 5:
                        break
            state = bert.pressure.state()
            assert state is not None
            assert (state.n_drops, state.n_rests, state.yields) == (1, 1, True)
            order = LoadDrafter(request=0, drafter=str(model), form=FORM, vocab_size=320)
            with pytest.raises(CapacityError, match="memory is short here"):
                await bert.lent.loader.load(order, lambda done, total: None)
            while anna.info().stage is not None:
                await other.look(anna)
            with pytest.raises(
                PlanError, match=r"no node is left .*, bert \(memory is short there\)"
            ):
                await client.complete([prompt], model=str(model), max_tokens=1)
            machine.available = 8.0
            await machine.look(bert, 3600.0)
            assert not bert.info().rests
            await until(lambda: bert.node in anna.links.peers.ready())
            [done] = await client.complete([prompt], model=str(model), max_tokens=len(made))
            assert [*done.token_ids] == made
            assert bert.info().stage is not None
            assert anna.info().stage is None
            other.is_typing = False
            await other.look(anna, 3600.0)
            assert not anna.info().rests

    asyncio.run(main())


def test_memory_is_looked_at_though_the_driver_of_a_gpu_hangs(tmp_path: Path) -> None:
    """Nor does the end of the process wait for that look."""
    answers = threading.Event()

    async def main() -> None:
        async with running(small_settings(tmp_path)) as node:
            looks: list[float] = []
            machine, pressure = Machine().of(node), cast(Any, node.pressure)
            pressure.disk = DiskJobs("test", silence_s=0.05)
            pressure.owner = lambda: answers.wait(60)
            pressure._policy = SimpleNamespace(
                look=lambda now_s, *_: looks.append(now_s) or Action.NOTHING, why=""
            )
            for _ in range(2):
                await machine.look(node)
            assert looks == [2.0, 4.0]

    try:
        asyncio.run(main())
    finally:
        answers.set()


def test_the_cards_that_the_node_computes_on_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With `--device cuda:1,cuda:2`, and not the first one of the machine."""
    monkeypatch.setattr(services, "gpu_use", lambda ours, index: {1: None, 2: 0.4}[index])
    cards = [Device(kind="cuda", index=index, description="", dtypes=()) for index in (1, 2)]
    settings = SimpleNamespace(
        local_nodes=SimpleNamespace(list=list), budget=SimpleNamespace(devices=cards)
    )
    head, host = SimpleNamespace(is_in_use=False), SimpleNamespace(is_busy=False)
    look = services._owner_look(cast(Any, settings), cast(Any, head), cast(Any, host))
    assert look().gpu == 0.4
    host.is_busy = True
    assert look().gpu is None


class Around:
    """A node with a loaded model, in a ring that it leads or, without `unused_s`, another node.

    It is its own head, host and link to the other head.
    """

    def __init__(self, unused_s: float | None) -> None:
        self.loaded = SimpleNamespace(order=SimpleNamespace(form=SimpleNamespace(model="m")))
        self.membership = SimpleNamespace(is_over=False, owner="b")
        self.idle_s = unused_s
        self.unloaded: list[float] = []
        self.asked: list[Unload] = []
        self.is_busy = False
        self.log: list[str] = []

    async def unload(self, *, idle_s: float) -> None:
        """Count."""
        self.unloaded.append(idle_s)

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
