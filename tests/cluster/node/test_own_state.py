"""What a node says of itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from shardnet.cluster.node.own_state import OwnState
from shardnet.types import LayerRange


@pytest.mark.parametrize(("is_over", "rank"), [(False, 2), (True, None)])
def test_a_stage_whose_ring_is_over_has_no_rank_in_it(is_over: bool, rank: int | None) -> None:
    """A node that was frozen for long comes back to a ring that has gone on without it."""
    device: Any = SimpleNamespace(description="cpu", dtypes=(), isa="", arithmetic="")
    order = SimpleNamespace(model="/m", layers=LayerRange(1, 4))
    own = OwnState(
        settings=cast(
            Any,
            SimpleNamespace(
                node="n",
                name="n",
                budget=SimpleNamespace(device=device, devices=(device,)),
                tensor_parallel=0,
            ),
        ),
        advertisement=cast(Any, SimpleNamespace(address="h:1")),
        host=cast(
            Any,
            SimpleNamespace(
                loaded=SimpleNamespace(order=order, weight_bytes=1),
                membership=SimpleNamespace(is_over=is_over, rank=2),
                refusals=SimpleNamespace(is_draining=False, rests=""),
            ),
        ),
        orders=cast(Any, SimpleNamespace(memory_bytes=lambda: 2, threads=1)),
    )
    stage = own.info().stage
    assert stage is not None
    assert stage.rank == rank
