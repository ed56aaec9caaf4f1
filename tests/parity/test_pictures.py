"""Pictures against transformers: what the towers read, what they give, and whole models."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.models.checkpoints import make_decoder
from support.models.gguf_files import write_gguf
from support.models.module_vision import TOWERS, ByHand, make_by_modules
from support.models.projector_files import PROJECTORS, Kind, write_mmproj
from support.models.vision_checkpoints import (
    CASES,
    TOKENS,
    Picture,
    VisionCase,
    random_picture,
    token_id,
)
from support.oracles.oracle import FLOAT32_TOLERANCE, load_reference
from support.rings.real_ring import ask, pictured, real_ring, say, say_all
from support.rings.shard_followers import load_sharded
from support.rings.stage_chain import (
    CPU,
    Rows,
    StageChain,
    batch_of,
    even_split,
    probed,
    random_prompt,
)
from support.soak import cases, is_soak
from torch import Tensor
from transformers import AutoProcessor
from transformers.models.llama4.processing_llama4 import Llama4Processor

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.pictures import open_pictures
from shardnet.errors import CheckpointError, UnsupportedModelError, UsageError
from shardnet.model.kernels.library import native_kernels
from shardnet.model.modules.module_tower import ModuleProcessor
from shardnet.model.vision.picture import EncodedPicture, PictureEncoder, PreparedPicture
from shardnet.model.vision.tower import TowerEncoder
from shardnet.runtime.engine.requests import GenerationRequest
from shardnet.runtime.loading.model_facts import tower_of
from shardnet.runtime.stage.picture_inputs import rows_of_store
from shardnet.runtime.stage.picture_store import PictureStore, StoredPicture
from shardnet.stage.load import load_encoder
from shardnet.types import DType, LayerRange

N_TOKENS = 6
HOW = {"max_new_tokens": N_TOKENS, "min_new_tokens": N_TOKENS, "do_sample": False}
CHOICE = probed(CPU, DType.FLOAT32, None)
WITH_FILES = [name for name, case in CASES.items() if case.wrapper in PROJECTORS]
KINDS = (Kind.F16, Kind.BF16, Kind.Q8_0)
PLAIN = [*product(WITH_FILES, [Kind.F32]), *product(WITH_FILES[:1], KINDS)]
ROUNDED = [*product(WITH_FILES[1:], KINDS)]
BY_PARTS = [CASES["glm46v"], CASES["gemma4-clipped"]]
"""Another processor and another tower of a whole model that the suite has: their patches and rows
show them."""
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


def encoder_of(folder: Path, mmproj: Path | None = None) -> TowerEncoder:
    pictures = open_pictures(Checkpoint.open(folder), token_id, mmproj)
    return load_encoder(
        pictures,
        choice=CHOICE,
        device=CPU,
        progress=lambda done, total: None,
    )


def encoded(
    encoder: PictureEncoder, *pictures: PreparedPicture, is_alone: bool = False
) -> list[EncodedPicture]:
    walk, made = encoder.encode(pictures), []
    with torch.inference_mode(), contextlib.suppress(StopIteration):
        given = next(walk)
        while True:
            made += [] if given is None else [given]
            given = walk.send(is_alone)
    return made


def test_patches_are_those_of_the_makers_processor(case: VisionCase, folder: Path) -> None:
    processor = open_pictures(Checkpoint.open(folder), token_id).processor
    for seed, (height, width) in enumerate(SIZES):
        picture = random_picture(height, width, seed)
        ours, theirs = processor.prepare(picture), case.prepared(picture)
        patches = case.patches(theirs)
        np.testing.assert_allclose(ours.pixels, patches, rtol=0, atol=1e-5)
        assert ours.n_rows == len(patches) // case.merge**2 == np.prod(ours.grid)


@pytest.mark.parametrize("fills", [False, True])
def test_tiles_are_chosen_and_written_as_llama_4s_processor_does(
    fills: bool, tmp_path: Path
) -> None:
    own = CASES["llama4"]
    settings = {**own.settings, "max_patches": 16, "resize_to_max_canvas": fills}
    case = replace(own, settings=settings)
    processor = open_pictures(Checkpoint.open(case.make(tmp_path)), token_id).processor
    sides = np.random.default_rng(3).integers(4, 130, (24, 2)).tolist()
    seen = set()
    for height, width in [*sides, (18, 18), (36, 36), (200, 200), (9, 18)]:
        picture = random_picture(height, width)
        ours, theirs = processor.prepare(picture), case.prepared(picture)
        np.testing.assert_array_equal(ours.pixels, case.patches(theirs))
        [ratio] = theirs["aspect_ratios"].tolist()
        written = Llama4Processor._prompt_split_image(None, ratio, 9)
        tokens = [TOKENS[token] for token in re.findall(r"<\|\w+\|>", written)]
        assert list(ours.token_ids) == tokens
        seen.add(tuple(ratio))
    assert len(seen) > 5


def test_rows_are_those_of_the_tower_and_projector(
    case: VisionCase, folder: Path, reference: Any
) -> None:
    encoder = encoder_of(folder)
    pictures = [random_picture(*size, seed) for seed, size in enumerate(SIZES)]
    prepared = [encoder.processor.prepare(picture) for picture in pictures]
    made = encoded(encoder, *prepared)
    for own, same in zip(made, encoded(encoder, *prepared, is_alone=True), strict=True):
        assert all(map(torch.equal, (own.rows, *own.deep), (same.rows, *same.deep)))
    for picture, own in zip(pictures, made, strict=True):
        rows, deep = case.features(reference, case.prepared(picture))
        torch.testing.assert_close(own.rows, rows, rtol=0, atol=FLOAT32_TOLERANCE)
        assert len(own.deep) == len(deep)
        for ours, theirs in zip(own.deep, deep, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=FLOAT32_TOLERANCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A request with pictures, whose rows are in the store."""

    request: GenerationRequest
    store: PictureStore

    @classmethod
    def of(cls, encoder: PictureEncoder, pictures: Sequence[Picture]) -> Prompt:
        """Put each picture behind some text, and text behind all."""
        processor, parts = encoder.processor, []
        for number, picture in enumerate(pictures):
            parts += [*random_prompt(5 + number, 290, seed=number), picture]
        parts += random_prompt(7, 290, seed=9)
        request, store = pictured(processor, *parts, max_tokens=N_TOKENS), PictureStore()
        prepared = [processor.prepare(picture) for picture in pictures]
        made = encoded(encoder, *prepared)
        for place, one, rows in zip(request.places, prepared, made, strict=True):
            offsets = np.flatnonzero(one.is_row)
            offsets = tuple((offsets - offsets[0]).tolist())
            store.put(place.digest, StoredPicture(offsets=offsets, encoded=rows))
        return cls(request=request, store=store)

    @property
    def ids(self) -> Sequence[int]:
        """The token ids."""
        return self.request.prompt

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Cut the ids into chunks of 13, or somewhat more where pictures must not be cut."""
        start = 0
        while start < len(self.ids):
            end = min(start + 13, len(self.ids))
            for place in self.request.places:
                if place.see_each_other and place.position < end < place.end:
                    end = place.end
            yield start, end
            start = end

    def step(self, chain: StageChain, own: Rows, *beside: Rows) -> Tensor:
        """Run some of its rows, beside those of texts: logits of the sampled ones."""
        pictures = rows_of_store(
            batch_of([own, *beside]),
            [self.request.places, *(() for _ in beside)],
            self.store,
            has_axes=chain.stages[0].has_position_axes,
            device=CPU,
        )
        return chain.step(own, *beside, pictures=pictures)

    def logits(self, chain: StageChain, slot: int = 0, n_beside: int = 0) -> Tensor:
        """Send it in chunks, each beside rows of a text: logits [T, V] of all rows."""
        parts = []
        for start, end in self.chunks():
            own = Rows(slot=slot, position=start, ids=self.ids[start:end], n_sampled=end - start)
            ids = range(n_beside)
            text = Rows(slot=9, position=len(parts) * n_beside, ids=ids, n_sampled=0)
            parts.append(self.step(chain, own, *[text] * bool(n_beside)))
        return torch.cat(parts)


def test_whole_models_write_the_same_at_every_split(
    case: VisionCase, folder: Path, reference: Any
) -> None:
    """Two pictures among text in chunks, then decoding; transformers computes all at once."""
    if any(case is each for each in BY_PARTS) and not is_soak():
        pytest.skip("scripts/soak runs it")
    encoder = encoder_of(folder)
    pictures = [random_picture(37, 53), random_picture(64, 20, seed=1)]
    prompt = Prompt.of(encoder, pictures)
    inputs = case.inputs([case.prepared(picture) for picture in pictures])
    ids = torch.tensor([prompt.ids])
    with torch.inference_mode():
        expected = reference(ids, **inputs, **case.kinds(ids)).logits[0]
        theirs = reference.generate(ids, **inputs, **case.kinds(ids), **HOW)[
            0, len(prompt.ids) :
        ].tolist()
    n_layers = Checkpoint.open(folder).config.n_layers
    seen: list[Tensor] = []
    for n_stages in cases([1, n_layers], range(2, n_layers)):
        chain = StageChain.load(folder, even_split(n_layers, n_stages))
        logits = prompt.logits(chain)
        torch.testing.assert_close(logits, expected, rtol=0, atol=FLOAT32_TOLERANCE)
        tokens = [int(logits[-1].argmax())]
        while len(tokens) < len(theirs):
            position = len(prompt.ids) + len(tokens) - 1
            step = Rows(slot=0, position=position, ids=tokens[-1:], n_sampled=1)
            tokens.append(int(prompt.step(chain, step).argmax()))
        assert tokens == theirs
        assert all(torch.equal(logits, other) for other in seen)
        seen += [logits, prompt.logits(chain, slot=1, n_beside=3)]
    if native_kernels() is not None:  # by which alone stages are cut
        [first] = StageChain.load(folder, [LayerRange(0, 1)]).stages
        last = load_sharded(folder, LayerRange(1, n_layers), 2, context=512)
        whole = load_sharded(folder, LayerRange(0, n_layers), 2, context=512)
        for cut in ([first, last], [whole]):
            assert torch.equal(prompt.logits(StageChain(cut)), seen[0])
    assert asyncio.run(in_a_ring(folder, encoder, prompt.request, n_layers)) == [theirs] * 3


@pytest.mark.parametrize("kind", TOWERS)
def test_towers_of_transformers_see_as_whole_models_of_it(kind: str, tmp_path: Path) -> None:
    folder = make_by_modules(kind, tmp_path)
    encoder, picture = encoder_of(folder), random_picture(37, 53)
    own = encoder.processor
    assert isinstance(own, ModuleProcessor)
    if not TOWERS[kind].made_by:
        by_hand = ByHand(kind=TOWERS[kind], row_id=own.row_id, takes=own.takes)
        encoder = replace(encoder, processor=by_hand)
    prompt, prepared = Prompt.of(encoder, [picture]), encoder.processor.prepare(picture)
    reference, ids = load_reference(folder), torch.tensor([prompt.ids])
    inputs = {name: torch.from_numpy(array) for name, array in prepared.arrays.items()}
    inputs["pixel_values"] = torch.from_numpy(prepared.pixels)
    with torch.inference_mode():
        expected = reference(ids, **inputs).logits[0]
        theirs = reference.generate(ids, **inputs, **HOW)[0, len(prompt.ids) :].tolist()
    for n_stages in (1, 2):
        logits = prompt.logits(StageChain.load(folder, even_split(2, n_stages)))
        torch.testing.assert_close(logits, expected, rtol=0, atol=FLOAT32_TOLERANCE)
    assert asyncio.run(in_a_ring(folder, encoder, prompt.request, 2)) == [theirs] * 3


def test_a_processor_that_counts_other_rows_than_the_tower_is_noticed(tmp_path: Path) -> None:
    encoder = encoder_of(make_by_modules("llava", tmp_path))
    prepared = encoder.processor.prepare(random_picture(37, 53))
    with pytest.raises(UsageError, match="16 rows, and its processor has 15 tokens"):
        encoded(encoder, replace(prepared, grid=(1, 1, 15)))


def test_a_picture_that_would_grow_without_bounds_is_refused(tmp_path: Path) -> None:
    """CLIP's shorter side has one length whatever the other's, before the picture is cropped."""
    processor = encoder_of(make_by_modules("llava", tmp_path)).processor
    with pytest.raises(UsageError, match="100 x 2 pixels: one side may be at most 20 times"):
        processor.prepare(np.zeros((2, 100, 3), np.uint8))


def test_what_a_processor_of_transformers_raises_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise KeyError("odd")

    own: dict[str, Any] = {"made": SimpleNamespace()}
    monkeypatch.setattr(AutoProcessor, "from_pretrained", lambda *args, **kwargs: own["made"])

    def processor(number: int) -> ModuleProcessor:
        folder = tmp_path / str(number)  # each is opened once
        return ModuleProcessor(folder=folder, row_id=5, takes=frozenset())

    with pytest.raises(UnsupportedModelError, match="a SimpleNamespace, has no token for pictures"):
        processor(1).placeholder  # noqa: B018
    with_token = type("Own", (), {"image_token": "<image>", "tokenizer": 1, "__call__": refuse})
    own["made"] = with_token()
    with pytest.raises(UsageError, match="does not take the picture: KeyError: 'odd'"):
        processor(2).prepare(np.zeros((2, 2, 3), np.uint8))

    def lacks(*args: Any, **kwargs: Any) -> Any:
        raise ImportError("it needs torchvision")

    monkeypatch.setattr(AutoProcessor, "from_pretrained", lacks)
    with pytest.raises(UnsupportedModelError, match=r"needs torchvision; .* pip install"):
        processor(3).placeholder  # noqa: B018


async def in_a_ring(
    folder: Path, encoder: PictureEncoder, request: GenerationRequest, n_layers: int
) -> list[list[int]]:
    """Say it over a stage for each layer, then twice beside a text; the prefix is there then."""
    ring = real_ring(folder, CHOICE, n_stages=n_layers, n_layers=n_layers, encoder=encoder)
    async with ring as engine:
        alone = await say(engine, request)
        one, _, other = await say_all(engine, [request, ask(range(20, 60), 4), request])
        assert engine.n_encoded == len(request.pictures)
        assert engine.totals.n_prefix_hits or Checkpoint.open(folder).config.has_state
        return [said.tokens for said in (alone, one, other)]


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        pytest.param(CASES[name], kind, id=f"{name}-{kind.name}")
        for name, kind in cases(PLAIN, ROUNDED)
    ],
)
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
    picture = found.processor.prepare(random_picture(37, 53), "low")  # files know no limits
    [rows], [expected] = encoded(found, picture), encoded(plain, picture)
    most = float(expected.rows.abs().max())
    atol = most / 50 if kind is Kind.Q8_0 else FLOAT32_TOLERANCE  # it computes with 8 bits
    torch.testing.assert_close(rows.rows, expected.rows, rtol=0, atol=atol)
    if kind is Kind.F32:
        own = encoder_of(folder)
        prepared = own.processor.prepare(random_picture(37, 53), "low")
        assert prepared.token_ids == picture.token_ids
        [same] = encoded(own, prepared)
        torch.testing.assert_close(rows.rows, same.rows, rtol=0, atol=FLOAT32_TOLERANCE)


def swapped(name: str) -> str:
    """What the first converters called the linears of MLPs."""
    other = {"up": "down", "down": "up"}
    return re.sub("ffn_(up|down)", lambda found: f"ffn_{other[found[1]]}", name)


@pytest.mark.parametrize("case_name", ["gemma3", "qwen2_vl"])
def test_mlps_of_the_first_projector_files_have_each_others_names(
    case_name: str, tmp_path: Path
) -> None:
    case = CASES[case_name]
    folder = case.make(tmp_path / "whole")
    model = write_gguf(make_decoder(tmp_path / "text", "llama"), tmp_path / "model.gguf")
    right = write_mmproj(folder, tmp_path / "right.gguf", Kind.F32)
    wrong = write_mmproj(folder, tmp_path / "wrong.gguf", Kind.F32, rename=swapped)
    found, plain = encoder_of(model, wrong), encoder_of(model, right)
    picture = found.processor.prepare(random_picture(37, 53), "low")
    [rows], [expected] = encoded(found, picture), encoded(plain, picture)
    assert torch.equal(rows.rows, expected.rows)


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        (lambda name: "" if name == "v.post_ln.bias" else name, "lacks .*post_layernorm.bias"),
        (
            lambda name: swapped(name) if ".1." in name else name,
            r"v\.blk\.1\.ffn_up\.weight has shape \[24, 44\], and .*fc1\.weight has \[44, 24\]",
        ),
    ],
    ids=["lacks-one", "another-shape"],
)
def test_a_projector_that_does_not_fit_stops_no_text(
    rename: Callable[[str], str], message: str, tmp_path: Path
) -> None:
    """A request with a picture hears why, and who names such a file with --mmproj."""
    folder = CASES["gemma3"].make(tmp_path / "whole")
    write_gguf(make_decoder(tmp_path / "text", "llama"), tmp_path / "model.gguf")
    file = write_mmproj(folder, tmp_path / "mmproj-model.gguf", Kind.F32, rename=rename)
    checkpoint = Checkpoint.open(tmp_path / "model.gguf")
    assert tower_of(checkpoint) is None
    for asked in (
        partial(tower_of, checkpoint, file),
        partial(open_pictures, checkpoint, token_id),
    ):
        with pytest.raises(CheckpointError, match=f"{file}:? {message}"):
            asked()


@pytest.mark.parametrize("known", [{}, {"<image_soft_token>": 320}], ids=["dropped", "no-row"])
def test_another_token_marks_gemma_3s_rows_where_its_own_is_left_out(
    known: dict[str, int], tmp_path: Path
) -> None:
    """llama.cpp's converter drops it, Ollama's the row of its embedding: none of 320 has it."""
    folder = CASES["gemma3"].make(tmp_path / "whole")
    model = write_gguf(make_decoder(tmp_path / "text", "llama"), tmp_path / "model.gguf")
    write_mmproj(folder, tmp_path / "mmproj-model.gguf", Kind.F32)
    tokens = {**TOKENS, "<image_soft_token>": None, "<pad>": 2, **known}
    processor = open_pictures(Checkpoint.open(model), tokens.get).processor
    prepared = processor.prepare(random_picture(37, 53))
    assert prepared.token_ids == (TOKENS["<start_of_image>"], *[2] * 36, TOKENS["<end_of_image>"])
    assert prepared.n_rows == 36


def test_pixtral_12b_projects_patches_as_they_are(tmp_path: Path) -> None:
    """Its projector file has neither the norm nor the linear that join patches."""
    parts = ("mm.input_norm.weight", "mm.patch_merger.weight")
    own = CASES["mistral3"]
    case = replace(own, merge=1, outer={**own.outer, "spatial_merge_size": 1})
    folder = case.make(tmp_path / "whole", hidden_act="silu")
    model = write_gguf(make_decoder(tmp_path / "text", "llama"), tmp_path / "model.gguf")
    write_mmproj(
        folder,
        tmp_path / "mmproj-model.gguf",
        Kind.F32,
        rename=lambda name: "" if name in parts else name,
    )
    encoder, picture, reference = encoder_of(model), random_picture(37, 53), load_reference(folder)
    [made] = encoded(encoder, encoder.processor.prepare(picture))
    projector = reference.model.multi_modal_projector
    with torch.inference_mode():
        seen = reference.model.vision_tower(**case.inputs([case.prepared(picture)]))
        inner = projector.act(projector.linear_1(seen.last_hidden_state.flatten(0, 1)))
        expected = projector.linear_2(inner)
    torch.testing.assert_close(made.rows, expected, rtol=0, atol=FLOAT32_TOLERANCE)
