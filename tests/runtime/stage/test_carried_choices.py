"""Positions that a stage's rows attend to by the choice of a layer on the stage before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.checkpoints import make_decoder
from support.models.family_cases import CASES
from support.rings.stage_chain import Rows, batch_of, random_prompt
from support.rings.torch_rings import TorchStages

from shardnet.errors import WrongValuesError
from shardnet.model.config.model_config import EntryChoice, Indexer
from shardnet.runtime.stage.position_choices import blocks_of_choice, choice_of_blocks
from shardnet.sampling_params import SamplingParams
from shardnet.types import LayerRange
from shardnet.wire.payloads.rows import read_rows, rows_frames

BATCH = batch_of(
    [
        Rows(slot=1, position=5, ids=[1, 2], n_sampled=0),
        Rows(slot=2, position=0, ids=[3], n_sampled=0),
    ]
)
CHOSEN = torch.tensor([[0, 2, 5], [1, 5, 6], [0, -1, -1]], dtype=torch.int32)
CPU = torch.device("cpu")
THREE = Indexer(n_heads=1, head_size=2, n_chosen=3, interleaved=False, layers=(0,))


def test_choices_travel_as_blocks_of_rows() -> None:
    frames = [
        frame
        for block in blocks_of_choice(BATCH, CHOSEN)
        for frame in rows_frames(block, epoch=1, step=1)
    ]
    assert torch.equal(
        came := choice_of_blocks(BATCH, [*map(read_rows, frames)], THREE, CPU), CHOSEN
    )
    assert came.dtype is torch.int32
    few = batch_of([Rows(slot=1, position=1, ids=[1, 2], n_sampled=0)])
    assert blocks_of_choice(few, None) == []
    assert choice_of_blocks(few, [], THREE, CPU) is None


def test_choices_of_entries_travel_with_the_tail() -> None:
    """Of rows behind 9 and 10 positions, in entries of 3, one of which is chosen."""
    batch = batch_of([Rows(slot=1, position=8, ids=[1, 2], n_sampled=0)])
    indexer = replace(THREE, n_pooled=3)
    chosen = torch.tensor([[3, 4, 5, -1, -1], [0, 1, 2, 9, -1]], dtype=torch.int32)
    assert torch.equal(
        choice_of_blocks(batch, blocks_of_choice(batch, chosen), indexer, CPU), chosen
    )
    chosen[1, 3] = -1
    with pytest.raises(WrongValuesError, match="came with positions that are none"):
        choice_of_blocks(batch, blocks_of_choice(batch, chosen), indexer, CPU)
    few = batch_of([Rows(slot=1, position=3, ids=[1, 2], n_sampled=0)])
    assert choice_of_blocks(few, [], indexer, CPU) is None


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        (0, [0, 2, 6]),  # what comes behind the row
        (0, [-1, 2, 5]),
        (0, [2, 2, 5]),
        (0, [2, 0, 5]),
        (0, [0, 2, -1]),
        (2, [0, 0, -1]),
        (2, [-1, -1, -1]),
        (1, [1, 5, float("nan")]),
        (1, [1, 5, 1e9]),
    ],
)
def test_positions_that_are_none_are_refused(row: int, wrong: list[float]) -> None:
    rows = CHOSEN.float()
    rows[row] = torch.tensor(wrong)
    with pytest.raises(WrongValuesError, match="step 1 came with positions that are none"):
        choice_of_blocks(BATCH, blocks_of_choice(BATCH, rows), THREE, CPU)


SHARED = EntryChoice(n_pooled=2, n_entries=3, n_blocks=2, block_size=2)
ENTRIES = torch.tensor([[0, 2, 4, -1, -1], [1, 4, -1, 0, 2], [9, 9, 9, 9, 9]], dtype=torch.int32)
"""Of rows that see 5 entries, and one that sees 3: whatever came for that is not looked at."""


def test_entries_and_blocks_of_them_travel_alike() -> None:
    batch = batch_of(
        [
            Rows(slot=1, position=9, ids=[1, 2], n_sampled=0),
            Rows(slot=2, position=5, ids=[3], n_sampled=0),
        ]
    )
    blocks = blocks_of_choice(batch, ENTRIES)
    assert torch.equal(choice_of_blocks(batch, blocks, SHARED, CPU), ENTRIES)
    few = batch_of([Rows(slot=1, position=5, ids=[1, 2], n_sampled=0)])
    assert choice_of_blocks(few, [], SHARED, CPU) is None
    for column, wrong in ((0, 4), (2, 5), (1, 0), (0, -2), (3, 3), (4, 0), (0, float("nan"))):
        rows = ENTRIES.float()
        rows[1, column] = wrong
        with pytest.raises(WrongValuesError, match="step 1 came with positions that are none"):
            choice_of_blocks(batch, blocks_of_choice(batch, rows), SHARED, CPU)


def test_rows_without_their_positions_are_refused() -> None:
    first, second = blocks_of_choice(BATCH, CHOSEN)
    wide = blocks_of_choice(BATCH, torch.zeros(3, 4, dtype=torch.int32))
    unlike: list[list[Any]] = [[], [first], [second, first], [first, second, second], wide]
    unlike.append([replace(first, position=4), second])
    for blocks in unlike:
        with pytest.raises(WrongValuesError, match="came without the positions of its rows"):
            choice_of_blocks(BATCH, blocks, THREE, CPU)


def test_a_stage_takes_the_choice_of_the_one_before(tmp_path: Path) -> None:
    """Of GLM-5 layer 2 does; prompts in chunks, and two sequences in one step."""
    folder = make_decoder(tmp_path, "glm_moe_dsa", **CASES["glm_moe_dsa"])
    prompt = random_prompt(90, 300)
    answers = []
    for ranges in ([LayerRange(0, 4)], [LayerRange(0, 2), LayerRange(2, 4)]):
        stages = TorchStages(folder, ranges)
        stages.open(SamplingParams())
        stages.step(0, prompt[:30], 0)
        stages.step(30, prompt[30:89], 0)
        answers.append(stages.step(89, prompt[89:], 1).token_ids)
    assert answers[0] == answers[1]
