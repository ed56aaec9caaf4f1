"""Mutated parts through what receives them on the compute thread.

Only the expected part may come of them, in its place, or a documented error.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final, cast

from msgspec import structs
from support.hostile.mutate_frames import mutated, noise
from support.hostile.receive_frames import Figures, Finding

from shardnet.errors import RemoteProtocolError
from shardnet.runtime.ring.shard_links import PartStream
from shardnet.transport.direct_connection import DirectConnection
from shardnet.types import Epoch, StepId, WireDType
from shardnet.wire.framing.frames import LIMITS, pack_frame
from shardnet.wire.payloads.parts import ShardPart, part_frame

_EPOCH: Final = Epoch(1)
_STEP: Final = StepId(4)
_ROOM: Final = 8
"""Bytes before and behind the place of a part, which must not change."""


class _Heard:
    """The end of a connection at which these bytes come, as DirectConnection's."""

    peer = "the other"

    def __init__(self, *, is_encrypted: bool) -> None:
        self.is_encrypted = is_encrypted
        self.waiting = b""
        self.most = 1 << 20
        """How many bytes come at once."""

    def send(self, *buffers: object) -> None:
        """Send to nobody."""

    def flush(self) -> bool:
        """Have nothing left to send."""
        return True

    def keep(self) -> None:
        """Have nothing that waits."""

    def receive(self, into: memoryview) -> int:
        """Give what is there."""
        n = min(len(into), len(self.waiting), self.most)
        into[:n] = self.waiting[:n]
        self.waiting = self.waiting[n:]
        return n


def fuzz_parts(n: int, seed: int) -> Figures:
    """Send `n` parts, mutated or not, to streams that wait for one. Raises Finding."""
    rng, figures = random.Random(seed), Figures()
    while figures.n_frames < n:
        _one_stream(rng, figures)
    return figures


def _one_stream(rng: random.Random, figures: Figures) -> None:
    """One stream: parts of steps before, mutated, until it refuses one or has what it expects."""
    heard = _Heard(is_encrypted=rng.random() < 0.5)
    stream = PartStream(cast(DirectConnection, heard), _EPOCH)
    dtype, n_rows = rng.choice([*WireDType]), rng.choice([1, 1, 3])
    expected = ShardPart(
        number=rng.choice([0, 0, 7]),
        shard=1,
        dtype=dtype,
        n_rows=n_rows,
        width=rng.randrange(1, 90),
    )
    payload = rng.randbytes(expected.n_bytes)
    place = bytearray(len(payload) + 2 * _ROOM)
    said: list[bytes] = []
    stream.exchange(
        _STEP, _with(expected, b""), expected, memoryview(place)[_ROOM : _ROOM + len(payload)]
    )
    is_through = False
    for _ in range(rng.randrange(1, 6)):
        step = rng.choice([_STEP, _STEP, _STEP - 1, _STEP - 2])
        frame = part_frame(_with(expected, payload), epoch=_EPOCH, step=step)
        whole = b"".join(pack_frame(frame, LIMITS, checked=not heard.is_encrypted))
        draw = rng.random()
        data = whole if draw < 0.5 else mutated(frame, rng) if draw < 0.8 else noise(whole, rng)
        said.append(data)
        heard.waiting += data
        heard.most = rng.choice([1, 7, 1 << 20])
        figures.n_frames += 1
        try:
            is_through = _moved(stream, heard)
        except RemoteProtocolError:
            figures.n_refused += 1
            break
        except Exception as error:
            raise Finding(f"{type(error).__name__}: {error}", b"".join(said)) from error
        if is_through:
            figures.n_read += 1
            break
    _check(place, payload, said, is_through=is_through, is_checked=not heard.is_encrypted)


def _moved(stream: PartStream, heard: _Heard) -> bool:
    """Let a stream take all that is there."""
    while True:
        before = len(heard.waiting)
        if stream.move():
            return True
        if len(heard.waiting) == before:
            return False


def _check(
    place: bytearray, payload: bytes, said: Sequence[bytes], *, is_through: bool, is_checked: bool
) -> None:
    """Raise Finding for bytes beside the part's place, and for a damaged part that was taken."""
    if any(place[:_ROOM]) or any(place[-_ROOM:]):
        raise Finding("bytes beside the place of a part", b"".join(said))
    if is_through and is_checked and bytes(place[_ROOM:-_ROOM]) != payload:
        raise Finding("a damaged part was taken", b"".join(said))


def _with(part: ShardPart, payload: bytes) -> ShardPart:
    return structs.replace(part, payload=payload or bytes(part.n_bytes))
