"""Every field of every message has a bound, and a value beyond it is the peer's fault."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any, get_args

import msgspec
import pytest
from support.hostile.extremes import extremes, plain, structs, unbounded
from support.strategies.wire_strategies import encoded

import shardnet.wire.messages
from shardnet import slot_operations, stage_form, types
from shardnet.errors import RemoteProtocolError
from shardnet.slot_operations import SlotOperation
from shardnet.stage_form import StageOptions
from shardnet.wire.framing import schema
from shardnet.wire.framing.frames import Frame, FrameKind
from shardnet.wire.messages.bulk import BulkMessage, read_bulk
from shardnet.wire.messages.control import ControlMessage, read_control
from shardnet.wire.messages.extras import Extras, read_extras, read_sequence
from shardnet.wire.messages.handshake import ErrorReport, Hello, read_error, read_hello

READERS: dict[Any, tuple[FrameKind, Callable[[Frame], Any]]] = {
    **dict.fromkeys(get_args(ControlMessage), (FrameKind.CONTROL, read_control)),
    **dict.fromkeys(get_args(BulkMessage), (FrameKind.BULK, read_bulk)),
    **dict.fromkeys(get_args(SlotOperation), (FrameKind.SEQUENCE, read_sequence)),
    Extras: (FrameKind.EXTRAS, read_extras),
    Hello: (FrameKind.HELLO, read_hello),
    ErrorReport: (FrameKind.ERROR, read_error),
}


def all_structs() -> set[type[Any]]:
    """Every struct that a module of messages defines."""
    package = shardnet.wire.messages
    modules = [
        importlib.import_module(f"{package.__name__}.{found.name}")
        for found in pkgutil.iter_modules(package.__path__)
    ]
    return {
        value
        for module in (*modules, slot_operations, stage_form)
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, msgspec.Struct)
        and value.__name__ not in {*vars(types), *vars(schema), StageOptions.__name__}
    }


def test_the_messages_below_are_all() -> None:
    assert set[type[Any]].union(*(structs(kind) for kind in READERS)) == all_structs()


def test_every_field_has_a_bound() -> None:
    assert [name for kind in READERS for name in unbounded(kind)] == []


@pytest.mark.parametrize("kind", READERS, ids=lambda kind: kind.__name__)
def test_extremes_are_read_and_what_is_beyond_is_refused(kind: type[Any]) -> None:
    frame_kind, read = READERS[kind]
    read(Frame(kind=frame_kind, meta=encoded(plain(kind))))
    n_within = n_beyond = 0
    for case in extremes(kind):
        frame = Frame(kind=frame_kind, meta=encoded(case.meta))
        if case.is_within:
            n_within += 1
            read(frame)
        else:
            n_beyond += 1
            with pytest.raises(RemoteProtocolError):
                read(frame)
    assert n_within
    assert n_beyond


@pytest.mark.parametrize("kind", [int, float, str, bytes, list[types.U32], Any, dict[str, int]])
def test_a_field_without_a_bound_would_be_noticed(kind: Any) -> None:
    assert unbounded(msgspec.defstruct("Loose", [("field", kind)])) == ["Loose.field"]


@pytest.mark.parametrize(
    "value", ["../../x", "/somewhere/evil", "A" * 64, "a" * 63, "a" * 64 + "\n"]
)
def test_a_models_id_is_no_path(value: str) -> None:
    for name in ("PlanReply", "FetchPart", "IdentifyModel"):
        kind = next(kind for kind in READERS if kind.__name__ == name)
        frame_kind, read = READERS[kind]
        meta = plain(kind) | {"model_id": value}
        with pytest.raises(RemoteProtocolError, match="model_id"):
            read(Frame(kind=frame_kind, meta=encoded(meta)))
