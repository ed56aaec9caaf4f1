"""Parts to and from one other shard: one message after the other, straight from and into memory.

For the compute thread. Knows the heads of parts. Must not know how long to wait.
"""

from __future__ import annotations

from typing import Final

from shardnet.errors import RemoteProtocolError
from shardnet.transport.direct_connection import DirectConnection
from shardnet.types import Epoch, StepId
from shardnet.wire.payloads.parts import PartHeads, ShardPart

_DROPPED_BYTES: Final = 1 << 16
"""How much of a part that nobody waits for is received at once."""


class PartStream:
    """This shard's end of the connection to another one.

    It has one part to send and one to receive at a time. Parts of steps before are left out.
    """

    def __init__(self, connection: DirectConnection, epoch: Epoch) -> None:
        self.connection = connection
        self._heads = PartHeads(epoch, is_checked=not connection.is_encrypted)
        self._head = memoryview(bytearray(self._heads.n_bytes))
        self._n_head = 0
        self._dropped = memoryview(bytearray(_DROPPED_BYTES))
        self._n_drop = 0
        """Bytes still to come of a part that is left out."""
        self._step = StepId(0)
        self._part: ShardPart | None = None
        self._expected = b""
        self._into = memoryview(b"")
        """Where the rest of the expected part belongs."""
        self._target = self._into

    def exchange(self, step: StepId, own: ShardPart, other: ShardPart, into: memoryview) -> None:
        """Send `own`, and receive `other` of the same gather to `into`: see `move`."""
        self._step, self._part = step, other
        self._expected = self._heads.plain(other, step)
        self._into = self._target = into
        self.connection.send(self._heads.packed(own, step), own.payload)

    def move(self) -> bool:
        """Send and receive what is possible now; return whether both parts are through.

        Raises LinkError when the connection is lost, RemoteProtocolError for another part than the
        expected one.
        """
        if self._part is not None and self._receive():
            self._part = None
        return self.connection.flush() and self._part is None

    def rest(self) -> None:
        """Leave the buffers of the last exchange alone: they may change from now on."""
        if self._part is not None:
            if self._n_head == len(self._head) and not self._n_drop:  # the rest of what has begun
                self._n_drop = len(self._into)
            self._part = None
        self.connection.keep()

    def _receive(self) -> bool:
        """Receive what has come of the part that is waited for; return whether it is whole."""
        while True:
            if self._n_drop:
                n = self.connection.receive(self._dropped[: self._n_drop])
                self._n_drop -= n
                if self._n_drop and n:
                    continue
                if self._n_drop:
                    return False
                self._n_head = 0
            if self._n_head < len(self._head):
                n = self.connection.receive(self._head[self._n_head :])
                self._n_head += n
                if not n:
                    return False
                if self._n_head < len(self._head) or not self._is_expected():
                    continue
            while self._into:
                n = self.connection.receive(self._into)
                if not n:
                    return False
                self._into = self._into[n:]
            self._heads.check(self._head, self._target)
            self._n_head = 0
            return True

    def _is_expected(self) -> bool:
        """Say whether the head that has come is that of the expected part.

        A part of a step before is dropped. Raises RemoteProtocolError for any other.
        """
        if self._heads.is_of(self._head, self._expected):
            return True
        step, found = self._heads.read(self._head)
        if step < self._step:
            self._n_drop = found.n_bytes
            return False
        raise RemoteProtocolError(
            f"{self.connection.peer} sent {_shape(found)} of step {step} as part of step "
            f"{self._step}, expected {_shape(self._part)} (gather, shard, dtype, rows, columns)"
        )


def _shape(part: ShardPart | None) -> tuple[object, ...]:
    assert part is not None
    return (part.number, part.shard, part.dtype.value, part.n_rows, part.width)
