"""Explain a plan to people: rates, times, what memory is lacking, and what would help.

Knows the finished choice and its figures. Pure. Must not choose.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from shardnet.cluster.placement import estimate
from shardnet.cluster.placement.figures import (
    NO_LINKS,
    CandidateNode,
    HeldModel,
    Links,
    ModelShape,
    Objective,
)
from shardnet.cluster.placement.room import (
    Fits,
    StageRole,
    context_that_fits,
    fits_in_order,
    fits_somehow,
    memory_that_helps,
    most_room,
    node_that_helps,
    role_of,
    room_of,
    rooms_of,
)
from shardnet.cluster.placement.split import (
    SAME,
    Problem,
    RingSplit,
    best_of,
    best_pair,
    best_single,
    ranges_of,
    rings_with,
    stages_of,
)
from shardnet.types import LayerRange

LISTED = 8
"""At most so many nodes are named in a sentence."""


def choice_words(candidates: Sequence[CandidateNode], problem: Problem, ring: RingSplit) -> str:
    """Explain why this ring was chosen, against the best alternative."""
    split = (
        f"{_names(candidates, ring)}: about {_number(ring)} ({_parts(candidates, problem, ring)})"
    )
    if len(ring.nodes) == 1:
        words, pair = f"alone on {_names(candidates, ring)}: {_rate(ring)}", best_pair(problem)
        if pair is None:
            return words
        times = _parts(candidates, problem, pair)
        return f"{words}; split {_names(candidates, pair)}: about {_number(pair)} ({times})"
    alone = _fastest_alone(problem)
    name = candidates[alone.nodes[0]].name
    fits = problem.room[alone.nodes[0]][StageRole.ALONE] >= problem.n_layers
    if alone.cost_s <= ring.cost_s and not fits:
        return (
            f"alone on {name}: {_rate(alone)}; split {split}. "
            f"Split only because it does not fit on {name}."
        )
    where = name if fits else f"{name}, where it does not fit"
    return f"split {split}; alone on {where}: {_rate(alone)}"


def named_words(candidates: Sequence[CandidateNode], problem: Problem, ring: RingSplit) -> str:
    """Explain the rate of a ring that was asked for, and which of its nodes is faster alone."""
    words = f"about {_rate(ring)} ({_parts(candidates, problem, ring)})"
    alone = best_single(problem)
    if len(ring.nodes) > 1 and alone and alone.cost_s < ring.cost_s:
        words += f"; alone on {_names(candidates, alone)}: {_rate(alone)}"
    return words


def rings_words(
    candidates: Sequence[CandidateNode],
    problem: Problem,
    rings: Sequence[RingSplit],
    one: RingSplit,
) -> str:
    """Explain why nodes make several rings, against the best single one."""
    parts = [f"{_names(candidates, ring)} ({_rate(ring)})" for ring in rings]
    if len(parts) > LISTED:
        parts[LISTED:] = [f"{len(parts) - LISTED} more"]
    tok_s = sum(1 / ring.cost_s for ring in rings)
    return (
        f"{len(rings)} rings behind one head: {', '.join(parts)}, about "
        f"{_figure(tok_s)} tok/s of many sequences; as one ring {_names(candidates, one)}: about "
        f"{_rate(one)} ({_parts(candidates, problem, one)})"
    )


def fetch_words(
    candidates: Sequence[CandidateNode],
    problem: Problem,
    ring: RingSplit,
    fastest: RingSplit | None,
) -> str:
    """Say, as a suffix, which faster ring was passed over since it would fetch too much first."""
    if fastest is None or fastest.cost_s >= ring.cost_s * (1 - SAME):
        return ""
    stages = _stages(fastest)
    n_bytes = _fetch_bytes(candidates, stages)
    if n_bytes <= _fetch_bytes(candidates, _stages(ring)):
        return ""
    times_s = [candidates[node].fetch_s(layers) for node, layers in stages]
    known_s = [time_s for time_s in times_s if time_s is not None]
    about = f" in about {_duration(sum(known_s))}" if len(known_s) == len(times_s) else ""
    return (
        f"; faster, {_rate(fastest)}, would be {_names(candidates, fastest)}, but {size(n_bytes)} "
        f"would have to be fetched first{about}: name these nodes if that is worth it"
    )


def _stages(ring: RingSplit) -> list[tuple[int, LayerRange]]:
    return list(zip(ring.nodes, ranges_of(ring.counts), strict=True))


def _fetch_bytes(
    candidates: Sequence[CandidateNode], stages: Sequence[tuple[int, LayerRange]]
) -> int:
    return sum(candidates[node].fetch_bytes(layers) for node, layers in stages)


def _duration(seconds: float) -> str:
    """Write a time that somebody waits: `40 s`, `3 min`."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min"


def assumption_words(ring: Sequence[CandidateNode], links: Links) -> str:
    """List what of a ring was not measured, or while busy, as a suffix; empty if nothing."""
    words = ""
    if nodes := estimate.unmeasured_nodes(ring):
        names = ", ".join(candidate.name for candidate in nodes[:LISTED])
        words += f" (not measured: {names})"
    if hops := estimate.unmeasured_hops(ring, links):
        names = ", ".join(f"{a.name} to {b.name}" for a, b in hops[:LISTED])
        words += f" (wire not measured: {names})"
    busy = [node.name for node in ring if node.speed is not None and not node.speed.is_steady]
    for hop in estimate.hops_of(ring):
        link = estimate.measured_link(links, *hop)
        if link is not None and not link.is_steady:
            busy.append(f"{hop[0].name} to {hop[1].name}")
    if busy:
        words += f" (measured while busy, so a guess: {', '.join(busy[:LISTED])})"
    return words


def exclusion_words(
    shape: ModelShape,
    candidates: Sequence[CandidateNode],
    problem: Problem,
    ring: RingSplit,
    node: int,
) -> str:
    """Explain why a node is left out: the rate of the best neighbouring ring with it."""
    with_it = best_of(problem, rings_with(node, ring.nodes))
    if with_it is None:
        held = candidates[node].held(shape)
        room = room_of(held.shape, held.memory_bytes)
        if room[StageRole.FIRST] or room[StageRole.LAST] or (any(room) and len(ring.nodes) > 1):
            return f"a model of {shape.n_layers} layers has none left for one more stage"
        if any(room):
            ends = held.shape.embedding_bytes, held.shape.head_bytes
            return (
                f"its {size(held.memory_bytes)} hold no layer beside the embedding "
                f"({size(ends[0])}) or the LM head ({size(ends[1])})"
            )
        middle = shape.n_layers // 2
        needed = held.shape.memory_bytes(LayerRange(middle, middle + 1))
        return f"its {size(held.memory_bytes)} hold no layer: one needs {size(needed)} here"
    speed = candidates[node].speed
    lacks = sum(candidates[node].lacking)
    if lacks and with_it.cost_s < ring.cost_s * (1 - SAME):
        return f"with it {_rate(with_it)}, without {_number(ring)}, but it lacks the model"
    busy = " (it was measured while busy)" if speed is not None and not speed.is_steady else ""
    if _rate(with_it) == _rate(ring):
        return f"no faster with it: {_rate(ring)} either way{busy}"
    return f"with it {_rate(with_it)}, without {_number(ring)}{busy}"


def shortfall_words(shape: ModelShape, candidates: Sequence[CandidateNode]) -> str:
    """Explain that no ring of these nodes holds the model: what lacks where, and the ways out."""
    rooms = rooms_of([candidate.held(shape) for candidate in candidates])
    most = [max(room) for room in rooms]
    words = _needs_words(shape) + _have_words(candidates, most)
    if not any(room[StageRole.FIRST] for room in rooms):
        words += f"; none has room for a layer beside the embedding ({size(shape.embedding_bytes)})"
    elif not any(room[StageRole.LAST] for room in rooms):
        words += f"; none has room for a layer beside the LM head ({size(shape.head_bytes)})"
    elif len(rooms) > 1:
        held = most_room(rooms, shape.n_layers)
        words += f"; together {held} of {shape.n_layers} layers with embedding and LM head"
    return words + _ways_out(shape, candidates, fits_somehow)


def ring_shortfall_words(shape: ModelShape, ring: Sequence[CandidateNode]) -> str:
    """Explain that this ring does not hold the model: what lacks where, and the ways out."""
    rooms = rooms_of([candidate.held(shape) for candidate in ring])
    held = [room[role_of(rank, len(ring))] for rank, room in enumerate(rooms)]
    words = _needs_words(shape) + _have_words(ring, held)
    if len(ring) > 1:
        words += f"; together {sum(held)} of {shape.n_layers} layers with embedding and LM head"
    return words + _ways_out(shape, ring, fits_in_order)


def streaming_words(shape: ModelShape, ring: estimate.StreamedRing, *, was_asked: bool) -> str:
    """Explain which stages stream how much from disk, why, and at what cost."""
    names = "+".join(stage.candidate.name for stage in ring.stages[:LISTED])
    why = "layers are streamed as was asked" if was_asked else "no memory for the whole model"
    parts = [_stream_part(shape, stage) for stage in ring.stages if stage.n_streamed]
    words = f"on {names}, {why}: {'; '.join(parts[:LISTED]) or 'nothing is streamed'}"
    if not ring.is_measured:
        return f"{words} (not everything is measured yet)"
    tok_s = 1 / ring.cost_s
    return f"{words}; about {tok_s:.2g} tok/s"


def _stream_part(shape: ModelShape, stage: estimate.StreamedStage) -> str:
    name, n_layers = stage.candidate.name, len(stage.layers)
    streams = f"{name} streams {stage.n_streamed} of {_layers(n_layers)} from disk"
    read_bytes, read_s = stage.read_bytes(shape), stage.read_s(shape)
    if not read_bytes:
        return f"{streams}, once: two fit its buffers"
    if read_s is None:
        return f"{streams}, {size(read_bytes)} a step"
    return f"{streams}, {size(read_bytes)} a step in about {ms_words(read_s)}"


def _needs_words(shape: ModelShape) -> str:
    needed = size(shape.memory_bytes(shape.whole))
    return f"the model needs {needed} with a context of {shape.context} and does not fit: "


def _have_words(candidates: Sequence[CandidateNode], held: Sequence[int]) -> str:
    have = [
        f"{candidate.name} has {size(candidate.memory_bytes)}, room for {_layers(count)}"
        for candidate, count in zip(candidates, held, strict=True)
    ]
    if len(have) > LISTED:
        have[LISTED:] = [f"and {len(have) - LISTED} more nodes"]
    return "; ".join(have)


def _ways_out(shape: ModelShape, candidates: Sequence[CandidateNode], fits: Fits) -> str:
    held = [candidate.held(shape) for candidate in candidates]
    roomiest = max(range(len(held)), key=lambda place: held[place].memory_bytes)
    ways = []
    if context := context_that_fits(held, fits):
        ways.append(f"use --context {context}")
    ways += _quantizations(shape, held, fits)
    if streamed := _streamed_way(shape, candidates, fits):
        ways.append(streamed)
    if extra := node_that_helps(shape, held, fits):
        ways.append(f"add a node of {size(extra)}")
    if raised := memory_that_helps(held, roomiest, fits):
        flag = size(raised).replace(" ", "")
        ways.append(f"give {candidates[roomiest].name} --memory {flag}")
    return f". Ways out: {' or '.join(ways)}" if ways else ". Name fewer nodes, or larger ones"


def _quantizations(shape: ModelShape, held: Sequence[HeldModel], fits: Fits) -> list[str]:
    """Name the flags that make the model fit; two at once only where no single one does."""
    ways: list[str] = []
    for choice, sizes in enumerate(shape.quantized_sizes):
        if len(sizes.flags) > 1 and ways:
            break
        if fits([one.quantized(choice) for one in held]):
            quantized = shape.quantized(sizes)
            needed = size(quantized.memory_bytes(quantized.whole))
            ways.append(f"use {' '.join(sizes.flags)} (needs {needed})")
    return ways


def _streamed_way(shape: ModelShape, candidates: Sequence[CandidateNode], fits: Fits) -> str | None:
    """Suggest streaming with its cost; None if these nodes cannot."""
    if all(candidate.held(shape).shape.streaming is None for candidate in candidates):
        return None
    if fits is fits_in_order:
        ring = estimate.streamed_ring(shape, candidates, NO_LINKS, Objective.LATENCY)
    else:
        ring = estimate.best_streamed_ring(shape, candidates, NO_LINKS, Objective.LATENCY)
    if ring is None:
        return None
    parts = [_stream_part(shape, stage) for stage in ring.stages if stage.n_streamed]
    return f"use --stream-layers auto ({'; '.join(parts[:LISTED])})"


def size(size_bytes: int) -> str:
    """Write a size for people, rounded up so that it is enough if used as a flag."""
    if size_bytes < 2**30:
        return f"{math.ceil(size_bytes / 2**20)} MiB"
    return f"{math.ceil(size_bytes / 2**30 * 100) / 100:.2f} GiB"


def _fastest_alone(problem: Problem) -> RingSplit:
    everything = (problem.n_layers,) * 4
    alone = best_single(replace(problem, room=[everything] * problem.n_nodes))
    assert alone is not None
    return alone


def _parts(candidates: Sequence[CandidateNode], problem: Problem, ring: RingSplit) -> str:
    """Write where a ring's time goes: `A 31 ms + wire 9 ms + B 24 ms`."""
    hops_s = _hops_s(problem, ring)
    stages = stages_of(problem, ring.nodes)
    times_s = [
        stage.fixed_s + count * stage.layer_s
        for stage, count in zip(stages, ring.counts, strict=True)
    ]
    names = [candidates[node].name for node in ring.nodes]
    if problem.objective is Objective.THROUGHPUT:
        slowest = times_s.index(max(times_s))
        return f"{names[slowest]} is the slowest stage: {ms_words(times_s[slowest])} a step"
    own_s = [time_s - hop_s for time_s, hop_s in zip(times_s, hops_s, strict=True)]
    parts = [f"{name} {ms_words(time_s)}" for name, time_s in zip(names, own_s, strict=True)]
    if len(parts) > LISTED:
        parts[LISTED:] = [f"{len(parts) - LISTED} more {ms_words(sum(own_s[LISTED:]))}"]
    if len(names) > 1:
        parts.insert(1, f"wire {ms_words(sum(hops_s))}")
    return " + ".join(parts)


def _hops_s(problem: Problem, ring: RingSplit) -> list[float]:
    """Seconds of each stage's hop, 0 in a ring of one."""
    head, tail = ring.nodes[0], ring.nodes[-1]
    hops = [problem.hop_s[a][b] for a, b in pairwise(ring.nodes)]
    return [*hops, problem.home_s[tail][head] if hops else 0.0]


def _names(candidates: Sequence[CandidateNode], ring: RingSplit) -> str:
    names = [candidates[node].name for node in ring.nodes]
    if len(names) > LISTED:
        names[LISTED:] = [f"{len(names) - LISTED} more"]
    return "+".join(names)


def _layers(count: int) -> str:
    return "1 layer" if count == 1 else f"{count} layers"


def _number(ring: RingSplit) -> str:
    return _figure(1 / ring.cost_s)


def _figure(tok_s: float) -> str:
    return f"{tok_s:.0f}" if tok_s >= 10 else f"{tok_s:.2g}"


def _rate(ring: RingSplit) -> str:
    return f"{_number(ring)} tok/s"


def ms_words(seconds: float) -> str:
    """Write milliseconds with two significant digits, whole ones from 10 on."""
    ms = seconds * 1e3
    return f"{ms:.0f} ms" if ms >= 10 else f"{ms:.2g} ms"
