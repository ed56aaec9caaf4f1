"""Control messages about speed: what is measured of nodes and of the links between them.

Knows the fields, their types and their bounds (docs/protocol.md section 8). Knows nothing of how
anything is measured.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

from msgspec import Meta

from shardnet.types import PathText, Report
from shardnet.wire.framing import schema
from shardnet.wire.framing.frames import LIMITS, FrameKind

MAX_PAYLOAD_BYTES: Final = LIMITS[FrameKind.DATA][1]


class MeasureStage(schema.OfModel, frozen=True, kw_only=True):
    """Ask a node how fast it is with a model, with or without its checkpoint.

    `model` is where the checkpoint may be, for the speed of the disk. With `again` a figure that
    the node has kept does not do. LoadProgress precedes the answer.
    """

    model: PathText = ""
    again: bool = False


class StageSeconds(Report, frozen=True, kw_only=True):
    """What a node needs for one model: a layer at 1 and at 256 rows, embedding, LM head.

    `step_s` is what a token costs it as head beside all computing, `read_bytes_per_s` what plain
    reads of its memory reach, null where that was not measured.
    """

    layer_s: schema.Seconds
    layer_256_s: schema.Seconds
    embed_s: schema.Seconds
    head_s: schema.Seconds
    step_s: schema.Seconds = 0.0
    read_bytes_per_s: schema.Figure | None = None


class DeviceMeasured(Report, frozen=True, kw_only=True):
    """What one of several devices of a node has measured; `seconds` is null where it has not.

    `memory_bytes` is what a part of a stage may take there now.
    """

    name: schema.Name
    memory_bytes: schema.Count
    seconds: StageSeconds | None = None
    is_steady: bool = True


DevicesMeasured = Annotated[list[DeviceMeasured], Meta(max_length=schema.MAX_DEVICES)]


class StageMeasured(schema.Reply, frozen=True, kw_only=True):
    """Answers MeasureStage. `measured_at_s` counts from 1970, by that node's clock.

    `memory_bytes` is what a stage may take now, `disk_bytes_per_s` null without a checkpoint there.
    `is_steady` is false if something else kept the device busy. A node of several `devices` tells
    of each; `seconds` are then the first one's, `memory_bytes` that of all, and `gather_s` is what
    it takes all of them to join the parts of one row, null where that was not measured.
    """

    seconds: StageSeconds
    kernel: schema.Name
    threads: schema.Threads
    measured_at_s: schema.Moment
    is_steady: bool = True
    memory_bytes: schema.Count
    disk_bytes_per_s: schema.Figure | None = None
    devices: DevicesMeasured = []
    gather_s: schema.Seconds | None = None


class StageObserved(schema.OfModel, frozen=True, kw_only=True):
    """Tell a node how long its stage took for one token in a generation, `compute_s`.

    It corrects its figure where that says something else by far. `layers` are the stage's.
    `step_s` is for the head: what a token took beside computing and wire. Answered by Done.
    """

    layers: schema.Layers
    compute_s: schema.Seconds
    step_s: schema.Seconds | None = None


class MeasureLinks(schema.Numbered, frozen=True, kw_only=True):
    """Ask a node how fast its links to others are. Some minutes old figures do.

    `payload_bytes` is the size of the largest frame of the model at hand.
    """

    nodes: Annotated[list[schema.Name], Meta(max_length=schema.MAX_STAGES)]
    payload_bytes: Annotated[int, Meta(ge=0, le=MAX_PAYLOAD_BYTES)]
    again: bool = False


class LinkMeasured(schema.LinkFigures, frozen=True, kw_only=True):
    """The way to `node`."""

    node: schema.Name


class LinksMeasured(schema.Reply, frozen=True, kw_only=True):
    """Answers MeasureLinks, without the nodes that have no link or are at work."""

    links: Annotated[list[LinkMeasured], Meta(max_length=schema.MAX_STAGES)]


class NodeMeasured(Report, frozen=True, kw_only=True):
    """What a candidate of a plan has measured of the model; `why_not` where it has not.

    `memory_bytes` is what a stage may take there now, `isa` that of its NodeInfo, the last two as
    in StageMeasured.
    """

    node: schema.Name
    name: schema.Name
    memory_bytes: schema.Count
    seconds: StageSeconds | None = None
    kernel: schema.Name = ""
    threads: schema.Threads = 0
    measured_at_s: schema.Moment | None = None
    is_steady: bool = True
    disk_bytes_per_s: schema.Figure | None = None
    why_not: schema.Explanation = ""
    isa: schema.Name = ""
    devices: DevicesMeasured = []
    gather_s: schema.Seconds | None = None


class WayMeasured(schema.LinkFigures, frozen=True, kw_only=True):
    """What was measured between two candidates of a plan; it counts for both directions."""

    sender: schema.Name
    receiver: schema.Name


MeasuringRequest: TypeAlias = MeasureStage | StageObserved | MeasureLinks
"""Requests about speed."""
MeasuringMessage: TypeAlias = MeasuringRequest | StageMeasured | LinksMeasured
"""These, their answers, and what is sent unasked."""
