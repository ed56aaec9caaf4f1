"""Explain how a node's layers are divided over its devices, against the other ways.

Pure. Must not choose.
"""

from __future__ import annotations

from shardnet.cluster.placement.device_cuts import DeviceCut, Seat, best_cut, cuts
from shardnet.cluster.placement.figures import NodeDevices, Objective, StagePlan
from shardnet.cluster.placement.spans import gather_s
from shardnet.types import LayerRange


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
    words += f": about {_ms(chosen.cost_s)}"
    kinds: dict[tuple[int, bool], list[DeviceCut]] = {}
    for cut in cuts(stage.layers, n_layers, devices, objective):
        kinds.setdefault((cut.n_shards, len(cut.seats) > 1), []).append(cut)
    kinds.pop((chosen.n_shards, len(chosen.seats) > 1), None)
    best = [best_cut(alike, devices) for alike in kinds.values()]
    others = sorted(filter(None, best), key=lambda cut: cut.cost_s)
    told = [f"{_words_of(cut, devices)}: {_ms(cut.cost_s)}" for cut in others]
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
    sizes = shape.gathers.layer_bytes
    total_s = len(layers) * sum(gather_s(devices.gather, n_shards, size) for size in sizes)
    words = f"its {len(layers) * len(sizes)} gathers take about {_ms(total_s)}"
    if n_shards in devices.whole_heads:
        words += f", and {n_shards} shards do not divide the heads: each computes all attention"
    return words


def _ms(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:.0f} ms" if ms >= 10 else f"{ms:.2g} ms"
