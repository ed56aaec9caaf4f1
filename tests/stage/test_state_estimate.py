"""Memory of states, as the loader and the planner count it, against what the KV cache holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.models.checkpoints import make_decoder

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.cluster.planning.model_shape import model_shape
from shardnet.errors import CapacityError
from shardnet.model.cache.kv_cache import KvCache
from shardnet.model.config.model_config import ModelConfig
from shardnet.runtime.loading.loading import MAX_ROOM_POSITIONS, KvRoom, kv_room
from shardnet.stage.estimate.memory_estimate import (
    WeightForm,
    activation_peak_bytes,
    kv_block_bytes,
    stage_weight_bytes,
    state_bytes,
)
from shardnet.types import (
    LEAST_STATES,
    PREFILL_CHUNK_ROWS,
    DType,
    LayerRange,
    SlotId,
    StateId,
)

DTYPE = DType.BFLOAT16


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    """Three layers with a state, then one with attention."""
    return Checkpoint.open(make_decoder(tmp_path, "qwen3_next", with_tokenizer=False)).config


def test_it_is_what_the_cache_holds(config: ModelConfig) -> None:
    layers = LayerRange(1, 4)
    kv = KvCache(
        3,
        config.n_kv_heads,
        config.head_size,
        torch.bfloat16,
        torch.device("cpu"),
        2,
        states=[config.state(layer) for layer in layers],
    )
    kv.ensure(SlotId(0), 290, 290)
    kv.assume_end(SlotId(0), 290)
    kv.keep_state(SlotId(0), 290, StateId(0))
    kv.copy(SlotId(0), SlotId(0), 290, StateId(0))
    states = [kv.state(SlotId(0), layer) for layer in (0, 1)]
    held = sum(state.recent.nbytes + state.recurrent.nbytes for state in states)
    assert state_bytes(config, layers, DTYPE) == kv.state_bytes == held > 0
    assert kv_block_bytes(config, layers, DTYPE) == kv.block_bytes
    keys, values = kv.layer(SlotId(0), 2)
    assert keys.nbytes + values.nbytes == 2 * kv.block_bytes


@pytest.mark.parametrize("layers", [LayerRange(0, 4), LayerRange(1, 3)], ids=str)
def test_a_stage_needs_room_for_the_least_states(config: ModelConfig, layers: LayerRange) -> None:
    """Weights, a step, states, and the blocks of one sequence: not a byte less."""
    form, block_bytes = WeightForm(dtype=DTYPE), kv_block_bytes(config, layers, DTYPE)
    needed = (
        stage_weight_bytes(config, layers, form)
        + activation_peak_bytes(config, layers, PREFILL_CHUNK_ROWS, DTYPE, 512)
        + LEAST_STATES * state_bytes(config, layers, DTYPE)
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
    least = next(n for n in range(0, 1 << 30, 1 << 16) if _fits(config, layers, form, n))
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
            assert shape.kv_layer_bytes >= blocks + LEAST_STATES * state_bytes(config, one, DTYPE)
