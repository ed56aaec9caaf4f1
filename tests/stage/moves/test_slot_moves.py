"""Which rows of another stage a stage takes in."""

from __future__ import annotations

import pytest
import torch

from shardnet.errors import CapacityError, UsageError
from shardnet.model.cache.kv_cache import KvCache
from shardnet.model.config.model_config import HeadShape, StateShape
from shardnet.sampling_params import SamplingParams
from shardnet.slot_operations import OpenSequence
from shardnet.stage.moves.slot_moves import JoinedMoves, SlotMoves
from shardnet.types import BLOCK_POSITIONS, HeldRows, KvDType, LayerRange, SequenceId, SlotId

ONE, TWO, SLOT = SequenceId(1), SequenceId(2), SlotId(0)
NARROW = HeadShape(n_kv_heads=2, key_size=8, value_size=8)
WIDE = HeadShape(n_kv_heads=1, key_size=16, value_size=16)
MODEL = (NARROW, WIDE, NARROW)
"""Heads by layer, as Gemma 4 has others in layers without a window."""


def stage(layers: LayerRange, kv_dtype: KvDType = KvDType.AUTO) -> SlotMoves:
    """Make what moves slots of layers, in the first of which sequence 1 has ten positions."""
    heads = [MODEL[layer] for layer in layers]
    cpu = torch.device("cpu")
    kv = KvCache(len(layers), 2, 8, torch.float32, cpu, 4, kv_dtype=kv_dtype, heads=heads)
    kv.ensure(SLOT, 10, 10)
    owner = OpenSequence(sequence_id=ONE, slot=SLOT, sampling=SamplingParams())
    return SlotMoves(kv, layers, {SLOT: owner})


def test_rows_of_a_layer_look_alike_whatever_other_layers_are_beside_it() -> None:
    whole = stage(LayerRange(0, 3))
    parts = JoinedMoves([stage(LayerRange(0, 1)), stage(LayerRange(1, 3))])
    forms = [whole.form(layer) for layer in range(3)]
    assert forms == [parts.part_of(layer).form(layer) for layer in range(3)]
    assert forms[0] == forms[2] == "float32 2x8+8 of float32"
    assert forms[1] == "float32 1x16+16 of float32"


def test_rows_of_another_form_on_the_same_node_are_refused() -> None:
    """So it is where a layer goes from one of its devices to one that computes in another dtype."""
    source, target = stage(LayerRange(0, 2)), stage(LayerRange(1, 3), KvDType.INT8)
    target.begin(ONE, range(10))
    with pytest.raises(UsageError, match=r"rows of int8 .* are needed, and here are float32 1x16"):
        target.take_own(ONE, 1, source.look(ONE, SLOT, 10)[1])
    target = stage(LayerRange(1, 3))
    target.begin(ONE, range(10))
    target.take_own(ONE, 1, source.look(ONE, SLOT, 10)[1])
    assert target.next_wanted(ONE, 1) == 10


def test_all_that_arrives_has_room_together() -> None:
    target = stage(LayerRange(0, 3))
    target.begin(ONE, range(3 * BLOCK_POSITIONS))
    with pytest.raises(CapacityError, match=r"2 sequences of 5 KV blocks .* room for 4 blocks"):
        target.begin(TWO, range(2 * BLOCK_POSITIONS))
    target.begin(TWO, range(BLOCK_POSITIONS))
    assert target.has(TWO)


def test_what_was_dropped_meanwhile_is_refused_by_name() -> None:
    """A head may say so while rows still come, and what nobody opens goes after a while."""
    source, target = stage(LayerRange(0, 3)), stage(LayerRange(0, 3))
    target.begin(ONE, range(10))
    target.forget(ONE)
    found = source.look(ONE, SLOT, 10)[1]
    held = found.held(0)
    for late in (
        lambda: target.next_wanted(ONE, 1),
        lambda: target.expect(ONE, 1, held, 10),
        lambda: target.write(ONE, 1, 0, 10, bytearray(held.n_bytes)),
        lambda: target.came(ONE, 1, 10),
        lambda: target.take_own(ONE, 1, found),
    ):
        with pytest.raises(UsageError, match="sequence 1 was dropped before all of it was here"):
            late()


def test_a_layer_has_come_when_its_window_of_the_next_row_has() -> None:
    sizes = (1, 1, 8, torch.float32, torch.device("cpu"), 4)
    target = SlotMoves(KvCache(*sizes, windows=(5,)), LayerRange(0, 1), {})
    target.begin(ONE, range(260))
    held = HeldRows(first=BLOCK_POSITIONS, n_bytes=4 * 4 * (8 + 8))
    target.expect(ONE, 0, held, 260)
    target.came(ONE, 0, 260)
    assert [target.is_whole(ONE, end) for end in (259, 260, 261)] == [False, True, False]


def test_two_rounds_that_are_cut_off_leave_what_the_one_before_brought() -> None:
    """Of the first of two layers with a state, more has come each time."""
    cpu = torch.device("cpu")
    shape = StateShape(recent=(1, 1), recurrent=(1, 1, 1))
    kv = KvCache(2, 1, 1, torch.float32, cpu, 4, states=(shape, shape))
    target = SlotMoves(kv, LayerRange(0, 2), {})
    for end, layers in ((256, (0, 1)), (512, (0,)), (768, (0,))):
        target.begin(ONE, range(end))
        for layer in layers:
            held = HeldRows(first=target.next_wanted(ONE, layer), n_bytes=8, is_state=True)
            target.expect(ONE, layer, held, end)
            state = torch.tensor([end, end], dtype=torch.float32)
            target.write(ONE, layer, held.first, end, bytearray(state.numpy().tobytes()))
            target.came(ONE, layer, end)
    assert [target.is_whole(ONE, end) for end in (256, 512, 768)] == [True, False, False]
    target.adopt(ONE, SLOT, 256)
    assert [kv.state(SLOT, layer).recurrent.item() for layer in (0, 1)] == [256, 256]


def test_rows_that_are_read_are_those_of_the_sequence_that_was_asked_for() -> None:
    """Another one may go on with its warm slot, in the same memory."""
    owners = {SLOT: OpenSequence(sequence_id=ONE, slot=SLOT, sampling=SamplingParams())}
    kv = KvCache(1, 2, 8, torch.float32, torch.device("cpu"), 4)
    kv.ensure(SLOT, 10, 10)
    found = SlotMoves(kv, LayerRange(0, 1), owners).look(ONE, SLOT, 10)[0]
    assert len(found.read(0, 10)) == found.held(0).n_bytes
    owners[SLOT] = OpenSequence(sequence_id=TWO, slot=SLOT, sampling=SamplingParams())
    with pytest.raises(UsageError, match="the sequence has left its slot meanwhile"):
        found.read(0, 10)
