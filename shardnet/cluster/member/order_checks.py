"""Check an order of a head against this node, before anything is made of it. Pure.

Knows what a node can tell from the order alone. That the model has the layers and the context is
checked when its files are open (runtime/loading/loading.py).
"""

from __future__ import annotations

from shardnet.errors import UsageError
from shardnet.model.shards.cut import MAX_SHARDS
from shardnet.types import DType, LayerRange, WireDType
from shardnet.wire.messages.stages import LoadStage


def check_threads(threads: int, most: int) -> None:
    """Raise UsageError for an order of more threads than `most`."""
    if threads > most:
        raise UsageError(
            f"{threads} threads were ordered, and this node may use {most}",
            remedy="lower --threads, or leave it out",
        )


def check_load_order(order: LoadStage, most_threads: int, n_devices: int = 1) -> None:
    """Raise UsageError for a stage that cannot be a part of any ring, or not on this node.

    The node has `n_devices` and may compute with `most_threads` threads.
    """
    check_threads(order.threads, most_threads)
    DType.named(order.dtype)
    WireDType.named(order.wire_dtype)
    WireDType.named(order.received_dtype or order.wire_dtype)
    n_layers = len(LayerRange(*order.layers))
    first_layer, _ = order.layers
    n_nodes = len(order.shard_nodes) or 1
    if order.gather_dtype:
        WireDType.named(order.gather_dtype)
    faults = {
        "its ring has no name": not order.ring,
        f"rank {order.rank} of {order.n_stages} stages": order.rank >= order.n_stages,
        f"{len(order.addresses)} addresses for {order.n_stages} stages": (
            len(order.addresses) != order.n_stages
        ),
        f"layer {first_layer} is the first one of rank {order.rank}": (
            (first_layer == 0) != (order.rank == 0)
        ),
        f"{order.streamed_layers} of {n_layers} layers are to be streamed": (
            order.streamed_layers > n_layers
        ),
        "a context of 0 positions": order.context == 0,
        "its parts are not its layers": order.parts != [] and not _covers(order),
        "layers of more than one device are to be streamed": (
            order.streamed_layers > 0 and len(order.parts) > 1
        ),
        f"shard {order.shard} of {n_nodes} nodes": order.shard >= n_nodes,
        f"it spans {len(order.shard_nodes)} nodes": (
            len(order.shard_nodes) == 1 or len(order.shard_nodes) > MAX_SHARDS
        ),
        "its adapters have parts for other layers": any(
            not first_layer <= part.layer < order.layers[1]
            for adapter in order.adapters
            for part in adapter.layers
        ),
        "it spans several nodes and is streamed": n_nodes > 1 and order.streamed_layers > 0,
    }
    for fault, holds in faults.items():
        if holds:
            raise UsageError(f"a stage was ordered that no ring has: {fault}")
    named = [place for part in order.parts for place in part.devices]
    if len(set(named)) < len(named) or any(place >= n_devices for place in named):
        raise UsageError(
            f"parts of a stage were ordered for the devices {named}, and this node has {n_devices}",
            remedy="ask again: the node was started anew with others",
        )


def _covers(order: LoadStage) -> bool:
    """Say whether the parts of a stage follow each other from its first layer to its last."""
    at, end = order.layers
    for part in order.parts:
        if part.layers[0] != at or part.layers[1] <= at or not part.devices:
            return False
        at = part.layers[1]
    return at == end
