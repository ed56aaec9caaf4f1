"""What would be: the plan with or without nodes, settings for programs; and what is wrong."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from shardnet.api.dashboard.node_history import NodeHistory
from shardnet.api.programs import KEY_PLACEHOLDER, PROGRAMS, Served
from shardnet.api.server.errors import refused
from shardnet.cluster.diagnosis.facts import Finding
from shardnet.types import MAX_POSITIONS
from shardnet.wire.framing.schema import MAX_STAGES
from shardnet.wire.messages.plans import LeftOut, PlanReply

NodeIds = Annotated[list[Annotated[str, Meta(max_length=256)]], Meta(max_length=MAX_STAGES)]
Context = Annotated[int, Meta(ge=0, le=MAX_POSITIONS)]
Text = Annotated[str, Meta(max_length=4096)]


class PlanBody(msgspec.Struct, kw_only=True):
    """Which plan is wanted: ids of nodes that it may not use, or has to, in that order."""

    model: Text = ""
    leave_out: NodeIds = []
    nodes: NodeIds = []
    context: Context = 0


class PreviewStage(msgspec.Struct, kw_only=True):
    """A stage as it would be."""

    rank: int
    node: str
    name: str
    layers: tuple[int, int]
    weight_bytes: int
    kv_bytes: int
    compute_ms: float | None
    hop_ms: float | None
    streamed_layers: int
    fetch_bytes: int
    fetch_s: float | None


class PlanPreview(msgspec.Struct, kw_only=True):
    """A plan."""

    model: str
    context: int
    dtype: str
    wire_dtype: str
    predicted_tok_s: float | None
    why: str
    warnings: list[str]
    stages: list[PreviewStage]
    left_out: list[LeftOut]


class ProgramsBody(msgspec.Struct, kw_only=True):
    """Where the server is as programs see it, and what they are to ask for."""

    url: Annotated[str, Meta(max_length=2048)]
    model: Text = ""
    api_key: Annotated[str, Meta(max_length=1024)] = ""
    context: Context = 0


class ProgramSettings(msgspec.Struct, kw_only=True):
    """The settings of one program: a text, and where it belongs."""

    name: str
    where: str
    text: str
    note: str | None


class AllPrograms(msgspec.Struct, kw_only=True):
    """The settings of every program."""

    programs: list[ProgramSettings]


class Findings(msgspec.Struct, kw_only=True):
    """All findings, problems first."""

    findings: list[Finding]


def addresses(history: NodeHistory, nodes: list[str]) -> list[str]:
    """Return the addresses of nodes by their ids. Raises HttpError 400 for an unknown one."""
    found = [history.address_of(node) for node in nodes]
    for place, address in enumerate(found):
        if not address:
            raise refused(f"there is no node '{nodes[place][:64]}' now", f"nodes[{place}]")
    return found


def preview(plan: PlanReply) -> PlanPreview:
    """Show a plan."""
    return msgspec.convert(plan, PlanPreview, from_attributes=True)


def program_settings(url: str, *, model: str, key: str, context: int) -> AllPrograms:
    """Write the settings of every program for a server at `url`."""
    served = Served(url=url, key=key or KEY_PLACEHOLDER, model=model, context=context)
    return AllPrograms(
        programs=[
            ProgramSettings(
                name=name,
                where=program.where,
                text=program.write(served),
                note=program.note or None,
            )
            for name, program in PROGRAMS.items()
        ]
    )
