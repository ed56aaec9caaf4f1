"""Control messages about copies: of a head's requests at its deputy, of programs' values elsewhere.

Knows the fields, their types and their bounds (docs/protocol.md section 8). Knows nothing of how a
ring is taken over, nor of what values mean.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

from msgspec import Meta

from shardnet.slot_operations import MAX_ADAPTERS
from shardnet.types import U32, Digest, Positions, Row, Strict, Tagged, TaggedReport
from shardnet.wire.framing import schema
from shardnet.wire.messages.extras import LikelyTokens
from shardnet.wire.messages.generation import Generate
from shardnet.wire.messages.plans import ModelChoice
from shardnet.wire.messages.stages import RingAdapter

MAX_COPIED_TOKENS: Final = 1024
"""In one row of TokensCopied."""
MAX_COPIED_ROWS: Final = 4096
MAX_VALUE: Final = 2 << 20
"""Most bytes of one value; what is larger is kept in parts."""
MAX_LISTED_VALUE: Final = 16 << 10
MAX_VALUES_LISTED: Final = 1024
MAX_LISTED_BYTES: Final = 3 << 20
"""Most bytes of all values in one list, which travels in one frame."""


class RingNode(Strict, frozen=True, kw_only=True):
    """A node of a ring, and where its head reaches it."""

    node: schema.Name
    address: schema.Address


class StandBy(Tagged, frozen=True, kw_only=True):
    """Tell a node, unasked, that it is the deputy of the sender, which leads a ring.

    It takes over when the sender is lost, with the checkpoint `model_id` alone. `nodes` are those
    of the ring in order, the sender first; the other fields are what its plan has settled on, and
    what its `adapters` are in all layers. Each replaces the one before.
    """

    epoch: U32
    choice: ModelChoice
    model_id: Digest
    dtype: schema.Name
    arith: schema.ArithName
    context: Positions
    nodes: Annotated[list[RingNode], Meta(max_length=schema.MAX_STAGES)]
    adapters: Annotated[list[RingAdapter], Meta(max_length=MAX_ADAPTERS)] = []


class RequestCopied(Tagged, frozen=True, kw_only=True):
    """Tell the deputy, unasked, of a request with a key; its prompt is `token_ids`."""

    generate: Generate


class CopiedToken(Row, frozen=True, array_like=True):
    """A token of an answer, with its logprob and the likeliest ones where those were asked for."""

    token_id: U32
    logprob: schema.Logprob | None
    top: LikelyTokens


class CopiedTokens(Row, frozen=True, array_like=True):
    """The tokens of the answer to `key` from number `first` on.

    `end` says whether more will come, it is complete, its client has left, or it failed.
    """

    key: schema.RequestKey
    first: U32
    tokens: Annotated[list[CopiedToken], Meta(max_length=MAX_COPIED_TOKENS)]
    end: Literal["", "complete", "left", "failed"]


class TokensCopied(Tagged, frozen=True, kw_only=True):
    """Tell the deputy, unasked, what was made since the last one."""

    rows: Annotated[list[CopiedTokens], Meta(max_length=MAX_COPIED_ROWS)]


class TakeOver(schema.Numbered, frozen=True, kw_only=True):
    """Tell the deputy to take over: the sender ends, and has let go of the ring."""


class TakenOver(TaggedReport, frozen=True, kw_only=True):
    """Tell a former head, unasked, that the sender leads in its place, from `epoch` on."""

    epoch: U32


class StandByRefused(TaggedReport, frozen=True, kw_only=True):
    """Tell a head, unasked, that the sender does not stand by for it, and why."""

    why: schema.Explanation


class FindNode(schema.Numbered, frozen=True, kw_only=True):
    """Ask a node whether it has a control link to another one, and stands by for it."""

    node: schema.Name


class NodeFound(schema.Reply, frozen=True, kw_only=True):
    """Answers FindNode. It `stands_by` where it has copies of requests that run there."""

    is_linked: bool
    stands_by: bool = False


class FindAnswer(schema.Numbered, frozen=True, kw_only=True):
    """Ask a node whether it has the answer to a Generate with `key`, its own or copied there."""

    key: schema.RequestKey


class AnswerFound(schema.Reply, frozen=True, kw_only=True):
    """Answers FindAnswer."""

    is_kept: bool


class CopiedTo(schema.Reply, frozen=True, kw_only=True):
    """Tells a client that what its Generate makes is copied to the node at `address`.

    If the link ends, Resume there has the rest.
    """

    address: schema.Address


class Resume(schema.Numbered, frozen=True, kw_only=True):
    """Ask for the rest of the answer to a Generate that had `key`, from token `n_tokens` on.

    Answered as that was, or by Redirect.
    """

    key: schema.RequestKey
    n_tokens: U32 = 0


class ValueName(Strict, frozen=True, kw_only=True):
    """What a value is found by: `owner` is the name of the API key that it came with."""

    owner: schema.Name
    name: schema.Name


class KeepValue(schema.Numbered, frozen=True, kw_only=True):
    """Have a node keep a value in memory, in place of the one of this name.

    One that a client sends is copied to one more node. Answered by Done.
    """

    of: ValueName
    value: Annotated[bytes, Meta(max_length=MAX_VALUE)]


class FindValue(schema.Numbered, frozen=True, kw_only=True):
    """Ask for a value. For a client the node asks others, where it has none itself.

    Answered by ValueFound.
    """

    of: ValueName


class ValueFound(schema.Reply, frozen=True, kw_only=True):
    """Answers FindValue; null where nobody has one."""

    value: Annotated[bytes, Meta(max_length=MAX_VALUE)] | None


class ListValues(schema.Numbered, frozen=True, kw_only=True):
    """Ask for the owner's small values whose names begin with that of `of`.

    For a client the node asks all others, too. Answered by ValuesListed.
    """

    of: ValueName


class ListedValue(Row, frozen=True, array_like=True):
    """A value, and how long ago it came to whoever has the latest."""

    name: schema.Name
    age_s: schema.Seconds
    value: Annotated[bytes, Meta(max_length=MAX_LISTED_VALUE)]


class ValuesListed(schema.Reply, frozen=True, kw_only=True):
    """Answers ListValues: the latest, as many as fit."""

    values: Annotated[list[ListedValue], Meta(max_length=MAX_VALUES_LISTED)]


class DropValue(schema.Numbered, frozen=True, kw_only=True):
    """Have a node keep a value no longer; for a client, all nodes. Answered by Done."""

    of: ValueName


DeputyRequest: TypeAlias = (
    TakeOver | FindNode | FindAnswer | KeepValue | FindValue | ListValues | DropValue | Resume
)
"""Requests about copies at deputies, and values at nodes."""
DeputyMessage: TypeAlias = (
    DeputyRequest
    | StandBy
    | RequestCopied
    | TokensCopied
    | TakenOver
    | StandByRefused
    | NodeFound
    | AnswerFound
    | ValueFound
    | ValuesListed
    | CopiedTo
)
"""These, their answers, and what is sent unasked."""
