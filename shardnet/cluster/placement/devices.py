"""Nodes of several devices among those that a model is placed on.

Knows that to those who place stages such a node is one node, and divides its layers afterwards:
layers are cut between devices, or each is shared by several. A device is left out where the node is
much faster without it. Who names devices wants them at work: one that costs next to nothing stays,
for its memory and for the next micro-batch. Pure. Must not know how devices are driven, nor how a
ring is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

from shardnet.cluster.placement import figures
from shardnet.cluster.placement.estimate import ASSUMED_MEMORY_BYTES_PER_S, speed_by_bytes
from shardnet.cluster.placement.room import Room, StageRole, room_of
from shardnet.cluster.placement.spans import gather_s
from shardnet.cluster.placement.split import Problem, best_split, ranges_of
from shardnet.cluster.placement.words import ms_words
from shardnet.types import LayerRange

HANDOVER_S = 1e-4
"""What it takes to hand a row from one device's thread to the next one's."""
WITHIN = 0.05
"""A cut over more devices may take so much longer than the best one."""
MOST_ORDERS = 4
"""Up to so many devices every order of them is tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A device, or several that share each of their layers; `devices` are their places."""

    devices: tuple[int, ...]
    held: figures.HeldModel
    speed: figures.StageSpeed


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCut:
    """A stage on some of a node's devices, in seconds for one row; `cost_s` is the objective's.

    `layers_s` are without embedding and LM head.
    """

    parts: tuple[figures.PartPlan, ...]
    seats: tuple[Seat, ...]
    compute_s: float
    cost_s: float

    @property
    def n_devices(self) -> int:
        """How many devices compute."""
        return sum(len(seat.devices) for seat in self.seats)

    @property
    def n_shards(self) -> int:
        """How many of them share each layer."""
        return max(len(seat.devices) for seat in self.seats)


def cut_over(
    layers: LayerRange, n_layers: int, devices: figures.NodeDevices, objective: figures.Objective
) -> DeviceCut | None:
    """Return the best way to compute `layers` of a model with `n_layers`; None if none has room.

    Without figures the fewest devices that hold them, unless it was asked how many share a layer.
    """
    return best_cut(cuts(layers, n_layers, devices, objective), devices)


def cuts(
    layers: LayerRange, n_layers: int, devices: figures.NodeDevices, objective: figures.Objective
) -> list[DeviceCut]:
    """Return the ways to compute `layers` on these devices that have room for them."""
    found = [
        _cut(layers, n_layers, devices, seats, objective)
        for seats in seatings(devices)
        if len(seats) <= len(layers)
    ]
    return [cut for cut in found if cut is not None]


def best_cut(found: Sequence[DeviceCut], devices: figures.NodeDevices) -> DeviceCut | None:
    """Return the best cut; of those that were asked for, one over as many devices as can be."""
    if not found:
        return None
    if devices.tensor_parallel:
        most = max(cut.n_devices for cut in found)
        return min((cut for cut in found if cut.n_devices == most), key=lambda cut: cut.cost_s)
    if not devices.is_measured:
        return min(found, key=lambda cut: (cut.n_devices, cut.cost_s))
    best_s = min(cut.cost_s for cut in found)
    good = [cut for cut in found if cut.cost_s <= best_s * (1 + WITHIN)]
    return min(good, key=lambda cut: (-cut.n_devices, cut.cost_s))


def seatings(devices: figures.NodeDevices) -> Iterator[Sequence[Seat]]:
    """List which devices compute, in which order, and how many of them share each layer."""
    n_devices = len(devices.each)
    asked = devices.tensor_parallel
    for n_shards in range(1, n_devices + 1):
        if n_devices % n_shards or (asked and n_shards != asked):
            continue
        is_known = devices.is_measured and devices.gather is not None
        if n_shards > 1 and not asked and (not is_known or devices.why_not_shared):
            continue
        places = range(0, n_devices, n_shards)
        seats = [_seat(devices, range(place, place + n_shards)) for place in places]
        yield from _orders(seats)


def _orders(seats: Sequence[Seat]) -> Iterator[Sequence[Seat]]:
    """List orders of some or all seats, without those that are like another one."""
    if len(seats) > MOST_ORDERS:
        by_speed = sorted(seats, key=lambda seat: seat.speed.layer_s)
        for n in range(1, len(seats) + 1):
            chosen = by_speed[:n]
            yield [seat for seat in seats if seat in chosen]
        return
    known: set[tuple[object, ...]] = set()
    for n in range(1, len(seats) + 1):
        for order in permutations(seats, n):
            alike = tuple((s.held.memory_bytes, id(s.held.shape), s.speed) for s in order)
            if alike not in known:
                known.add(alike)
                yield order


def _seat(devices: figures.NodeDevices, places: Sequence[int]) -> Seat:
    """Join devices that share each layer: as fast as the slowest of them, but for the gathers."""
    own = [devices.each[place] for place in places]
    speeds = [_speed_of(device) for device in own]
    shape, n_shards = own[0].held.shape, len(own)
    if n_shards == 1:
        return Seat(devices=tuple(places), held=own[0].held, speed=speeds[0])
    share = _share(devices, n_shards)
    link = devices.gather or figures.LinkSpeed(round_trip_s=0, bytes_per_s=1e9)
    gathers = shape.gathers or figures.NO_GATHERS
    computing = figures.StageSpeed(
        layer_s=max(s.layer_s for s in speeds) * share,
        layer_256_s=max(s.layer_256_s for s in speeds) * share,
        embed_s=max(s.embed_s for s in speeds),
        head_s=max(s.head_s for s in speeds) / (n_shards if gathers.head_bytes else 1),
        step_s=speeds[0].step_s,
        is_steady=all(s.is_steady for s in speeds),
    )

    def taken_s(n_bytes: int, n_rows: int) -> float:
        return gather_s(link, n_shards, n_bytes, n_rows)

    speed = gathers.added_to(computing, taken_s, n_shards)
    held = own[0].held.shared_by((1,) * n_shards, [device.held.memory_bytes for device in own])
    return Seat(devices=tuple(places), held=held, speed=speed)


def _share(devices: figures.NodeDevices, n_shards: int) -> float:
    """Return the share of a layer that each of `n_shards` computes.

    Where its heads do not divide, each computes all of the attention.
    """
    whole = devices.attention_share if n_shards in devices.whole_heads else 0.0
    return whole + (1 - whole) / n_shards


def _speed_of(device: figures.NodeDevice) -> figures.StageSpeed:
    return device.speed or speed_by_bytes(device.held.shape, ASSUMED_MEMORY_BYTES_PER_S)


def _cut(
    layers: LayerRange,
    n_layers: int,
    devices: figures.NodeDevices,
    seats: Sequence[Seat],
    objective: figures.Objective,
) -> DeviceCut | None:
    """Divide layers over seats in this order; None if they have no room."""
    is_first, is_last = layers.start == 0, layers.end == n_layers
    hop_s = HANDOVER_S if objective is figures.Objective.LATENCY else 0.0
    problem = Problem(
        objective=objective,
        n_layers=len(layers),
        room=[_room_within(seat, layers, n_layers) for seat in seats],
        layer_s=[seat.speed.layer_s for seat in seats],
        embed_s=[(seat.speed.embed_s + seat.speed.step_s) * is_first for seat in seats],
        head_s=[seat.speed.head_s * is_last for seat in seats],
        hop_s=[[hop_s] * len(seats) for _ in seats],
        home_s=[[0.0] * len(seats) for _ in seats],
    )
    split = best_split(problem, range(len(seats)))
    if split is None:
        return None
    parts = []
    for seat, own in zip(seats, ranges_of(split.counts), strict=True):
        place = LayerRange(layers.start + own.start, layers.start + own.end)
        shape = seat.held.shape
        if shape.memory_bytes(place) > seat.held.memory_bytes:
            return None  # these layers are larger than most
        compute_s = len(place) * seat.speed.layer_s
        compute_s += (place.start == 0) * seat.speed.embed_s
        compute_s += (place.end == n_layers) * seat.speed.head_s
        parts.append(
            figures.PartPlan(
                layers=place,
                devices=seat.devices,
                names=tuple(devices.each[n].name for n in seat.devices),
                weight_bytes=shape.weight_bytes(place),
                kv_bytes=shape.kv_bytes(place),
                compute_s=compute_s if devices.is_measured else None,
            )
        )
    total_s = sum(
        count * seat.speed.layer_s for count, seat in zip(split.counts, seats, strict=True)
    )
    total_s += is_first * seats[0].speed.embed_s + is_last * seats[-1].speed.head_s
    total_s += HANDOVER_S * (len(seats) - 1)
    return DeviceCut(parts=tuple(parts), seats=tuple(seats), compute_s=total_s, cost_s=split.cost_s)


def _room_within(seat: Seat, layers: LayerRange, n_layers: int) -> Room:
    """Count the layers of a stage that a seat has room for, by its role among the seats."""
    shape, memory_bytes = seat.held.shape, seat.held.memory_bytes
    middle, first, last, _ = room_of(shape, memory_bytes)
    is_first, is_last = layers.start == 0, layers.end == n_layers
    fits_alone = shape.memory_bytes(layers) <= memory_bytes
    return (
        middle,
        first if is_first else middle,
        last if is_last else middle,
        len(layers) * fits_alone,
    )


_TURNS = 3


def as_one(
    candidate: figures.CandidateNode,
    devices: figures.NodeDevices,
    layers: LayerRange | None,
    n_layers: int,
    objective: figures.Objective,
) -> figures.CandidateNode:
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


def first_device(candidate: figures.CandidateNode) -> figures.CandidateNode:
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
    place_on: Callable[[Sequence[figures.CandidateNode]], figures.Placement],
    candidates: Sequence[figures.CandidateNode],
    n_layers: int,
    objective: figures.Objective,
) -> figures.Placement:
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
    placement: figures.Placement,
    candidates: Sequence[figures.CandidateNode],
    n_layers: int,
    objective: figures.Objective,
) -> figures.Placement:
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
    if tok_s is not None and objective is figures.Objective.LATENCY:
        tok_s = 1 / max(1e-9, 1 / tok_s - saved_s)
    why = "; ".join(whys)
    return replace(placement, stages=tuple(stages), predicted_tok_s=tok_s, why=why)


def _room(devices: figures.NodeDevices, n_layers: int) -> Room:
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


def _memory_bytes(shape: figures.ModelShape, room: Room, n_layers: int) -> int:
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


def _speed(cut: DeviceCut, layers: LayerRange, objective: figures.Objective) -> figures.StageSpeed:
    """Return the speed of a node that computes `layers` so."""
    first, last, n = cut.seats[0].speed, cut.seats[-1].speed, len(layers)
    counts = [len(part.layers) for part in cut.parts]
    each = [c * seat.speed.layer_s for c, seat in zip(counts, cut.seats, strict=True)]
    many = [c * seat.speed.layer_256_s for c, seat in zip(counts, cut.seats, strict=True)]
    handed_s = HANDOVER_S * (len(counts) - 1)
    is_latency = objective is figures.Objective.LATENCY
    return figures.StageSpeed(
        layer_s=((sum(each) + handed_s) if is_latency else max(each)) / n,
        layer_256_s=(sum(many) + handed_s) / n,
        embed_s=first.embed_s,
        head_s=last.head_s,
        step_s=first.step_s,
        is_steady=all(seat.speed.is_steady for seat in cut.seats),
    )


def cut_words(
    stage: figures.StagePlan,
    chosen: DeviceCut,
    n_layers: int,
    devices: figures.NodeDevices,
    objective: figures.Objective,
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


def _words_of(cut: DeviceCut, devices: figures.NodeDevices) -> str:
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


def _gather_words(cut: DeviceCut, layers: LayerRange, devices: figures.NodeDevices) -> str:
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
