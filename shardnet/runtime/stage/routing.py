"""Which experts rows visited: what a stage tells of its layers, and the head's rows of all layers.

Knows the layout of StageExperts. Must not know torch, links, or whose rows count in the end
(outputs.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from shardnet.errors import RemoteProtocolError
from shardnet.types import (
    NO_EXPERT,
    LayerRange,
    MicroBatch,
    OutputKind,
    RoutingShape,
    RowGroup,
    SequenceId,
)
from shardnet.wire.messages.extras import StageExperts
from shardnet.wire.payloads.rows import RowBlock

MAX_ROUTING_BYTES = 1 << 13
"""Bytes of one row's experts that travel: 61 layers of 67. A step's EXTRAS hold 2048 such rows."""


def tell_routing(
    batch: MicroBatch,
    asking: Sequence[SequenceId],
    layers: LayerRange,
    top_k: int,
    chosen: Mapping[int, NDArray[np.int64]],
) -> list[StageExperts]:
    """Tell those who ask which experts their rows visited in the `layers` of a stage.

    `chosen` has the experts [T, top_k] of the layers that have any, counted within the stage.
    """
    table = np.full((batch.n_rows, len(layers), top_k), NO_EXPERT, "<i2")  # [T, layers, K]
    for index, experts in chosen.items():
        table[:, index] = experts
    told = []
    start = 0
    for group in batch.groups:
        end = start + group.n_rows
        if group.sequence_id in asking:
            told.append(
                StageExperts(
                    sequence_id=group.sequence_id,
                    first_layer=layers.start,
                    n_layers=len(layers),
                    top_k=top_k,
                    experts=table[start:end].tobytes(),
                )
            )
        start = end
    return told


def join_routing(
    batch: MicroBatch, parts: Sequence[StageExperts], shape: RoutingShape | None
) -> list[RowBlock]:
    """Join what the stages told of a step: for each sequence rows of all layers, in their order.

    Raises RemoteProtocolError for parts that are not asked of this model, a sequence that is not of
    the step, and where a layer or a row is missing or too much.
    """
    if shape is None:
        raise RemoteProtocolError(f"experts came with step {batch.step} of a model without any")
    of_sequence: dict[int, list[StageExperts]] = {}
    for part in parts:
        of_sequence.setdefault(part.sequence_id, []).append(part)
    groups = {group.sequence_id: group for group in batch.groups}
    blocks = []
    for sequence_id, theirs in of_sequence.items():
        group = groups.get(SequenceId(sequence_id))
        if group is None:
            raise RemoteProtocolError(
                f"experts of sequence {sequence_id} came with step {batch.step}, which has no rows "
                "of it"
            )
        blocks.append(_join(batch, group, theirs, shape))
    return blocks


def _join(
    batch: MicroBatch, group: RowGroup, parts: Sequence[StageExperts], shape: RoutingShape
) -> RowBlock:
    tables = []
    n_layers = 0
    for part in parts:
        expected = group.n_rows * part.n_layers * part.top_k * OutputKind.ROUTING.element_bytes
        fits = part.top_k == shape.top_k and len(part.experts) == expected
        if part.first_layer != n_layers or not fits:
            raise RemoteProtocolError(
                f"step {batch.step}: experts of layers {part.first_layer} and {part.n_layers - 1} "
                f"more came in {len(part.experts)} bytes, {part.top_k} for each row; layer "
                f"{n_layers} comes next, with {shape.top_k} for each of {group.n_rows} rows"
            )
        n_layers += part.n_layers
        tables.append(np.frombuffer(part.experts, "<i2").reshape(group.n_rows, -1))
    if n_layers != shape.n_layers:
        raise RemoteProtocolError(
            f"step {batch.step}: experts of {n_layers} layers came, the model has {shape.n_layers}"
        )
    return RowBlock(
        sequence_id=group.sequence_id,
        kind=OutputKind.ROUTING,
        position=group.position,
        width=shape.width,
        payload=np.concatenate(tables, 1).tobytes(),
    )
