"""Rotary positions with three axes against transformers' function for whole prompts."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

from shardnet.runtime.stage.picture_inputs import axis_positions
from shardnet.slot_operations import PicturePlace

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
