"""Count the layers that nodes have memory for, and find what would make a model fit.

Knows memory alone. Pure. Must not know times: the search finds the fastest ring.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from enum import IntFlag
from itertools import permutations

from shardnet.cluster.placement.figures import HeldModel, ModelShape
from shardnet.types import LayerRange

MIB = 2**20


class StageRole(IntFlag):
    """What a stage holds besides its layers: nothing, the embedding, the LM head or both."""

    MIDDLE = 0
    FIRST = 1
    LAST = 2
    ALONE = 3


Room = tuple[int, int, int, int]
"""The layers that a node has memory for, by StageRole. Alone it is all of them or 0."""

Fits = Callable[[Sequence[HeldModel]], bool]
"""Whether a model fits nodes that hold it so."""


def role_of(rank: int, n_stages: int) -> StageRole:
    """Return the role of a stage by its rank."""
    return StageRole((rank == 0) * StageRole.FIRST | (rank == n_stages - 1) * StageRole.LAST)


def room_of(shape: ModelShape, memory_bytes: int) -> Room:
    """Count the layers that fit a node's memory, in every role.

    A stage in the middle may begin anywhere: there any so many layers fit.
    """
    n_layers = shape.n_layers

    def needed(n: int, role: StageRole) -> int:
        if role is StageRole.MIDDLE:
            return shape.most_memory_bytes(n)
        start = 0 if role & StageRole.FIRST else n_layers - n
        return shape.memory_bytes(LayerRange(start, start + n))

    def room(role: StageRole) -> int:
        # A stage that is only first or only last leaves one layer to others, one in the middle two.
        most = n_layers - (not role & StageRole.FIRST) - (not role & StageRole.LAST)
        return bisect_right(range(1, most + 1), memory_bytes, key=lambda n: needed(n, role))

    fits_alone = shape.memory_bytes(shape.whole) <= memory_bytes
    return (
        room(StageRole.MIDDLE),
        room(StageRole.FIRST),
        room(StageRole.LAST),
        n_layers * fits_alone,
    )


def rooms_of(held: Sequence[HeldModel]) -> list[Room]:
    """Count the layers that fit each node, in every role."""
    return [room_of(one.shape, one.memory_bytes) for one in held]


def ring_room(rooms: Sequence[Room], ring: Sequence[int]) -> int:
    """Count the layers that a ring of these nodes, by index and in this order, has room for.

    0 when one of them has no room for a single layer.
    """
    parts = [rooms[node][role_of(rank, len(ring))] for rank, node in enumerate(ring)]
    return sum(parts) if all(parts) else 0


def shortest_ring(rooms: Sequence[Room], n_layers: int) -> tuple[int, ...] | None:
    """Return the shortest ring that holds the model, as indices; None when there is none.

    Exact. Among rings of one length the head is the first node it can be, and so is the tail; the
    nodes between are those with most room. So the order of the nodes is an order of preference.
    """
    fitting = (ring for ring in _roomy_rings(rooms, n_layers) if ring_room(rooms, ring) >= n_layers)
    return min(fitting, key=len, default=None)


def most_room(rooms: Sequence[Room], n_layers: int) -> int:
    """Count the layers that these nodes have room for, in the ring that has most of it."""
    rings = _roomy_rings(rooms, n_layers)
    return max((ring_room(rooms, ring) for ring in rings), default=0)


def _roomy_rings(rooms: Sequence[Room], n_layers: int) -> Iterator[tuple[int, ...]]:
    """Every ring of one; for every head and tail the shortest ring that fits, else the roomiest."""
    nodes = range(len(rooms))
    yield from ((node,) for node in nodes)
    by_room = sorted(nodes, key=lambda node: -rooms[node][StageRole.MIDDLE])
    for head, tail in permutations(nodes, 2):
        room, middle = rooms[head][StageRole.FIRST] + rooms[tail][StageRole.LAST], []
        for node in by_room:
            if room >= n_layers or not rooms[node][StageRole.MIDDLE]:
                break
            if node not in (head, tail):
                middle.append(node)
                room += rooms[node][StageRole.MIDDLE]
        yield (head, *middle, tail)


def fits_somehow(held: Sequence[HeldModel]) -> bool:
    """Say whether some ring of these nodes holds the model."""
    return bool(held) and shortest_ring(rooms_of(held), held[0].shape.n_layers) is not None


def fits_in_order(held: Sequence[HeldModel]) -> bool:
    """Say whether the ring of exactly these nodes, in this order, holds the model."""
    n_stages, n_layers = len(held), held[0].shape.n_layers
    return n_stages <= n_layers and ring_room(rooms_of(held), range(n_stages)) >= n_layers


def context_that_fits(held: Sequence[HeldModel], fits: Fits) -> int | None:
    """Return the longest context, in whole blocks, with which the model fits; None if none does."""
    shape = held[0].shape
    blocks = range(shape.n_blocks - 1, 0, -1)
    index = bisect_left(blocks, True, key=lambda n: fits([one.with_blocks(n) for one in held]))
    return shape.with_blocks(blocks[index]).context if index < len(blocks) else None


def node_that_helps(shape: ModelShape, held: Sequence[HeldModel], fits: Fits) -> int | None:
    """Return the least memory, in whole MiB as bytes, of one more node that makes it fit.

    That node would hold the model as `shape` says. None if not even a node that holds the whole
    model helps: the ring has too many nodes.
    """

    def helps(extra: int) -> bool:
        return fits([*held, HeldModel(shape=shape, memory_bytes=extra)])

    return _least(shape, helps)


def memory_that_helps(held: Sequence[HeldModel], index: int, fits: Fits) -> int | None:
    """Return the least memory, in whole MiB as bytes, with which the node at `index` makes it fit.

    None if no memory there helps, since another stage lacks memory too.
    """
    before, after, one = held[:index], held[index + 1 :], held[index]

    def helps(raised: int) -> bool:
        return fits([*before, replace(one, memory_bytes=raised), *after])

    return _least(one.shape, helps)


def _least(shape: ModelShape, enough: Callable[[int], bool]) -> int | None:
    sizes = range(0, shape.memory_bytes(shape.whole) + MIB, MIB)
    index = bisect_left(sizes, True, key=enough)
    return sizes[index] if index < len(sizes) else None
