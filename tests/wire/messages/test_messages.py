"""The msgpack schemas: round trip of every message, and strictness."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.soak import examples
from support.strategies.msgspec_strategies import values
from support.strategies.wire_strategies import encoded, hello

from shardnet.errors import PlanError, RemoteProtocolError, ShardnetError
from shardnet.slot_operations import SlotOperation
from shardnet.wire.framing.frames import LIMITS, Frame, FrameKind, pack_frame
from shardnet.wire.messages.bulk import BulkMessage, FetchSkeleton, Piece, bulk_frame, read_bulk
from shardnet.wire.messages.control import (
    Done,
    Failed,
    control_frame,
    read_control,
    reported_error,
)
from shardnet.wire.messages.extras import (
    Extras,
    extras_frame,
    read_extras,
    read_sequence,
    sequence_frame,
)
from shardnet.wire.messages.generation import Cancel
from shardnet.wire.messages.handshake import (
    ErrorReport,
    Hello,
    error_frame,
    hello_frame,
    read_error,
    read_hello,
)
from shardnet.wire.messages.membership import Ping


@pytest.mark.parametrize("kind", BulkMessage.__args__, ids=lambda kind: kind.__name__)
def test_bulk_round_trip(kind: type[Any]) -> None:
    @settings(max_examples=examples(8))
    @given(values(kind))
    def round_trip(message: Any) -> None:
        assert read_bulk(bulk_frame(message)) == message

    round_trip()


def test_only_a_piece_has_a_payload() -> None:
    assert read_bulk(bulk_frame(Piece(request=1), b"x")) == Piece(request=1)
    with pytest.raises(RemoteProtocolError, match="FetchSkeleton came with 1 bytes of payload"):
        read_bulk(bulk_frame(FetchSkeleton(request=1, model_id="ab" * 32), b"x"))


@given(values(Hello))
def test_hello_round_trip(hello: Hello) -> None:
    assert read_hello(hello_frame(hello)) == hello


@given(values(SlotOperation))
def test_sequence_round_trip(operation: SlotOperation) -> None:
    assert read_sequence(sequence_frame(operation, epoch=1)) == operation


@given(values(Extras))
def test_extras_round_trip(extras: Extras) -> None:
    assert read_extras(extras_frame(extras, epoch=1, step=2)) == extras


@given(st.text(st.characters(exclude_categories=[]), max_size=5000))
def test_any_error_text_fits_its_frame(text: str) -> None:
    frame = error_frame(PlanError(text), step=4, sequence=9)
    pack_frame(frame, LIMITS)
    report = read_error(frame)
    assert (report.code, report.sequence, frame.step) == (PlanError.code, 9, 4)
    if text.isascii() and len(text) <= 2000:
        assert report.message == text


def test_a_remedy_travels_beside_the_message_and_only_where_there_is_one() -> None:
    report = read_error(error_frame(PlanError("no plan fits", remedy="add a node")))
    assert (report.message, report.remedy) == ("no plan fits", "add a node")
    assert b"remedy" not in error_frame(PlanError("no plan fits")).meta


CANCEL = {"type": "Cancel", "request": 1}


@pytest.mark.parametrize(
    "meta",
    [
        b"",
        b"\xc1",
        encoded(CANCEL)[:-1],
        encoded(CANCEL) + b"\0",
        encoded({**CANCEL, "more": 1}),
        encoded({"type": "Cancel"}),
        encoded({"type": "Nonsense", "request": 1}),
        encoded({"request": 1}),
        encoded({**CANCEL, "request": -1}),
        encoded({**CANCEL, "request": "1"}),
        encoded({**CANCEL, "request": 2**63}),
        encoded([1]),
        b"\x91" * 100_000,
        encoded({"type": "Failed", "request": 1, "code": 2, "message": "x" * 3000}),
        encoded({"type": "Failed", "request": 1, "code": 2}) + b"\xa7message\xa1\xff",
        b"\x84" + encoded({"type": "Failed", "request": 1, "code": 2})[1:] + b"\xa7message\xa1\xff",
    ],
)
def test_a_malformed_message_is_the_peers_fault(meta: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="CONTROL frame is malformed"):
        read_control(Frame(kind=FrameKind.CONTROL, meta=meta))


def test_the_message_that_the_cases_above_break_is_good() -> None:
    assert read_control(Frame(kind=FrameKind.CONTROL, meta=encoded(CANCEL))) == Cancel(request=1)


@pytest.mark.parametrize("more", [{"rank": 256}, {"node": "x" * 257}, {"purpose": "?"}])
def test_a_malformed_hello_is_the_peers_fault(more: dict[str, Any]) -> None:
    meta = encoded({**msgspec.to_builtins(hello()), **more})
    with pytest.raises(RemoteProtocolError, match="HELLO frame is malformed"):
        read_hello(Frame(kind=FrameKind.HELLO, meta=meta))


def test_what_informs_may_have_keys_of_another_release_and_what_orders_may_not() -> None:
    more = {**msgspec.to_builtins(hello()), "colour": "red"}
    assert read_hello(Frame(kind=FrameKind.HELLO, meta=encoded(more))) == hello()
    done = Frame(kind=FrameKind.CONTROL, meta=encoded({"type": "Done", "request": 1, "colour": 2}))
    assert read_control(done) == Done(request=1)
    status = {"type": "Status", "request": 1, "with_peers": True, "colour": 2}
    with pytest.raises(RemoteProtocolError, match="unknown field `colour`"):
        read_control(Frame(kind=FrameKind.CONTROL, meta=encoded(status)))


def test_an_order_is_sent_without_what_has_its_default() -> None:
    plain = control_frame(Ping(request=1))
    assert msgspec.msgpack.decode(plain.meta) == {"type": "Ping", "request": 1}


def test_a_reported_error_has_its_class_and_names_the_peer() -> None:
    report = Failed(request=1, code=PlanError.code, message="no plan fits")
    error = reported_error(report, "nas")
    assert type(error) is PlanError
    assert str(error) == "nas: no plan fits"
    assert error.remedy == ""
    advised = Failed(request=1, code=PlanError.code, message="no plan fits", remedy="add a node")
    error = reported_error(advised, "nas")
    assert (error.message, error.remedy) == ("nas: no plan fits", "add a node")
    unknown = reported_error(ErrorReport(code=9999, message="new"), "nas")
    assert type(unknown) is ShardnetError


def test_a_text_without_a_bound_would_be_noticed() -> None:
    """The round trips above go through `values`, which refuses schemas without bounds."""
    for unbounded in (str, list[int]):
        with pytest.raises(NotImplementedError, match="bound it"):
            values(unbounded)
