"""Control messages as one: which there are, their frames, and the answers that any request may get.

Knows which messages may come in a CONTROL frame (docs/protocol.md section 8). Knows nothing of what
is done with them; their fields stand in messages/membership.py, messages/measurements.py,
stages.py, plans.py, generation.py and activity.py.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from shardnet.errors import ContextExceededError, ShardnetError, error_for_code
from shardnet.types import U32, U32_MAX, Tagged
from shardnet.wire.framing.frames import Frame, FrameKind
from shardnet.wire.framing.schema import (
    Address,
    Explanation,
    Remedy,
    Reply,
    decode,
    encode,
)
from shardnet.wire.messages.activity import ActivityMessage
from shardnet.wire.messages.chat import DescribeTokenizer, TokenizerDescribed
from shardnet.wire.messages.deputies import DeputyMessage
from shardnet.wire.messages.drafting import DraftMessage
from shardnet.wire.messages.generation import TextMessage
from shardnet.wire.messages.handshake import ErrorReport, explained
from shardnet.wire.messages.household import HouseholdMessage
from shardnet.wire.messages.measurements import MeasuringMessage
from shardnet.wire.messages.membership import MembershipMessage
from shardnet.wire.messages.plans import NodeProgress, PlanReply, PlanRequest
from shardnet.wire.messages.stages import StageMessage
from shardnet.wire.messages.updates import UpdateMessage


class Done(Reply, frozen=True, kw_only=True):
    """Answers a request that has nothing to report."""


class Failed(Reply, frozen=True, kw_only=True):
    """Answers any request: it failed. Codes are those of ERROR frames.

    `n_prompt` and `n_context` are the counts of a ContextExceededError.
    """

    code: U32
    message: Explanation
    remedy: Remedy = msgspec.UNSET
    n_prompt: U32 | msgspec.UnsetType = msgspec.UNSET
    n_context: U32 | msgspec.UnsetType = msgspec.UNSET


class Redirect(Reply, frozen=True, kw_only=True):
    """Ask the node at `address` instead: it is the ring's head.

    In the middle of an answer the rest is asked for there: by Resume where it is copied, else by
    Generate with what has come as `made`.
    """

    address: Address


ControlMessage = (
    ActivityMessage
    | DeputyMessage
    | DraftMessage
    | HouseholdMessage
    | TextMessage
    | MeasuringMessage
    | MembershipMessage
    | StageMessage
    | UpdateMessage
    | Done
    | Failed
    | PlanRequest
    | PlanReply
    | NodeProgress
    | DescribeTokenizer
    | TokenizerDescribed
    | Redirect
)


# --- between messages and frames ----------------------------------------------------------------

_decoder: msgspec.msgpack.Decoder[ControlMessage] = msgspec.msgpack.Decoder(ControlMessage)


def reported_error(report: ErrorReport | Failed, peer: str) -> ShardnetError:
    """Make the exception that a peer reported; its message begins with the name of the `peer`."""
    error = error_for_code(report.code, f"{peer}: {report.message}", remedy=report.remedy or "")
    error.peer = peer
    if isinstance(error, ContextExceededError) and isinstance(report, Failed):
        error.n_prompt, error.n_context = report.n_prompt or 0, report.n_context or 0
    return error


def failed(request: int, error: ShardnetError) -> Failed:
    """Make the answer to a request that ended with `error`."""
    message, remedy = explained(error)
    answer = Failed(request=request, code=error.code, message=message, remedy=remedy)
    if isinstance(error, ContextExceededError):
        n_prompt = min(error.n_prompt, U32_MAX)
        return replace(answer, n_prompt=n_prompt, n_context=error.n_context)
    return answer


def control_frame(message: Tagged) -> Frame:
    """Make a CONTROL frame of a ControlMessage."""
    return Frame(kind=FrameKind.CONTROL, meta=encode(message))


def read_control(frame: Frame) -> ControlMessage:
    """Read a CONTROL frame. Raises RemoteProtocolError when it breaks the schema."""
    return decode(_decoder, frame)
