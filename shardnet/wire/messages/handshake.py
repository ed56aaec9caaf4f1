"""HELLO and ERROR frames: who is at the ends of a link, and what went wrong on it.

Knows the fields, their types and their bounds (docs/protocol.md sections 6 and 7). Knows nothing of
what is done with a message.
"""

from __future__ import annotations

import enum
from typing import Annotated, Final, Self

import msgspec
from msgspec import Meta

from shardnet.errors import ShardnetError, VersionMismatchError, WrongValuesError
from shardnet.types import U32, U64, Report
from shardnet.wire.framing import schema
from shardnet.wire.framing.frames import Frame, FrameKind


class Purpose(enum.Enum):
    """What a link is for."""

    CONTROL = "control"
    DATA = "data"
    BULK = "bulk"
    PARTS = "parts"


OF_RINGS: Final = frozenset({Purpose.DATA, Purpose.PARTS})
"""The purposes of links that belong to a ring in an epoch."""
MEASURED_RING: Final = "gathers"
"""What the hellos of a parts link name that belongs to no ring, and measures gathers."""


class Capability(enum.StrEnum):
    """What this release understands beyond the one before, as its hellos list it.

    Whoever sends a message of a new kind, or a key that changes what is done, looks first whether
    the peer has it. `what` says for people what is done by it.
    """

    what: str

    WHAT_IF = "what-if", "machines that are not there (plan --add)"
    KEYS = "keys", "how a cluster key is replaced"
    UPDATE = "update", "how a node is updated from elsewhere"
    SAMPLERS = "samplers-2", "DRY, top-n-sigma and typical sampling"
    THOUGHTS = "thoughts", "budgets of reasoning"
    HOUSEHOLD = "household", "several models of a household"
    READ_AHEAD = "read-ahead", "what a whole prompt looks up in files"
    TABLE_ROWS = "table-rows", "how rows of tables are given to other nodes"
    BORDER_WIDTH = "border-width", "how wide the rows between stages are to be"

    def __new__(cls, name: str, what: str) -> Self:
        """Take the name for the value."""
        made = str.__new__(cls, name)
        made._value_, made.what = name, what
        return made


MAX_CAPABILITIES: Final = 64


class PeerRole(enum.Enum):
    """Who is at an end of a link."""

    NODE = "node"
    CLIENT = "client"


class Hello(Report, frozen=True, kw_only=True):
    """The first frame of each side: who it is and what the link is for.

    On links of data and parts `ring` and `epoch` name the ring and `rank` is the sender's. Between
    the nodes of one stage `shard` is which part of it the sender has. `capabilities` are names of
    what it understands beyond what every release of the protocol's version does.
    """

    purpose: Purpose
    role: PeerRole
    node: schema.Name
    name: schema.Name
    version: Annotated[str, Meta(max_length=64)]
    ring: schema.Name = ""
    epoch: U32 = 0
    rank: schema.Rank = 0
    shard: schema.Rank | msgspec.UnsetType = msgspec.UNSET
    capabilities: Annotated[
        list[Annotated[str, Meta(max_length=32)]], Meta(max_length=MAX_CAPABILITIES)
    ] = []

    def lacking(self, *needed: Capability) -> list[Capability]:
        """Return those of the capabilities that the peer does not list."""
        return [one for one in needed if one not in self.capabilities]

    def require(self, *needed: Capability) -> None:
        """Raise VersionMismatchError unless the peer lists each capability."""
        for lacking in self.lacking(*needed):
            raise VersionMismatchError(
                f"{self.name} runs shardnet {self.version}, which does not know {lacking.what}",
                remedy="update it: all nodes of a cluster may run one release",
            )


class ErrorReport(Report, frozen=True, kw_only=True):
    """The meta of an ERROR frame. Without sequence and step it is about the link, and ends it.

    `rank` is that of the stage which has computed what is wrong.
    """

    code: U32
    message: schema.Explanation
    sequence: U64 | None = None
    remedy: schema.Remedy = msgspec.UNSET
    rank: schema.Rank | msgspec.UnsetType = msgspec.UNSET


_hello_decoder = msgspec.msgpack.Decoder(Hello)
_error_decoder = msgspec.msgpack.Decoder(ErrorReport)


def hello_frame(hello: Hello) -> Frame:
    """Make the HELLO frame."""
    return Frame(kind=FrameKind.HELLO, meta=schema.encode(hello))


def read_hello(frame: Frame) -> Hello:
    """Read a HELLO frame. Raises RemoteProtocolError when it breaks the schema."""
    return schema.decode(_hello_decoder, frame)


def explanation(cause: BaseException | str, most_bytes: int = schema.MAX_EXPLANATION) -> str:
    """Return an error's text or another one as it may travel: valid UTF-8, at most `most_bytes`.

    For fields without a remedy beside them: the text of an error has its remedy at the end.
    """
    raw = str(cause).encode("utf-8", "replace")[:most_bytes]
    return raw.decode("utf-8", "ignore")


def explained(
    error: ShardnetError, most_bytes: int = schema.MAX_EXPLANATION
) -> tuple[str, str | msgspec.UnsetType]:
    """Return an error's message and its remedy as they may travel, each of at most `most_bytes`."""
    remedy = explanation(error.remedy, most_bytes) if error.remedy else msgspec.UNSET
    return explanation(error.message, most_bytes), remedy


def error_frame(
    error: ShardnetError, *, epoch: int = 0, step: int = 0, sequence: int | None = None
) -> Frame:
    """Make an ERROR frame: about a step or a sequence, or else about the link, which it ends."""
    message, remedy = explained(error)
    rank: int | msgspec.UnsetType = msgspec.UNSET
    if isinstance(error, WrongValuesError):
        rank, sequence = error.rank, error.sequence
    report = ErrorReport(
        code=error.code, message=message, sequence=sequence, remedy=remedy, rank=rank
    )
    return Frame(kind=FrameKind.ERROR, epoch=epoch, step=step, meta=schema.encode(report))


def read_error(frame: Frame) -> ErrorReport:
    """Read an ERROR frame. Raises RemoteProtocolError when it breaks the schema."""
    return schema.decode(_error_decoder, frame)
