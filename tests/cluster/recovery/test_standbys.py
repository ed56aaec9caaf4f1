"""Nodes that stand by for others: chosen by memory, kept up to date, used at a loss."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast
from unittest.mock import AsyncMock, Mock

import pytest
from cluster.recovery.test_drain import said
from support.cluster.small_node import small_settings
from support.models.checkpoints import make_decoder
from support.rings.stage_chain import random_prompt
from support.soak import cases

from shardnet.api.client import connect
from shardnet.cluster.head.head import Head
from shardnet.cluster.node.node import Node, listening
from shardnet.cluster.placement import standbys as placement_standbys
from shardnet.cluster.placement.figures import Placement, StagePlan
from shardnet.cluster.placement.standbys import Standby, without_stage
from shardnet.cluster.recovery.standbys import Ready, Standbys
from shardnet.errors import (
    CapacityError,
    LinkClosedError,
    PeerFailedError,
    ShardnetError,
    UsageError,
)
from shardnet.runtime.scheduling.sequences import ComputedSequence
from shardnet.types import LayerRange, NodeId, SequenceId, SlotId, StateId
from shardnet.wire.messages.plans import ModelChoice

A, B, C, D, SPARE = (NodeId(letter * 32) for letter in "abcds")


def stage(node: NodeId, start: int, end: int) -> StagePlan:
    return StagePlan(
        node=node,
        layers=LayerRange(start, end),
        weight_bytes=100 * (end - start),
        kv_bytes=10 * (end - start),
    )


choose_standbys = partial(placement_standbys.choose_standbys, holds_weights=True)

STAGES = [stage(A, 0, 2), stage(B, 2, 4), stage(C, 4, 6), stage(D, 6, 8)]


def test_each_node_stands_by_for_the_next_where_memory_is_plenty() -> None:
    chosen = choose_standbys(STAGES, dict.fromkeys((A, B, C, D, SPARE), 1000))
    assert [(standby.rank, standby.node) for standby in chosen] == [(1, A), (2, B), (3, C)]
    assert (chosen[0].weight_bytes, chosen[0].kv_bytes) == (200, 20)


def test_who_lacks_memory_stands_by_for_nobody() -> None:
    """A node beside the ring needs room for one stage, one in it for two; each for one at most."""
    memory = {A: 300, B: 300, C: 300, D: 300, SPARE: 220}
    assert [(one.rank, one.node) for one in choose_standbys(STAGES, memory)] == [(3, SPARE)]
    assert choose_standbys(STAGES, dict.fromkeys((A, B, C, D), 439)) == ()
    memory = {A: 300, B: 440, C: 300, D: 300}
    assert [(one.rank, one.node) for one in choose_standbys(STAGES, memory)] == [(2, B)]
    streamed = [replace(stage, n_streamed=1) for stage in STAGES]
    assert choose_standbys(streamed, dict.fromkeys((A, B, C, D), 1000)) == ()


@pytest.mark.parametrize(
    ("rank", "node", "layers"),
    [
        (1, A, [(A, 0, 4), (C, 4, 6), (D, 6, 8)]),
        (1, C, [(A, 0, 2), (C, 2, 6), (D, 6, 8)]),
        (3, C, [(A, 0, 2), (B, 2, 4), (C, 4, 8)]),
        (2, SPARE, [(A, 0, 2), (B, 2, 4), (SPARE, 4, 6), (D, 6, 8)]),
    ],
)
def test_the_ring_that_goes_on_has_all_layers(
    rank: int, node: NodeId, layers: list[tuple[NodeId, int, int]]
) -> None:
    placement = Placement(stages=tuple(STAGES), left_out=(), predicted_tok_s=1.0, why="")
    standby = replace(
        choose_standbys(STAGES, {D: 999, SPARE: 999, C: 999})[0], rank=rank, node=node
    )
    then = without_stage(placement, standby)
    assert [(s.node, s.layers.start, s.layers.end) for s in then.stages] == layers
    assert [(out.node, out.why) for out in then.left_out] == [(STAGES[rank].node, "it was lost")]
    assert sum(s.weight_bytes for s in then.stages) == sum(s.weight_bytes for s in STAGES)


class Chosen:
    """A head whose plan has two standbys, of which one can be reached."""

    def __init__(self) -> None:
        self.ring: Any = SimpleNamespace(
            is_in_use=False,
            is_busy=False,
            broken=None,
            engine=SimpleNamespace(computed=list, to_follow=lambda _: []),
        )
        self.plan: Any = SimpleNamespace(
            nodes=[SimpleNamespace(name=name) for name in ("anna", "bert", "carl")],
            standbys=choose_standbys(STAGES[:3], dict.fromkeys((A, B, C), 1000)),
        )
        self.latest: Any = SimpleNamespace(
            ring=self.ring,
            plan=self.plan,
            is_recovering=False,
            is_replacing=False,
            is_given_up=False,
        )
        self.led = self
        self.lines: list[str] = []
        self.made: list[int] = []

    @asynccontextmanager
    async def changing(self, lead: object) -> AsyncIterator[None]:
        yield

    async def make(self, lead: object, plan: object, standby: Standby) -> Any:
        self.made.append(standby.rank)
        if standby.rank == 1:
            raise LinkClosedError("anna is not there")
        return SimpleNamespace(
            standby=standby,
            is_loaded=True,
            n_failed=0,
            followed={},
            worth_following=lambda running: running,
        )


def test_a_node_that_cannot_be_reached_keeps_no_other_one_from_standing_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is asked again later, and nothing is made twice meanwhile."""
    head = Chosen()

    async def main() -> None:
        standbys = Standbys(head=cast(Head, head), log=head.lines.append)
        monkeypatch.setattr(standbys, "_made", head.make)
        monkeypatch.setattr(standbys, "_keep", AsyncMock())
        await standbys.look()
        assert standbys.is_ready.is_set()
        standbys.is_ready.clear()
        running = SimpleNamespace(sequence_id=SequenceId(1))
        monkeypatch.setattr(head.ring.engine, "computed", lambda: [running])
        await standbys.look()
        assert not standbys.is_ready.is_set()  # one that runs has not been followed
        assert head.made == [1, 2]
        assert head.lines == ["no node stands by for bert yet: anna is not there"]
        standbys._not_before_s = 0.0
        await standbys.look()
        assert head.made == [1, 2, 1]

    asyncio.run(main())


def test_a_ring_that_is_lost_while_standbys_are_chosen_keeps_no_recovery_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The one that is asked then is the last one."""
    head = Chosen()

    async def lose(lead: object, plan: object, standby: Standby) -> Any:
        head.made.append(standby.rank)
        head.ring.broken = LinkClosedError("bert was lost")
        raise PeerFailedError("the ring was lost before it could be replaced")

    async def main() -> None:
        standbys = Standbys(head=cast(Head, head), log=head.lines.append)
        monkeypatch.setattr(standbys, "_made", lose)
        monkeypatch.setattr(standbys, "_keep", AsyncMock())
        await standbys.look()
        assert head.made == [1]
        assert not head.lines

    asyncio.run(main())


def test_a_node_that_cannot_stand_by_is_asked_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a full disk the log would else say the same every ten seconds. One success ends that."""
    head, now_s = Chosen(), 0.0
    failing = CapacityError("the disk is full")

    async def main() -> None:
        nonlocal now_s
        standbys = Standbys(head=cast(Head, head), log=head.lines.append)
        load = AsyncMock(side_effect=failing)
        port, spec = SimpleNamespace(load=load, node_name="anna"), Mock()
        spec.config.has_movable_slots = False
        ready = Ready(
            standby=head.plan.standbys[0],
            lost=B,
            name="bert",
            former=cast(Any, SimpleNamespace(broken=None, spec=spec)),
            plan=head.plan,
            ring=cast(Any, SimpleNamespace(order=Mock(), ports=[port])),
            rank=0,
            moves=Mock(),
        )
        standbys._ready, standbys._ring = [ready], head.ring
        head.latest.plan.standbys = [ready.standby]
        asked_at: list[float] = []
        for now_s in range(1200):
            await standbys.look()
            if load.await_count > len(asked_at):
                asked_at.append(now_s)
        assert asked_at == [0, 10, 30, 70, 150, 310, 630, 950]
        assert len(head.lines) == 8
        load.side_effect = None
        now_s = 1300
        await standbys.look()
        assert standbys.is_ready.is_set()
        ready.lose()
        load.side_effect = failing
        await standbys.look()
        assert ready.not_before_s == now_s + 10

    clock = SimpleNamespace(monotonic=lambda: now_s)
    monkeypatch.setattr("shardnet.cluster.recovery.standbys.time", clock)
    monkeypatch.setattr("shardnet.cluster.recovery.standbys.replace", lambda order, **_: order)
    asyncio.run(main())


@pytest.mark.parametrize(
    "error", [PeerFailedError("bert is gone"), UsageError("it has left"), CapacityError("full")]
)
def test_what_was_followed_counts_when_a_round_fails_with_the_node_that_is_lost(
    monkeypatch: pytest.MonkeyPatch, error: ShardnetError
) -> None:
    """A round is nearly always under way then, and fails before anybody says that the ring did."""
    monkeypatch.setattr("shardnet.cluster.recovery.standbys.replace", lambda order, **_: order)
    head = Chosen()

    async def main() -> None:
        standbys = Standbys(head=cast(Head, head), log=head.lines.append)
        load, is_there = AsyncMock(), AsyncMock()
        ports = [
            SimpleNamespace(node=node, node_name="", load=load, compare_clock=is_there)
            for node in (A, C)
        ]
        gone = SimpleNamespace(node=B, compare_clock=AsyncMock(side_effect=LinkClosedError("gone")))
        head.ring.spec = SimpleNamespace(config=SimpleNamespace(has_movable_slots=True))
        head.ring.ports, head.ring.blamed = [ports[0], gone, ports[1]], {}
        moves = Mock(follow=AsyncMock())
        ready = Ready(
            standby=head.plan.standbys[0],
            lost=B,
            name="bert",
            former=head.ring,
            plan=head.plan,
            ring=cast(Any, SimpleNamespace(order=Mock(), ports=ports)),
            rank=0,
            moves=moves,
        )
        standbys._ready, standbys._ring = [ready], head.ring
        head.latest.plan.standbys = [ready.standby]
        one = ComputedSequence(sequence_id=SequenceId(1), slot=SlotId(0), token_ids=range(512))
        half = one.cut(256, StateId(0))
        monkeypatch.setattr(head.ring.engine, "to_follow", lambda _: [half])
        await standbys.look()
        moves.follow.side_effect = error
        monkeypatch.setattr(head.ring.engine, "to_follow", lambda _: [one])
        await standbys.look()
        assert await standbys.ready_for(head.ring) is ready
        assert ready.brought([one]) == [half]
        ready.not_before_s, moves.follow.side_effect = 0.0, None
        more = replace(one, token_ids=range(768))
        monkeypatch.setattr(head.ring.engine, "to_follow", lambda _: [more])
        await standbys.look()  # it was not lost: it goes on, or the node loads again
        assert load.await_count == 1 + isinstance(error, PeerFailedError)
        assert ready.brought([more]) == [more]

    asyncio.run(main())


def test_a_node_that_cannot_be_reached_is_looked_for_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head, now_s = Chosen(), 0.0

    async def main() -> None:
        nonlocal now_s
        standbys = Standbys(head=cast(Head, head), log=head.lines.append)
        monkeypatch.setattr(standbys, "_made", head.make)
        monkeypatch.setattr(standbys, "_keep", AsyncMock())
        while now_s < 200:
            await standbys.look()
            now_s += 1
        assert head.made == [1, 2, 1, 1, 1, 1]

    clock = SimpleNamespace(monotonic=lambda: now_s)
    monkeypatch.setattr("shardnet.cluster.recovery.standbys.time", clock)
    asyncio.run(main())


def test_who_stands_by_leaves_nodes_alone_while_another_ring_is_made_ready() -> None:
    """They make one stage ready at a time: what a standby had there is lost."""
    head = Chosen()
    head.latest.is_replacing = True

    async def main() -> None:
        standbys = Standbys(head=cast(Head, head), log=head.lines.append)
        ready: Any = SimpleNamespace(is_loaded=True, lose=Mock())
        standbys._ready, standbys._ring = [ready], head.ring
        standbys.is_ready.set()
        await standbys.look()  # a node that is asked for anything fails here: it has no port
        ready.lose.assert_called_once()
        assert not standbys.is_ready.is_set()
        assert not head.made

    asyncio.run(main())


def test_who_stands_by_frees_its_layers_when_recovery_is_given_up() -> None:
    """No ring is left that they could go on with."""
    head = Chosen()
    head.latest.is_given_up, head.ring.broken = True, PeerFailedError("gone")

    async def main() -> None:
        standbys = Standbys(head=cast(Head, head), log=head.lines.append)
        port = Mock(unload=AsyncMock())
        ring = SimpleNamespace(name="next", ports=[port])
        standbys._ready = [cast(Any, SimpleNamespace(standby=Mock(), ring=ring, rank=0))]
        standbys._ring = head.ring
        await standbys.look()
        port.unload.assert_awaited_once_with("next")
        await standbys.look()
        port.unload.assert_awaited_once()

    asyncio.run(main())


def test_a_lost_ring_that_requests_wait_for_is_not_looked_at_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It counts as used, and runs nothing: the loop has the next ring to build."""
    monkeypatch.setattr("shardnet.cluster.recovery.standbys.LOOK_S", 3600.0)
    head, looks = Chosen(), 0
    head.ring.is_in_use, head.ring.wait_until_used = True, AsyncMock()

    async def look() -> None:
        nonlocal looks
        looks += 1
        assert looks < 3, "it never waits"

    async def main() -> None:
        standbys = Standbys(head=cast(Head, head), log=head.lines.append)
        monkeypatch.setattr(standbys, "look", look)
        monkeypatch.setattr(standbys, "_ring", head.ring)
        monkeypatch.setattr(standbys, "_ready", [object()])
        running = asyncio.create_task(standbys.run())
        for _ in range(10):
            await asyncio.sleep(0)
        assert not looks
        running.cancel()

    asyncio.run(main())


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    ("family", "standby"),
    cases([("qwen3_next", "auto"), ("llama", "kv")], [("llama", "auto"), ("qwen3_next", "kv")]),
)
def test_a_standby_goes_on_with_what_it_has_followed(
    tmp_path: Path, family: str, standby: Literal["auto", "kv"]
) -> None:
    """Little is computed again: a middle node goes, then the tail, of one run.

    The shorter prompt of the model with linear attention has grown to its first kept state. Without
    the weights only the longer one need be followed.
    """

    hybrid = {"layer_types": 2 * ["linear_attention", "linear_attention", "full_attention"]}
    model = make_decoder(
        tmp_path / "model",
        family,
        max_position_embeddings=4096,
        num_hidden_layers=6,
        **(hybrid if family == "qwen3_next" else {}),
    )
    prompts = [random_prompt(n, 300, seed=n) for n in (20, 300)]

    async def main() -> None:
        lines: list[str] = []
        recovered = asyncio.Event()

        def log(line: str) -> None:
            lines.append(line)
            if line.startswith("recovered"):
                recovered.set()

        async with AsyncExitStack() as stack:
            nodes: list[tuple[Node, AsyncExitStack]] = []
            for name in ("anna", "bert", "carl"):
                settings = small_settings(tmp_path / name)
                settings = replace(settings, node=NodeId(name[0] * 32), name=name, log=log)
                own = await stack.enter_async_context(AsyncExitStack())
                node = await own.enter_async_context(listening(settings, "127.0.0.1", 0))
                nodes.append((node, own))
            anna = nodes[0][0]
            client = await stack.enter_async_context(connect(anna.address))
            choice = ModelChoice(
                model=str(model), nodes=[node.address for node, _ in nodes], standby=standby
            )
            began, lost = asyncio.Event(), asyncio.Event()
            saying = asyncio.create_task(said(client, choice, prompts, began, lost))
            await began.wait()
            for _, ending in nodes[1:]:
                anna.standbys.is_ready.clear()
                await anna.standbys.is_ready.wait()
                recovered.clear()
                await ending.aclose()
                await recovered.wait()
            lost.set()
            made = await saying
            undisturbed = asyncio.Event()
            undisturbed.set()
            began.clear()
            least = max(map(len, made))
            whole = await said(client, choice, prompts, began, undisturbed, least)
            for one, all_ in zip(made, whole, strict=True):
                assert one == all_[: len(one)]
            n_moved = [record.n_moved for record in anna.recovery.records]
            assert n_moved in ([2, 2], *([1, 1], [1, 2]) * (standby == "kv")), "\n".join(lines)

    asyncio.run(main())


def test_without_weights_neighbours_alone_follow() -> None:
    """What they hold is what sequences have; they need the memory to load the rest at a loss."""
    memory = {A: 300, B: 440, C: 439, D: 439, SPARE: 1000}
    chosen = placement_standbys.choose_standbys(STAGES, memory, holds_weights=False)
    assert [(one.rank, one.node, one.weight_bytes, one.kv_bytes) for one in chosen] == [
        (2, B, 0, 20)
    ]
