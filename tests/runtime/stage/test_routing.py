"""Parts of a routing: what a stage tells, and how the head joins them or refuses."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardnet.errors import RemoteProtocolError
from shardnet.output_params import OutputKind, RoutingShape
from shardnet.runtime.stage.routing import join_routing, routing_table
from shardnet.types import Epoch, LayerRange, MicroBatch, RowGroup, SequenceId, SlotId, StepId
from shardnet.wire.messages.extras import Extras, StageExperts, extras_frame

SHAPE = RoutingShape(n_layers=3, top_k=2)


def batch_of(*n_rows: int) -> MicroBatch:
    """Sequences 1, 2, …, each from position 10 times its number on."""
    groups = tuple(
        RowGroup(
            sequence_id=SequenceId(number),
            slot=SlotId(number),
            position=10 * number,
            n_rows=rows,
            n_sampled=1,
        )
        for number, rows in enumerate(n_rows, 1)
    )
    return MicroBatch(epoch=Epoch(1), step=StepId(5), groups=groups, token_ids=[0] * sum(n_rows))


@given(st.data())
def test_any_split_of_the_layers_joins_to_the_same_rows(data: st.DataObject) -> None:
    n_layers, top_k = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    n_rows = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    asking = data.draw(st.sets(st.sampled_from(range(1, len(n_rows) + 1))))
    dense = data.draw(st.sets(st.integers(0, n_layers - 1)))
    cuts = sorted(data.draw(st.sets(st.integers(1, n_layers))) - {n_layers})
    whole = np.arange(sum(n_rows) * n_layers * top_k).reshape(-1, n_layers, top_k)
    batch = batch_of(*n_rows)
    parts: list[StageExperts] = []
    for start, end in itertools.pairwise([0, *cuts, n_layers]):
        chosen = {n - start: whole[:, n] for n in range(start, end) if n not in dense}
        told = routing_table(
            batch, [SequenceId(n) for n in asking], LayerRange(start, end), top_k, chosen
        )
        parts += told
    blocks = join_routing(batch, parts, RoutingShape(n_layers=n_layers, top_k=top_k))
    whole[:, sorted(dense)] = -1
    ends = list(itertools.accumulate(n_rows))
    assert [block.sequence_id for block in blocks] == sorted(asking)
    for block in blocks:
        end = ends[block.sequence_id - 1]
        rows = whole[end - n_rows[block.sequence_id - 1] : end]
        assert block.kind is OutputKind.ROUTING
        assert (block.position, block.n_rows) == (10 * block.sequence_id, len(rows))
        assert np.frombuffer(block.payload, "<i2").tolist() == rows.flatten().tolist()


def part(
    first: int, n_layers: int, n_rows: int = 2, *, top_k: int = 2, of: int = 1
) -> StageExperts:
    return StageExperts(of, first, n_layers, top_k, bytes(2 * n_rows * n_layers * top_k))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([part(0, 2)], "experts of 2 layers came, the model has 3"),
        ([part(0, 2), part(2, 2)], "experts of 4 layers came, the model has 3"),
        ([part(0, 1), part(2, 1)], "layer 1 comes next"),
        ([part(1, 2), part(0, 1)], "layer 0 comes next"),
        ([part(0, 3), part(0, 3)], "layer 3 comes next"),
        ([part(0, 3, top_k=1)], "with 2 for each of 2 rows"),
        ([part(0, 3, n_rows=3)], "came in 36 bytes, 2 for each row"),
        ([part(0, 3, of=9)], "step 5 came with routed experts of sequence 9, which has no rows"),
    ],
)
def test_what_does_not_fit_is_refused(parts: Sequence[StageExperts], message: str) -> None:
    with pytest.raises(RemoteProtocolError, match=message):
        join_routing(batch_of(2), parts, SHAPE)


def test_a_model_without_experts_has_no_routing() -> None:
    with pytest.raises(RemoteProtocolError, match="routed experts, but the model has none"):
        join_routing(batch_of(2), [part(0, 3)], None)


def test_nothing_of_it_travels_where_nobody_asks() -> None:
    quiet = extras_frame(Extras(), epoch=1, step=1)
    assert b"routing" not in bytes(quiet.meta)
    told = extras_frame(Extras(routing=[part(0, 3)]), epoch=1, step=1)
    assert b"routing" in bytes(told.meta)
