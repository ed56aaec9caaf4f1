"""Groups of shards: every shard gets every part, whatever the widths; who is lost is named."""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest
import torch
from support.needs import needs_library
from support.rings.shard_threads import on_each_shard

from shardnet.errors import LostShardError, UsageError
from shardnet.model.shards.cut import MAX_SHARDS, apportion, head_ends, shares
from shardnet.model.shards.group import (
    BUFFER_BYTES,
    MemoryGroup,
    ShardGroup,
    SharedMemory,
)

pytestmark = needs_library

ENDS = (0, 16, 16, 19, 40)
"""Four shards, one of which has nothing."""


def gathered(group: ShardGroup) -> list[torch.Tensor]:
    """Gather parts that say whose they are, in turns of different sizes and dtypes."""
    made = []
    for turn, (n_rows, dtype) in enumerate([(1, torch.float32), (5, torch.bfloat16)] * 20):
        width = ENDS[group.index + 1] - ENDS[group.index]
        part = torch.full((n_rows, width), group.index * 100.0 + turn, dtype=dtype)
        made.append(group.gather(part, ENDS))
        group.check()
    return made


def assert_whole(made: list[torch.Tensor]) -> None:
    for turn, whole in enumerate(made):
        for index in range(4):
            part = whole[:, ENDS[index] : ENDS[index + 1]]
            assert (part == torch.tensor(index * 100.0 + turn, dtype=whole.dtype)).all()


def test_shared_memory_brings_every_part_to_every_shard() -> None:
    for made in on_each_shard(4, gathered):
        assert_whole(made)


def test_more_rows_than_a_buffer_holds_are_gathered_in_pieces() -> None:
    n_rows = BUFFER_BYTES // 4 // 1000 * 2 + 1

    def work(group: ShardGroup) -> torch.Tensor:
        rows = torch.arange(n_rows, dtype=torch.float32)[:, None].expand(n_rows, 1000)
        return group.gather(rows * (group.index + 1), (0, 1000, 2000))

    for whole in on_each_shard(2, work):
        rows = torch.arange(n_rows, dtype=torch.float32)
        assert torch.equal(whole[:, 0], rows)
        assert torch.equal(whole[:, 1999], rows * 2)


def test_who_does_not_come_in_time_is_named() -> None:
    group = MemoryGroup(SharedMemory.create(2), 0, 2, deadline_s=0.05)
    group.gather(torch.zeros(1, 4), (0, 4, 8))
    with pytest.raises(LostShardError, match="shard 1 of 2"):
        group.check()


def test_a_lost_shard_ends_the_waiting_at_once() -> None:
    memory = SharedMemory.create(2)
    group = MemoryGroup(memory, 0, 2)
    waiting = threading.Thread(target=group.gather, args=(torch.zeros(1, 4), (0, 4, 8)))
    waiting.start()
    memory.fail(1)
    waiting.join(10)
    assert not waiting.is_alive()
    with pytest.raises(LostShardError, match="shard 1 of 2"):
        group.check()


def test_columns_are_shared_out_in_whole_panels_where_there_are_enough() -> None:
    assert shares(64, 4) == (0, 16, 32, 48, 64)
    assert shares(70, 2) == (0, 32, 70)
    assert shares(35, 4) == (0, 8, 17, 26, 35)
    for total in (16, 17, 1000, 50257):
        for n_shards in range(1, MAX_SHARDS + 1):
            ends = shares(total, n_shards)
            assert ends[0] == 0
            assert ends[-1] == total
            assert all(begin < end for begin, end in pairwise(ends))
    with pytest.raises(UsageError, match="3 columns cannot be cut over 4 shards"):
        shares(3, 4)


def test_things_are_apportioned_by_weight_and_everybody_has_one() -> None:
    assert apportion(8, (8, 1, 1)) == (0, 6, 7, 8)
    assert apportion(10, (100, 1, 1)) == (0, 8, 9, 10)
    assert apportion(8, (1, 1, 1)) == (0, 3, 6, 8)
    assert shares(352, 2, (4, 1)) == (0, 288, 352)
    assert shares(352, 2, (3, 3)) == shares(352, 2)
    assert shares(10, 3, (8, 1, 1)) == (0, 8, 9, 10)


@pytest.mark.parametrize(
    "weights", [(1, 1), (5, 1), (1, 1, 1), (9, 1, 4), (1,) * 5, (3, 1, 9, 2, 2)]
)
@pytest.mark.parametrize("heads", [(32, 8), (8, 2), (6, 3), (4, 1), (12, 12), (2, 2), (3, 1)])
def test_each_shard_has_heads_of_whole_groups_or_of_one(
    heads: tuple[int, int], weights: tuple[int, ...]
) -> None:
    n_heads, n_kv_heads = heads
    each, size = n_heads // n_kv_heads, len(weights)
    ends = head_ends(n_heads, n_kv_heads, weights)
    if not ends:  # more shards have the same KV head than it has query heads
        assert each < size
        return
    assert (ends[0], ends[-1], len(ends)) == (0, n_heads, size + 1)
    for begin, end in pairwise(ends):
        assert begin < end
        assert (begin % each == 0 == end % each) or begin // each == (end - 1) // each
    if len(set(weights)) == 1 and n_kv_heads % size == 0:
        assert ends == tuple(n_heads * shard // size for shard in range(size + 1))
