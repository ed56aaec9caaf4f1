"""What the wire says is plain MessagePack: the `msgpack` package reads it, and may write it."""

from __future__ import annotations

from typing import Any, get_args

import msgpack
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.soak import examples
from support.strategies.msgspec_strategies import values

from shardnet.wire.framing.frames import Frame, FrameKind
from shardnet.wire.messages.control import ControlMessage, control_frame, read_control

MESSAGES: tuple[type[msgspec.Struct], ...] = get_args(ControlMessage)


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_any_library_reads_and_writes_a_control_message(kind: type[msgspec.Struct]) -> None:
    """What ours writes, it reads too."""

    @settings(max_examples=examples(4), suppress_health_check=[HealthCheck.too_slow])
    @given(values(kind))
    def check(message: Any) -> None:
        frame = control_frame(message)
        assert read_control(frame) == message
        meta = bytes(frame.meta)
        told = msgpack.unpackb(meta)
        assert told == plain(message)
        assert told["type"] == kind.__name__
        written = Frame(kind=FrameKind.CONTROL, meta=msgpack.packb(told))
        assert read_control(written) == message

    check()


def test_every_control_message_is_tried() -> None:
    assert len(MESSAGES) > 25
    assert len({kind.__name__ for kind in MESSAGES}) == len(MESSAGES)


@given(st.sampled_from([0, 127, 128, 2**32, 2**63 - 1]))
def test_numbers_of_every_width_are_the_same(number: int) -> None:
    assert msgpack.unpackb(msgspec.msgpack.encode(number)) == number
    assert msgspec.msgpack.decode(msgpack.packb(number)) == number


def plain(value: object) -> object:
    """A message as maps, lists and scalars, which is all that MessagePack has."""
    made: object = msgspec.to_builtins(value, builtin_types=(bytes,))
    return as_lists(made)


def as_lists(value: object) -> object:
    if isinstance(value, dict):
        return {key: as_lists(entry) for key, entry in value.items()}
    return [*map(as_lists, value)] if isinstance(value, list | tuple) else value
