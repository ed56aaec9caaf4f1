"""Routed experts: what a stage reports of its layers, and the head's rows of all layers.

Knows the layout of StageExperts. Must not know torch, links, or which rows are kept
(engine/outputs.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from shardnet.errors import RemoteProtocolError
from shardnet.output_params import NO_EXPERT, OutputKind, RoutingShape
from shardnet.types import LayerRange, MicroBatch, RowGroup, SequenceId
from shardnet.wire.messages.extras import StageExperts
from shardnet.wire.payloads.rows import RowBlock

MAX_ROUTING_BYTES = 1 << 13
"""Most bytes of one row's experts on the wire: 61 layers with 67 each. A step's EXTRAS hold 2048
rows.
"""


def routing_table(
    batch: MicroBatch,
    asking: Sequence[SequenceId],
    layers: LayerRange,
    top_k: int,
    chosen: Mapping[int, NDArray[np.int64]],
) -> list[StageExperts]:
    """Encode which experts the rows of the `asking` sequences were routed to in a stage's `layers`.

    `chosen` maps layers with experts, counted within the stage, to expert ids [T, top_k]. Layers
    without experts are encoded as NO_EXPERT.
    """
    table = np.full((batch.n_rows, len(layers), top_k), NO_EXPERT, "<i2")  # [T, layers, K]
    for index, experts in chosen.items():
        table[:, index] = experts
    encoded = []
    start = 0
    for group in batch.groups:
        end = start + group.n_rows
        if group.sequence_id in asking:
            encoded.append(
                StageExperts(
                    sequence_id=group.sequence_id,
                    first_layer=layers.start,
                    n_layers=len(layers),
                    top_k=top_k,
                    experts=table[start:end].tobytes(),
                )
            )
        start = end
    return encoded


def join_routing(
    batch: MicroBatch, parts: Sequence[StageExperts], shape: RoutingShape | None
) -> list[RowBlock]:
    """Join the stages' routing of a step: for each sequence the rows of all layers, in order.

    Raises RemoteProtocolError for a model without experts, a sequence that is not in the step, and
    missing or surplus layers or rows.
    """
    if shape is None:
        raise RemoteProtocolError(
            f"step {batch.step} came with routed experts, but the model has none"
        )
    of_sequence: dict[int, list[StageExperts]] = {}
    for part in parts:
        of_sequence.setdefault(part.sequence_id, []).append(part)
    groups = {group.sequence_id: group for group in batch.groups}
    blocks = []
    for sequence_id, theirs in of_sequence.items():
        group = groups.get(SequenceId(sequence_id))
        if group is None:
            raise RemoteProtocolError(
                f"step {batch.step} came with routed experts of sequence {sequence_id}, which has "
                "no rows in it"
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
