"""Bulk messages: what a node asks of another's checkpoint or KV cache, and what answers it.

Knows the fields, their types and their bounds (docs/protocol.md section 15). Knows nothing of files
or of what is done with a message.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from shardnet.errors import RemoteProtocolError
from shardnet.types import U32, U64, Digest, LayerNumber, Positions, Row, Strict
from shardnet.wire.framing import schema
from shardnet.wire.framing.frames import Buffer, Frame, FrameKind

MAX_FILES: Final = 4096
MAX_DIGESTS: Final = 256
MAX_ROWS: Final = 1 << 14
MAX_TABLES: Final = 4096

MAX_RANGES: Final = 1 << 16
MAX_WHEEL_BYTES: Final = 256 << 20

TensorName = Annotated[str, Meta(max_length=1024)]


class FetchSkeleton(schema.Numbered, frozen=True, kw_only=True):
    """Ask which files a model has. Answered by Skeleton."""

    model_id: Digest


class HeadRange(Row, frozen=True, array_like=True):
    """Bytes of a file that the model's id covers."""

    offset: schema.Count
    n_bytes: schema.Count


class SkeletonFile(Strict, frozen=True, kw_only=True):
    """A file of a model, and which of its bytes its id covers: in order, without overlap."""

    name: schema.FileName
    size_bytes: schema.Count
    heads: Annotated[list[HeadRange], Meta(max_length=MAX_RANGES)]


class Skeleton(schema.Numbered, frozen=True, kw_only=True):
    """Answers FetchSkeleton."""

    files: Annotated[list[SkeletonFile], Meta(max_length=MAX_FILES)]


class FetchHead(schema.Numbered, frozen=True, kw_only=True):
    """Ask for the bytes of a file that the id covers, in order. Answered by Piece frames."""

    model_id: Digest
    file: schema.FileName


class FetchPart(schema.Numbered, frozen=True, kw_only=True):
    """Ask for part number `part` of a tensor. Answered by Piece frames."""

    model_id: Digest
    tensor: TensorName
    part: U32


class Piece(schema.Numbered, frozen=True, kw_only=True):
    """The payload is what follows the bytes of the Piece before. The last one completes them."""


class PartName(Row, frozen=True, array_like=True):
    """A part of a tensor."""

    tensor: TensorName
    part: U32


class FetchDigests(schema.Numbered, frozen=True, kw_only=True):
    """Ask for the SHA-256 of parts. Answered by Digests."""

    model_id: Digest
    parts: Annotated[list[PartName], Meta(max_length=MAX_DIGESTS)]


class Digests(schema.Numbered, frozen=True, kw_only=True):
    """Answers FetchDigests: SHA-256 in hex, in its order, null for a part that is not here."""

    sha256: Annotated[list[Digest | None], Meta(max_length=MAX_DIGESTS)]


class RowNumbers(Row, frozen=True, array_like=True):
    """Rows of a stored tensor: their numbers, u64 little-endian."""

    tensor: TensorName
    numbers: Annotated[bytes, Meta(max_length=8 * MAX_ROWS)]


class FetchRows(schema.Numbered, frozen=True, kw_only=True):
    """Ask for at most MAX_ROWS rows of tables that are looked up in. Answered by Piece frames.

    They are as they are stored, one behind the other.
    """

    model_id: Digest
    tables: Annotated[list[RowNumbers], Meta(max_length=MAX_TABLES)]


class FetchAdapter(schema.Numbered, frozen=True, kw_only=True):
    """Ask for one layer's part of a LoRA adapter. Answered by Piece frames."""

    adapter_id: Digest
    layer: LayerNumber


class FetchKv(schema.OfRing, frozen=True, kw_only=True):
    """Ask for positions `[begin, end)` of one layer of a sequence, or for the layer's state.

    The sequence owns `slot` in the ring and epoch. `form` is what rows look like at the sender's.
    With `state`, what is kept as it follows the positions. Answered by KvRows, Piece frames and
    KvSent.
    """

    sequence_id: U64
    slot: U32
    layer: LayerNumber
    begin: Positions
    end: Positions
    form: schema.Name
    state: U32 | None = None


class KvRows(schema.Numbered, frozen=True, kw_only=True):
    """What follows: `n_bytes` of rows from position `first` on, or of a state and rows beside it.

    Rows before `first` are gone.
    """

    first: Positions
    n_bytes: schema.Count
    is_state: bool = False


class KvSent(schema.Numbered, frozen=True, kw_only=True):
    """All bytes of a FetchKv were sent; `sha256` is that of all of them, in hex."""

    sha256: Digest


class OfferWheel(schema.Numbered, frozen=True, kw_only=True):
    """Offer a wheel. Answered by WheelState; then its bytes follow in Piece frames, and another
    WheelState answers. Clients send it too.

    `proof` is the HMAC-SHA-256 of the UTF-8 of name and `sha256`, a line each, by the key that both
    sides derive from the cluster key.
    """

    name: schema.FileName
    size_bytes: Annotated[int, Meta(ge=1, le=MAX_WHEEL_BYTES)]
    sha256: Digest
    proof: Digest


class WheelState(schema.Reply, frozen=True, kw_only=True):
    """Answers OfferWheel: it is wanted; and its bytes: it is whole, and can be installed there."""

    is_whole: bool


class Refused(schema.Numbered, frozen=True, kw_only=True):
    """Answers any request of a bulk link, also after pieces: it failed. Codes as in ERROR."""

    code: U32
    message: schema.Explanation


WeightsRequest = FetchSkeleton | FetchHead | FetchPart | FetchDigests | FetchRows
BulkRequest = WeightsRequest | FetchAdapter | FetchKv | OfferWheel
BulkMessage = BulkRequest | Skeleton | Piece | Digests | KvRows | KvSent | WheelState | Refused

_decoder: msgspec.msgpack.Decoder[BulkMessage] = msgspec.msgpack.Decoder(BulkMessage)


def bulk_frame(message: BulkMessage, payload: Buffer = b"") -> Frame:
    """Make a BULK frame. Only a Piece has a payload."""
    return Frame(kind=FrameKind.BULK, meta=schema.encode(message), payload=payload)


def read_bulk(frame: Frame) -> BulkMessage:
    """Read a BULK frame. Raises RemoteProtocolError when it breaks the schema."""
    message = schema.decode(_decoder, frame)
    if len(frame.payload) and not isinstance(message, Piece):
        raise RemoteProtocolError(
            f"a {type(message).__name__} came with {len(frame.payload)} bytes of payload"
        )
    return message
