"""Pictures against transformers: what the towers read, what they give, and whole models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.models.checkpoints import make_decoder
from support.models.gguf_files import write_gguf
from support.models.projector_files import Kind, write_mmproj
from support.models.vision_checkpoints import CASES, Picture, VisionCase, random_picture, token_id
from support.oracles.oracle import FLOAT32_TOLERANCE, load_reference
from support.rings.stage_chain import CPU, Rows, StageChain, even_split, probed, random_prompt
from torch import Tensor

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.pictures import open_pictures
from shardnet.model.cache.picture_rows import PictureRows
from shardnet.model.vision.picture import EncodedPicture, PictureEncoder, PreparedPicture
from shardnet.stage.load import load_encoder
from shardnet.types import DType

SIZES = [(37, 53), (100, 61), (60, 60), (7, 90)]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> VisionCase:
    return CASES[request.param]


@pytest.fixture(scope="module")
def folder(case: VisionCase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return case.make(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return load_reference(folder)


def encoder_of(folder: Path, mmproj: Path | None = None) -> PictureEncoder:
    pictures = open_pictures(Checkpoint.open(folder), token_id, mmproj)
    return load_encoder(
        pictures,
        choice=probed(CPU, DType.FLOAT32, None),
        device=CPU,
        progress=lambda done, total: None,
    )


def encoded(encoder: PictureEncoder, *pictures: PreparedPicture) -> list[EncodedPicture]:
    with torch.inference_mode():
        return [made for made in encoder.encode(pictures) if made is not None]


def test_patches_are_those_of_the_makers_processor(case: VisionCase, folder: Path) -> None:
    processor = open_pictures(Checkpoint.open(folder), token_id).processor
    for seed, (height, width) in enumerate(SIZES):
        picture = random_picture(height, width, seed)
        ours, theirs = processor.prepare(picture), case.prepared(picture)
        patches = case.patches(theirs)
        np.testing.assert_allclose(ours.pixels, patches, rtol=0, atol=1e-5)
        assert ours.n_rows == len(patches) // case.merge**2 == ours.grid[1] * ours.grid[2]


def test_rows_are_those_of_the_tower_and_projector(
    case: VisionCase, folder: Path, reference: Any
) -> None:
    encoder = encoder_of(folder)
    pictures = [random_picture(*size, seed) for seed, size in enumerate(SIZES)]
    made = encoded(encoder, *(encoder.processor.prepare(picture) for picture in pictures))
    for picture, own in zip(pictures, made, strict=True):
        rows, deep = case.features(reference, case.prepared(picture))
        torch.testing.assert_close(own.rows, rows, rtol=0, atol=FLOAT32_TOLERANCE)
        assert len(own.deep) == len(deep)
        for ours, theirs in zip(own.deep, deep, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=FLOAT32_TOLERANCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Token ids with pictures among them, whose rows are encoded."""

    ids: list[int]
    starts: list[int]
    prepared: list[PreparedPicture]
    encoded: list[EncodedPicture]

    @classmethod
    def of(cls, encoder: PictureEncoder, pictures: Sequence[Picture]) -> Prompt:
        """Put each picture behind some text, and text behind all."""
        prepared = [encoder.processor.prepare(picture) for picture in pictures]
        ids, starts = [], []
        for number, one in enumerate(prepared):
            ids += random_prompt(5 + number, 290, seed=number)
            starts.append(len(ids))
            ids += one.token_ids
        ids += random_prompt(7, 290, seed=9)
        return cls(ids=ids, starts=starts, prepared=prepared, encoded=encoded(encoder, *prepared))

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Cut the ids into chunks of 13, or somewhat more where pictures must not be cut."""
        start = 0
        while start < len(self.ids):
            end = min(start + 13, len(self.ids))
            for first, one in zip(self.starts, self.prepared, strict=True):
                if one.see_each_other and first < end < first + len(one.token_ids):
                    end = first + len(one.token_ids)
            yield start, end
            start = end

    def rows_of(self, start: int, end: int) -> PictureRows:
        """What the rows of a chunk have of pictures."""
        index, rows, blocks = [], [], []
        deep: dict[int, list[Tensor]] = {}
        for first, one, made in zip(self.starts, self.prepared, self.encoded, strict=True):
            places = [first + place for place in np.flatnonzero(one.is_row).tolist()]
            own = [place for place in range(len(places)) if start <= places[place] < end]
            index += [places[place] - start for place in own]
            rows.append(made.rows[own])
            for layer, added in enumerate(made.deep):
                deep.setdefault(layer, []).append(added[own])
            if one.see_each_other and own:
                blocks.append((places[0] - start, places[-1] + 1 - start))
        return PictureRows(
            index=torch.tensor(index, dtype=torch.int64),
            rows=torch.cat(rows),
            deep={layer: torch.cat(parts) for layer, parts in deep.items()},
            blocks=tuple(blocks),
        )

    def logits(self, chain: StageChain, slot: int = 0, n_beside: int = 0) -> Tensor:
        """Send it in chunks, each beside rows of a text: logits [T, V] of all rows."""
        parts = []
        for start, end in self.chunks():
            own = Rows(slot=slot, position=start, ids=self.ids[start:end], n_sampled=end - start)
            text = Rows(slot=9, position=0, ids=range(n_beside), n_sampled=0)
            both = (own, text) if n_beside else (own,)
            parts.append(chain.step(*both, pictures=self.rows_of(start, end)))
        return torch.cat(parts)


def test_whole_models_write_the_same_at_every_split(
    case: VisionCase, folder: Path, reference: Any
) -> None:
    """Two pictures among text in chunks, then decoding; transformers computes all at once."""
    encoder = encoder_of(folder)
    pictures = [random_picture(37, 53), random_picture(64, 20, seed=1)]
    prompt = Prompt.of(encoder, pictures)
    inputs = case.inputs([case.prepared(picture) for picture in pictures])
    ids = torch.tensor([prompt.ids])
    with torch.inference_mode():
        expected = reference(ids, **inputs, **case.kinds(ids)).logits[0]
        theirs = reference.generate(
            ids, **inputs, **case.kinds(ids), max_new_tokens=6, min_new_tokens=6, do_sample=False
        )[0, len(prompt.ids) :].tolist()
    n_layers = Checkpoint.open(folder).config.n_layers
    seen: list[Tensor] = []
    for n_stages in range(1, n_layers + 1):
        chain = StageChain.load(folder, even_split(n_layers, n_stages))
        logits = prompt.logits(chain)
        torch.testing.assert_close(logits, expected, rtol=0, atol=FLOAT32_TOLERANCE)
        tokens = [int(logits[-1].argmax())]
        while len(tokens) < len(theirs):
            position = len(prompt.ids) + len(tokens) - 1
            step = Rows(slot=0, position=position, ids=tokens[-1:], n_sampled=1)
            tokens.append(int(chain.step(step).argmax()))
        assert tokens == theirs
        assert all(torch.equal(logits, other) for other in seen)
        seen += [logits, prompt.logits(chain, slot=1, n_beside=3)]


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0], ids=str)
def test_a_projector_file_gives_the_rows_of_its_weights(
    case: VisionCase, kind: Kind, tmp_path: Path
) -> None:
    """Of a file with the values of `kind` in float32; of F32 also those of the safetensors."""
    folder = case.make(tmp_path / "whole", **case.wide)
    text = make_decoder(tmp_path / "text", "llama")
    model = write_gguf(text, tmp_path / "model.gguf")
    write_mmproj(folder, tmp_path / "mmproj-model.gguf", kind)
    rounded = write_mmproj(folder, tmp_path / "whole" / "rounded.gguf", kind, is_rounded=True)
    found, plain = encoder_of(model), encoder_of(folder, rounded)
    picture = found.processor.prepare(random_picture(37, 53))
    [rows], [expected] = encoded(found, picture), encoded(plain, picture)
    most = float(expected.rows.abs().max())
    atol = most / 50 if kind is Kind.Q8_0 else FLOAT32_TOLERANCE  # it computes with 8 bits
    torch.testing.assert_close(rows.rows, expected.rows, rtol=0, atol=atol)
    if kind is Kind.F32:
        own = encoder_of(folder)
        assert own.processor.prepare(random_picture(37, 53)).token_ids == picture.token_ids
        [same] = encoded(own, picture)
        torch.testing.assert_close(rows.rows, same.rows, rtol=0, atol=FLOAT32_TOLERANCE)
