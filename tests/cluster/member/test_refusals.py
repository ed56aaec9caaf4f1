"""Orders that no ring has, or not on this node."""

from __future__ import annotations

from typing import Any

import pytest
from support.rings.stage_forms import FORM

from shardnet.cluster.member.refusals import check_load_order
from shardnet.errors import UsageError
from shardnet.types import WireDType
from shardnet.wire.messages.stages import DevicePart, LoadStage


def order(*parts: DevicePart, **changes: Any) -> LoadStage:
    values: dict[str, Any] = {
        "request": 1, "ring": "r", "epoch": 1, "rank": 0, "n_stages": 1, "form": FORM,
        "layers": (0, 4), "wire_dtype": WireDType.FLOAT32, "received_dtype": WireDType.FLOAT32,
        "threads": 0, "addresses": ["a:1"], "parts": list(parts),
    }  # fmt: skip
    return LoadStage(**values | changes)


def part(start: int, end: int, *devices: int) -> DevicePart:
    return DevicePart(layers=(start, end), devices=list(devices))


def test_parts_cover_the_layers_on_devices_that_are_here() -> None:
    for good in (order(), order(part(0, 4, 1)), order(part(0, 1, 1), part(1, 4, 0))):
        check_load_order(good, 8, 2)
    check_load_order(order(part(0, 4, 0, 1)), 8, 2)
    for bad, complaint in (
        (order(part(0, 3, 0)), "its parts are not its layers"),
        (order(part(0, 2, 0), part(1, 4, 1)), "its parts are not its layers"),
        (order(part(0, 2, 0), part(2, 2, 1), part(2, 4, 1)), "its parts are not its layers"),
        (order(part(0, 2, 0), part(2, 4)), "its parts are not its layers"),
        (order(part(0, 2, 0), part(2, 4, 0)), "and this node has 2"),
        (order(part(0, 4, 1, 1)), "and this node has 2"),
        (order(part(0, 4, 2)), "and this node has 2"),
        (order(part(0, 2, 0), part(2, 4, 1), n_streamed=1), "are to be streamed"),
    ):
        with pytest.raises(UsageError, match=complaint):
            check_load_order(bad, 8, 2)


def test_the_first_stage_of_a_ring_is_its_heads() -> None:
    """Of others it would be, where it is the only one, a ring that is linked to itself for ever."""
    with pytest.raises(UsageError, match="its first stage is not its head's"):
        check_load_order(order(), 8, is_own=False)
    shards = ["a:1", "b:1"]
    check_load_order(order(shard_nodes=shards, shard=1, shares=[4, 1]), 8, is_own=False)
    with pytest.raises(UsageError, match="3 shares of 2 nodes"):
        check_load_order(order(shard_nodes=shards, shard=1, shares=[4, 1, 1]), 8, is_own=False)
    last = order(rank=1, n_stages=2, layers=(4, 8), addresses=shards)
    check_load_order(last, 8, is_own=False)
