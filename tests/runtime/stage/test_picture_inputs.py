"""What rows have of pictures: rotary positions as transformers' function has them, and rows."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

from shardnet.errors import WrongValuesError
from shardnet.model.vision.picture import EncodedPicture
from shardnet.runtime.stage.picture_inputs import (
    axis_positions,
    blocks_for_later,
    rows_of_blocks,
    rows_of_store,
)
from shardnet.runtime.stage.picture_store import PictureStore, StoredPicture
from shardnet.slot_operations import PicturePlace
from shardnet.types import Epoch, MicroBatch, RowGroup, SequenceId, SlotId, StepId

PAD, START = 7, 8


def test_rows_have_transformers_positions_in_chunks_of_any_size() -> None:
    grids = [(1, 3, 5), (1, 4, 2)]
    ids: list[int] = [1, 2, 3]
    places = []
    for number, grid in enumerate(grids):
        ids.append(START)
        n_rows = grid[1] * grid[2]
        places.append(
            PicturePlace(
                position=len(ids),
                n_positions=n_rows,
                grid=grid,
                see_each_other=False,
                digest=bytes(16),
            )
        )
        ids += [PAD] * n_rows + [4] * (3 + number)
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=2)
    config = SimpleNamespace(
        vision_config=vision, image_token_id=PAD, video_token_id=99, vision_start_token_id=START
    )
    known = torch.tensor([ids])
    kinds = (known == PAD).int()
    whole = torch.tensor([(t, 2 * h, 2 * w) for t, h, w in grids])
    model = SimpleNamespace(config=config)
    model.get_vision_position_ids = lambda *args, **how: Qwen2_5_VLModel.get_vision_position_ids(
        model, *args, **how
    )
    theirs, offset = Qwen2_5_VLModel.get_rope_index(
        model, known, mm_token_type_ids=kinds, image_grid_thw=whole
    )
    expected = theirs[:, 0].numpy()
    for size in (1, 7, len(ids)):
        parts = [
            axis_positions(places, first, min(size, len(ids) - first))
            for first in range(0, len(ids), size)
        ]
        np.testing.assert_array_equal(np.concatenate(parts, 1), expected)
    after = axis_positions(places, len(ids) + 3, 1)
    assert after.tolist() == [[len(ids) + 3 + int(offset)]] * 3


def test_another_shard_of_a_first_stage_gets_what_the_store_has() -> None:
    """Marks between lines take no row; DeepStack's layers have those of the picture."""
    place = PicturePlace(
        position=2, n_positions=5, grid=(1, 2, 2), see_each_other=True, digest=bytes(16)
    )
    rows, deep = torch.randn(4, 3), (torch.randn(4, 3), torch.randn(4, 3))
    store = PictureStore()
    encoded = EncodedPicture(rows=rows, deep=deep)
    store.put(place.digest, StoredPicture(offsets=(0, 1, 3, 4), encoded=encoded))
    group = RowGroup(sequence_id=SequenceId(5), slot=SlotId(0), position=1, n_rows=7, n_sampled=0)
    batch = MicroBatch(epoch=Epoch(1), step=StepId(1), groups=(group,), token_ids=(9,) * 7)
    how = {"has_axes": False, "device": torch.device("cpu")}
    own = rows_of_store(batch, [(place,)], store, **how)
    assert own is not None
    blocks = blocks_for_later(batch, own, 0, embeds=True)
    same = rows_of_blocks(batch, [(place,)], blocks, width=3, embeds=True, **how)
    assert same is not None
    assert same.rows is not None
    assert own.rows is not None
    assert torch.equal(same.index, own.index)
    assert torch.equal(same.rows, own.rows)
    assert same.deep.keys() == own.deep.keys() == {0, 1}
    assert all(torch.equal(same.deep[layer], own.deep[layer]) for layer in (0, 1))
    assert same.blocks == own.blocks == ((1, 6),)
    with pytest.raises(WrongValuesError, match="rows of no picture"):
        rows_of_blocks(batch, [(place,)], blocks, width=3, **how)
