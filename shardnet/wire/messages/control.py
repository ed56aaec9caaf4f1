"""Control messages as one: which there are, their frames, and the answers that any request may get.

Knows which messages may come in a CONTROL frame (docs/protocol.md section 8). Knows nothing of what
is done with them; their fields stand in messages/membership.py, messages/measurements.py,
stages.py, plans.py and generation.py.
"""

from __future__ import annotations

import msgspec

from shardnet.errors import ShardnetError, error_for_code
from shardnet.wire.framing.frames import Frame, FrameKind
from shardnet.wire.framing.schema import (
    U32,
    Address,
    Explanation,
    Remedy,
    RequestId,
    Tagged,
    decode,
    encode,
)
from shardnet.wire.messages.chat import DescribeTokenizer, TokenizerDescribed
from shardnet.wire.messages.generation import (
    Cancel,
    Finished,
    Generate,
    LastRun,
    LastRunRequest,
    RowsPiece,
    StateChanged,
    TextPiece,
    Unload,
)
from shardnet.wire.messages.handshake import ErrorReport
from shardnet.wire.messages.measurements import (
    LinksMeasured,
    MeasureLinks,
    MeasureStage,
    StageMeasured,
)
from shardnet.wire.messages.membership import (
    IdentifyModel,
    ListModels,
    ModelIdentity,
    ModelsListed,
    PeersKnown,
    Ping,
    ReportReply,
    ReportRequest,
    Status,
    StatusReply,
)
from shardnet.wire.messages.plans import NodeProgress, PlanReply, PlanRequest
from shardnet.wire.messages.stages import (
    ConnectRing,
    LoadProgress,
    LoadStage,
    RingBroken,
    StageReady,
    UnloadStage,
)


class Done(Tagged, frozen=True, kw_only=True):
    """Answers a request that has nothing to report."""

    request: RequestId


class Failed(Tagged, frozen=True, kw_only=True):
    """Answers any request: it failed. Codes are those of ERROR frames."""

    request: RequestId
    code: U32
    message: Explanation
    remedy: Remedy = msgspec.UNSET


class Redirect(Tagged, frozen=True, kw_only=True):
    """Ask the node at `address` instead: it is the ring's head."""

    request: RequestId
    address: Address


ControlMessage = (
    Status
    | StatusReply
    | Ping
    | PeersKnown
    | ReportRequest
    | ReportReply
    | IdentifyModel
    | ModelIdentity
    | ListModels
    | ModelsListed
    | MeasureStage
    | StageMeasured
    | MeasureLinks
    | LinksMeasured
    | LoadStage
    | LoadProgress
    | StageReady
    | ConnectRing
    | RingBroken
    | UnloadStage
    | Done
    | Failed
    | PlanRequest
    | PlanReply
    | LastRunRequest
    | LastRun
    | NodeProgress
    | Generate
    | StateChanged
    | Cancel
    | Unload
    | DescribeTokenizer
    | TokenizerDescribed
    | Redirect
    | TextPiece
    | RowsPiece
    | Finished
)


# --- between messages and frames ----------------------------------------------------------------

_decoder: msgspec.msgpack.Decoder[ControlMessage] = msgspec.msgpack.Decoder(ControlMessage)


def reported_error(report: ErrorReport | Failed, peer: str) -> ShardnetError:
    """Make the exception that a peer reported; its message begins with the name of the `peer`."""
    return error_for_code(report.code, f"{peer}: {report.message}", remedy=report.remedy or "")


def control_frame(message: ControlMessage) -> Frame:
    """Make a CONTROL frame."""
    return Frame(kind=FrameKind.CONTROL, meta=encode(message))


def read_control(frame: Frame) -> ControlMessage:
    """Read a CONTROL frame. Raises RemoteProtocolError when it breaks the schema."""
    return decode(_decoder, frame)
