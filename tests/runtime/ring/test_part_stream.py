"""Parts from another shard: what is expected is received, and nothing else is taken for it."""

from __future__ import annotations

import re

import pytest
from msgspec import structs
from support.direct_pairs import direct_pair
from support.hostile.receive_parts import fuzz_parts
from support.soak import examples

from shardnet.errors import RemoteProtocolError
from shardnet.runtime.ring.shard_links import PartStream
from shardnet.transport.direct_connection import DirectConnection
from shardnet.types import Epoch, StepId, WireDType
from shardnet.wire.framing.frames import LIMITS, Frame, FrameKind, pack_frame
from shardnet.wire.payloads.parts import ShardPart, part_frame

EPOCH, STEP = Epoch(2), StepId(5)
OWN = ShardPart(number=0, shard=0, dtype=WireDType.FLOAT32, n_rows=2, width=1, payload=b"own part")
OTHER = ShardPart(number=0, shard=1, dtype=WireDType.BFLOAT16, n_rows=1, width=3)
THEIRS = structs.replace(OTHER, payload=b"theirs")
BOTH = pytest.mark.parametrize("is_encrypted", [False, True])


def packed(
    end: DirectConnection, part: ShardPart = THEIRS, step: int = STEP, epoch: int = EPOCH
) -> bytes:
    frame = part_frame(part, epoch=epoch, step=step)
    return b"".join(pack_frame(frame, LIMITS, checked=not end.is_encrypted))


def moved(stream: PartStream) -> None:
    while not stream.move():
        pass


@BOTH
def test_a_part_is_received_in_its_place_however_it_is_cut(is_encrypted: bool) -> None:
    with direct_pair(is_encrypted=is_encrypted) as (zero, one):
        stream, data = PartStream(zero, EPOCH), packed(one)
        for cut in range(1, len(data)):
            into = bytearray(10)
            stream.exchange(STEP, OWN, OTHER, memoryview(into)[2:8])
            one.send(data[:cut])
            assert not stream.move()
            one.send(data[cut:])
            moved(stream)
            assert into == b"\0\0theirs\0\0"
            sent = memoryview(bytearray(200))
            assert bytes(sent[: one.receive(sent)]) == packed(zero, OWN)


@BOTH
def test_parts_of_steps_before_are_left_out_also_half_a_one(is_encrypted: bool) -> None:
    long = structs.replace(OTHER, n_rows=9, width=99)
    with direct_pair(is_encrypted=is_encrypted) as (zero, one):
        stream, into = PartStream(zero, EPOCH), memoryview(bytearray(6))
        before = packed(one, structs.replace(long, payload=bytes(long.n_bytes)), step=STEP - 1)
        for cut in (10, 300, len(before)):  # within the head, within the payload, between parts
            one.send(before[:cut])
            stream.exchange(StepId(STEP - 1), OWN, long, memoryview(bytearray(long.n_bytes)))
            stream.move()
            stream.rest()  # the step has failed
            stream.exchange(STEP, OWN, OTHER, into)
            assert not stream.move()
            one.send(before[cut:], packed(one))
            moved(stream)
            assert bytes(into) == b"theirs"
            into[:] = bytes(6)


def test_parts_of_steps_before_without_an_end_do_not_keep_whoever_waits() -> None:
    with direct_pair(is_encrypted=False) as (zero, one):
        stream, before = PartStream(zero, EPOCH), packed(one, step=STEP - 1)
        stream.exchange(STEP, OWN, OTHER, memoryview(bytearray(6)))
        for _ in range(9):
            one.send(before * 3)
            assert not stream.move()
            left = memoryview(bytearray(1 << 16))
            assert zero.receive(left) == 2 * len(before)


@BOTH
@pytest.mark.parametrize(
    ("change", "step", "epoch", "message"),
    [
        ({"number": 1}, STEP, EPOCH, r"sent \(1, 1, .* as part of step 5, expected \(0, 1, "),
        ({"shard": 0}, STEP, EPOCH, r"sent \(0, 0, "),
        ({"width": 2, "payload": bytes(4)}, STEP, EPOCH, r"1, 2\) as part of step 5"),
        ({"n_rows": 2, "payload": bytes(12)}, STEP, EPOCH, r"2, 3\) as part of step 5"),
        ({"dtype": WireDType.FLOAT16}, STEP, EPOCH, "float16"),
        ({}, STEP, EPOCH + 1, "of epoch 3 came on a link of epoch 2"),
    ],
)
def test_another_part_is_refused_by_name(
    change: dict[str, object], step: int, epoch: int, message: str, is_encrypted: bool
) -> None:
    with direct_pair(is_encrypted=is_encrypted) as (zero, one):
        stream = PartStream(zero, EPOCH)
        into = memoryview(bytearray(6))
        stream.exchange(STEP, OWN, OTHER, into)
        one.send(packed(one, structs.replace(THEIRS, **change), step, epoch))
        with pytest.raises(RemoteProtocolError) as refused:
            moved(stream)
        assert re.search(message, refused.value.message)
        assert bytes(into) == bytes(6)


@BOTH
def test_a_part_of_the_next_step_waits_for_it(is_encrypted: bool) -> None:
    """Its sender has failed with this one, and says so by another link."""
    with direct_pair(is_encrypted=is_encrypted) as (zero, one):
        stream, into = PartStream(zero, EPOCH), memoryview(bytearray(6))
        one.send(packed(one, step=STEP + 1))
        stream.exchange(STEP, OWN, OTHER, memoryview(bytearray(6)))
        for _ in range(3):
            assert not stream.move()
        stream.rest()
        stream.exchange(StepId(STEP + 1), OWN, OTHER, into)
        moved(stream)
        assert bytes(into) == b"theirs"


@BOTH
def test_what_is_no_part_or_too_long_is_refused(is_encrypted: bool) -> None:
    for frame, message in (
        (Frame(kind=FrameKind.DATA, epoch=EPOCH, step=STEP), "a DATA frame is not allowed"),
        (Frame(kind=FrameKind.PART, epoch=EPOCH, step=STEP, meta=b"abc", payload=bytes(99)), "3 b"),
    ):
        with direct_pair(is_encrypted=is_encrypted) as (zero, one):
            stream = PartStream(zero, EPOCH)
            stream.exchange(STEP, OWN, OTHER, memoryview(bytearray(6)))
            one.send(*pack_frame(frame, LIMITS, checked=not is_encrypted), bytes(99))
            with pytest.raises(RemoteProtocolError, match=f"^one: .*{message}"):
                stream.move()
    with direct_pair(is_encrypted=is_encrypted) as (zero, one):
        data = bytearray(packed(one))
        data[8:12] = (1 << 31).to_bytes(4, "little")
        stream = PartStream(zero, EPOCH)
        stream.exchange(STEP, OWN, OTHER, memoryview(bytearray(6)))
        one.send(data)
        with pytest.raises(RemoteProtocolError, match="claims 2147483648 bytes of payload"):
            stream.move()


def test_without_tls_a_damaged_part_is_found_by_its_checksum() -> None:
    for place in (-1, 40):
        with direct_pair(is_encrypted=False) as (zero, one):
            stream = PartStream(zero, EPOCH)
            stream.exchange(STEP, OWN, OTHER, memoryview(bytearray(6)))
            data = bytearray(packed(one))
            data[place] ^= 1
            one.send(data)
            with pytest.raises(RemoteProtocolError, match=r"^one: "):
                stream.move()


def test_mutated_parts_end_in_the_expected_one_or_an_error_by_name() -> None:
    figures = fuzz_parts(examples(20_000), seed=7)
    assert figures.n_read > 0
    assert figures.n_refused > 0
