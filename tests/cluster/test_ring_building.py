"""A ring while it is built: what is lost by then ends it, and nothing stays loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

import pytest

from shardnet.cluster.ring import Ring, RingSpec
from shardnet.cluster.stage_port import Progress, StagePort
from shardnet.errors import PeerFailedError, ShardnetError
from shardnet.runtime.pipeline import Pipeline
from shardnet.types import DType, Epoch, LayerRange, WireDType
from shardnet.wire.stages import LoadStage, StageReady

SPEC = RingSpec(
    model="/m",
    model_id="0" * 64,
    stamp=(),
    addresses=("a:1", "b:2"),
    layers=(LayerRange(0, 1), LayerRange(1, 2)),
    dtype=DType.FLOAT32,
    quant="",
    kv_dtype="auto",
    streamed=(0, 0),
    wire_dtype=WireDType.FLOAT32,
    context=256,
    threads=1,
    vocab_size=8,
    window=None,
    routing=None,
)


async def nothing() -> None:
    """Happens at once."""


class Port:
    """A node that does at once what it is told; `loading` and `connecting` are awaited first."""

    last_step = 0

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_loaded = False
        self.loading: Callable[[], Awaitable[None]] = nothing
        self.connecting: Callable[[], Awaitable[None]] = nothing

    async def load(self, message: LoadStage, on_progress: Progress) -> StageReady:
        self.is_loaded = True
        await self.loading()
        return StageReady(
            request=0,
            weight_bytes=1,
            room_blocks=4,
            reused=False,
            kernel="fake",
            load_s=0.0,
            exact_rows=1,
        )

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
