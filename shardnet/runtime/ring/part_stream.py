"""Parts to and from one other shard: one message after the other, straight from and into memory.

For the compute thread. Knows the heads of parts. Must not know how long to wait.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from shardnet.errors import RemoteProtocolError
from shardnet.transport.direct_connection import DirectConnection
from shardnet.types import Epoch, StepId
from shardnet.wire.payloads.parts import PartHeads, ShardPart

_DROPPED_BYTES: Final = 1 << 16
"""How much of a part that nobody waits for is received at once."""


class _Expected(NamedTuple):
    """A part that is to come, its head without checksums, and where its payload belongs."""

    part: ShardPart
    head: bytes
    into: memoryview


class PartStream:
    """This shard's end of the connection to another one.

    Parts come in the order of their gathers. Those of steps before are left out.
    """

    def __init__(self, connection: DirectConnection, epoch: Epoch) -> None:
        self.connection = connection
        self._heads = PartHeads(epoch, is_checked=not connection.is_encrypted)
        self._head = memoryview(bytearray(self._heads.n_bytes))
        self._n_head = 0
        self._dropped = memoryview(bytearray(_DROPPED_BYTES))
        self._n_drop = 0
        """Bytes still to come of a part that is left out."""
        self._is_open = False
        """Whether the head that has come is that of the first expected part."""
        self._step = StepId(0)
        self._expected: deque[_Expected] = deque()
        self._rest = memoryview(b"")
        """Where the rest of the part belongs whose head has come."""

    def exchange(self, step: StepId, own: ShardPart, other: ShardPart, into: memoryview) -> None:
        """Send `own`, and receive `other` of the same gather to `into`: see `move`.

        Raises LinkError when the connection is lost.
        """
        self._step = step
        self._expected.append(_Expected(other, self._heads.plain(other, step), into))
        self.connection.send(self._heads.packed(own, step), own.payload)

    def move(self, n_left: int = 0) -> bool:
        """Send and receive what is possible; return whether all but `n_left` exchanges are over.

        Raises LinkError when the connection is lost, RemoteProtocolError for another part than the
        expected one.
        """
        while len(self._expected) > n_left and self._receive(self._expected[0]):
            self._expected.popleft()
        return (self.connection.flush() or n_left > 0) and len(self._expected) <= n_left

    def rest(self) -> None:
        """Leave the buffers of all exchanges alone: they may change from now on."""
        if self._is_open:
            self._leave_out(len(self._rest))
        self._expected.clear()
        self.connection.keep()

    def _receive(self, expected: _Expected) -> bool:
        """Receive what has come of the part that is waited for; return whether it is whole."""
        while not self._is_open:
            if not self._receive_head(expected):
                return False
        while self._rest:
            n = self.connection.receive(self._rest)
            if not n:
                return False
            self._rest = self._rest[n:]
        try:
            self._heads.check(self._head, expected.into)
        except RemoteProtocolError as error:
            raise error.at(self.connection.peer) from None
        self._is_open, self._n_head = False, 0
        return True

    def _receive_head(self, expected: _Expected) -> bool:
        """Receive some of a head, or of a part that is left out; return whether that got on.

        Not behind such a part either: whoever waits looks at the time between two of them.
        """
        if self._n_drop:
            n = self.connection.receive(self._dropped[: self._n_drop])
            self._n_drop -= n
            return n > 0 and self._n_drop > 0
        if self._n_head < len(self._head):
            n = self.connection.receive(self._head[self._n_head :])
            self._n_head += n
            return n > 0
        return self._take_head(expected)

    def _take_head(self, expected: _Expected) -> bool:
        """Open the expected part, or leave out one of a step before.

        Returns False for a part of a step to come: why this one has failed there is on its way, by
        another link. Raises RemoteProtocolError for any other.
        """
        if self._heads.is_of(self._head, expected.head):
            self._is_open, self._rest = True, expected.into
            return True
        try:
            step, found = self._heads.read(self._head)
        except RemoteProtocolError as error:
            raise error.at(self.connection.peer) from None
        if step < self._step:
            self._leave_out(found.n_bytes)
        if step != self._step:
            return step < self._step
        raise RemoteProtocolError(
            f"{self.connection.peer} sent {_shape(found)} as part of step {step}, expected "
            f"{_shape(expected.part)} (gather, shard, dtype, rows, columns)"
        )

    def _leave_out(self, n_bytes: int) -> None:
        """Drop the next `n_bytes`, behind which a head comes."""
        self._n_drop, self._n_head, self._is_open = n_bytes, 0, False


def _shape(part: ShardPart) -> tuple[object, ...]:
    return (part.number, part.shard, part.dtype.value, part.n_rows, part.width)
