"""The ways to compute layers on the devices of one node, and what each costs.

Layers are cut between devices, or each is shared by several. A device is left out where the node is
much faster without it. Who names devices wants them at work: one that costs next to nothing stays,
for its memory and for the next micro-batch. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

from shardnet.cluster.placement.estimate import ASSUMED_MEMORY_BYTES_PER_S, speed_by_bytes
from shardnet.cluster.placement.figures import (
    NO_GATHERS,
    HeldModel,
    LinkSpeed,
    NodeDevice,
    NodeDevices,
    Objective,
    PartPlan,
    StageSpeed,
)
from shardnet.cluster.placement.room import Room, room_of
from shardnet.cluster.placement.spans import gather_s
from shardnet.cluster.placement.split import Problem, best_split, ranges_of
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
    held: HeldModel
    speed: StageSpeed


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCut:
    """A stage on some of a node's devices, in seconds for one row; `cost_s` is the objective's.

    `layers_s` are without embedding and LM head.
    """

    parts: tuple[PartPlan, ...]
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
    layers: LayerRange, n_layers: int, devices: NodeDevices, objective: Objective
) -> DeviceCut | None:
    """Return the best way to compute `layers` of a model with `n_layers`; None if none has room.

    Without figures the fewest devices that hold them, unless it was asked how many share a layer.
    """
    return best_cut(cuts(layers, n_layers, devices, objective), devices)


def cuts(
    layers: LayerRange, n_layers: int, devices: NodeDevices, objective: Objective
) -> list[DeviceCut]:
    """Return the ways to compute `layers` on these devices that have room for them."""
    found = [
        _cut(layers, n_layers, devices, seats, objective)
        for seats in seatings(devices)
        if len(seats) <= len(layers)
    ]
    return [cut for cut in found if cut is not None]


def best_cut(found: Sequence[DeviceCut], devices: NodeDevices) -> DeviceCut | None:
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


def seatings(devices: NodeDevices) -> Iterator[Sequence[Seat]]:
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


def _seat(devices: NodeDevices, places: Sequence[int]) -> Seat:
    """Join devices that share each layer: as fast as the slowest of them, but for the gathers."""
    own = [devices.each[place] for place in places]
    speeds = [_speed_of(device) for device in own]
    shape, n_shards = own[0].held.shape, len(own)
    if n_shards == 1:
        return Seat(devices=tuple(places), held=own[0].held, speed=speeds[0])
    share = _share(devices, n_shards)
    link = devices.gather or LinkSpeed(round_trip_s=0, bytes_per_s=1e9)
    gathers = shape.gathers or NO_GATHERS
    computing = StageSpeed(
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


def _share(devices: NodeDevices, n_shards: int) -> float:
    """Return the share of a layer that each of `n_shards` computes.

    Where its heads do not divide, each computes all of the attention.
    """
    whole = devices.attention_share if n_shards in devices.whole_heads else 0.0
    return whole + (1 - whole) / n_shards


def _speed_of(device: NodeDevice) -> StageSpeed:
    return device.speed or speed_by_bytes(device.held.shape, ASSUMED_MEMORY_BYTES_PER_S)


def _cut(
    layers: LayerRange,
    n_layers: int,
    devices: NodeDevices,
    seats: Sequence[Seat],
    objective: Objective,
) -> DeviceCut | None:
    """Divide layers over seats in this order; None if they have no room."""
    is_first, is_last = layers.start == 0, layers.end == n_layers
    hop_s = HANDOVER_S if objective is Objective.LATENCY else 0.0
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
            PartPlan(
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
