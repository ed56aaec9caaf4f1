"""What the fields of msgpack schemas are: their types and bounds, and the first ones of messages.

A missing field or a value out of bounds is the peer's fault and becomes RemoteProtocolError where
it is read; so is an unknown field of what orders something. Knows no message.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from shardnet.errors import RemoteProtocolError
from shardnet.types import NO_NUL, U32, KvDTypeName, LayerNumber, Quant, Report, Tagged
from shardnet.wire.framing.frames import Frame

MAX_STAGES: Final = 256
MAX_PEER_ADDRESSES: Final = 16

MAX_DEVICES: Final = 16
"""Devices of one node."""
MAX_THREADS: Final = 4096
MAX_SECONDS: Final = 1e9
"""31 years."""
MAX_FIGURE: Final = 1e18
"""Most of what is computed from seconds and bytes. NaN is outside of every range of floats."""

_PRINTABLE: Final = r"\A[^\x00-\x1f\x7f]*\Z"

RequestId = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""Bytes, or what is counted like them."""
Layers = tuple[LayerNumber, LayerNumber]
"""A half-open range. That it is in order and within a model is checked where it is used."""
Threads = Annotated[int, Meta(ge=0, le=MAX_THREADS)]
Seconds = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
Figure = Annotated[float, Meta(ge=0, le=MAX_FIGURE)]
"""A rate per second, or milliseconds."""
Difference = Annotated[float, Meta(ge=-MAX_FIGURE, le=MAX_FIGURE)]
Logprob = Annotated[float, Meta(le=1e-6)]
"""Rounding may lift one above 0. Minus infinity is the logprob of what cannot be drawn."""
Priority = Annotated[int, Meta(ge=-100, le=100)]
Share = Annotated[float, Meta(ge=0, le=MAX_FIGURE)]
"""A part of something, which it may exceed."""
Moment = Annotated[float, Meta(ge=0, le=253_402_300_799)]
"""Seconds since 1970, until the year 9999."""
Rank = Annotated[int, Meta(ge=0, lt=MAX_STAGES)]
DeviceNumbers = Annotated[
    list[Annotated[int, Meta(ge=0, lt=MAX_DEVICES)]], Meta(max_length=MAX_DEVICES)
]
"""Some of the devices of a node, by their places in its list."""
MAX_NAME: Final = 256
Name = Annotated[str, Meta(max_length=MAX_NAME, pattern=NO_NUL)]
RequestKey = Annotated[str, Meta(max_length=128, pattern=_PRINTABLE)]
"""By which a request is found again, "" for none."""
ArithName = Literal["portable", "fast"]
StreamLayers = LayerNumber | Literal["auto"]
"""How many layers of a stage stay on disk."""
Address = Annotated[str, Meta(max_length=300, pattern=_PRINTABLE)]
"""`host:port`, an IPv6 host in brackets."""
Addresses = Annotated[list[Address], Meta(max_length=MAX_STAGES)]
Shares = Annotated[list[Annotated[int, Meta(ge=1, le=10_000)]], Meta(max_length=MAX_STAGES)]
"""What of each layer the nodes of one stage have, compared with each other; [] for equal parts."""
AdapterName = Annotated[str, Meta(max_length=64, pattern=_PRINTABLE)]
FileName = Annotated[str, Meta(max_length=255, pattern=NO_NUL)]
"""One file of a checkpoint. Which names a model may have is checked where it is used."""
Mac = Annotated[str, Meta(max_length=17, pattern=_PRINTABLE)]
"""A hardware address, as `00:1b:44:11:3a:b7`."""
DigestOrNone = Annotated[str, Meta(max_length=64, pattern=r"\A(?:[0-9a-f]{64})?\Z")]
"""SHA-256 in hex, "" for none."""
Phase = Literal["downloading", "fetching", "loading", "waiting", "measuring"]
"""What a node does before its stage is ready: weights come from the Hub, from peers or from its own
disk; it still works for another head, or wakes; nodes and links are measured for a plan."""
MAX_TEXT: Final = 1 << 20
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
MAX_PING_BYTES: Final = 2 * 2**20
PingPayload = Annotated[bytes, Meta(max_length=MAX_PING_BYTES)]
"""Bytes whose way is timed. With them a CONTROL frame is still far below its cap."""
MAX_EXPLANATION: Final = 2000
Explanation = Annotated[str, Meta(max_length=MAX_EXPLANATION)]
"""Text for a person: an error's message, the reason of a plan."""
Remedy = Explanation | msgspec.UnsetType
"""What to do about a failure, in the imperative. The key is left out where nothing is known."""
TokenIds = Annotated[list[U32], Meta(max_length=1 << 20)]


class Numbered(Tagged, frozen=True, kw_only=True):
    """A request; what answers it has the same number."""

    request: RequestId


class Reply(Numbered, frozen=True, kw_only=True, forbid_unknown_fields=False, omit_defaults=False):
    """An answer to a request."""


class OfRing(Numbered, frozen=True, kw_only=True):
    """A request that concerns one ring."""

    ring: Name
    epoch: U32


class LinkFigures(Report, frozen=True, kw_only=True):
    """The way to a node and back: a round trip of a step without rows, and the bandwidth.

    `is_steady` is false if other programs kept the machine busy. A gather of both nodes takes
    `gather_s`, and its bytes travel at `gather_bytes_per_s`; null where that was not measured.
    """

    round_trip_s: Seconds
    bytes_per_s: Figure
    is_steady: bool = True
    gather_s: Seconds | None = None
    gather_bytes_per_s: Figure | None = None


class OfModel(Numbered, frozen=True, kw_only=True):
    """A request that concerns how fast a node is with a model, whether it has it or not.

    `config` is the text of config.json, whose unknown keys are refused unless
    `ignore_unknown_config`. `dtype`, `quant`, `kv_dtype` and `arith` are the ring's, `threads` 0
    leaves the number to the node.
    """

    config: Text
    dtype: Name
    threads: Threads
    quant: Quant = ""
    kv_dtype: KvDTypeName = "auto"
    ignore_unknown_config: bool = False
    arith: ArithName = "fast"


class Envelope(Report, frozen=True, kw_only=True):
    """What every control message has, one of another release too: its name, a request's number."""

    type: Name
    request: RequestId | None = None


_T = TypeVar("_T")

_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """Write a message as msgpack."""
    return _encoder.encode(message)


def decode(decoder: msgspec.msgpack.Decoder[_T], frame: Frame) -> _T:
    """Read the meta of a frame. Raises RemoteProtocolError when it breaks the schema."""
    try:
        return decoder.decode(frame.meta)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        why = str(error)[:MAX_EXPLANATION]  # it may repeat a value of any length
        raise RemoteProtocolError(f"a {frame.kind.name} frame is malformed: {why}") from error


_envelope_decoder = msgspec.msgpack.Decoder(Envelope)


def read_envelope(frame: Frame) -> Envelope:
    """Read of a CONTROL frame what any release can. Raises RemoteProtocolError."""
    return decode(_envelope_decoder, frame)
