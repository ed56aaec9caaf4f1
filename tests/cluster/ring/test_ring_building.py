"""A ring while it is built: what is lost by then ends it, and nothing stays loaded; and of heads
that build at the same time all get their rings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.rings.stage_forms import FORM

from shardnet.cluster.member.stage_orders import PhaseProgress
from shardnet.cluster.ring import ring as ring_module
from shardnet.cluster.ring.ring import Ring
from shardnet.cluster.ring.ring_spec import RingSpec
from shardnet.cluster.ring.stage_port import StagePort
from shardnet.errors import BusyError, CapacityError, PeerFailedError, ShardnetError, TakenError
from shardnet.model.families.registry import parse_config
from shardnet.runtime.ring.pipeline import Pipeline, StuckStage
from shardnet.types import Arith, Epoch, LayerRange, NodeId, StepId, WireDType
from shardnet.wire.messages.stages import LoadStage, StageReady

SPEC = RingSpec(
    form=FORM,
    addresses=("a:1", "b:2"),
    layers=(LayerRange(0, 1), LayerRange(1, 2)),
    n_streamed=(0, 0),
    wires=(WireDType.FLOAT32,),
    ariths=(Arith.FAST, Arith.PORTABLE),
    threads=1,
    config=parse_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "vocab_size": 8,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-5,
        },
        "config.json",
    ),
)


async def nothing() -> None:
    """Happens at once."""


def ready_stage() -> StageReady:
    return StageReady(
        request=0,
        weight_bytes=1,
        room_blocks=4,
        reused=False,
        kernel="fake",
        load_s=0.0,
        exact_rows=1,
    )


async def nothing_to_tell(on_progress: PhaseProgress) -> None:
    """Happens at once."""


class Port:
    """A node that does at once what it is told, after `taking`, `loading` or `connecting`."""

    last_step = 0
    first_stage = None

    def __init__(self, name: str) -> None:
        self.name = name
        self.node = NodeId(name)
        self.is_loaded = False
        self.taking: Callable[[PhaseProgress], Awaitable[None]] = nothing_to_tell
        self.loading: Callable[[], Awaitable[None]] = nothing
        self.connecting: Callable[[], Awaitable[None]] = nothing

    async def load(self, message: LoadStage, on_progress: PhaseProgress) -> StageReady:
        self.is_loaded = True
        await self.taking(on_progress)
        await self.loading()
        return ready_stage()

    async def connect(self, ring: str, epoch: int, pipeline: Pipeline) -> None:
        await self.connecting()

    async def unload(self, ring: str) -> None:
        await asyncio.sleep(0)  # a message to a peer and back
        self.is_loaded = False

    def watch(self, on_lost: Callable[[ShardnetError], None]) -> Callable[[], None]:
        return lambda: None


def ring_of(*ports: Port) -> Ring:
    return Ring(SPEC, [cast(StagePort, port) for port in ports], Epoch(1))


@pytest.mark.parametrize("phase", ["loading", "connecting"])
def test_a_stage_that_is_lost_before_the_others_are_ready_ends_the_ring(phase: str) -> None:
    async def main() -> None:
        ports = Port("a"), Port("b")
        ring = ring_of(*ports)

        async def lose_the_other() -> None:
            ring.lost("the ring broke: its place was given away")

        setattr(ports[1], phase, lose_the_other)
        with pytest.raises(PeerFailedError, match="its place was given away; ask again"):
            await ring.build(lambda *_: None)
        assert not any(port.is_loaded for port in ports)

    asyncio.run(main())


def test_a_stage_that_answers_and_does_not_compute_is_blamed_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stuck = StuckStage(rank=1, step=StepId(5), age_s=81, limit_s=80)
    monkeypatch.setattr(Pipeline, "stuck_stage", lambda pipeline, completed: stuck)
    monkeypatch.setattr(ring_module, "WATCH_EVERY_S", 0.0)

    async def main() -> Ring:
        ring = ring_of(Port("a"), Port("ab"))
        await ring.build(lambda *_: None)
        while ring.broken is None:  # noqa: ASYNC110  # the watchdog's turn
            await asyncio.sleep(0)
        return ring

    ring = asyncio.run(main())
    assert "node ab is stuck: step 5 has waited 81 s there" in str(ring.broken)
    assert ring.stuck == set(ring.blamed) == {NodeId("ab")}


def test_who_gives_up_and_hangs_up_leaves_nothing_loaded() -> None:
    """Both cancel: the second comes while the stages are being freed."""

    async def main() -> None:
        ports = Port("a"), Port("b")
        begun = asyncio.Event()

        async def load_for_ever() -> None:
            begun.set()
            await asyncio.Event().wait()

        ports[1].loading = load_for_ever
        building = asyncio.create_task(ring_of(*ports).build(lambda *_: None))
        await begun.wait()
        while not building.done():
            building.cancel()
            await asyncio.sleep(0)
        assert building.cancelled()
        assert not any(port.is_loaded for port in ports)

    asyncio.run(main())


class SharedPort:
    """A head's way to a node that several heads want; `places` tells which of them has which."""

    last_step = 0
    first_stage = None

    def __init__(self, node: str, head: int, places: dict[str, int]) -> None:
        self.name = node
        self.node = NodeId(node)
        self._head = head
        self._places = places

    async def load(self, message: LoadStage, on_progress: PhaseProgress) -> StageReady:
        await asyncio.sleep(0)  # a message takes its time
        if self._places.setdefault(self.node, self._head) != self._head:
            raise TakenError(f"{self.name} is loading for {self._places[self.node]}")
        on_progress("loading", 0, 0)
        await asyncio.sleep(0)
        return ready_stage()

    async def connect(self, ring: str, epoch: int, pipeline: Pipeline) -> None:
        assert self._places[self.node] == self._head

    async def unload(self, ring: str) -> None:
        await asyncio.sleep(0)
        if self._places.get(self.node) == self._head:
            del self._places[self.node]

    def watch(self, on_lost: Callable[[ShardnetError], None]) -> Callable[[], None]:
        return lambda: None


@given(
    st.lists(st.lists(st.sampled_from("abcde"), min_size=1, unique=True), min_size=2, max_size=5)
)
def test_heads_that_want_each_others_nodes_all_get_their_rings(wanted: list[list[str]]) -> None:
    """One after the other where they must: they ask in one order, and none gives up."""

    async def main() -> None:
        places: dict[str, int] = {}

        async def lead(head: int, nodes: list[str]) -> None:
            n_asked = 0

            async def ask_again(error: BusyError) -> None:
                nonlocal n_asked
                n_asked += 1
                assert n_asked < 500, error
                await asyncio.sleep(0)

            ring = Ring(
                replace(
                    SPEC,
                    addresses=tuple(nodes),
                    layers=(LayerRange(0, 1),) * len(nodes),
                    n_streamed=(0,) * len(nodes),
                    wires=(WireDType.FLOAT32,) * (len(nodes) - 1),
                    ariths=(Arith.FAST,) * len(nodes),
                ),
                [cast(StagePort, SharedPort(node, head, places)) for node in nodes],
                Epoch(1),
                on_busy=ask_again,
            )
            await ring.build(lambda *_: None)
            await ring.unload()

        await asyncio.gather(*(lead(head, nodes) for head, nodes in enumerate(wanted)))
        assert places == {}

    asyncio.run(main())


def test_a_node_is_asked_when_those_of_smaller_ids_have_taken_their_orders() -> None:
    async def main() -> None:
        ports, asked = (Port("b"), Port("a")), list[str]()
        is_asked, may_take = asyncio.Event(), asyncio.Event()

        async def take(on_progress: PhaseProgress) -> None:
            asked.append("a")
            is_asked.set()
            await may_take.wait()
            asked.append("a took it")
            on_progress("loading", 0, 0)
            await asyncio.Event().wait()

        async def refuse() -> None:
            asked.append("b")
            raise CapacityError("b has no room")

        ports[1].taking = take
        ports[0].loading = refuse
        building = asyncio.create_task(ring_of(*ports).build(lambda *_: None))
        await is_asked.wait()
        may_take.set()
        with pytest.raises(CapacityError, match="no room"):
            await building
        assert asked == ["a", "a took it", "b"]

    asyncio.run(main())


def test_who_is_busy_after_it_took_the_order_is_not_asked_again() -> None:
    async def main() -> None:
        ports = Port("a"), Port("b")

        async def take_and_fail(on_progress: PhaseProgress) -> None:
            on_progress("fetching", 0, 0)
            raise BusyError("it gives weights to many already")

        async def never(error: BusyError) -> None:
            raise AssertionError("the head waits")

        ports[0].taking = take_and_fail
        ring = Ring(SPEC, [cast(StagePort, port) for port in ports], Epoch(1), on_busy=never)
        with pytest.raises(BusyError, match="gives weights"):
            await ring.build(lambda *_: None)

    asyncio.run(main())
