"""Audits of one stage: what they find, and that they find nothing where nothing is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.checkpoints import make_decoder, make_gpt2, make_llama
from support.models.family_cases import CASES
from support.needs import HAS_VECTORS, needs_library
from support.rings.stage_chain import CPU
from support.rings.stage_forms import form_of, with_form
from support.soak import cases, is_soak
from xxhash import xxh3_64

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.cluster.member.kv_orders import compute_layer
from shardnet.errors import (
    CapacityError,
    ChangedMemoryError,
    CheckpointError,
    RemoteProtocolError,
    WrongValuesError,
)
from shardnet.model.kernels.codec import to_bytes
from shardnet.model.kernels.library import ISA_VARIABLE, Isa, native_kernels
from shardnet.model.kernels.linear import probe
from shardnet.runtime.loading.loaded_stage import LoadedStage
from shardnet.runtime.loading.loading import load
from shardnet.runtime.stage.stage_order import StageOrder
from shardnet.stage.load import load_stage
from shardnet.stage.stage_audit import StageAudit
from shardnet.types import BLOCK_POSITIONS, Arith, DType, LayerRange, SlotId

pytestmark = needs_library

FAMILIES = ["gemma2", "qwen3_next", "deepseek_v3", "gpt2"]
"""Windows, states, latents with experts, another order."""


def order_of(folder: Path, layers: LayerRange | None = None, **changes: Any) -> StageOrder:
    n_layers = Checkpoint.open(folder).config.n_layers
    layers = layers or LayerRange(0, n_layers)
    return StageOrder(
        form=form_of(folder, **{"dtype": DType.BFLOAT16, "context": 64} | changes),
        folder=folder,
        layers=layers,
        is_tail=layers.end == n_layers,
        arith=Arith.PORTABLE,
    )


def loaded(order: StageOrder) -> tuple[LoadedStage, StageAudit]:
    stage = load(order, 1 << 28, lambda done, total: None)
    assert stage.audit is not None
    return stage, stage.audit


def a_turn(audit: StageAudit) -> int:
    """Look at all weights once; return the bytes of those that are there still."""
    n_pieces = len(audit._model.digests._pieces)  # type: ignore[union-attr]
    return sum(audit.look_at_memory() for _ in range(n_pieces))


def flip(audit: StageAudit, name: str) -> None:
    pieces = audit._model.digests._pieces  # type: ignore[union-attr]
    tensor = next(piece.tensor() for piece in pieces if piece.name == name)
    assert tensor is not None
    tensor.view(-1).view(torch.uint8)[3] ^= 4


def family(folder: Path, name: str) -> Path:
    if name == "gpt2":
        return make_gpt2(folder)
    sizes = CASES.get(name, {})
    return make_decoder(folder, name.partition("-")[0], with_tokenizer=False, **sizes)


@pytest.mark.parametrize("name", cases(FAMILIES, sorted(CASES.keys() - set(FAMILIES))))
def test_no_family_raises_an_alarm_and_each_layer_alone_gives_the_same_bits(
    name: str, tmp_path: Path
) -> None:
    order = order_of(family(tmp_path / name, name))
    stage, audit = loaded(order)
    assert audit.promises_bits or not HAS_VECTORS
    first = a_turn(audit)
    for layer in order.layers if audit.promises_bits else ():
        before, after = audit.compute(layer)
        assert compute_layer(order, layer, before) == after, layer
    assert stage.compute.used_blocks == 0
    assert a_turn(audit) == first > 0
    assert not stage.is_lost


@pytest.mark.parametrize(
    "changes",
    [{"quant": "int4"}, {"kv_dtype": "int8"}, {"dtype": DType.FLOAT32}],
    ids=["int4", "int8 keys", "float32"],
)
def test_rows_are_the_same_in_every_form_of_weights_and_keys(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    order = order_of(make_llama(tmp_path / "llama"), LayerRange(1, 4), **changes)
    _, audit = loaded(order)
    for layer in order.layers:
        before, after = audit.compute(layer)
        assert before
        assert compute_layer(order, layer, before) == after


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens",
        "model.layers.2.input_layernorm",
        "model.layers.1.mlp.down_proj",
        "lm_head",
    ],
)
def test_a_bit_that_flips_is_found_and_its_parameter_named(name: str, tmp_path: Path) -> None:
    order = order_of(make_llama(tmp_path / "llama"))
    stage, audit = loaded(order)
    a_turn(audit)
    assert not stage.is_lost
    assert stage.kept
    flip(audit, name)
    with pytest.raises(ChangedMemoryError, match=rf"of {name} have changed.*memtest86"):
        a_turn(audit)
    assert stage.is_lost
    assert not stage.fits(order)
    assert not stage.kept


def test_a_bit_of_a_key_that_flips_is_found(tmp_path: Path) -> None:
    stage, audit = loaded(order_of(make_llama(tmp_path / "llama"), context=512))
    kv = audit._model.kv
    kv.ensure(SlotId(0), BLOCK_POSITIONS + 1, BLOCK_POSITIONS + 1)
    a_turn(audit)
    kv.layer(SlotId(0), 1)[0].view(-1).view(torch.uint8)[3] ^= 4
    with pytest.raises(ChangedMemoryError, match="keys or values of positions 0 to 256"):
        a_turn(audit)
    assert stage.is_lost


def test_rows_that_come_out_unlike_name_the_weights_that_changed(tmp_path: Path) -> None:
    _, audit = loaded(order_of(make_llama(tmp_path / "llama")))
    a_turn(audit)
    audit.compute(0)
    flip(audit, "model.layers.1.mlp.down_proj")
    with pytest.raises(ChangedMemoryError, match="down_proj have changed"):
        audit.compute(0)


@pytest.mark.parametrize("at", [0, 2, 5])
def test_rows_that_come_out_unlike_name_the_layer(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, audit = loaded(order_of(make_llama(tmp_path / "llama")))
    audit.compute(0)
    plain = audit._model.trial

    def trial(*arguments: Any) -> list[torch.Tensor]:
        states = plain(*arguments)
        states[at] = states[at] + 1
        return states

    monkeypatch.setattr(audit._model, "trial", trial)
    named = {0: "the embedding", 2: "layer 1", 5: "the LM head"}[at]
    with pytest.raises(WrongValuesError, match=f"{named} gave other bits"):
        audit.compute(0)
    assert stage.is_lost


def test_what_cannot_be_computed_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = order_of(make_llama(tmp_path / "llama"))
    for before in (b"12", b""):  # nothing is before the first layer alone
        with pytest.raises(RemoteProtocolError):
            compute_layer(order, 1, before)
    with pytest.raises(CheckpointError):
        compute_layer(with_form(order, model_id="0" * 64), 1, b"")
    monkeypatch.setattr("shardnet.cluster.member.kv_orders.MAX_BYTES", 1000)
    with pytest.raises(CapacityError, match="more than is read for an audit"):
        compute_layer(order, 1, b"")


def digest(folder: Path, n_chunks: int) -> str:
    """Of what two layers give for random rows."""
    choice = probe(CPU, DType.BFLOAT16, DType.BFLOAT16, arith=Arith.PORTABLE)
    model = load_stage(
        Checkpoint.open(folder),
        LayerRange(1, 3),
        device=CPU,
        room_blocks=1,
        choice=choice,
        progress=lambda done, total: None,
        context=256,
    )
    noise, made = torch.Generator().manual_seed(1), xxh3_64()
    for _ in range(n_chunks):
        rows = torch.randn(256, model.width, generator=noise).bfloat16().float()
        for state in model.trial(rows, 256):
            made.update(to_bytes(state))
    return made.hexdigest()


@pytest.mark.timeout(3000 if is_soak() else 120)
def test_no_row_is_unlike_over_instruction_sets(tmp_path: Path) -> None:
    """In the long form a million rows."""
    folder = make_llama(tmp_path / "llama", dtype=torch.bfloat16)
    n_chunks = 3907 if is_soak() else 8
    native = native_kernels()
    assert native is not None
    sets = {native.isa.name.lower(), "portable"} | ({"avx2"} if native.isa is Isa.AVX512 else set())

    found = set()
    for isa in sets:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(ISA_VARIABLE, isa)
            native_kernels.cache_clear()
            taken = native_kernels()
            assert taken is not None
            assert taken.isa.name.lower() == isa
            found.add(digest(folder, n_chunks))
        native_kernels.cache_clear()
    assert len(found) == 1
