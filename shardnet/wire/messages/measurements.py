"""Control messages about speed: what is measured of nodes and of the links between them.

Knows the fields, their types and their bounds (docs/protocol.md section 8). Knows nothing of how
anything is measured.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

from msgspec import Meta

from shardnet.types import PathText, Strict
from shardnet.wire.framing.frames import Limits
from shardnet.wire.framing.schema import (
    MAX_DEVICES,
    MAX_STAGES,
    Count,
    Explanation,
    Figure,
    Layers,
    LinkFigures,
    Moment,
    Name,
    Numbered,
    OfModel,
    Seconds,
    Threads,
)

MAX_PAYLOAD_BYTES: Final = Limits().data_payload_bytes


class MeasureStage(OfModel, frozen=True, kw_only=True):
    """Ask a node how fast it is with a model, with or without its checkpoint.

    `model` is where the checkpoint may be, for the speed of the disk. With `again` a figure that
    the node has kept does not do. LoadProgress precedes the answer.
    """

    model: PathText = ""
    again: bool = False


class StageSeconds(Strict, frozen=True, kw_only=True):
    """What a node needs for one model: a layer at 1 and at 256 rows, embedding, LM head.

    `step_s` is what a token costs it as head beside all computing.
    """

    layer_s: Seconds
    layer_256_s: Seconds
    embed_s: Seconds
    head_s: Seconds
    step_s: Seconds = 0.0


class DeviceMeasured(Strict, frozen=True, kw_only=True):
    """What one of several devices of a node has measured; `seconds` is null where it has not.

    `memory_bytes` is what a part of a stage may take there now.
    """

    name: Name
    memory_bytes: Count
    seconds: StageSeconds | None = None
    is_steady: bool = True


DevicesMeasured = Annotated[list[DeviceMeasured], Meta(max_length=MAX_DEVICES)]


class StageMeasured(Numbered, frozen=True, kw_only=True):
    """Answers MeasureStage. `measured_at_s` counts from 1970, by that node's clock.

    `memory_bytes` is what a stage may take now, `disk_bytes_per_s` null without a checkpoint there.
    `is_steady` is false if something else kept the device busy. A node of several `devices` tells
    of each; `seconds` are then the first one's, `memory_bytes` that of all, and `gather_s` is what
    it takes all of them to join the parts of one row, null where that was not measured.
    """

    seconds: StageSeconds
    kernel: Name
    threads: Threads
    measured_at_s: Moment
    is_steady: bool = True
    memory_bytes: Count
    disk_bytes_per_s: Figure | None = None
    devices: DevicesMeasured = []
    gather_s: Seconds | None = None


class StageObserved(OfModel, frozen=True, kw_only=True):
    """Tell a node how long its stage took for one token in a generation, `compute_s`.

    It corrects its figure where that says something else by far. `layers` are the stage's.
    `step_s` is for the head: what a token took beside computing and wire. Answered by Done.
    """

    layers: Layers
    compute_s: Seconds
    step_s: Seconds | None = None


class MeasureLinks(Numbered, frozen=True, kw_only=True):
    """Ask a node how fast its links to others are. Some minutes old figures do.

    `payload_bytes` is the size of the largest frame of the model at hand.
    """

    nodes: Annotated[list[Name], Meta(max_length=MAX_STAGES)]
    payload_bytes: Annotated[int, Meta(ge=0, le=MAX_PAYLOAD_BYTES)]
    again: bool = False


class LinkMeasured(LinkFigures, frozen=True, kw_only=True):
    """The way to `node`."""

    node: Name


class LinksMeasured(Numbered, frozen=True, kw_only=True):
    """Answers MeasureLinks, without the nodes that have no link or are at work."""

    links: Annotated[list[LinkMeasured], Meta(max_length=MAX_STAGES)]


class NodeMeasured(Strict, frozen=True, kw_only=True):
    """What a candidate of a plan has measured of the model; `why_not` where it has not.

    `memory_bytes` is what a stage may take there now, `isa` that of its NodeInfo, the last two as
    in StageMeasured.
    """

    node: Name
    name: Name
    memory_bytes: Count
    seconds: StageSeconds | None = None
    kernel: Name = ""
    threads: Threads = 0
    measured_at_s: Moment | None = None
    is_steady: bool = True
    disk_bytes_per_s: Figure | None = None
    why_not: Explanation = ""
    isa: Name = ""
    devices: DevicesMeasured = []
    gather_s: Seconds | None = None


class WayMeasured(LinkFigures, frozen=True, kw_only=True):
    """What was measured between two candidates of a plan; it counts for both directions."""

    sender: Name
    receiver: Name


MeasuringRequest: TypeAlias = MeasureStage | StageObserved | MeasureLinks
"""Requests about speed."""
MeasuringMessage: TypeAlias = MeasuringRequest | StageMeasured | LinksMeasured
"""These, their answers, and what is sent unasked."""
