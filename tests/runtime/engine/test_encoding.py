"""Pictures of requests, from a tower to tokens: over several stages, and again."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.models.checkpoints import make_llama
from support.models.fake_tower import FakeEncoder, FakeProcessor, noise
from support.rings.real_ring import N_LAYERS, ask, pictured, real_ring, say, say_all
from support.rings.stage_chain import CPU, StageChain, even_split, probed

from shardnet.errors import ShardnetError
from shardnet.model.cache.picture_rows import PictureRows
from shardnet.runtime.engine.requests import GenerationRequest
from shardnet.stage.runs import Run, sampled_rows
from shardnet.types import (
    DType,
    Epoch,
    MicroBatch,
    RowGroup,
    SequenceId,
    SlotId,
    StepId,
)

PAD, MARK = 7, 9
PROCESSOR = FakeProcessor(placeholder_id=PAD, mark_id=MARK)
WIDTH = 48
CHOICE = probed(CPU, DType.FLOAT32, None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("llama")
    make_llama(made)
    return made


def encoder(**how: int) -> FakeEncoder:
    return FakeEncoder(width=WIDTH, processor=PROCESSOR, **how)


def expected(
    folder: Path, request: GenerationRequest, *rgb: np.ndarray, n_deep: int = 0
) -> list[int]:
    """Generate greedily with one stage whose prompt has the rows of these pictures put in."""
    [stage] = StageChain.load(folder, even_split(N_LAYERS, 1), CHOICE).stages
    prompt, tower = request.prompt, encoder(n_deep=n_deep)
    prepared = [PROCESSOR.prepare(each) for each in rgb]
    made = [done for done in tower.encode(prepared) if done is not None]
    index = [
        place.position + int(offset)
        for place, each in zip(request.places, prepared, strict=True)
        for offset in each.is_row.nonzero()[0]
    ]
    pictures = PictureRows(
        index=torch.tensor(index),
        rows=torch.cat([one.rows for one in made]),
        deep={layer: torch.cat([one.deep[layer] for one in made]) for layer in range(n_deep)},
    )
    tokens: list[int] = []
    ids, first = list(prompt), 0
    for _ in range(request.max_tokens):
        group = RowGroup(
            sequence_id=SequenceId(1), slot=SlotId(0), position=first, n_rows=len(ids), n_sampled=1
        )
        batch = MicroBatch(epoch=Epoch(1), step=StepId(1), groups=(group,), token_ids=ids)
        hidden = stage.run_alone(
            Run(batch=batch, hidden=None, pictures=None if tokens else pictures)
        )
        tokens.append(int(stage.logits(sampled_rows(hidden, batch)).argmax()))
        first, ids = first + len(ids), tokens[-1:]
    return tokens


@pytest.mark.parametrize(("n_stages", "n_deep"), [(1, 0), (2, 0), (2, 1), (3, 3)])
def test_a_picture_is_its_rows_whatever_the_split(folder: Path, n_stages: int, n_deep: int) -> None:
    """What DeepStack adds after layers travels to the stages that have them."""
    rgb, other = noise(20, 72), noise(12, 12, seed=1)
    request = pictured(PROCESSOR, 3, 4, rgb, 5, 6, other, 8)

    async def run() -> tuple[list[int], list[list[int]]]:
        tower = encoder(n_deep=n_deep)
        async with real_ring(folder, CHOICE, n_stages=n_stages, encoder=tower) as engine:
            alone = (await say(engine, request)).tokens
            beside = await say_all(engine, [request, ask(range(20, 60), 8), request])
            return alone, [said.tokens for said in beside]

    alone, beside = asyncio.run(run())
    assert alone == expected(folder, request, rgb, other, n_deep=n_deep)
    assert beside[0] == beside[2] == alone


def test_a_picture_is_encoded_once_and_another_one_shares_no_prefix(folder: Path) -> None:
    rgb = noise(40, 80)
    first, again = pictured(PROCESSOR, 3, rgb, 5), pictured(PROCESSOR, 3, rgb, 5, 6, 7 + 4)
    other = pictured(PROCESSOR, 3, noise(40, 80, seed=2), 5)

    async def run() -> list[object]:
        async with real_ring(folder, CHOICE, encoder=encoder()) as engine:
            said = [(await say(engine, one)).tokens for one in (first, again, other, first)]
            totals = engine.totals
            return [said, engine.n_encoded, totals.n_prefix_hits, totals.n_prefix_tokens]

    said, n_encoded, n_hits, n_shared = asyncio.run(run())
    fresh = [expected(folder, first, rgb), expected(folder, again, rgb)]
    assert said[:2] == fresh
    assert said[3] == fresh[0] != said[2]
    assert n_encoded == 2
    assert (n_hits, n_shared) == (2, 2 * len(first.prompt) - 1)


@pytest.mark.parametrize("has_tower", [False, True])
def test_a_picture_that_cannot_be_encoded_fails_alone(folder: Path, has_tower: bool) -> None:
    def fail() -> None:
        raise ValueError("a bug of a tower")

    tower = replace(encoder(), on_piece=fail) if has_tower else None
    request = pictured(PROCESSOR, 3, noise(40, 80), 5)

    async def run() -> list[int]:
        async with real_ring(folder, CHOICE, encoder=tower) as engine:
            with pytest.raises(ShardnetError, match="tower" if not has_tower else "picture"):
                await say(engine, request)
            return (await say(engine, ask(range(20, 60), 4))).tokens

    assert len(asyncio.run(run())) == 4
