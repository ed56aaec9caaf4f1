"""Weights that stay as they are stored: loaded, counted, planned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
from support.models.checkpoints import make_decoder, make_llama
from support.models.gguf_files import pack_as, write_gguf
from support.models.packed_blocks import packed_and_plain
from support.rings.stage_chain import CPU, StageChain, probed

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.cluster.planning.model_shape import QuantizationChoice, model_shape
from shardnet.cluster.store.local_models import identify_apart
from shardnet.model.config.panel_form import Quantization
from shardnet.model.kernels import panel_linear
from shardnet.model.kernels.panels import Panels
from shardnet.runtime.loading.model_facts import identify
from shardnet.stage import weights
from shardnet.stage.estimate.memory_estimate import (
    WeightForm,
    layers_weight_bytes,
    read_bytes_per_step,
    stage_weight_bytes,
)
from shardnet.stage.estimate.packed_sizes import PackedCount, packed_sizes
from shardnet.stage.estimate.stored_dtype import weight_form
from shardnet.stage.load import load_stage
from shardnet.types import DType, LayerRange

MIXED = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "attn": "Q4_K", "ffn": "Q4_K", "token_embd": "Q8_0"}
WHOLE = LayerRange(0, 2)
CHOICE = probed(CPU, DType.FLOAT32, DType.BFLOAT16)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model of three types, whose table is its head."""
    folder = tmp_path_factory.mktemp("tied")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "tie_word_embeddings": True}
    source = make_llama(folder / "source", with_tokenizer=False, **sizes, **heads)
    return write_gguf(source, folder / "m.gguf", pack=packed_and_plain(MIXED)[0])


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with packed experts."""
    folder = tmp_path_factory.mktemp("sparse")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    source = make_decoder(folder / "source", "mixtral", with_tokenizer=False, **sizes)
    pack = packed_and_plain({"exps": "Q4_0", "token_embd": "Q8_0"})[0]
    return write_gguf(source, folder / "m.gguf", pack=pack)


def panels_of(path: Path, layers: LayerRange, monkeypatch: pytest.MonkeyPatch) -> list[Panels]:
    """All panels that a stage makes."""
    monkeypatch.setattr(panel_linear, "native_kernels", lambda: None)
    made: list[Panels] = []
    make_panels = weights.make_panels

    def noted(*args: Any) -> list[Panels]:
        panels = make_panels(*args)
        made.extend(panels)
        return panels

    monkeypatch.setattr(weights, "make_panels", noted)
    StageChain.load(path, [layers], CHOICE)
    monkeypatch.setattr(weights, "make_panels", make_panels)
    return made


@pytest.mark.parametrize("model", ["tied", "sparse"])
def test_a_stage_takes_what_was_estimated(
    model: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = request.getfixturevalue(model)
    checkpoint = Checkpoint.open(path)
    form, sizes = weight_form(checkpoint, CHOICE), packed_sizes(checkpoint)
    assert sizes is not None
    assert form.packed == sizes
    config = checkpoint.config
    for layers in (WHOLE, LayerRange(0, 1), LayerRange(1, 2)):
        packed_bytes = sum(p.packed.nbytes for p in panels_of(path, layers, monkeypatch))
        counts = [sizes.layers[layer] for layer in layers]
        counts += [sizes.embedding] if layers.start == 0 or sizes.is_tied else []
        assert packed_bytes == sum(count.n_bytes for count in counts)
        plain = WeightForm(dtype=form.dtype, linear_dtype=form.linear_dtype)
        as_plain = stage_weight_bytes(config, layers, plain)
        saved = sum(count.n_weights * 4 for count in counts) - packed_bytes
        if sizes.is_tied and layers == WHOLE:
            saved += sizes.embedding.n_weights * 4
        assert stage_weight_bytes(config, layers, form) == as_plain - saved
        shape = model_shape(config, form.dtype, 64, stored=form.linear_dtype, packed=sizes)
        assert shape.weight_bytes(layers) == stage_weight_bytes(config, layers, form)


def test_a_mixed_file_takes_about_its_size(tied: Path) -> None:
    checkpoint = Checkpoint.open(tied)
    form = weight_form(checkpoint, CHOICE)
    stored = sum(info.size_bytes for info in checkpoint.stored.values())
    assert stored <= stage_weight_bytes(checkpoint.config, WHOLE, form) <= 1.15 * stored


def test_layers_of_different_types_weigh_differently(tied: Path, tmp_path: Path) -> None:
    source = tied.parent / "source"
    kinds = {"blk.0.ffn_down": "Q6_K", "attn": "Q4_K", "ffn": "Q4_K"}
    path = write_gguf(source, tmp_path / "m.gguf", pack=packed_and_plain(kinds)[0])
    checkpoint = Checkpoint.open(path)
    form = weight_form(checkpoint, CHOICE)
    layers = layers_weight_bytes(checkpoint.config, form)
    n_weights = 256 * 512
    assert layers[0] - layers[1] == n_weights * (210 - 148) // 256  # with a byte for each scale
    shape = model_shape(checkpoint.config, form.dtype, 64, packed=form.packed)
    assert shape.spared_bytes == (0, layers[0] - layers[1])


def test_a_row_reads_only_the_experts_that_it_visits(sparse: Path) -> None:
    checkpoint = Checkpoint.open(sparse)
    form = weight_form(checkpoint, CHOICE)
    assert form.packed is not None
    experts = checkpoint.config.experts
    assert experts is not None
    unread = sum(
        count.n_bytes * (experts.n_experts - experts.top_k) // experts.n_experts
        for count in form.packed.experts
    )
    ends = stage_weight_bytes(checkpoint.config, WHOLE, form) - form.packed.embedding.n_bytes
    assert read_bytes_per_step(checkpoint.config, WHOLE, form) == ends - unread


def test_weights_that_are_quantised_again_count_so(tied: Path) -> None:
    checkpoint = Checkpoint.open(tied)
    config, kind = checkpoint.config, Quantization.INT8
    choice = replace(CHOICE, quant=kind)
    form = weight_form(checkpoint, choice)
    assert form.packed is not None
    plain = WeightForm(dtype=form.dtype, quant=kind, linear_dtype=form.linear_dtype)
    saved = form.packed.embedding.n_weights * 4 - form.packed.embedding.n_bytes
    quantised = stage_weight_bytes(config, WHOLE, form)
    assert quantised == stage_weight_bytes(config, WHOLE, plain) - saved
    shape = model_shape(config, form.dtype, 64, packed=form.packed)
    again = next(sizes for sizes in shape.quantized_sizes if sizes.flags == ("--quant int8",))
    assert shape.quantized(again).weight_bytes(WHOLE) == quantised
    asked = QuantizationChoice(weights=kind)
    shape = model_shape(config, form.dtype, 64, quantization=asked, packed=form.packed)
    assert shape.weight_bytes(WHOLE) == quantised
    done: list[tuple[int, int]] = []
    load_stage(
        checkpoint,
        WHOLE,
        choice=choice,
        device=CPU,
        room_blocks=1,
        progress=lambda n_bytes, of_all: done.append((n_bytes, of_all)),
    )
    assert done[-1][0] == done[-1][1]


def test_progress_ends_with_all_bytes(tied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has_library = panel_linear.native_kernels() is not None
    monkeypatch.setattr(panel_linear, "native_kernels", lambda: None)
    for name in ("_PACKED_BYTES", "_PIECE_BYTES"):
        monkeypatch.setattr(f"shardnet.stage.tensor_reader.{name}", 1 << 12)
    done: list[tuple[int, int]] = []
    load_stage(
        Checkpoint.open(tied),
        WHOLE,
        choice=CHOICE,
        device=CPU,
        room_blocks=1,
        progress=lambda n_bytes, of_all: done.append((n_bytes, of_all)),
    )
    assert done == sorted(done)
    assert done[-1][0] == done[-1][1]
    if has_library:  # which alone packs rows as they are read
        assert len({n_bytes for n_bytes, _ in done}) > 40, "pieces of tensors are reported"


def test_facts_are_the_same_from_another_process(tied: Path) -> None:
    facts = identify(tied)
    assert facts.packed is not None
    assert identify_apart(tied).packed == facts.packed


def test_the_kernel_names_most_of_the_forms(tied: Path) -> None:
    [stage] = StageChain.load(tied, [WHOLE], CHOICE).stages
    assert "float32 with Q4_K and Q6_K weights, " in stage.kernel


@pytest.mark.parametrize(
    ("bytes_of_256", "nearest"),
    [(84, Quantization.INT4), (144, Quantization.INT4), (210, Quantization.INT8), (512, None)],
)
def test_packed_weights_are_measured_as_the_nearest_kind(
    bytes_of_256: int, nearest: Quantization | None, tied: Path
) -> None:
    sizes = packed_sizes(Checkpoint.open(tied))
    assert sizes is not None
    count = PackedCount(n_weights=256 << 20, n_bytes=bytes_of_256 << 20)
    assert replace(sizes, layers=(count, count)).nearest is nearest


def test_nothing_is_packed_in_a_plain_file(tied: Path, tmp_path: Path) -> None:
    pack = pack_as(gguf.GGMLQuantizationType.BF16)
    path = write_gguf(tied.parent / "source", tmp_path / "m.gguf", pack=pack)
    assert identify(path).packed is None
