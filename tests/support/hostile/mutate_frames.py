"""Frames that are wrong in one or some places, made from good ones and from the corpus.

Knows the format of frames and messages. Must not know who receives them.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Final, get_args

import msgspec
from support.hostile.extremes import extremes, plain
from support.protocol.protocol_examples import EXAMPLES
from xxhash import xxh3_64_intdigest

from shardnet.slot_operations import SlotOperation
from shardnet.wire.framing.frames import CHECKSUMS, HEADER, Frame, FrameKind
from shardnet.wire.messages.bulk import BulkMessage, Piece, bulk_frame
from shardnet.wire.messages.control import ControlMessage
from shardnet.wire.messages.extras import Extras
from shardnet.wire.messages.handshake import ErrorReport

MOST_META: Final = 2 << 20
"""What the fuzzer makes of one frame; the largest meta of a kind is 16 MiB."""
NOWHERE: Final = "/nowhere/model"
DEEPER: Final = 0.7
"""How likely a value inside of another one is changed, rather than that one."""
CORPUS: Final = Path(__file__).parents[2] / "hostile" / "frames"
_LONG_HEADS: Final = (
    *(b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"),
    *(b"\xc6\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x01", b"\xdc\xff\xff", b"\xde\xff\xff"),
    *(b"\xdd\x00\x01\x00\x00", b"\xdd\x00\x10\x00\x00", b"\xd9\xff", b"\x9f", b"\x8f", b"\xc1"),
)
"""Heads of msgpack values that claim to be long, and one that no value has."""
_VALUES: Final = (
    *(None, True, 0, 1, -1, 255, 256, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1),
    *(-(2**63), 0.0, -0.0, 1e308, float("nan"), float("inf"), float("-inf"), "", "x", "a\0b"),
    *("../../etc/passwd", "/", "a" * 64, "é" * 300, b"", b"\xff" * 64, [], {}, [[]], {"": {}}),
    *([0] * 300, [[0, 0]] * 300, ["x"] * 300, [{}] * 300, {"type": "Ping"}, [2**32 - 1] * 20),
)


def good_frames() -> list[Frame]:
    """Make small frames of every kind and every message, valid but for those of the corpus."""
    frames = [*EXAMPLES.values()]
    kinds = {
        FrameKind.CONTROL: get_args(ControlMessage),
        FrameKind.BULK: get_args(BulkMessage),
        FrameKind.SEQUENCE: get_args(SlotOperation),
        FrameKind.EXTRAS: (Extras,),
        FrameKind.ERROR: (ErrorReport,),
    }
    for kind, messages in kinds.items():
        for message in messages:
            metas = [plain(message), *(e.meta for e in extremes(message) if e.is_within)]
            small = (_nowhere(meta) for meta in metas if _is_small(meta))
            frames += [Frame(kind=kind, meta=msgspec.msgpack.encode(meta)) for meta in small]
    frames.append(bulk_frame(Piece(request=3), bytes(5000)))
    return frames + corpus_frames()


def _is_small(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_small, value.values()))
    if isinstance(value, str | bytes):
        return len(value) < 1000
    return not isinstance(value, list) or (len(value) < 100 and all(map(_is_small, value)))


def corpus_frames() -> list[Frame]:
    """Return the frames of the corpus whose header is sound."""
    frames = []
    for path in sorted(CORPUS.glob("*.bin")):
        data = path.read_bytes()
        _, kind, _, n_meta, n_payload, epoch, step = HEADER.unpack_from(data)
        if kind in [*FrameKind] and HEADER.size + n_meta + n_payload == len(data):
            meta, payload = data[HEADER.size :][:n_meta], data[HEADER.size + n_meta :]
            known = FrameKind(kind)
            frames.append(Frame(kind=known, epoch=epoch, step=step, meta=meta, payload=payload))
    return frames


def _nowhere(value: Any) -> Any:
    """Replace the names of models: a node would look for them on the Hub."""
    if isinstance(value, list):
        return [_nowhere(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    return {key: NOWHERE if key == "model" else _nowhere(entry) for key, entry in value.items()}


def mutated(frame: Frame, rng: random.Random) -> bytes:
    """Return the bytes of `frame` with one to four changes, some of them below the header."""
    epoch, step, kind = frame.epoch, frame.step, int(frame.kind)
    meta, payload = bytes(frame.meta), bytes(frame.payload)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        match rng.randrange(10):
            case 0 | 1 | 2 | 3 if frame.kind is not FrameKind.DATA and meta:
                meta = _other_value(meta, rng)
            case 4 if meta:
                at = rng.randrange(len(meta))
                meta = meta[:at] + rng.choice(_LONG_HEADS) + meta[at + rng.randrange(2) :]
            case 5:
                meta = noise(meta, rng)
            case 6:
                payload = noise(payload, rng)
            case 7:
                epoch, step = rng.choice((0, 1, 2**32 - 1)), rng.choice((0, 1, 2**64 - 1))
            case 8:
                kind = rng.randrange(14)
            case _:
                meta = meta + meta if rng.random() < 0.5 else meta[: rng.randrange(len(meta) + 1)]
    header = HEADER.pack(0x4E53, kind, 0, len(meta), len(payload), epoch, step)
    whole = header + meta + payload
    return noise(whole, rng) if rng.random() < 0.2 else whole


def sealed(data: bytes) -> bytes:
    """Put the right checksums into the bytes of a frame, as on a link without TLS."""
    header, rest = data[: HEADER.size], data[HEADER.size :]
    if len(header) < HEADER.size or header[2] == FrameKind.HELLO:
        return data
    halves = (xxh3_64_intdigest(part) & 0xFFFFFFFF for part in (header, rest))
    return header + CHECKSUMS.pack(*halves) + rest


def noise(data: bytes, rng: random.Random) -> bytes:
    """Flip, cut, repeat or overwrite some bytes."""
    result = bytearray(data)
    at = rng.randrange(len(result) + 1)
    match rng.randrange(5):
        case 0 if at < len(result):
            result[at] ^= 1 << rng.randrange(8)
        case 1:
            del result[at : at + rng.randint(1, 20)]
        case 2:
            result[at:at] = rng.randbytes(rng.randint(1, 20))
        case 3:
            result[at:at] = result[at : at + rng.randint(1, 60)] * rng.choice((1, 1, 50))
        case _:
            result[at : at + 4] = rng.choice((b"\xff" * 4, bytes(4), b"\x00\x00\x00\x80"))
    return bytes(result)


def _other_value(meta: bytes, rng: random.Random) -> bytes:
    """Change one value in a msgpack map."""
    try:
        root = [msgspec.msgpack.decode(meta)]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return noise(meta, rng)
    holder, key = _place(root, rng)
    match rng.randrange(6):
        case 0 if isinstance(holder, dict):
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[rng.choice(("", "x", "type", "request", 1, None))] = holder[key]
        case 2:
            other, other_key = _place(root, rng)
            holder[key] = other[other_key]
        case 3 if isinstance(holder[key], list):
            most = max(1, MOST_META // len(meta))  # the fuzzer itself must not fill the memory
            holder[key] = (holder[key] or [0]) * min(most, rng.choice((2, 20, 300)))
        case 4:
            for _ in range(rng.choice((1, 10, 500))):
                holder[key] = [holder[key]]
        case _:
            holder[key] = rng.choice(_VALUES)
    try:
        return msgspec.msgpack.encode(root[0])
    except (msgspec.EncodeError, RecursionError, OverflowError, ValueError):
        return meta


def _place(root: Any, rng: random.Random) -> tuple[Any, Any]:
    """Choose a value: the list or map that holds it, and where."""
    holder, key = root, 0
    while isinstance(inside := holder[key], list | dict) and inside and rng.random() < DEEPER:
        holder, key = (
            inside,
            rng.choice([*inside]) if isinstance(inside, dict) else rng.randrange(len(inside)),
        )
    return holder, key
