"""Mutated frames through the connection and all decoders, and against a node that runs.

Only documented errors may come of them, quickly and in little memory. `scripts/fuzz` calls
`fuzz_frames` and `fuzz_live`; a round that fails raises Finding, which has the bytes.
"""

from __future__ import annotations

import asyncio
import random
import resource
import ssl
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, get_args

import msgspec
from support.cluster.small_node import small_settings
from support.hostile.extremes import extremes, plain
from support.protocol.protocol_examples import EXAMPLES
from support.strategies.wire_strategies import hello
from xxhash import xxh3_64_intdigest

from shardnet.cluster.node.node import Node, listening
from shardnet.cluster.peers.control_link import ControlLink
from shardnet.errors import RemoteProtocolError, ShardnetError
from shardnet.transport.address import split_address
from shardnet.transport.identity import Identity, make_identity
from shardnet.wire.connection.connection import FrameReceived, LinkConnection, LinkFailed, LinkState
from shardnet.wire.framing.frames import (
    CHECKSUMS,
    HEADER,
    PREAMBLE,
    Frame,
    FrameKind,
    Limits,
    pack_frame,
)
from shardnet.wire.messages.bulk import BulkMessage, Piece, bulk_frame, read_bulk
from shardnet.wire.messages.control import ControlMessage, Done, read_control
from shardnet.wire.messages.extras import Extras, read_extras
from shardnet.wire.messages.handshake import (
    ErrorReport,
    PeerRole,
    Purpose,
    hello_frame,
    read_error,
    read_hello,
)
from shardnet.wire.messages.membership import Ping
from shardnet.wire.messages.sequences import SequenceMessage, read_sequence
from shardnet.wire.payloads.data import read_data, read_tokens
from shardnet.wire.payloads.parts import read_part
from shardnet.wire.payloads.rows import read_rows

SLOW_S: Final = 0.5
"""A frame that takes more processor time than this is a finding."""
MOST_GROWTH_BYTES: Final = 512 << 20
"""And so is one after which the process has grown by more."""
MOST_META: Final = 2 << 20
"""What the fuzzer makes of one frame; the largest meta of a kind is 16 MiB."""
MOST_TEXT: Final = 3000
"""And an error that repeats more of what came."""
ANSWER_S: Final = 5.0
"""A node that is attacked answers a ping within this."""
NOWHERE: Final = "/nowhere/model"

READERS: Final[dict[FrameKind, Callable[[Frame], object]]] = {
    FrameKind.HELLO: read_hello,
    FrameKind.ERROR: read_error,
    FrameKind.CONTROL: read_control,
    FrameKind.DATA: read_data,
    FrameKind.TOKENS: lambda frame: read_tokens(frame, n_sampled=len(frame.payload) // 4),
    FrameKind.EXTRAS: read_extras,
    FrameKind.SEQUENCE: read_sequence,
    FrameKind.BULK: read_bulk,
    FrameKind.ROWS: read_rows,
    FrameKind.PART: read_part,
}
PURPOSES: Final[dict[int, Purpose]] = {
    FrameKind.CONTROL: Purpose.CONTROL,
    FrameKind.BULK: Purpose.BULK,
}
"""The purpose of the links that a kind of frame travels on, where it is not data."""
CORPUS: Final = Path(__file__).parents[2] / "hostile" / "frames"
_KINDS: Final = [*READERS]
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


class Finding(Exception):
    """A frame that did what no frame may do. `data` is what was received after the handshake."""

    def __init__(self, what: str, data: bytes) -> None:
        super().__init__(f"{what}: {len(data)} bytes, {data[:64].hex()}")
        self.data = data


@dataclass(slots=True)
class Figures:
    """What became of mutated frames."""

    n_frames: int = 0
    n_read: int = 0
    n_refused: int = 0
    slowest_s: float = 0.0
    n_pings: int = 0
    slowest_ping_s: float = 0.0
    grown_bytes: int = 0
    slow: list[bytes] = field(default_factory=list)
    """Frames that took longer than SLOW_S."""


def good_frames() -> list[Frame]:
    """Make small frames of every kind and every message, valid but for those of the corpus."""
    frames = [*EXAMPLES.values()]
    kinds = {
        FrameKind.CONTROL: get_args(ControlMessage),
        FrameKind.BULK: get_args(BulkMessage),
        FrameKind.SEQUENCE: get_args(SequenceMessage),
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
    places: list[tuple[Any, Any]] = []
    waiting: list[Any] = [root]
    while waiting and len(places) < 2000:
        inside = waiting.pop()
        keys = [*inside] if isinstance(inside, dict) else range(len(inside))
        places += [(inside, key) for key in keys]
        waiting += [inside[key] for key in keys if isinstance(inside[key], list | dict)]
    holder, key = rng.choice(places)
    match rng.randrange(6):
        case 0 if isinstance(holder, dict):
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[rng.choice(("", "x", "type", "request", 1, None))] = holder[key]
        case 2:
            other, other_key = rng.choice(places)
            holder[key] = other[other_key] if other_key in _keys(other) else None
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


def _keys(holder: Any) -> Any:
    return holder if isinstance(holder, dict) else range(len(holder))


def receive(data: bytes, purpose: Purpose, *, checked: bool = False) -> tuple[int, int]:
    """Let a link of `purpose` receive `data`, and read every frame. Returns (read, refused).

    On a `checked` link frames have checksums. Raises Finding for whatever is not a documented
    error.
    """
    connection = LinkConnection(_own(purpose), initiator=False, checked=checked)
    n_read = n_refused = 0
    try:
        events = _fed(connection, _OPENING[purpose] + data)
        events += connection.eof()
        for event in events:
            if isinstance(event, LinkFailed) and not isinstance(event.error, ShardnetError):
                raise Finding(f"a link failed with {event.error!r}", data)
            if isinstance(event, FrameReceived):
                is_good = _is_read(event.frame, data)
                n_read, n_refused = n_read + is_good, n_refused + (not is_good)
    except (MemoryError, Exception) as error:
        if isinstance(error, Finding):
            raise
        raise Finding(f"{type(error).__name__}: {error}", data) from error
    if connection.state is not LinkState.ENDED:
        raise Finding("the link has not ended with its stream", data)
    return n_read, n_refused + (not n_read)


def _is_read(frame: Frame, data: bytes) -> bool:
    """Read a frame as its own kind, and as another one. Says whether it was read as its own."""
    is_good = False
    for kind in {frame.kind, _KINDS[len(data) % len(_KINDS)]} & READERS.keys():
        try:
            READERS[kind](frame)
        except RemoteProtocolError as error:
            if len(str(error)) > MOST_TEXT:
                raise Finding(f"an error has {len(str(error))} characters", data) from error
        else:
            is_good |= kind is frame.kind
    return is_good


def _own(purpose: Purpose) -> Any:
    return hello("b", purpose)


_OPENING: Final = {
    purpose: PREAMBLE + b"".join(pack_frame(hello_frame(hello("a", purpose)), Limits()))
    for purpose in Purpose
}


def _fed(connection: LinkConnection, data: bytes) -> list[Any]:
    events: list[Any] = []
    at = 0
    while at < len(data):
        room = connection.get_buffer()
        n = min(len(room), len(data) - at)
        room[:n] = data[at : at + n]
        events += connection.received(n)
        at += n
    return events


def fuzz_frames(n: int, seed: int, frames: list[Frame] | None = None) -> Figures:
    """Mutate `n` frames, receive and read them. Raises Finding.

    `frames` are those to begin with, by default `good_frames`. The figures tell of frames that took
    more than SLOW_S, and by how much the process grew.
    """
    rng, figures = random.Random(seed), Figures()
    frames = frames or good_frames()
    grown_from = 0
    for number in range(n):
        frame = rng.choice(frames)
        data = mutated(frame, rng)
        purpose = PURPOSES.get(frame.kind, Purpose.DATA)
        began = time.process_time()
        if checked := number % 4 == 3:
            data = sealed(data)
            data = noise(data, rng) if rng.random() < 0.1 else data
        n_read, n_refused = receive(data, purpose, checked=checked)
        took_s = time.process_time() - began
        figures.n_frames += 1
        figures.n_read += n_read
        figures.n_refused += n_refused
        figures.slowest_s = max(figures.slowest_s, took_s)
        if took_s > SLOW_S:
            figures.slow.append(data)
        if number == min(1000, n // 10):
            grown_from = _most_bytes()
        elif grown_from:
            figures.grown_bytes = _most_bytes() - grown_from
            if figures.grown_bytes > MOST_GROWTH_BYTES:
                raise Finding(f"the process grew by {figures.grown_bytes} bytes", data)
    return figures


def _most_bytes() -> int:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# --- a node that runs


def fuzz_live(seconds: float, seed: int, key: bytes | None) -> Figures:
    """Send mutated frames to a node in this process over loopback, as a member and as a client.

    With a `key`, 16 bytes, inside of TLS. Raises Finding if the node stops answering a client that
    behaves, or a request ends in an internal error.
    """
    return asyncio.run(_fuzz_live(seconds, seed, key))


async def _fuzz_live(seconds: float, seed: int, key: bytes | None) -> Figures:
    rng, figures, frames = random.Random(seed), Figures(), good_frames()
    with tempfile.TemporaryDirectory() as folder:
        async with _node(Path(folder), key) as (node, identity):
            client = ControlLink(await node.client(), _refuse)
            serving = asyncio.create_task(_until_it_ends(client))
            before = _most_bytes()
            ends = time.monotonic() + seconds
            while time.monotonic() < ends:
                purpose = rng.choice([*Purpose])
                chosen = [
                    frame
                    for frame in rng.choices(frames, k=20)
                    if PURPOSES.get(frame.kind, Purpose.DATA) is purpose
                ]
                said = [mutated(frame, rng) for frame in chosen]
                role = rng.choice([*PeerRole])
                answer = await _attack(node.address, identity, purpose, role, said)
                figures.n_frames += len(said)
                figures.n_refused += bool(answer)
                if b"internal error" in answer:
                    raise Finding(f"an internal error: {answer[-400:]!r}", b"".join(said))
                await _ping(client, figures, b"".join(said))
            figures.grown_bytes = _most_bytes() - before
            await client.link.close()
            await serving
    return figures


async def _refuse(control: ControlLink, message: object) -> None:
    raise RemoteProtocolError("nothing is asked of this client")


async def _until_it_ends(control: ControlLink) -> None:
    try:
        await control.serve()
    except ShardnetError:
        return


async def _ping(client: ControlLink, figures: Figures, said: bytes) -> None:
    """Check that the node answers somebody else."""
    began = time.monotonic()
    try:
        async with asyncio.timeout(ANSWER_S):
            await client.ask(Ping(request=client.next_request()), Done)
    except (TimeoutError, ShardnetError) as error:
        raise Finding(f"a ping ended with {error!r}", said) from error
    figures.n_pings += 1
    figures.slowest_ping_s = max(figures.slowest_ping_s, time.monotonic() - began)


async def _attack(
    address: str, identity: Identity | None, purpose: Purpose, role: PeerRole, said: list[bytes]
) -> bytes:
    """Open a link, send frames and return what the node answers until it closes, or for 50 ms."""
    host, port = split_address(address)
    opened = hello("c" * 32, purpose, ring="r", epoch=1) if purpose is Purpose.DATA else None
    own = msgspec.structs.replace(opened or hello("c" * 32, purpose), role=role)
    answer = b""
    try:
        reader, writer = await asyncio.open_connection(
            host, port, ssl=None if identity is None else identity.client, server_hostname=None
        )
    except OSError:
        return answer
    try:
        writer.write(PREAMBLE + b"".join(pack_frame(hello_frame(own), Limits())))
        await asyncio.wait_for(reader.read(1), ANSWER_S)  # its preamble
        writer.write(b"".join(said if identity is not None else map(sealed, said)))
        async with asyncio.timeout(0.05):
            while part := await reader.read(1 << 16):
                answer += part
    except (OSError, TimeoutError, ssl.SSLError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.transport.abort()
    return answer


@asynccontextmanager
async def _node(folder: Path, key: bytes | None) -> AsyncIterator[tuple[Node, Identity | None]]:
    """Run a node on loopback, with a key or without, that has no model."""
    identity = None if key is None else make_identity(key)
    settings = small_settings(folder, identity)
    async with listening(settings, "127.0.0.1", 0) as node:
        yield node, identity
