"""The tree of exceptions, their remedies, and each one's code in an ERROR frame.

Knows which failures exist and the code each has in an ERROR frame. Knows nothing of how they arise.

    ShardnetError                     the root; every named failure a user can meet
    ├── UsageError                    a request that no cluster could carry out
    │   └── SamplingError             a sampling parameter outside its range
    ├── ConfigurationError            an unknown or unusable configuration key
    ├── CheckpointError               a checkpoint that is missing, damaged or inconsistent
    │   ├── UnsupportedModelError     a model feature that is not implemented, by name
    │   ├── HubError                  a model that cannot be had from the Hugging Face Hub
    │   └── DiskSilentError           a disk that does not answer in time
    ├── PlanError                     no plan fits, or the nodes do not agree on the model
    ├── CapacityError                 a request that needs more memory or context than there is
    │   └── ContextExceededError      a prompt that is longer than the context
    ├── BusyError                     the node serves another ring while requests run
    │   ├── TakenError                the node's place is given to a ring that is being built
    │   ├── ShortageError             a machine is out of descriptors or memory, or its disk fails
    │   └── QueueFullError            as many requests wait as may
    ├── LinkError                     a link to a peer ended or never came up
    │   ├── LinkClosedError           the peer closed, or we did
    │   ├── PeerUnreachableError      nothing answers at that address
    │   ├── PeerSilentError           no byte, heartbeat or progress for the allowed silence
    │   ├── VersionMismatchError      the peer speaks another protocol version
    │   ├── AuthenticationError       one side does not hold the other's cluster key
    │   └── ProtocolError             bytes that break docs/protocol.md
    │       ├── LocalProtocolError    our own bug: we tried to send or do what is not allowed
    │       └── RemoteProtocolError   the peer's fault
    │           └── DamagedFrameError bytes that changed on their way
    ├── NumericalError                the model computed something that is not a number
    │   └── WrongValuesError          the same, and which stage has computed it
    │       └── ChangedMemoryError    weights, keys or values in memory are not what they were
    ├── PeerFailedError               a node of the ring was lost or reported a failure
    │   ├── SupersededError           another node leads the ring by now
    │   └── LostShardError            a shard of a stage ended or does not answer
    ├── CancelledRequestError         the client cancelled, or went away
    └── DeadlineError                 a request that did not end within its deadline
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from reprlib import Repr
from typing import ClassVar, Final, Self, TypeVar

E = TypeVar("E", bound=BaseException)


def shown(value: object) -> str:
    """Format a value of somebody else for a message: its beginning, whatever its size."""
    return _SHOWN.repr(value)


_SHOWN = Repr()
_SHOWN.maxlevel, _SHOWN.maxlist, _SHOWN.maxdict = 3, 6, 4
_SHOWN.maxstring = _SHOWN.maxlong = _SHOWN.maxother = 80


class ShardnetError(Exception):
    """The root of every named failure. `code` stands in ERROR frames (docs/protocol.md).

    `message` says what was expected, what came and where; `remedy` what the reader can do about it,
    in the imperative, "" where nothing is known. `str()` gives both in one line, "message; remedy".
    `peer` is who reported it, whose name the message begins with, "" for nobody.
    """

    code: ClassVar[int] = 1
    peer: str = ""

    def __init__(self, message: str = "", *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}" if self.remedy else self.message

    def at(self, where: str) -> Self:
        """Make the same error with `where` in front of its message, its remedy kept."""
        return type(self)(f"{where}: {self.message}", remedy=self.remedy)


class UsageError(ShardnetError):
    """A request that no cluster could carry out as asked."""

    code = 2


class SamplingError(UsageError):
    """A sampling parameter outside its range."""

    code = 3


class ConfigurationError(ShardnetError):
    """An unknown or unusable configuration key or value."""

    code = 4


class CheckpointError(ShardnetError):
    """A checkpoint that is missing, damaged or inconsistent."""

    code = 10


class UnsupportedModelError(CheckpointError):
    """A model feature that is not implemented; the message names it."""

    code = 11


class HubError(CheckpointError):
    """A model that cannot be had from the Hugging Face Hub; the message says why."""

    code = 12


class DiskSilentError(CheckpointError):
    """A disk that does not answer in time; the message names the path."""

    code = 13


class PlanError(ShardnetError):
    """No plan fits, or the nodes of a plan do not hold the same model."""

    code = 20


class CapacityError(ShardnetError):
    """A request that needs more memory or context than there is."""

    code = 21


class ContextExceededError(CapacityError):
    """A prompt that is longer than the context. Both are counts of tokens, 0 where not known.

    Where `n_prompt` was not counted it is the least that the prompt can have.
    """

    code = 24
    n_prompt: int = 0
    n_context: int = 0

    @classmethod
    def of(
        cls,
        message: str,
        n_prompt: int,
        n_context: int,
        *,
        remedy: str = "shorten the prompt or raise --context",
    ) -> Self:
        """Make the error with both counts."""
        error = cls(message, remedy=remedy)
        error.n_prompt, error.n_context = n_prompt, n_context
        return error

    def at(self, where: str) -> Self:
        """Make the same error with `where` in front of its message."""
        error = super().at(where)
        error.n_prompt, error.n_context = self.n_prompt, self.n_context
        return error


class BusyError(ShardnetError):
    """The node serves another ring while requests run.

    `retry_s` is when to ask again, in whole seconds, 0 where that is not known. It does not travel.
    """

    code = 22
    retry_s: int = 0


class TakenError(BusyError):
    """Another head builds a ring with the node just now; the message says with which model.

    Unlike a generation, that ends soon: who meets it may wait and ask again.
    """

    code = 23


class ShortageError(BusyError):
    """A machine has no descriptor, memory or process left, or its disk fails: what was to be read
    may be as it should.
    """

    code = 26


_SHORT_OF: Final = {
    errno.EMFILE: ("this process may open no more files", "raise its limit (`ulimit -n`)"),
    errno.ENFILE: ("this machine may open no more files", "raise its limit (fs.file-max)"),
    errno.ENOMEM: ("the system has no memory left", "end other programs"),
    errno.ENOBUFS: ("the system has no memory left", "end other programs"),
    errno.EAGAIN: ("this machine may start no more processes", "raise its limit (`ulimit -u`)"),
    errno.EIO: ("the disk fails", "look into the system's log (`dmesg`)"),
}
"""By number of the error: what a machine is short of, and what to do."""


def shortage(error: BaseException, what: object) -> ShortageError | None:
    """Return the error for what came of this machine's own shortage at `what`, None for others."""
    if not isinstance(error, OSError) or error.errno not in _SHORT_OF:
        return None
    why, remedy = _SHORT_OF[error.errno]
    return ShortageError(f"{what}: {why} ({error.strerror})", remedy=f"{remedy}, and ask again")


@contextmanager
def telling_shortages(what: object) -> Iterator[None]:
    """Raise ShortageError in the place of an OSError that is about this machine, not `what`."""
    try:
        yield
    except OSError as error:
        if (short := shortage(error, what)) is not None:
            raise short from error
        raise


class QueueFullError(BusyError):
    """As many requests wait for the ring as may: ask again later."""

    code = 25


class LinkError(ShardnetError):
    """A link to a peer ended or never came up."""

    code = 30


class LinkClosedError(LinkError):
    """The link is closed: by the peer, or by us."""

    code = 31


class PeerUnreachableError(LinkError):
    """Nothing answers at that address."""

    code = 32


class PeerSilentError(LinkError):
    """No byte, heartbeat or progress report came for the allowed silence."""

    code = 33


class VersionMismatchError(LinkError):
    """The peer speaks another version of the protocol; the message names both."""

    code = 34


class AuthenticationError(LinkError):
    """One side of the link does not hold the other's cluster key."""

    code = 38


class ProtocolError(LinkError):
    """Bytes or calls that break docs/protocol.md."""

    code = 35


class LocalProtocolError(ProtocolError):
    """Our own bug: we tried to send or do what the protocol does not allow."""

    code = 36


class RemoteProtocolError(ProtocolError):
    """The peer's fault: it sent what the protocol does not allow."""

    code = 37


class DamagedFrameError(RemoteProtocolError):
    """A frame whose bytes are not those that its sender made a checksum of."""

    code = 39


class NumericalError(ShardnetError):
    """The model computed something that is not a number.

    `rows` lists the sampled rows at fault, as indices into the micro-batch's sampled rows; it does
    not travel.
    """

    code = 50
    rows: tuple[int, ...] = ()


class WrongValuesError(NumericalError):
    """A stage gave what its model cannot compute, or what is no number.

    `rank` is that of the stage, once known, `sequence` the id of the first sequence with such rows,
    None where the whole step is wrong. `is_received` says that the stage which met it had it from
    the one before; it does not travel.
    """

    code = 51
    rank: int = 0
    sequence: int | None = None
    is_received: bool = False

    @classmethod
    def received(cls, message: str, sequence: int | None = None) -> Self:
        """Make the error of what came from the stage before."""
        error = cls(message, remedy="check that machine's memory, and the checkpoint")
        error.is_received, error.sequence = True, sequence
        return error


CHECK_MACHINE: Final = (
    "test that machine's memory (memtest86+), and set the clocks of its processor and memory back "
    "to what their makers say"
)
"""What to do about a machine that computes or keeps wrong bits."""


class ChangedMemoryError(WrongValuesError):
    """Weights of a stage are not what they were when loaded, or keys and values not what they were
    when computed: memory has changed.
    """

    code = 52


class PeerFailedError(ShardnetError):
    """A node of the ring was lost or reported a failure; the message names it."""

    code = 40


class SupersededError(PeerFailedError):
    """Another node leads the ring in the place of the one that was asked, at `address` if known.

    The address does not travel.
    """

    code = 43
    address: str = ""


class LostShardError(PeerFailedError):
    """A shard of a stage, or what it looks up in, has ended or is silent: all of it is lost."""

    code = 44


class CancelledRequestError(ShardnetError):
    """The client cancelled the request, or went away."""

    code = 41


class DeadlineError(ShardnetError):
    """The request did not end within the deadline that came with it."""

    code = 42


def _tree(root: type[ShardnetError]) -> list[type[ShardnetError]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in _tree(child))]


def error_for_code(code: int, message: str, *, remedy: str = "") -> ShardnetError:
    """Make the exception that an ERROR frame's `code` stands for.

    An unknown code, from a newer peer, becomes a plain ShardnetError with the same message.
    """
    by_code = {kind.code: kind for kind in _tree(ShardnetError)}
    return by_code.get(code, ShardnetError)(message, remedy=remedy)


def internal_error(what: str, error: BaseException) -> ShardnetError:
    """Make the error that ends one request because of a bug of ours in `what`.

    Of a group it is about the first error. What has a name already is returned as it is, and a
    machine's shortage is no bug. A check of our own that failed says nothing but its place.
    """
    cause = first_error(error) if isinstance(error, BaseExceptionGroup) else error
    if isinstance(cause, ShardnetError):
        return cause
    if (short := shortage(cause, what)) is not None:
        return short
    is_check = isinstance(cause, AssertionError)
    why = f"a check of its own failed in {where(cause)}" if is_check else repr(cause)
    return ShardnetError(
        f"internal error in {what}: {why}, a bug of shardnet",
        remedy="report it, with what that node wrote",
    )


def without_frames(error: E) -> E:
    """Return `error` without what it knows of where it was raised: that keeps tensors in memory."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def where(error: BaseException) -> str:
    """Return the file and line that raised `error`, for a log of one line."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    if frame is None:
        return "an unknown place"
    code = frame.tb_frame.f_code
    return f"{code.co_filename.rpartition('/')[2]}:{frame.tb_lineno} ({code.co_name})"


def first_error(group: BaseExceptionGroup[E]) -> E:
    """Return the error that a task group failed with first, out of nested groups."""
    first = group.exceptions[0]
    return first_error(first) if isinstance(first, BaseExceptionGroup) else first
