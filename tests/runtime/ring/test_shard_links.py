"""Links between the shards of a stage: parts, steps, and how they end."""

from __future__ import annotations

import asyncio
import re
import struct
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

import pytest
from msgspec import structs
from support.direct_pairs import direct_pair
from support.strategies.wire_strategies import hello

from shardnet.errors import (
    CapacityError,
    LostShardError,
    RemoteProtocolError,
    ShardnetError,
)
from shardnet.output_params import OutputKind
from shardnet.runtime.ring.shard_links import ShardLinks, ShardSource
from shardnet.runtime.stage.compute import Activations, StepArrived
from shardnet.slot_operations import FreeSlot
from shardnet.transport.direct_connection import DirectConnection
from shardnet.transport.link import Link
from shardnet.transport.memory import memory_pair
from shardnet.types import (
    Epoch,
    MicroBatch,
    RowGroup,
    SequenceId,
    SlotId,
    StepId,
    WireDType,
)
from shardnet.wire.framing.frames import LIMITS, Frame, FrameKind, pack_frame
from shardnet.wire.messages.handshake import Hello, Purpose, error_frame
from shardnet.wire.payloads.parts import ShardPart, part_frame
from shardnet.wire.payloads.rows import RowBlock

EPOCH = Epoch(2)
STEP = StepId(5)
WIDTHS = (2, 1)
PART = ShardPart(
    number=0,
    shard=1,
    dtype=WireDType.FLOAT32,
    n_rows=1,
    width=1,
    payload=struct.pack("<f", 7.0),
)


def data_hello(name: str) -> Hello:
    return hello(name, Purpose.DATA, ring="r", epoch=EPOCH)


@dataclass(frozen=True)
class End:
    """One shard's end of what connects it with the other one."""

    link: Link
    connection: DirectConnection

    def links(self, shard: int, part_s: float = 60.0) -> ShardLinks:
        other = 1 - shard
        return ShardLinks(
            shard=shard,
            links={other: self.link},
            connections={other: self.connection},
            epoch=EPOCH,
            part_s=part_s,
        )


def linked(test: Callable[[End, End], Awaitable[None]], *, is_encrypted: bool = False) -> None:
    """Run `test` with both ends of a link and a connection: shard 0's and shard 1's."""

    async def main() -> None:
        ends = await memory_pair(data_hello("zero"), data_hello("one"))
        try:
            with direct_pair(is_encrypted=is_encrypted) as connections:
                await test(*map(End, ends, connections))
        finally:
            await asyncio.gather(*(end.close() for end in ends))

    asyncio.run(main())


def gathered(links: ShardLinks, step: StepId, value: float) -> float:
    """What shard 0 or 1 gets of the other in the next gather of a step."""
    width, other = WIDTHS[links.shard], 1 - links.shard
    payload = struct.pack(f"<{width}f", *[value] * width)
    received = memoryview(bytearray(4 * WIDTHS[other]))
    links.send_part(WireDType.FLOAT32, 1, WIDTHS, payload, {other: received})
    links.await_parts(0)
    (value,) = struct.unpack_from("<f", received)
    return value


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_each_shard_gets_the_parts_of_the_others(is_encrypted: bool) -> None:
    async def test(zero: End, one: End) -> None:
        both = [zero.links(0), one.links(1)]
        reading = [asyncio.create_task(links.read(1 - links.shard)) for links in both]

        def computed(links: ShardLinks) -> list[float]:
            links.begin(STEP)
            first = [gathered(links, STEP, 10 * links.shard + number) for number in range(3)]
            links.begin(StepId(STEP + 1))
            return [*first, gathered(links, StepId(STEP + 1), links.shard)]

        found = await asyncio.gather(*(asyncio.to_thread(computed, links) for links in both))
        assert found == [[10, 11, 12, 1], [0, 1, 2, 0]]
        for task in reading:
            task.cancel()

    linked(test, is_encrypted=is_encrypted)


def test_a_shard_takes_in_what_shard_0_computes() -> None:
    batch = MicroBatch(
        epoch=EPOCH,
        step=STEP,
        groups=(
            RowGroup(sequence_id=SequenceId(1), slot=SlotId(0), position=0, n_rows=1, n_sampled=1),
        ),
        token_ids=(9,),
    )
    deep = RowBlock(
        sequence_id=SequenceId(1),
        kind=OutputKind.HIDDEN,
        position=0,
        width=2,
        payload=bytes(8),
        layer=3,
        is_deep=True,
    )
    hidden = Activations(payload=bytes(8), dtype=WireDType.FLOAT32, width=2, deep=[deep])

    async def test(zero: End, one: End) -> None:
        links = zero.links(0)
        other = one.links(1)
        source = other.source(lambda: None)

        def sent() -> None:
            links.operate(FreeSlot(slot=SlotId(3)))
            links.step(batch, hidden)
            # step 6 failed before it came to this stage
            links.step(structs.replace(batch, step=StepId(STEP + 2)), None)

        await asyncio.to_thread(sent)
        assert await source.receive() == FreeSlot(slot=SlotId(3))
        first, second = await source.receive(), await source.receive()
        assert isinstance(first, StepArrived)
        assert isinstance(second, StepArrived)
        assert (first.batch, first.activations) == (batch, hidden)
        assert second.batch.step == STEP + 2
        await asyncio.to_thread(links.step, batch, None)
        with pytest.raises(RemoteProtocolError, match="sent step 5 after step 7"):
            await source.receive()

    linked(test)


def packed(part: ShardPart = PART, step: int = STEP, epoch: int = EPOCH) -> bytes:
    frame = part_frame(part, epoch=epoch, step=step)
    return b"".join(pack_frame(frame, LIMITS, checked=True))


def in_gather(*sent: Frame | bytes, part_s: float = 60.0) -> list[object]:
    """What becomes of the first gather of STEP on shard 0, after frames and bytes of parts."""
    found: list[object] = []

    async def test(zero: End, one: End) -> None:
        links = zero.links(0, part_s)
        reading = asyncio.create_task(links.read(1))
        for what in sent:
            if isinstance(what, Frame):
                one.link.send(what)
            else:
                one.connection.send(what)

        def computed() -> object:
            links.begin(STEP)
            try:
                return gathered(links, STEP, 1.0)
            except ShardnetError as error:
                return error

        found.append(await asyncio.to_thread(computed))
        if reading.done():
            with suppress(ShardnetError):
                await reading
        reading.cancel()

    linked(test)
    return found


def test_what_is_left_of_a_failed_step_is_dropped() -> None:
    failed = error_frame(CapacityError("full"), epoch=EPOCH, step=STEP - 1)
    assert in_gather(packed(step=STEP - 1), failed, packed()) == [7.0]


def test_a_step_fails_with_what_another_shard_says() -> None:
    (error,) = in_gather(error_frame(CapacityError("full", remedy="wait"), epoch=EPOCH, step=STEP))
    assert isinstance(error, CapacityError)
    assert (error.message, error.remedy) == ("full", "wait")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (packed(structs.replace(PART, number=1)), r"one sent \(1, 1, .*expected \(0, 1, "),
        (packed()[:-1] + b"x", "came damaged"),
        (Frame(kind=FrameKind.TOKENS, epoch=EPOCH, step=STEP), "sent TOKENS"),
        (error_frame(CapacityError("full"), epoch=3, step=STEP), "of epoch 3 on a link of epoch 2"),
    ],
    ids=["another gather", "damaged", "another kind", "another epoch"],
)
def test_what_nobody_waits_for_breaks_the_stage(wrong: Frame | bytes, message: str) -> None:
    (broken,) = in_gather(wrong)
    assert isinstance(broken, LostShardError)
    assert re.search(message, broken.message)


def test_a_step_has_failed_though_the_parts_of_the_next_one_come_before_why() -> None:
    async def test(zero: End, one: End) -> None:
        links = zero.links(0)
        one.connection.send(packed(step=STEP + 1))

        def computed(step: StepId) -> object:
            links.begin(step)
            try:
                return gathered(links, step, 1.0)
            except CapacityError as error:
                return error.message

        waiting = asyncio.create_task(asyncio.to_thread(computed, STEP))
        await asyncio.sleep(0.01)
        links.take(1, error_frame(CapacityError("full"), epoch=EPOCH, step=STEP))
        links.take(1, error_frame(CapacityError("later"), epoch=EPOCH, step=STEP + 2))
        assert await waiting == "full"
        assert await asyncio.to_thread(computed, StepId(STEP + 1)) == 7.0
        assert await asyncio.to_thread(computed, StepId(STEP + 2)) == "later"

    linked(test)


def test_more_failures_than_steps_break_the_stage() -> None:
    async def test(zero: End, one: End) -> None:
        links = zero.links(0)
        for step in range(STEP, STEP + 64):
            links.take(1, error_frame(CapacityError("full"), epoch=EPOCH, step=step))
        with pytest.raises(RemoteProtocolError, match="64 steps that did not come here"):
            links.take(1, error_frame(CapacityError("full"), epoch=EPOCH, step=STEP))

    linked(test)


def test_a_shard_that_sends_nothing_is_named() -> None:
    (broken,) = in_gather(part_s=0.01)
    assert isinstance(broken, LostShardError)
    assert broken.message.startswith("one is stuck")
    assert ": it has sent no part of step 5" in broken.message


def test_a_lost_link_ends_the_wait_at_once() -> None:
    async def test(zero: End, one: End) -> None:
        links = zero.links(0)
        reading = asyncio.create_task(links.read(1))
        begun = threading.Event()

        def computed() -> None:
            links.begin(STEP)
            begun.set()
            gathered(links, STEP, 1.0)

        waiting = asyncio.create_task(asyncio.to_thread(computed))
        await asyncio.to_thread(begun.wait)
        one.link.abort("killed")
        for _ in range(2):  # now, and whatever comes after it
            with pytest.raises(LostShardError):
                await waiting
            waiting = asyncio.create_task(asyncio.to_thread(computed))
        with pytest.raises(LostShardError):
            await waiting
        with pytest.raises(ShardnetError):
            await reading

    linked(test)


def test_the_source_of_a_shard_ends_its_wait_too() -> None:
    async def test(zero: End, one: End) -> None:
        links = one.links(1)
        source = links.source(lambda: None)
        assert isinstance(source, ShardSource)
        zero.link.abort("killed")
        with pytest.raises(ShardnetError):
            await source.receive()
        links.begin(STEP)
        with pytest.raises(LostShardError):
            await asyncio.to_thread(gathered, links, STEP, 1.0)

    linked(test)


def test_steps_that_fail_one_after_the_other_end_no_link() -> None:
    """Each leaves a part and an error of the other shard that nobody has waited for."""

    async def test(zero: End, one: End) -> None:
        links = zero.links(0)
        for step in map(StepId, range(1, 100)):
            links.begin(step)
            one.connection.send(packed(step=step))
            links.take(1, error_frame(CapacityError("full"), epoch=EPOCH, step=step))
        links.begin(StepId(100))
        one.connection.send(packed(step=100))
        assert await asyncio.to_thread(gathered, links, StepId(100), 1.0) == 7

    linked(test)


def test_a_step_fails_while_a_large_part_is_on_its_way() -> None:
    """The rest of it is sent before the parts of the next step, and left out there."""
    widths = (1 << 20, 1)

    async def test(zero: End, one: End) -> None:
        both = [zero.links(0), one.links(1)]
        reading = [asyncio.create_task(links.read(1 - links.shard)) for links in both]

        def exchanged(links: ShardLinks) -> bytes:
            other = 1 - links.shard
            received = memoryview(bytearray(4 * widths[other]))
            payload = bytes([links.shard + 1]) * (4 * widths[links.shard])
            links.send_part(WireDType.FLOAT32, 1, widths, payload, {other: received})
            links.await_parts(0)
            return bytes(received)

        def first() -> None:
            both[0].begin(STEP)
            with pytest.raises(CapacityError):
                exchanged(both[0])

        def second() -> None:
            both[1].begin(STEP)
            both[1].fail_step(CapacityError("full"))

        await asyncio.gather(*map(asyncio.to_thread, (first, second)))
        for links in both:
            links.begin(StepId(STEP + 1))
        found = await asyncio.gather(*(asyncio.to_thread(exchanged, links) for links in both))
        assert found == [bytes([2]) * 4, bytes([1]) * (4 << 20)]
        for task in reading:
            task.cancel()

    linked(test)


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_several_gathers_are_under_way(is_encrypted: bool) -> None:
    """Each is over when its own parts are there, whatever comes behind."""

    async def test(zero: End, one: End) -> None:
        both = [zero.links(0), one.links(1)]

        def computed(links: ShardLinks) -> list[bytes]:
            links.begin(STEP)
            other, found = 1 - links.shard, []
            received = [memoryview(bytearray(4 * WIDTHS[other])) for _ in range(4)]
            for number, into in enumerate(received):
                payload = bytes([10 * links.shard + number]) * (4 * WIDTHS[links.shard])
                links.send_part(WireDType.FLOAT32, 1, WIDTHS, payload, {other: into})
                if number:
                    links.await_parts(1)
                    found.append(bytes(received[number - 1][:1]))
            links.await_parts(0)
            return [*found, bytes(received[-1][:1])]

        found = await asyncio.gather(*(asyncio.to_thread(computed, links) for links in both))
        assert found == [[b"\n", b"\x0b", b"\x0c", b"\r"], [b"\0", b"\1", b"\2", b"\3"]]

    linked(test, is_encrypted=is_encrypted)
