"""Memory of states, as the loader and the planner count it, against what the KV cache holds."""

from __future__ import annotations

from bisect import bisect_left
from functools import partial
from pathlib import Path

import pytest
import torch
from support.models.checkpoints import make_decoder
from support.rings.stage_chain import Rows, StageChain, probed, random_prompt

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.cluster.planning.model_shape import model_shape
from shardnet.errors import CapacityError
from shardnet.model.cache.kv_cache import KvCache
from shardnet.model.cache.slot_blocks import RowInputs
from shardnet.model.config.model_config import ModelConfig
from shardnet.runtime.loading.loading import MAX_ROOM_POSITIONS, KvRoom, kv_room
from shardnet.stage.estimate.memory_estimate import (
    WeightForm,
    activation_peak_bytes,
    draft_bytes,
    kv_block_bytes,
    stage_weight_bytes,
    state_bytes,
)
from shardnet.types import (
    LEAST_STATES,
    LIVE_STATES,
    PREFILL_CHUNK_ROWS,
    DType,
    LayerRange,
    SlotId,
    StateId,
)

DTYPE = DType.BFLOAT16


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three layers with a state, then one with attention."""
    return make_decoder(tmp_path, "qwen3_next", with_tokenizer=False, dtype=torch.bfloat16)


@pytest.fixture
def config(folder: Path) -> ModelConfig:
    return Checkpoint.open(folder).config


def bytes_of(rows: RowInputs) -> int:
    """What a closure over the inputs of rows keeps in memory."""
    cells = rows.replay.__closure__ or ()
    return sum(each.cell_contents.nbytes for each in cells if torch.is_tensor(each.cell_contents))


def test_it_is_what_running_sequences_hold(folder: Path, config: ModelConfig) -> None:
    """Their states, those to rewind drafts by, and of one those of drafts in flight."""
    layers, n_slots = LayerRange(0, 4), 8
    choice = probed(torch.device("cpu"), DTYPE, None)
    chain = StageChain.load(folder, [layers], choice)
    kv = chain.stages[0].kv
    ids = random_prompt(400, 300)

    def send(slot: int, position: int, n_rows: int, n_drafts: int = 0) -> None:
        rows = ids[position : position + n_rows]
        chain.step(Rows(slot=slot, position=position, ids=rows, n_sampled=1, n_drafts=n_drafts))

    for slot in range(n_slots):
        send(slot, 0, 140)
        send(slot, 140, 32, 31)
        send(slot, 172, 32, 31)
    for begin in range(204, 396, 32):
        send(0, begin, 32, min(begin - 204 + 63, 128))
    states = [kv.state(SlotId(slot), layer) for slot in range(n_slots) for layer in range(3)]
    others = [other for state in states for other in state.kept]
    held = sum(state.recent.nbytes + state.recurrent.nbytes for state in (*states, *others))
    held += sum(bytes_of(rows) for state in states for rows in state.inputs)
    assert all(state._spare is None for state in states)
    dtype = choice.dtype  # float32 where bfloat16 is computed in it
    one, drafts = state_bytes(config, layers, dtype), draft_bytes(config, layers, dtype)
    most = n_slots * LIVE_STATES * one + drafts
    assert 0.85 * most < held <= most
    kv.keep_state(SlotId(7), 204, StateId(0))
    kv.copy(SlotId(7), SlotId(7), 204, StateId(0))
    kept = [kv.state(SlotId(7), layer) for layer in range(3)]
    assert one == kv.state_bytes == sum(s.recent.nbytes + s.recurrent.nbytes for s in kept)
    whole = KvCache(
        *(4, config.n_kv_heads, config.head_size, torch.bfloat16, torch.device("cpu"), 2),
        states=[config.state(layer) for layer in layers],
    )
    assert kv_block_bytes(config, layers, DTYPE) == whole.block_bytes


@pytest.mark.parametrize("layers", [LayerRange(0, 4), LayerRange(1, 3)], ids=str)
def test_a_stage_needs_room_for_the_least_states(config: ModelConfig, layers: LayerRange) -> None:
    """Weights, a step, states, and the blocks of one sequence: not a byte less."""
    form, block_bytes = WeightForm(dtype=DTYPE), kv_block_bytes(config, layers, DTYPE)
    needed = (
        stage_weight_bytes(config, layers, form)
        + activation_peak_bytes(config, layers, PREFILL_CHUNK_ROWS, DTYPE, 512)
        + LEAST_STATES * state_bytes(config, layers, DTYPE)
        + draft_bytes(config, layers, DTYPE)
        + 2 * block_bytes
    )
    assert kv_room(config, layers, form, 512, needed) == KvRoom(blocks=2, states=LEAST_STATES)
    with pytest.raises(CapacityError, match="for a context of 512"):
        kv_room(config, layers, form, 512, needed - 1)
    held_bytes = 2 * block_bytes
    assert kv_room(config, layers, form, 512, needed, held_bytes=held_bytes)
    with pytest.raises(CapacityError, match=f"beside {held_bytes + 1} of the stage"):
        kv_room(config, layers, form, 512, needed, held_bytes=held_bytes + 1)
    most = MAX_ROOM_POSITIONS // 256
    room = kv_room(config, layers, form, 512, 1 << 50)
    assert room == KvRoom(blocks=most, states=LEAST_STATES + most // 4)


def test_further_memory_is_for_states_and_blocks_in_proportion(config: ModelConfig) -> None:
    layers, form = LayerRange(0, 4), WeightForm(dtype=DTYPE)
    one, block = state_bytes(config, layers, DTYPE), kv_block_bytes(config, layers, DTYPE)
    least = bisect_left(range(1 << 30), True, key=partial(_fits, config, layers, form))
    room = kv_room(config, layers, form, 512, least + 100 * (one + 4 * block))
    assert abs(room.states - LEAST_STATES - 100) <= 4
    assert abs(room.blocks - 400) <= 8


def _fits(config: ModelConfig, layers: LayerRange, form: WeightForm, n_bytes: int) -> bool:
    try:
        return bool(kv_room(config, layers, form, 512, n_bytes))
    except CapacityError:
        return False


def test_the_planner_counts_no_layer_as_less_than_it_takes(config: ModelConfig) -> None:
    for context in (256, 512):
        shape = model_shape(config, DTYPE, context)
        for layer in range(4):
            one = LayerRange(layer, layer + 1)
            blocks = context // 256 * kv_block_bytes(config, one, DTYPE)
            states = LEAST_STATES * state_bytes(config, one, DTYPE)
            states += draft_bytes(config, one, DTYPE)
            assert shape.kv_layer_bytes >= blocks + states
