"""All layers of a stage in one call of the library, against one call for each half."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.models.checkpoints import make_decoder
from support.models.family_cases import CASES
from support.needs import needs_library
from support.rings.stage_chain import CPU, Rows, StageChain, batch_of, random_prompt
from torch import Tensor

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.model.fused import decoder
from shardnet.model.fused.decoder import DecoderStage
from shardnet.model.fused.layers import _MAX_ROWS, NativeLayers
from shardnet.model.kernels.linear import Kernel, KernelChoice
from shardnet.model.layers.attention import ForwardStep, plan_step
from shardnet.model.layers.rotary import Rotary
from shardnet.stage.load import load_stage
from shardnet.types import DType, KvDType, LayerRange

pytestmark = needs_library
N_PROMPT = 40


def rows(slot: int, position: int, n_rows: int) -> Rows:
    ids = random_prompt(n_rows, 300, seed=100 * slot + position)
    return Rows(slot=slot, position=position, ids=ids, n_sampled=n_rows)


def batches() -> Iterator[tuple[bool, tuple[Rows, ...]]]:
    """Steps, and whether they go through all layers in one call."""
    yield True, (rows(0, 0, N_PROMPT),)
    yield True, (rows(1, 0, 5), rows(2, 0, 1))
    yield True, (rows(0, N_PROMPT, 1),)
    yield True, (rows(0, N_PROMPT + 1, 1), rows(1, 5, 1), rows(2, 1, 17))
    yield True, (rows(0, N_PROMPT + 2, 1), rows(3, 0, N_PROMPT))
    yield True, (rows(0, N_PROMPT + 3, 1),)
    yield True, (rows(1, 6, N_PROMPT),)
    yield True, (rows(0, N_PROMPT + 4, 1),)  # of the kind of those before the chunk
    many = [rows(slot, 0, 30) for slot in (4, 5, 6)]
    assert sum(len(one.ids) for one in many) > _MAX_ROWS
    yield False, tuple(many)


def load(folder: Path, dtype: DType, kv_dtype: KvDType = KvDType.AUTO) -> StageChain:
    choice = KernelChoice(dtype=dtype, kernel=Kernel.NATIVE, exact_rows=32, min_rows=1)
    whole = [LayerRange(0, Checkpoint.open(folder).config.n_layers)]
    return StageChain.load(folder, whole, choice, kv_dtype=kv_dtype)


def family_of(chain: StageChain) -> DecoderStage:
    family = chain.stages[0].family
    assert isinstance(family, DecoderStage)
    return family


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each step through joined layers went through them in one call."""
    said: list[bool] = []
    call = NativeLayers.__call__

    def noted(
        layers: NativeLayers, hidden: Tensor, rotaries: list[Rotary], step: ForwardStep
    ) -> object:
        result = call(layers, hidden, rotaries, step)
        said.append(result is not None)
        return result

    monkeypatch.setattr(NativeLayers, "__call__", noted)
    return said


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize(
    ("family", "dtype", "kv_dtype"),
    [
        ("mistral", DType.BFLOAT16, KvDType.AUTO),
        ("qwen3", DType.FLOAT32, KvDType.INT8),
        ("gemma3_text", DType.BFLOAT16, KvDType.INT8),
        ("granite", DType.FLOAT32, KvDType.AUTO),
        ("gpt_oss", DType.BFLOAT16, KvDType.AUTO),
        ("qwen3_moe", DType.FLOAT32, KvDType.AUTO),
    ],
)
def test_one_call_gives_the_bits_of_many(
    family: str,
    dtype: DType,
    kv_dtype: KvDType,
    n_threads: int,
    joined: list[bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = {"head_dim": 32} if kv_dtype is KvDType.INT8 else {}  # the library rounds by 16 columns
    folder = make_decoder(tmp_path, family, dtype=torch.bfloat16, **CASES[family] | own)
    ours = load(folder, dtype, kv_dtype)
    monkeypatch.setattr(NativeLayers, "of", lambda layers, kernels: None)
    theirs = load(folder, dtype, kv_dtype)
    assert family_of(theirs)._joined is None
    expected = []
    try:
        for number, (is_joined, groups) in enumerate(batches()):
            torch.set_num_threads(n_threads if number % 2 else 1)
            assert torch.equal(ours.step(*groups), theirs.step(*groups))
            expected.append(is_joined)
    finally:
        torch.set_num_threads(1)
    assert joined == expected


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("qwen3_next", DType.BFLOAT16), ("qwen3_5_moe_text", DType.FLOAT32)],
)
def test_a_hybrid_has_the_bits_of_its_parts(
    family: str, dtype: DType, joined: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recurrences, attention with gates and experts, against each linear and function by itself."""
    folder = make_decoder(tmp_path, family, dtype=torch.bfloat16, **CASES[family])
    ours = load(folder, dtype)
    monkeypatch.setattr(decoder, "native_kernels", lambda: None)
    theirs = load(folder, dtype)
    assert family_of(theirs)._joined is None

    def some(slot: int, position: int, n_rows: int, n_sampled: int = 1) -> Rows:
        given = rows(slot, position, n_rows)
        return replace(given, n_sampled=n_sampled, n_drafts=n_sampled - 1)

    for groups in (
        (some(0, 0, N_PROMPT),),
        (some(0, N_PROMPT, 1), some(1, 0, 7)),
        (some(1, 7, 1), some(0, N_PROMPT + 1, 1)),
        (some(0, N_PROMPT + 2, 3, n_sampled=3),),  # drafts
        (some(0, N_PROMPT + 4, 1),),  # the last of them was rejected
        (some(2, 0, 70),),
        (some(2, 70, 1), some(0, N_PROMPT + 5, 1)),
    ):
        assert torch.equal(ours.step(*groups), theirs.step(*groups))
    assert joined == [True, True, True, True, True, False, True]


def test_what_comes_out_lasts_and_what_goes_in_stays(joined: list[bool], tmp_path: Path) -> None:
    folder = make_decoder(tmp_path, "mistral", dtype=torch.bfloat16, **CASES["mistral"])
    [stage] = load(folder, DType.BFLOAT16).stages
    width = stage.width
    hidden = torch.randn(2, width, generator=torch.Generator().manual_seed(1)).bfloat16()
    before = hidden.clone()
    step = plan_step(batch_of([rows(0, 0, 2)]), stage.kv, 64, stage.dtype)
    first = [out.clone() for out in stage.family.walk(hidden, step)][-1]
    kept = list(stage.family.walk(hidden, step))[-1]
    again = list(stage.family.walk(hidden + 1, step))[-1]
    assert joined == [True, True, True]
    assert torch.equal(hidden, before)
    assert torch.equal(kept, first)
    assert not torch.equal(kept, again)


def test_layers_that_the_library_has_not_all_of_are_not_joined(tmp_path: Path) -> None:
    latent = make_decoder(tmp_path / "l", "deepseek_v2", dtype=torch.bfloat16)
    assert family_of(load(latent, DType.BFLOAT16))._joined is None
    dense = make_decoder(tmp_path / "d", "mistral", dtype=torch.bfloat16, **CASES["mistral"])
    chain = load(dense, DType.BFLOAT16)
    assert family_of(chain)._joined is not None
    streamed = load_stage(
        Checkpoint.open(dense),
        chain.stages[0].layers,
        choice=chain.stages[0].choice,
        device=CPU,
        room_blocks=8,
        progress=lambda done, total: None,
        n_streamed=1,
    )
    assert family_of(StageChain([streamed]))._joined is None


def test_rows_that_do_not_belong_to_the_step_are_refused(tmp_path: Path) -> None:
    folder = make_decoder(tmp_path, "mistral", dtype=torch.bfloat16, **CASES["mistral"])
    [stage] = load(folder, DType.BFLOAT16).stages
    step = plan_step(batch_of([rows(0, 0, 2)]), stage.kv, 64, stage.dtype)
    wide = torch.zeros(2, stage.width + 1).bfloat16()
    with pytest.raises(ValueError, match=f"library needs {stage.width} columns"):
        list(stage.family.walk(wide, step))
    with pytest.raises(ValueError, match="of 3 rows"):
        list(stage.family.walk(torch.zeros(3, stage.width).bfloat16(), step))
    with pytest.raises(ValueError, match="rows are"):
        list(stage.family.walk(torch.zeros(2, stage.width), step))
