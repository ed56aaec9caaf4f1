"""The KV cache of layers that keep a state: it follows the slot, and is never rewound."""

from __future__ import annotations

import pytest
import torch

from shardnet.errors import CapacityError
from shardnet.model.cache.kv_cache import KvCache
from shardnet.model.cache.slot_blocks import SlotState
from shardnet.model.config.model_config import StateShape
from shardnet.types import BLOCK_POSITIONS, SlotId, StateId

SHAPE = StateShape(recent=(3, 5), recurrent=(2, 4, 6))
SLOT, OTHER = SlotId(0), SlotId(1)


@pytest.fixture
def cache() -> KvCache:
    """A layer with a state, and one with keys and values of 8 columns in 2 heads."""
    return KvCache(2, 2, 8, torch.float32, torch.device("cpu"), 8, states=(SHAPE, None))


def write(cache: KvCache, slot: SlotId, position: int, n_rows: int) -> None:
    """Do what a layer does with rows: the state becomes that after them."""
    cache.ensure(slot, position + n_rows, n_rows)
    state = cache.state(slot, 0)
    state.recurrent += n_rows
    state.recent += n_rows
    state.end += n_rows


def test_rows_follow_each_other(cache: KvCache) -> None:
    write(cache, SLOT, 0, 200)
    write(cache, SLOT, 200, 100)  # into the next block
    assert cache.state(SLOT, 0).recurrent.eq(300).all()
    for position in (299, 301, 1):
        with pytest.raises(CapacityError, match="holds the state after 300 positions"):
            cache.ensure(SLOT, position + 5, 5)
    with pytest.raises(CapacityError, match="holds the state after 0 positions"):
        cache.ensure(OTHER, 12, 2)
    assert cache.blocks_used == 2


def test_a_slot_that_begins_again_has_no_state(cache: KvCache) -> None:
    write(cache, SLOT, 0, 20)
    write(cache, SLOT, 0, 3)
    assert cache.state(SLOT, 0).recurrent.eq(3).all()
    assert cache.state(SLOT, 0).recent.eq(3).all()
    cache.trim(SLOT, 0)
    write(cache, SLOT, 0, 4)
    assert cache.state(SLOT, 0).recent.eq(4).all()


def test_a_trimmed_slot_continues_from_its_state_only(cache: KvCache) -> None:
    write(cache, SLOT, 0, 300)
    cache.trim(SLOT, 300)
    write(cache, SLOT, 300, 1)
    cache.trim(SLOT, 200)
    with pytest.raises(CapacityError, match="after 301 positions"):
        cache.ensure(SLOT, 201)


def test_a_copy_has_a_state_of_its_own(cache: KvCache) -> None:
    write(cache, SLOT, 0, 30)
    with pytest.raises(CapacityError, match="after 30 positions"):
        cache.copy(SLOT, OTHER, 20)
    assert cache.blocks_used == 1
    cache.copy(SLOT, OTHER, 30)
    write(cache, OTHER, 30, 1)
    assert (cache.state(SLOT, 0).end, cache.state(OTHER, 0).end) == (30, 31)
    assert cache.state(SLOT, 0).recurrent.eq(30).all()


def test_a_slot_goes_on_from_a_state_that_was_kept(cache: KvCache) -> None:
    """Its own or another one, as often as it is asked for, until it is dropped."""
    for position in range(0, 700, 100):
        if position in (300, 600):
            cache.keep_state(SLOT, position, StateId(position))
        write(cache, SLOT, position, 100)
    with pytest.raises(CapacityError, match="holds the state after 700 positions"):
        cache.keep_state(SLOT, 600, StateId(1))
    for _ in range(2):
        cache.copy(SLOT, OTHER, 300, StateId(300))
        assert cache.state(OTHER, 0).recurrent.eq(300).all()
        write(cache, OTHER, 300, 5)
        assert cache.state(OTHER, 0).recurrent.eq(305).all()
    cache.copy(SLOT, SLOT, 600, StateId(600))
    write(cache, SLOT, 600, 5)
    assert cache.state(SLOT, 0).recurrent.eq(605).all()
    for state, n_positions in ((StateId(300), 299), (StateId(7), 300)):
        with pytest.raises(CapacityError, match="is not here any more"):
            cache.copy(SLOT, OTHER, n_positions, state)
    cache.drop_states([StateId(300), StateId(7)])
    with pytest.raises(CapacityError, match="state 300 after 300 positions is not here any more"):
        cache.copy(SLOT, OTHER, 300, StateId(300))


def test_a_slot_that_rests_has_only_what_was_kept(cache: KvCache) -> None:
    write(cache, SLOT, 0, 30)
    cache.keep_state(SLOT, 30, StateId(0))
    cache.rest(SLOT)
    cache.rest(OTHER)  # there is no such slot
    with pytest.raises(CapacityError, match="holds the state after 0 positions"):
        cache.ensure(SLOT, 31, 1)
    cache.copy(SLOT, SLOT, 30, StateId(0))
    write(cache, SLOT, 30, 1)
    assert cache.state(SLOT, 0).recent.eq(31).all()


def send(cache: KvCache, position: int, n_rows: int, n_drafts: int) -> SlotState:
    """Write rows of which the slot's last `n_drafts` positions may be rejected: each counts one."""

    def count(source: SlotState, target: SlotState, n_rows: int) -> None:
        target.recurrent.copy_(source.recurrent + n_rows)
        target.recent.fill_(target.recurrent.flatten()[0])

    cache.ensure(SLOT, position + n_rows, n_rows)
    state = cache.state(SLOT, 0)
    before = state.keep_before(n_rows, n_drafts)
    state.recurrent.copy_(before.recurrent + n_rows)
    state.recent.copy_(before.recent + n_rows)
    state.count(n_rows, count if state.kept else None)
    return state


def test_a_state_is_rewound_to_any_row_that_may_be_rejected(cache: KvCache) -> None:
    """Of a step, and of drafts in flight behind it; copies and trimmed slots begin there too."""
    write(cache, SLOT, 0, 10)
    for n_right in range(10, 21):
        send(cache, 10, 5, 4)
        send(cache, 15, 3, 7)
        send(cache, 18, 3, 10)
        cache.copy(SLOT, OTHER, n_right)
        state = send(cache, n_right, 1, 0)
        assert (state.end, state.kept, state.inputs) == (n_right + 1, [], [])
        assert state.recurrent.eq(n_right + 1).all()
        assert state.recent.eq(n_right + 1).all()
        assert cache.state(OTHER, 0).recurrent.eq(n_right).all()
        with pytest.raises(CapacityError, match=f"after {n_right + 1} positions"):
            cache.ensure(SLOT, n_right + 1, 1)
        cache.trim(OTHER, n_right)
        cache.copy(OTHER, SLOT, n_right)
        send(cache, n_right, 3, 2)
        cache.trim(SLOT, n_right)
        assert cache.state(SLOT, 0).recurrent.eq(n_right).all()
        cache.free(SLOT)
        write(cache, SLOT, 0, 10)


def test_drafts_in_flight_take_the_memory_of_two_states_however_many_are_right(
    cache: KvCache,
) -> None:
    write(cache, SLOT, 0, 10)
    send(cache, 10, 4, 3)
    places = set()
    for position in range(14, 2000, 4):
        state = send(cache, position, 4, min(position - 10, 40))
        assert len(state.kept) <= 2
        assert state.kept[0].end <= position + 4 - 40 or position < 60
        assert len(state.inputs) <= 22
        places |= {each.recurrent.data_ptr() for each in (state, *state.kept)}
    assert len(places) == 3
    assert cache.state(SLOT, 0).recurrent.eq(state.end).all()
    cache.ensure(SLOT, state.end - 35, 1)
    assert state.recurrent.eq(state.end).all()


def test_rows_that_were_never_computed_leave_the_state_as_it_was(cache: KvCache) -> None:
    """As where another layer of the step fails, before this one or behind it."""
    write(cache, SLOT, 0, 10)
    state = cache.state(SLOT, 0)
    for n_drafts in (2, 2, 0):
        state.keep_before(3, n_drafts)
        assert state.at(10) is not None
        cache.copy(SLOT, OTHER, 10)
        assert cache.state(OTHER, 0).recurrent.eq(10).all()
    assert state.recurrent.eq(10).all()


def test_only_other_layers_have_blocks(cache: KvCache) -> None:
    write(cache, SLOT, 0, 1)
    assert cache.block_bytes == 2 * (8 + 8) * 4 * BLOCK_POSITIONS
    assert [rows.shape[1] for rows in cache.layer(SLOT, 0)] == [0, 0]
    assert [rows.shape[1] for rows in cache.layer(SLOT, 1)] == [BLOCK_POSITIONS] * 2
