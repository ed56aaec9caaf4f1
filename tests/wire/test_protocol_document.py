"""docs/protocol.md against the code: examples replayed, tables compared."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.protocol.protocol_examples import EXAMPLES, HELLO, INT8_STEP, STEP
from support.protocol.protocol_notation import STRUCTS, fields_of
from support.strategies.wire_strategies import feed, hello, pair

from shardnet import errors
from shardnet.checkpoint.tensors.manifest import ID_FILES, INDEX_FILES
from shardnet.cluster.machine.folders import ClusterKey
from shardnet.transport.identity import derive_authority_key, fingerprint, make_identity
from shardnet.types import WEIGHT_PART_BYTES
from shardnet.wire.connection.connection import (
    FrameReceived,
    HelloReceived,
    LinkConnection,
    LinkFailed,
    PeerLeft,
    ProgressReported,
)
from shardnet.wire.framing.frames import LIMITS, PREAMBLE, FrameKind, pack_frame
from shardnet.wire.messages.handshake import Purpose
from shardnet.wire.payloads.data import read_data

DOCUMENT = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")
HEX = {
    name: bytes.fromhex(re.sub(r"#.*", "", body))
    for name, body in re.findall(r"```hex (\S+)\n(.*?)```", DOCUMENT, re.DOTALL)
}
STEPS = {"data": STEP, "data-int8": INT8_STEP}


def table(header: str) -> list[list[str]]:
    """The cells of every row of every table with this header."""
    rows = []
    for body in DOCUMENT.split(header + "\n")[1:]:
        for line in body.split("\n\n")[0].splitlines()[1:]:
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
    assert rows, f"no table {header}"
    return rows


def test_the_examples_are_those_of_the_code() -> None:
    assert HEX.keys() == EXAMPLES.keys() | {"preamble", "tokens-checked"}
    assert HEX["preamble"] == PREAMBLE


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_what_the_code_sends(name: str) -> None:
    assert b"".join(pack_frame(EXAMPLES[name], LIMITS)) == HEX[name]


def test_an_example_with_checksums_is_what_the_code_sends() -> None:
    packed = pack_frame(EXAMPLES["tokens"], LIMITS, checked=True)
    assert b"".join(packed) == HEX["tokens-checked"]


@pytest.mark.parametrize("name", sorted(EXAMPLES.keys() - {"hello"}))
def test_an_example_is_what_the_code_receives(name: str) -> None:
    frame = EXAMPLES[name]
    purposes = {
        FrameKind.CONTROL: Purpose.CONTROL,
        FrameKind.BULK: Purpose.BULK,
        FrameKind.PART: Purpose.PARTS,
    }
    (event,) = feed(pair(purposes.get(frame.kind, Purpose.DATA)).b, HEX[name])
    match frame.kind:
        case FrameKind.HEARTBEAT:
            assert event == ProgressReported(epoch=3, step=7)
        case FrameKind.BYE:
            assert event == PeerLeft()
        case FrameKind.ERROR:
            assert isinstance(event, LinkFailed)
            assert type(event.error) is errors.BusyError
        case _:
            assert event == FrameReceived(frame=frame)
            assert frame.kind is not FrameKind.DATA or read_data(event.frame) == STEPS[name]


def test_the_hello_example_makes_a_link() -> None:
    connection = LinkConnection(hello("other", Purpose.DATA, ring="r"), initiator=False)
    assert feed(connection, HEX["preamble"] + HEX["hello"]) == [HelloReceived(hello=HELLO)]


def test_the_table_of_kinds() -> None:
    written = {
        kind: (int(number), (int(meta), int(payload)))
        for number, kind, meta, payload, *_ in table(
            "| number | kind | largest meta | largest payload | on links | section |"
        )
    }
    assert written == {kind.name: (int(kind), LIMITS[kind]) for kind in FrameKind}


def test_the_table_of_errors() -> None:
    written = {int(code): name for code, name in table("| code | error |")}
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    shardnet_errors = [kind for kind in kinds if issubclass(kind, errors.ShardnetError)]
    assert written == {kind.code: kind.__name__ for kind in shardnet_errors}
    assert len(written) == len(shardnet_errors), "two errors share a code"


def test_the_table_of_keys() -> None:
    for row in table("| key | written | authority's public key | fingerprint |"):
        secret, written, public, name = (cell.strip("`") for cell in row)
        key = ClusterKey(bytes.fromhex(secret))
        authority = derive_authority_key(key.secret)
        assert key.text() == written
        assert authority.public_key().public_bytes_raw().hex() == public
        assert fingerprint(authority) == make_identity(key.secret).fingerprint == name


def test_every_schema_is_in_the_document_once() -> None:
    written = [name.strip("`") for name, *_ in table("| name | fields | meaning |")]
    assert sorted(written) == sorted(STRUCTS)


def test_fields_of_schemas() -> None:
    written = {name: fields for name, fields, *_ in table("| name | fields | meaning |")}
    for name, kind in STRUCTS.items():
        assert written[f"`{name}`"] == f"`{fields_of(kind)}`", "write the row into docs/protocol.md"


def test_the_files_of_a_models_id() -> None:
    section = DOCUMENT.split("## 16. A model's id")[1]
    in_order = [name for name in re.findall(r"`([\w./]+)`", section) if name in ID_FILES]
    assert tuple(in_order) == ID_FILES
    assert all(f"`{name}`" in section for name in INDEX_FILES)
    assert f"cut every {WEIGHT_PART_BYTES} bytes" in DOCUMENT.replace("\n", " ")
