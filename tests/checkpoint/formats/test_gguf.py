"""GGUF files: packed values by plain formulas, parts, folders, and every damage named."""

from __future__ import annotations

import contextlib
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from support.models.checkpoints import make_decoder, make_llama
from support.models.family_cases import CASES as FAMILIES
from support.models.gguf_files import Array, converted, pack_as, write_gguf
from support.oracles.plain_blocks import BLOCKS

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.formats import gguf_types
from shardnet.checkpoint.formats.gguf_header import read_gguf_header
from shardnet.errors import CheckpointError, ShardnetError, UnsupportedModelError
from shardnet.model.families.stage_tensors import left_over, stage_tensors
from shardnet.types import DType, LayerRange

KEYS = "model.layers.1.self_attn.k_proj.weight"
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough for blocks of 256."""
    return make_llama(
        tmp_path_factory.mktemp("source"),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        with_tokenizer=False,
    )


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    source = make_llama(folder / "source", num_hidden_layers=2, with_tokenizer=False)
    return write_gguf(source, folder / "model.gguf")


def write_no_model(path: Path, architecture: str) -> None:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_blocks(kind: str, rows: int, columns: int, seed: int) -> Array:
    """Rows of blocks whose bytes are random and whose scales are small numbers."""
    n_values, n_bytes, _ = BLOCKS[kind]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (rows, columns // n_values, n_bytes), dtype=np.uint8)
    scales = generator.uniform(0.01, 0.02, blocks.shape[:2]).astype(np.float16)[..., None]
    if kind == "MXFP4":
        blocks[..., 0] = generator.integers(118, 124, blocks.shape[:2])
        return blocks.reshape(rows, -1)
    places = {"Q6_K": [208], "Q4_K": [0, 2]}.get(kind, [0])
    for at in places:
        blocks[..., at : at + 2] = scales.view(np.uint8)
    return blocks.reshape(rows, -1)


def plain_values(kind: str, raw: Array) -> torch.Tensor:
    """The values of packed rows, block by block."""
    _, n_bytes, formula = BLOCKS[kind]
    rows = [
        [value for at in range(0, len(row), n_bytes) for value in formula(row[at : at + n_bytes])]
        for row in map(bytes, raw)
    ]
    return torch.tensor(rows)


@pytest.mark.parametrize("kind", list(BLOCKS))
def test_packed_values_are_those_of_the_plain_formula(
    kind: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed: dict[str, Array] = {}

    def pack(name: str, values: Array) -> tuple[Array, gguf.GGMLQuantizationType | None]:
        if values.ndim < 2:
            return values, None
        packed[name] = random_blocks(kind, *values.shape, seed=len(packed))
        return packed[name], gguf.GGMLQuantizationType[kind]

    checkpoint = Checkpoint.open(write_gguf(source, tmp_path / "m.gguf", pack=pack))
    expected = plain_values(kind, packed["blk.1.ffn_up.weight"])
    torch.testing.assert_close(checkpoint.read(UP), expected, rtol=1e-6, atol=0)
    halves = checkpoint.read(UP, torch.bfloat16)
    assert halves.dtype is torch.bfloat16
    assert torch.equal(halves, checkpoint.read(UP).bfloat16())
    monkeypatch.setattr(gguf_types, "BLOCK_ELEMENTS", 1000)
    assert torch.equal(checkpoint.read(UP, torch.bfloat16), halves), "whatever the pieces"
    info = checkpoint.stored["blk.1.ffn_up.weight"]
    assert (info.dtype, info.size_bytes) == (kind, packed[info.name].nbytes)
    keys = plain_values(kind, packed["blk.1.attn_k.weight"]).view(2, 32, 2, 256)
    by_pairs = torch.cat((keys[:, :, 0], keys[:, :, 1]), 1).reshape(128, 256)
    torch.testing.assert_close(checkpoint.read(KEYS), by_pairs, rtol=1e-6, atol=0)


def test_what_the_package_packs_is_close_to_what_it_was(source: Path, tmp_path: Path) -> None:
    pack = pack_as(gguf.GGMLQuantizationType.Q8_0)
    checkpoint = Checkpoint.open(write_gguf(source, tmp_path / "m.gguf", pack=pack))
    assert checkpoint.config.checkpoint_dtype is DType.BFLOAT16
    for name, tensor in load_file(source / "model.safetensors").items():
        torch.testing.assert_close(checkpoint.read(name), tensor, rtol=0, atol=0.004)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("F16", DType.FLOAT16), ("BF16", DType.BFLOAT16), ("F32", DType.FLOAT32)]
)
def test_plain_types_are_read_as_stored(
    kind: str, dtype: DType, source: Path, tmp_path: Path
) -> None:
    pack = pack_as(gguf.GGMLQuantizationType[kind])
    checkpoint = Checkpoint.open(write_gguf(source, tmp_path / "m.gguf", pack=pack))
    assert checkpoint.config.checkpoint_dtype is dtype
    kept = load_file(source / "model.safetensors")
    for name in (UP, KEYS):
        read = checkpoint.read(name)
        assert read.dtype == getattr(torch, dtype.value)
        assert torch.equal(read, kept[name].to(read.dtype))


def test_opening_imports_no_torch(small: Path) -> None:
    code = (
        "import sys; from shardnet.checkpoint.checkpoint import Checkpoint;"
        f"Checkpoint.open({str(small)!r}).model_id; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


class TestPaths:
    def test_a_folder_with_one_is_the_same_model(self, small: Path, tmp_path: Path) -> None:
        shutil.copy(small, tmp_path / "model.gguf")
        (tmp_path / "config.json").write_text("{}")
        whole = Checkpoint.open(tmp_path)
        assert whole.model_id == Checkpoint.open(small).model_id
        assert torch.equal(whole.read(UP), Checkpoint.open(small).read(UP))

    def test_a_folder_with_several_asks_which(self, small: Path, tmp_path: Path) -> None:
        for name in ("a.gguf", "b.gguf"):
            shutil.copy(small, tmp_path / name)
        with pytest.raises(CheckpointError, match=r"holds 2 GGUF models; name one .*a\.gguf"):
            Checkpoint.open(tmp_path)
        assert Checkpoint.open(tmp_path / "b.gguf").tensors

    def test_parts_are_one_model(self, small: Path, source: Path, tmp_path: Path) -> None:
        folder = make_llama(tmp_path / "hf", num_hidden_layers=2, with_tokenizer=False)
        parts = tmp_path / "parts"
        parts.mkdir()
        write_gguf(folder, parts / "model.gguf", split_max_tensors=9)
        names = sorted(path.name for path in parts.iterdir())
        assert names == [f"model-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
        whole = Checkpoint.open(small)
        for path in (parts, parts / names[0], parts / names[2]):
            checkpoint = Checkpoint.open(path)
            assert checkpoint.config == whole.config
            assert {info.file for info in checkpoint.stored.values()} == set(names)
            for name in whole.tensors:
                assert torch.equal(checkpoint.read(name), whole.read(name))
        (parts / names[1]).unlink()
        with pytest.raises(CheckpointError, match=r"00002-of-00003\.gguf: this part is missing"):
            Checkpoint.open(parts)

    def test_a_name_that_counts_no_parts_is_one_file(self, small: Path, tmp_path: Path) -> None:
        path = tmp_path / "model-00001-of-00000.gguf"
        shutil.copy(small, path)
        assert Checkpoint.open(path).config == Checkpoint.open(small).config


def test_files_of_2023_have_a_tensor_for_each_expert(tmp_path: Path) -> None:
    source = make_decoder(
        tmp_path / "source",
        "mixtral",
        with_tokenizer=False,
        num_hidden_layers=1,
        num_local_experts=3,
    )
    new = Checkpoint.open(write_gguf(source, tmp_path / "new.gguf"))
    apart: dict[str, Array | None] = {}
    for name, values in converted(source).items():
        if "_exps." in name:
            apart[name] = None
            apart |= {name.replace("_exps", f".{n}"): one for n, one in enumerate(values)}
    old = Checkpoint.open(write_gguf(source, tmp_path / "old.gguf", extra=apart))
    assert old.tensors.keys() == new.tensors.keys()
    for name in new.tensors:
        assert torch.equal(old.read(name), new.read(name))


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_the_projection_of_latents_in_two_halves(kind: str, tmp_path: Path) -> None:
    sizes = {"qk_nope_head_dim": 32, "kv_lora_rank": 64, "num_hidden_layers": 1}
    source = make_decoder(tmp_path / "source", "deepseek_v2", with_tokenizer=False, **sizes)
    number = gguf.GGMLQuantizationType[kind]

    def pack(name: str, values: Array) -> tuple[Array, gguf.GGMLQuantizationType | None]:
        if kind == "F32" or "_b.weight" not in name:
            return values, None
        return gguf.quants.quantize(np.ascontiguousarray(values), number), number

    path = write_gguf(source, tmp_path / "m.gguf", pack=pack)
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    whole = Checkpoint.open(source).read(name)
    read = Checkpoint.open(path).read(name)
    assert read.dtype is torch.float32
    assert (read - whole).abs().max() <= (0 if kind == "F32" else 0.01)
    assert not torch.equal(read, whole.flip(0))


def test_half_a_projection_of_latents_has_no_place(tmp_path: Path) -> None:
    source = make_decoder(tmp_path / "s", "deepseek_v2", with_tokenizer=False, num_hidden_layers=1)
    cut = {
        "blk.0.attn_v_b.weight": np.zeros((6, 11, 16), np.float32),
        "blk.0.attn_kv_b.weight": None,
    }
    checkpoint = Checkpoint.open(write_gguf(source, tmp_path / "m.gguf", extra=cut))
    assert left_over(checkpoint.config, checkpoint.tensors) == ["blk.0.attn_v_b.weight"]
    assert "model.layers.0.self_attn.kv_b_proj.weight" not in checkpoint.tensors


class TestRefusals:
    def test_a_type_that_is_not_implemented(self, source: Path, tmp_path: Path) -> None:
        def pack(name: str, values: Array) -> tuple[Array, None]:
            return values.astype(np.float64), None

        path = write_gguf(source, tmp_path / "m.gguf", pack=pack)
        with pytest.raises(
            UnsupportedModelError,
            match=r"m\.gguf: tensor output\.weight is stored as F64; supported: F32, F16, BF16, "
            "IQ1_M, IQ1_S, IQ2_S",
        ):
            Checkpoint.open(path)

    @pytest.mark.parametrize(
        ("metadata", "message"),
        [
            ({"pooling_type": 9}, r"llama\.pooling_type = 9 is not known to shardnet"),
            (
                {"classifier__output_labels": ["a"]},
                r"llama\.classifier\.output_labels = \['a'\] is not supp",
            ),
            ({"expert_count": 8}, r"llama\.expert_used_count is missing"),
            (
                {"expert_count": 4, "expert_used_count": 2, "expert_gating_func": 2},
                r"llama\.expert_gating_func = 2 is not supported; supported: 1",
            ),
            ({"block_count": None}, r"llama\.block_count is missing"),
            ({"block_count": "two"}, r"llama\.block_count is 'two', expected int"),
            ({"nextn_predict_layers": -1}, r"llama\.nextn_predict_layers is -1, expected 1"),
            ({"nextn_predict_layers": 4}, r"llama\.block_count is 0, expected 1"),
            ({"block_count": 0}, r"llama\.block_count is 0, expected 1"),
            ({"block_count": 2**31 - 1}, r"llama\.block_count is 2147483647, expected 1 to"),
            ({"attention__value_length": 3}, r"llama\.attention\.value_length = 3 is not support"),
            ({"rope__dimension_count": 4}, r"partial_rotary_factor = 0\.5 is not supported"),
            ({"rope__scaling__type": "ntk"}, r"llama\.rope\.scaling\.type = 'ntk' is not support"),
            ({"attention__causal": False}, r"llama\.attention\.causal = False is not supported"),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
    )
    def test_keys(self, tmp_path: Path, metadata: dict[str, object], message: str) -> None:
        folder = make_llama(tmp_path / "source", with_tokenizer=False)
        path = write_gguf(folder, tmp_path / "m.gguf", **metadata)
        with pytest.raises(ShardnetError, match=r"m\.gguf(, as config\.json)?: " + message):
            Checkpoint.open(path)

    @pytest.mark.parametrize(
        ("metadata", "message"),
        [
            ({"ple__layers": [0, 2]}, r"ple\.layers = \[0, 2\] is not supported; .* a single one"),
            ({"ple__head_offsets": [0, 1, 2]}, r"ple\.head_offsets \[0, 1, 2\] do not follow each"),
            (
                {"ple__heads_per_ngram": 3},
                "ple_head_rows or ple_factors are not one of each head and token",
            ),
            (
                {"attention__compress_ratios": [0, 0, 0, 0]},
                r"attention\.compress_ratios = \[0, 0, 0, 0\] is not supported; supported: above 0",
            ),
        ],
        ids=["layers", "offsets", "heads", "ratios"],
    )
    def test_ngrams_and_blocks(
        self, tmp_path: Path, metadata: dict[str, object], message: str
    ) -> None:
        config = FAMILIES["qwen4_exp_text"] | {"ple_layer_ids": [3]}
        folder = make_decoder(tmp_path, "qwen4_exp_text", with_tokenizer=False, **config)
        path = write_gguf(folder, tmp_path / "m.gguf", **metadata)
        with pytest.raises(ShardnetError, match=message):
            Checkpoint.open(path)

    def test_clamps_of_experts_that_differ(self, tmp_path: Path) -> None:
        folder = make_decoder(tmp_path / "source", "deepseek_v4", with_tokenizer=False)
        limits = [10.0] * 3 + [7.0]
        path = write_gguf(folder, tmp_path / "m.gguf", swiglu_clamp_shexp=limits)
        with pytest.raises(UnsupportedModelError, match=r"swiglu_clamp_exp = .* one number"):
            Checkpoint.open(path)

    def test_whole_numbers_that_are_no_table_of_experts(self, tmp_path: Path) -> None:
        folder = make_llama(tmp_path / "source", with_tokenizer=False)

        def pack(name: str, values: Array) -> tuple[Array, None]:
            return values.astype(np.int32), None

        path = write_gguf(folder, tmp_path / "m.gguf", pack=pack)
        with pytest.raises(UnsupportedModelError, match="is stored as I32; supported: F32"):
            Checkpoint.open(path)

    def test_a_projector_of_images(self, small: Path, tmp_path: Path) -> None:
        """Beside a model it is passed over; by itself it says what it is."""
        write_no_model(tmp_path / "mmproj-model-f16.gguf", "clip")
        with pytest.raises(
            UnsupportedModelError, match=r"'clip': this reads pictures .*with --mmproj"
        ):
            Checkpoint.open(tmp_path)
        shutil.copy(small, tmp_path / "model.gguf")
        assert Checkpoint.open(tmp_path).config.n_layers == 2
        with pytest.raises(UnsupportedModelError, match=r"mmproj-model-f16\.gguf: general\.arch"):
            Checkpoint.open(tmp_path / "mmproj-model-f16.gguf")

    def test_an_architecture(self, tmp_path: Path) -> None:
        for name, words in (
            ("t5", "architecture = 't5' is not supp.*gemma2"),
            ("jina-bert-v2", "'jina-bert-v2': of encoders these are read from GGUF: bert, nomic"),
            ("nomic-bert", "an encoder, which makes vectors or scores"),
        ):
            write_no_model(tmp_path / "m.gguf", name)
            with pytest.raises(UnsupportedModelError, match=words):
                Checkpoint.open(tmp_path)

    def test_a_tensor_without_a_place_is_left_over(self, tmp_path: Path) -> None:
        folder = make_decoder(tmp_path / "source", "qwen2", with_tokenizer=False)
        extra = {"blk.0.attn_sinks.weight": np.zeros(6, np.float32)}
        checkpoint = Checkpoint.open(write_gguf(folder, tmp_path / "m.gguf", extra=extra))
        config = checkpoint.config
        known = stage_tensors(config, LayerRange(0, config.n_layers)).all.keys()
        assert checkpoint.tensors.keys() - known == extra.keys()


def patched(path: Path, copy: Path, at: int, data: bytes) -> Path:
    """A copy of a file with other bytes at one place."""
    content = bytearray(path.read_bytes())
    content[at : at + len(data)] = data
    copy.write_bytes(content)
    return copy


def place_of(path: Path, text: bytes, behind: int = 0) -> int:
    """Where the bytes behind a string of the header begin."""
    return path.read_bytes().index(text) + len(text) + behind


U64 = struct.Struct("<Q").pack
U32 = struct.Struct("<I").pack
DAMAGES: dict[str, tuple[Callable[[Path, Path], Path], str]] = {
    "no GGUF": (lambda p, c: patched(p, c, 0, b"GGML"), "this is not a GGUF file"),
    "version 1": (lambda p, c: patched(p, c, 4, U32(1)), "GGUF version 1, supported: 2 and 3"),
    "big-endian": (lambda p, c: patched(p, c, 4, b"\0\0\0\3"), "a big-endian file"),
    "2^60 tensors": (
        lambda p, c: patched(p, c, 8, U64(1 << 60)),
        "the number of tensors: claims 1152921504606846976 entries, but only",
    ),
    "2^60 keys": (
        lambda p, c: patched(p, c, 16, U64(1 << 60)),
        "the number of metadata keys: claims 1152921504606846976 entries, but only",
    ),
    "a key of 2^50 bytes": (
        lambda p, c: patched(p, c, 24, U64(1 << 50)),
        "truncated: claims 1125899906842624 bytes, but only",
    ),
    "a value of unknown type": (
        lambda p, c: patched(p, c, place_of(p, b"llama.block_count"), U32(77)),
        "key 'llama.block_count': a value of type 77",
    ),
    "five dimensions": (
        lambda p, c: patched(p, c, place_of(p, b"output_norm.weight"), U32(5)),
        "tensor 'output_norm.weight': 5 dimensions",
    ),
    "a row of 2^60": (
        lambda p, c: patched(p, c, place_of(p, b"output_norm.weight", 4), U64(1 << 60)),
        "tensor 'output_norm.weight': shape .* is impossible",
    ),
    "a type of no number": (
        lambda p, c: patched(p, c, place_of(p, b"output_norm.weight", 12), U32(999)),
        "tensor output_norm.weight is stored as type 999; supported",
    ),
    "Ollama's first MXFP4": (
        lambda p, c: patched(p, c, place_of(p, b"output_norm.weight", 12), U32(4)),
        "tensor output_norm.weight is stored as .*; `ollama pull` it again",
    ),
    "a type of another block": (
        lambda p, c: patched(p, c, place_of(p, b"output_norm.weight", 12), U32(8)),
        r"tensor output_norm.weight of shape \[48\] cannot be Q8_0",
    ),
    "an offset beyond the end": (
        lambda p, c: patched(p, c, place_of(p, b"output_norm.weight", 16), U64(1 << 40)),
        "truncated: .* tensor output_norm.weight ends at",
    ),
    "an offset of another tensor": (
        lambda p, c: patched(p, c, place_of(p, b"output_norm.weight", 16), U64(0)),
        "lies over another one",
    ),
    "empty": (lambda p, c: Path(shutil.copy("/dev/null", c)), "its first bytes: truncated"),
}


@pytest.mark.parametrize("name", list(DAMAGES))
def test_a_damaged_file_is_named(small: Path, tmp_path: Path, name: str) -> None:
    damage, message = DAMAGES[name]
    copy = damage(small, tmp_path / "damaged.gguf")
    with pytest.raises(ShardnetError, match=message) as error:
        Checkpoint.open(copy)
    assert str(copy) in str(error.value)
    assert "\n" not in str(error.value)


@settings(max_examples=60)
@given(data=st.data())
def test_any_cut_and_any_byte_is_an_error_or_a_header(small: Path, data: st.DataObject) -> None:
    content = small.read_bytes()
    head = read_gguf_header(small).head_bytes
    copy = small.with_name("any.cut")
    cut = data.draw(st.integers(0, head - 1))
    copy.write_bytes(content[:cut])
    with pytest.raises(CheckpointError, match=r"any\.cut"):
        read_gguf_header(copy)
    at = data.draw(st.integers(0, head - 1))
    other = data.draw(st.binary(min_size=1, max_size=8))
    copy.write_bytes(content[:at] + other + content[at + len(other) :])
    with contextlib.suppress(CheckpointError):
        read_gguf_header(copy)


def test_shapes_that_do_not_fit_the_metadata(tmp_path: Path) -> None:
    from support.rings.stage_chain import StageChain

    folder = make_llama(tmp_path / "source", num_hidden_layers=2, with_tokenizer=False)
    path = write_gguf(folder, tmp_path / "m.gguf", feed_forward_length=96)
    with pytest.raises(CheckpointError, match=r"m\.gguf: tensor blk\.0\.ffn_gate\.weight has shap"):
        StageChain.load(path, [LayerRange(0, 2)])
