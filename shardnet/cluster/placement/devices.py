"""Nodes of several devices among those that a model is placed on.

Knows that to those who place stages such a node is one node, and divides its layers afterwards.
Pure. Must not know how devices are driven, nor how a ring is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from shardnet.cluster.placement.device_cuts import (
    HANDOVER_S,
    DeviceCut,
    Seat,
    best_cut,
    cut_over,
    cuts,
    seatings,
)
from shardnet.cluster.placement.figures import (
    CandidateNode,
    ModelShape,
    NodeDevices,
    Objective,
    Placement,
    StagePlan,
    StageSpeed,
)
from shardnet.cluster.placement.room import Room, StageRole, room_of
from shardnet.cluster.placement.spans import gather_s
from shardnet.cluster.placement.words import ms_words
from shardnet.types import LayerRange

_TURNS = 3


def as_one(
    candidate: CandidateNode,
    devices: NodeDevices,
    layers: LayerRange | None,
    n_layers: int,
    objective: Objective,
) -> CandidateNode:
    """Return what a node of these devices is to those that place stages on nodes.

    It is as fast for each layer as the best cut of `layers` makes it, of as many as it has room for
    where there are none. Its memory is such that no more layers seem to fit than do.
    """
    shape = devices.each[0].held.shape
    room = _room(devices, n_layers)
    memory_bytes = _memory_bytes(shape, room, n_layers)
    if not devices.is_measured:
        return replace(candidate, memory_bytes=memory_bytes, speed=None, shape=shape)
    if layers is None:
        whole = LayerRange(0, n_layers)
        n_fitting = max(1, room[StageRole.MIDDLE])
        layers = whole if room[StageRole.ALONE] else LayerRange(1, 1 + min(n_fitting, n_layers))
    cut = cut_over(layers, n_layers, devices, objective)
    if cut is None:
        return replace(candidate, memory_bytes=memory_bytes, speed=None, shape=shape)
    return replace(
        candidate, memory_bytes=memory_bytes, speed=_speed(cut, layers, objective), shape=shape
    )


def first_device(candidate: CandidateNode) -> CandidateNode:
    """Return a node as if it had its first device alone."""
    if candidate.devices is None:
        return candidate
    first = candidate.devices.each[0]
    return replace(
        candidate,
        memory_bytes=first.held.memory_bytes,
        speed=first.speed,
        shape=first.held.shape,
        devices=None,
    )


def place_over_devices(
    place_on: Callable[[Sequence[CandidateNode]], Placement],
    candidates: Sequence[CandidateNode],
    n_layers: int,
    objective: Objective,
) -> Placement:
    """Place a model on nodes of which some have several devices, and divide their layers.

    `place_on` places it on nodes of one device each. How fast a node is for a layer depends on how
    many it gets: that is found in a few turns. Raises what `place_on` raises.
    """
    placement = place_on(candidates)
    for _ in range(_TURNS):
        got = {stage.node: stage.layers for stage in placement.stages if not stage.shards}
        weighed = [
            as_one(each, each.devices, got[each.node], n_layers, objective)
            if each.devices is not None and each.node in got
            else each
            for each in candidates
        ]
        again = placement if weighed == [*candidates] else place_on(weighed)
        is_settled = [stage.layers for stage in again.stages] == [
            stage.layers for stage in placement.stages
        ]
        placement, candidates = again, weighed
        if is_settled:
            break
    return with_parts(placement, candidates, n_layers, objective)


def with_parts(
    placement: Placement,
    candidates: Sequence[CandidateNode],
    n_layers: int,
    objective: Objective,
) -> Placement:
    """Say for each stage of a node with several devices which of them has what, and why."""
    by_node = {each.node: each for each in candidates}
    stages, whys, saved_s = [], [placement.why], 0.0
    for stage in placement.stages:
        node = by_node.get(stage.node)
        devices = None if node is None else node.devices
        cut = None
        if devices is not None and not stage.n_streamed and not stage.shards:
            cut = cut_over(stage.layers, n_layers, devices, objective)
        if cut is None or devices is None or node is None:
            stages.append(stage)
            continue
        compute_s = cut.compute_s if devices.is_measured else None
        saved_s += (stage.compute_s or 0.0) - (compute_s or 0.0)
        words = cut_words(stage, cut, n_layers, devices, objective)
        whys.append(words if len(placement.stages) == 1 else f"{node.name}: {words}")
        stages.append(
            replace(
                stage,
                weight_bytes=sum(part.weight_bytes for part in cut.parts),
                kv_bytes=sum(part.kv_bytes for part in cut.parts),
                compute_s=compute_s,
                parts=cut.parts,
                parts_why=words,
            )
        )
    tok_s = placement.predicted_tok_s
    if tok_s is not None and objective is Objective.LATENCY:
        tok_s = 1 / max(1e-9, 1 / tok_s - saved_s)
    why = "; ".join(whys)
    return replace(placement, stages=tuple(stages), predicted_tok_s=tok_s, why=why)


def _room(devices: NodeDevices, n_layers: int) -> Room:
    """Count the layers that the devices have room for together, by the role of their node."""
    most = [0, 0, 0, 0]
    for seats in seatings(devices):
        rooms = [room_of(seat.held.shape, seat.held.memory_bytes) for seat in seats]
        middle = [room[StageRole.MIDDLE] for room in rooms]
        first, last = rooms[0][StageRole.FIRST], rooms[-1][StageRole.LAST]
        alone = rooms[0][StageRole.ALONE] if len(rooms) == 1 else 0
        if len(rooms) > 1 and first and last and first + last + sum(middle[1:-1]) >= n_layers:
            alone = n_layers
        found = (
            min(n_layers - 2, sum(middle)),
            min(n_layers - 1, first + sum(middle[1:])) if first else 0,
            min(n_layers - 1, sum(middle[:-1]) + last) if last else 0,
            alone,
        )
        most = [max(0, *pair) for pair in zip(most, found, strict=True)]
    return (most[0], most[1], most[2], most[3])


def _memory_bytes(shape: ModelShape, room: Room, n_layers: int) -> int:
    """Return the largest memory of one device in which no more layers would fit than in `room`."""
    if room[StageRole.ALONE]:
        return shape.memory_bytes(shape.whole)
    limits: list[float] = [shape.memory_bytes(shape.whole) - 1]
    if room[StageRole.MIDDLE] < n_layers - 2:
        limits.append(shape.most_memory_bytes(1 + room[StageRole.MIDDLE]) - 1)
    if room[StageRole.FIRST] < n_layers - 1:
        limits.append(shape.memory_bytes(LayerRange(0, room[StageRole.FIRST] + 1)) - 1)
    if room[StageRole.LAST] < n_layers - 1:
        start = n_layers - room[StageRole.LAST] - 1
        limits.append(shape.memory_bytes(LayerRange(start, n_layers)) - 1)
    return max(0, math.floor(min(limits)))


def _speed(cut: DeviceCut, layers: LayerRange, objective: Objective) -> StageSpeed:
    """Return the speed of a node that computes `layers` so."""
    first, last, n = cut.seats[0].speed, cut.seats[-1].speed, len(layers)
    counts = [len(part.layers) for part in cut.parts]
    each = [c * seat.speed.layer_s for c, seat in zip(counts, cut.seats, strict=True)]
    many = [c * seat.speed.layer_256_s for c, seat in zip(counts, cut.seats, strict=True)]
    handed_s = HANDOVER_S * (len(counts) - 1)
    is_latency = objective is Objective.LATENCY
    return StageSpeed(
        layer_s=((sum(each) + handed_s) if is_latency else max(each)) / n,
        layer_256_s=(sum(many) + handed_s) / n,
        embed_s=first.embed_s,
        head_s=last.head_s,
        step_s=first.step_s,
        is_steady=all(seat.speed.is_steady for seat in cut.seats),
    )


def cut_words(
    stage: StagePlan,
    chosen: DeviceCut,
    n_layers: int,
    devices: NodeDevices,
    objective: Objective,
) -> str:
    """Explain which cut was chosen for a stage, against the best of every other kind."""
    words = _words_of(chosen, devices)
    if not devices.is_measured:
        return f"{words} (its devices are not measured yet)"
    words += f": about {ms_words(chosen.cost_s)}"
    kinds: dict[tuple[int, bool], list[DeviceCut]] = {}
    for cut in cuts(stage.layers, n_layers, devices, objective):
        kinds.setdefault((cut.n_shards, len(cut.seats) > 1), []).append(cut)
    kinds.pop((chosen.n_shards, len(chosen.seats) > 1), None)
    best = [best_cut(alike, devices) for alike in kinds.values()]
    others = sorted(filter(None, best), key=lambda cut: cut.cost_s)
    told = [f"{_words_of(cut, devices)}: {ms_words(cut.cost_s)}" for cut in others]
    shared = [cut for cut in (chosen, *others) if cut.n_shards > 1]
    if shared:
        told.append(_gather_words(shared[0], stage.layers, devices))
    elif devices.why_not_shared:
        told.append(f"no layer is shared, since {devices.why_not_shared}")
    left = [
        device.name
        for place, device in enumerate(devices.each)
        if not any(place in seat.devices for seat in chosen.seats)
    ]
    if left:
        told.append(f"{' and '.join(left)} would only slow it down")
    return "; ".join([words, *told])


def _words_of(cut: DeviceCut, devices: NodeDevices) -> str:
    """Name a cut: `layers cut over cuda:0 (20) and cpu (4)`."""

    def seat_words(seat: Seat) -> str:
        return "+".join(devices.each[place].name for place in seat.devices)

    if len(cut.seats) == 1:
        names = seat_words(cut.seats[0])
        return f"each layer shared by {names}" if cut.n_shards > 1 else f"all layers on {names}"
    parts = [
        f"{seat_words(seat)} ({len(part.layers)})"
        for seat, part in zip(cut.seats, cut.parts, strict=True)
    ]
    shared = ", each shared by those joined with +" if cut.n_shards > 1 else ""
    return f"layers cut over {' and '.join(parts)}{shared}"


def _gather_words(cut: DeviceCut, layers: LayerRange, devices: NodeDevices) -> str:
    """Say what it costs to share layers: its gathers, and heads that do not divide."""
    shape, n_shards = cut.seats[0].held.shape, cut.n_shards
    if devices.gather is None or shape.gathers is None:
        return "what its gathers cost is not measured"
    sizes = shape.gathers.of(layers, n_shards)
    total_s = sum(gather_s(devices.gather, n_shards, size) for size in sizes)
    words = f"its {len(sizes)} gathers take about {ms_words(total_s)}"
    if n_shards in devices.whole_heads:
        words += f", and {n_shards} shards do not divide the heads: each computes all attention"
    return words
