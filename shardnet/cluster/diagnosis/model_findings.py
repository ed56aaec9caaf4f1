"""Findings about a model: does it fit these nodes, on which, and is it where it should be.

Pure. Uses the planner's own figures and words, so that doctor and plan agree.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardnet.cluster.diagnosis.facts import (
    Facts,
    Finding,
    ModelAsked,
    good,
    hint,
    problem,
)
from shardnet.cluster.placement.figures import CandidateNode, ModelShape
from shardnet.cluster.placement.room import StageRole, rooms_of, shortest_ring
from shardnet.cluster.placement.words import shortfall_words, size
from shardnet.types import LayerRange, NodeId
from shardnet.wire.messages.membership import ReportReply

_NO_FOLDER = "check the path, or fetch a model of the Hub with `shardnet pull`"


def model_findings(facts: Facts) -> Iterator[Finding]:
    """Judge the nodes by the model that was named, if one was."""
    asked = facts.model
    if asked is None:
        return
    if asked.shape is None:
        yield problem("model", asked.model, asked.failure, asked.remedy or _NO_FOLDER)
        return
    yield _memory(facts, asked, asked.shape)
    for reply in facts.replies:
        yield from _checkpoint(facts, asked, asked.shape, reply)


def _memory(facts: Facts, asked: ModelAsked, shape: ModelShape) -> Finding:
    candidates = [
        CandidateNode(
            node=NodeId(i.node),
            name=facts.label(i.node),
            memory_bytes=i.memory_bytes,
            shape=asked.shapes.get(NodeId(i.node)),
        )
        for i in facts.infos
    ]
    rooms = rooms_of([candidate.held(shape) for candidate in candidates])
    dtype = f" in {asked.dtype.value}" if asked.dtype is not None else ""
    needs = (
        f"needs {size(shape.memory_bytes(shape.whole))} with a context of {shape.context}{dtype}"
    )
    if not candidates:
        return good("model", asked.model, f"{needs}; no node was there to ask")
    alone = [
        c.name
        for c, room in zip(candidates, rooms, strict=True)
        if room[StageRole.ALONE] >= shape.n_layers
    ]
    if alone:
        return good("model", asked.model, f"{needs}: fits alone on {', '.join(alone)}")
    ring = shortest_ring(rooms, shape.n_layers)
    if ring is None:
        return problem("model", asked.model, shortfall_words(shape, candidates))
    names = ", ".join(f"{candidates[n].name} ({size(candidates[n].memory_bytes)})" for n in ring)
    return good("model", asked.model, f"{needs}: fits on no node alone, together on {names}")


def _checkpoint(
    facts: Facts, asked: ModelAsked, shape: ModelShape, reply: ReportReply
) -> Iterator[Finding]:
    """Report whether a node has the checkpoint, else whether its disk has room for its part."""
    report, info, where = reply.report, reply.info, facts.label(reply.node)
    if report is None or info is None:
        return
    if report.model_id == asked.model_id:
        yield good("model", where, f"has the checkpoint {asked.model}")
    elif report.model_id:
        yield problem(
            "model",
            where,
            f"{asked.model} is another model there: {report.model_id[:12]}, and "
            f"{asked.model_id[:12]} here",
            "copy one checkpoint to both",
        )
    else:
        part = min(_weight_bytes(shape), info.memory_bytes)
        what = f"it has no checkpoint of its own: {report.model_failure}"
        if _somebody_has(facts, asked):
            what = f"it has not got {asked.model}, and takes its part from a node that has"
        if report.disk_free_bytes is not None and report.disk_free_bytes < part:
            yield problem(
                "model",
                where,
                f"{what}; and its disk has {size(report.disk_free_bytes)} free, its part may take "
                f"{size(part)}",
                "free some space there",
            )
        else:
            yield hint("model", where, what)


def _somebody_has(facts: Facts, asked: ModelAsked) -> bool:
    return any(r.report.model_id == asked.model_id for r in facts.replies if r.report is not None)


def _weight_bytes(shape: ModelShape) -> int:
    return shape.weight_bytes(LayerRange(0, shape.n_layers))
