"""Nodes that give memory back: to a real ring of two, and the head in the middle of requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from support.cluster.small_node import small_settings
from support.models.checkpoints import make_llama
from support.rings.stage_chain import random_prompt

from shardnet.api.client import connect
from shardnet.cluster.node.node import Node, listening
from shardnet.cluster.pressure.memory_strain import MemoryLook
from shardnet.cluster.pressure.owner_watch import OwnerLook
from shardnet.errors import PeerFailedError, PlanError
from shardnet.types import NodeId
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


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what a message between nodes brings about."""
    while True:
        if condition():
            return
        await asyncio.sleep(0.01)


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
                await until(lambda: bert.node not in anna.ready_peers())
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
            while anna.info().stage is not None:
                await other.look(anna)
            with pytest.raises(
                PlanError, match=r"no node is left .*, bert \(memory is short there\)"
            ):
                await client.complete([prompt], model=str(model), max_tokens=1)
            machine.available = 8.0
            await machine.look(bert, 3600.0)
            assert not bert.info().rests
            await until(lambda: bert.node in anna.ready_peers())
            [done] = await client.complete([prompt], model=str(model), max_tokens=len(made))
            assert [*done.token_ids] == made
            assert bert.info().stage is not None
            assert anna.info().stage is None
            other.is_typing = False
            await other.look(anna, 3600.0)
            assert not anna.info().rests

    asyncio.run(main())
