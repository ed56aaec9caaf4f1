"""Files as Ollama's converter writes them give what llama.cpp's give, pictures too."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isqrt
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import quantize
from safetensors.numpy import load_file
from support.models import trained_tokenizers as trained
from support.models.checkpoints import make_decoder
from support.models.gguf_files import add_value, write_gguf
from support.models.projector_files import Kind, write_mmproj
from support.models.vision_checkpoints import CASES, random_picture, token_id
from support.rings.stage_chain import CPU, probed

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.formats.gguf_header import GgufHeader, MetadataValue
from shardnet.checkpoint.formats.gguf_ollama import language_of
from shardnet.checkpoint.pictures import open_pictures
from shardnet.errors import UnsupportedModelError
from shardnet.model.vision.picture import PictureEncoder, PreparedPicture
from shardnet.stage.load import load_encoder
from shardnet.types import DType

GEMMA = {
    "v.patch_embd": "v.patch_embedding",
    "v.position_embd": "v.position_embedding",
    "v.post_ln": "v.post_layernorm",
    ".ln1": ".layer_norm1",
    ".ln2": ".layer_norm2",
    ".attn_out": ".attn_output",
    ".ffn_up": ".mlp.fc1",
    ".ffn_down": ".mlp.fc2",
    "mm.input_projection": "mm.mm_input_projection",
    "mm.soft_emb_norm": "mm.mm_soft_emb_norm",
}
QWEN = {
    "v.patch_embd.weight.1": "v.patch_embd_1.weight",
    "v.patch_embd.weight": "v.patch_embd_0.weight",
    "v.post_ln": "v.merger.ln_q",
    "mm.": "v.merger.mlp.",
}


def as_ollama(
    sources: Sequence[tuple[Path, Mapping[str, str]]],
    path: Path,
    name: str,
    keys: Mapping[str, str | None],
    more: Mapping[str, Any] | None = None,
) -> Path:
    """Join a model's file and its projector's to one, with other names of their tensors and keys.

    Keys that are None are left out; `more` are put in.
    """
    writer = gguf.GGUFWriter(path, name)
    for key, value in (more or {}).items():
        add_value(writer, key if key.startswith("tokenizer.") else f"{name}.{key}", value)
    for file, tensors in sources:
        reader = gguf.GGUFReader(file)
        said: Any = reader.fields["general.architecture"].contents()
        for key, own_field in reader.fields.items():
            own = key.removeprefix(f"{said}.")
            is_of_tokenizer = own == key and key.startswith("tokenizer.")
            if said == "clip" and (not own.startswith("vision.") or "image_m" in own):
                continue
            if (own == key and not is_of_tokenizer) or own.endswith(("_std", "n_wa_pattern")):
                continue
            renamed = None if own in (more or {}) else keys.get(own, own)
            if own == "vision.projector.scale_factor":
                side = reader.fields["clip.vision.image_size"].contents()
                patch = reader.fields["clip.vision.patch_size"].contents()
                n_rows = (side // patch // own_field.contents()) ** 2
                writer.add_uint32(f"{name}.mm.tokens_per_image", n_rows)
            elif renamed is not None:
                place = key if own == key else f"{name}.{renamed}"
                kind, *inner = own_field.types
                writer.add_key_value(place, own_field.contents(), kind, inner[0] if inner else None)
        for tensor in reader.tensors:
            other = tensor.name
            for old, new in tensors.items():
                if old in other:
                    other = other.replace(old, new)
                    if old.startswith("v.patch_embd"):
                        break
            writer.add_tensor(other, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def encoder_of(model: Path) -> PictureEncoder:
    return load_encoder(
        open_pictures(Checkpoint.open(model), token_id),
        choice=probed(CPU, DType.FLOAT32, None),
        device=CPU,
        progress=lambda done, total: None,
    )


def rows_of(encoder: PictureEncoder, prepared: PreparedPicture) -> torch.Tensor:
    made = []
    walk = encoder.encode([prepared])
    with torch.inference_mode(), contextlib.suppress(StopIteration):
        while True:
            made += [next(walk)]
    return next(one.rows for one in made if one is not None)


@pytest.mark.parametrize(
    ("family", "name", "changed", "keys", "tensors", "wrapper"),
    [
        (
            "gemma3_text",
            "gemma3",
            {"rms_norm_eps": 1e-6, "head_dim": 16},
            {
                "rope.freq_base": "rope.global.freq_base",
                "rope.freq_base_swa": "rope.local.freq_base",
                "attention.layer_norm_rms_epsilon": None,
            },
            GEMMA,
            "gemma3",
        ),
        (
            "qwen2",
            "qwen25vl",
            {},
            {"rope.dimension_sections": "rope.mrope_section"},
            QWEN,
            "qwen2_5_vl",
        ),
    ],
)
def test_one_file_has_the_language_model_and_what_reads_pictures(
    family: str,
    name: str,
    changed: dict[str, Any],
    keys: dict[str, str | None],
    tensors: dict[str, str],
    wrapper: str,
    tmp_path: Path,
) -> None:
    case = CASES[wrapper]
    whole = case.make(tmp_path / "whole", **case.wide)
    source = make_decoder(tmp_path / "text", family, num_hidden_layers=2, **changed)
    sections = {"rope__dimension_sections": [2, 1, 1, 0]} if family == "qwen2" else {}
    (tmp_path / "apart").mkdir()
    plain = write_gguf(
        source,
        tmp_path / "apart" / "model.gguf",
        architecture="qwen2vl" if family == "qwen2" else "",
        **sections,
    )
    projector = write_mmproj(whole, tmp_path / "apart" / "mmproj.gguf", Kind.F16)
    files = [(plain, {}), (projector, tensors)]
    full_layers = case.tower.get("fullatt_block_indexes")
    more = {"vision.fullatt_block_indexes": full_layers} if full_layers else {}
    joined = as_ollama(files, tmp_path / "joined.gguf", name, keys, more)
    ours, theirs = Checkpoint.open(joined), Checkpoint.open(plain)
    assert ours.config == theirs.config
    assert {n: t.shape for n, t in ours.tensors.items()} == {
        n: t.shape for n, t in theirs.tensors.items()
    }
    found, apart = encoder_of(joined), encoder_of(plain)
    prepared = apart.processor.prepare(random_picture(37, 53), "low")  # Ollama's knows no limits
    assert torch.equal(rows_of(found, prepared), rows_of(apart, prepared))


AXES = {"rope__dimension_sections": [2, 1, 1, 0]}
TURNS = {
    "mrope_sections": [2, 1, 1],
    "rope.mrope_section": [2, 1, 1],
    "rope.dimension_sections": [2, 1, 1],
    "rope.mrope_interleaved": True,
}
HYBRID = TURNS | {
    "attention.head_count_kv": [0, 2, 0, 2],
    "ssm.v_head_reordered": True,
    "full_attention_interval": 2,
    "vision.block_count": 3,
    "image_token_id": 306,
}
DECAY = {".ssm_dt.bias": ".ssm_dt"}
SWAPPED = {
    "attention.key_length": "attention.key_length_mla",
    "attention.key_length_mla": "attention.key_length",
    "attention.value_length": "attention.value_length_mla",
    "attention.value_length_mla": "attention.value_length",
    "expert_group_count": None,
    "expert_group_used_count": None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """How a family's file is written: its `name`, and what is otherwise than llama.cpp's."""

    name: str
    changed: Mapping[str, Any] = field(default_factory=dict)
    plain: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str | None] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)


WRITTEN = {
    "gpt_oss": Written(
        name="gptoss",
        changed={"num_hidden_layers": 2, "head_dim": 8},
        tensors={
            ".attn_output.": ".attn_out.",
            ".attn_sinks.weight": ".attn_sinks",
            ".post_attention_norm": ".ffn_norm",
        },
        keys={"expert_feed_forward_length": None},
    ),
    "qwen3_5_text": Written(
        name="qwen35",
        changed={"full_attention_interval": 2},
        plain=AXES | {"extra": {"mtp.fc.weight": np.zeros((4, 4), np.float32)}},
        tensors=DECAY,
        more=HYBRID,
    ),
    "qwen3_5_moe_text": Written(
        name="qwen35moe",
        changed={"full_attention_interval": 2},
        plain=AXES | {"feed_forward_length": None},
        more=HYBRID | {"feed_forward_length": 0, "norm_top_k_prob": True},
    ),
    "qwen3_next": Written(
        name="qwen3next",
        tensors=DECAY,
        more={"attention.head_count_kv": [0, 0, 0, 2], "norm_top_k_prob": True},
    ),
    "qwen3_moe": Written(
        name="qwen3vlmoe",
        changed={"num_hidden_layers": 2, "head_dim": 10, "norm_topk_prob": True},
        plain=AXES | {"architecture": "qwen3vlmoe"},
        keys={"expert_feed_forward_length": None},
        more={key: TURNS[key] for key in ("rope.mrope_section",)}
        | {"norm_top_k_prob": True, "vision.deepstack_visual_indexes": [8, 16, 24]},
    ),
    "lfm2": Written(
        name="lfm2",
        changed={"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
        tensors={"token_embd_norm": "output_norm"},
        more={"attention.head_count": [0, 6], "feed_forward_length": 999},
    ),
    "lfm2_moe": Written(name="lfm2moe", tensors={"token_embd_norm": "output_norm"}),
    "olmo3": Written(
        name="olmo3",
        changed={"sliding_window": 20},
        more={"attention.sliding_window_pattern": [True, True, True, False]},
    ),
    "gemma3_text": Written(
        name="gemma3",
        changed={"num_hidden_layers": 4, "rms_norm_eps": 1e-6, "sliding_window": 20},
        plain={"attention__sliding_window_pattern": 3},
        more={"attention.sliding_window_pattern": [True, True, False, True]}
        | {"rope.local.freq_base": 10000.0},
    ),
    "glm4_moe_lite": Written(
        name="glm4moelite",
        changed={"num_hidden_layers": 3},
        keys=SWAPPED,
        more={"attention.head_count_kv": 6},
    ),
    "nemotron_h": Written(
        name="nemotron_h_omni",
        plain={"extra": {"mtp.layers.0.norm.weight": np.zeros(4, np.float32)}},
        keys={"expert_gating_func": None},
        more={"vision.block_count": 3, "audio.block_count": 3},
    ),
    "gemma4_text": Written(
        name="gemma4",
        changed={"num_hidden_layers": 2, "enable_moe_block": True, "num_experts": 6}
        | {"top_k_experts": 2, "moe_intermediate_size": 20, "sliding_window": 20},
        tensors={".ffn_down_exps.scale": ".ffn_gate_inp.per_expert_scale"},
        more={"embedding_length_per_layer_input": 0, "audio.block_count": 3},
    ),
}


@pytest.mark.parametrize("family", WRITTEN)
def test_a_language_model_is_read_by_its_other_names(family: str, tmp_path: Path) -> None:
    own = WRITTEN[family]
    source = make_decoder(tmp_path / "text", family, **own.changed)
    plain = write_gguf(source, tmp_path / "plain.gguf", **own.plain)
    files = [(plain, own.tensors)]
    joined = as_ollama(files, tmp_path / "joined.gguf", own.name, own.keys, own.more)
    ours, theirs = Checkpoint.open(joined), Checkpoint.open(plain)
    assert ours.config == theirs.config
    assert ours.unknown_keys == theirs.unknown_keys
    left = [name for name in theirs.tensors if not name.startswith("mtp.")]
    assert [*ours.tensors] == left
    for name in left:
        assert torch.equal(ours.read(name), theirs.read(name)), name


QWEN_TOWER = {
    "visual.": "v.",
    "patch_embed.proj": "patch_embed",
    "blocks": "blk",
    "attn.qkv": "attn_qkv",
    "attn.proj": "attn_out",
    "deepstack_merger_list": "deepstack_merger",
}
PIXTRAL = {
    "vision_tower.": "v.",
    "transformer.layers": "blk",
    "ln_pre": "encoder_norm",
    "attention_norm": "attn_norm",
    "attention.o_proj": "attn_output",
    "multi_modal_projector": "mm",
    **{f"attention.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}
GEMMA4 = {
    ".linear.weight": ".weight",
    "vision_tower.encoder.layers": "v.blk",
    "vision_tower.patch_embedder.input_proj": "v.patch_embd",
    "vision_tower.patch_embedder.position_embedding_table": "v.position_embd.weight",
    "vision_tower.": "v.",
    "embed_vision.embedding_projection": "mm.input_projection",
    "input_layernorm": "ln1",
    "post_attention_layernorm": "attn_post_norm",
    "pre_feedforward_layernorm": "ln2",
    "post_feedforward_layernorm": "ffn_post_norm",
    "self_attn.o_proj": "attn_out",
    **{f"self_attn.{part}_": f"attn_{part}_" for part in "qk"},
    **{f"attn_{part}_proj": f"attn_{part}" for part in "qk"},
    "self_attn.v_proj": "attn_v",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}
LLAMA4 = {
    "vision_model.": "v.",
    "model.layers": "blk",
    "patch_embedding.linear": "patch_embedding",
    "multi_modal_projector": "mm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
}


def tower_of(whole: Path, names: Mapping[str, str]) -> dict[str, Any]:
    """What reads pictures in the checkpoint `whole`, as Ollama's converter writes it."""
    made: dict[str, Any] = {}
    for name, values in load_file(whole / "model.safetensors").items():
        other = name.removeprefix("model.")
        for old, new in names.items():
            other = other.replace(old, new)
        if not other.startswith(("v.", "mm.")):
            continue
        if "attn_qkv" in other:
            parts = [other.replace("qkv", part) for part in "qkv"]
            made |= dict(zip(parts, np.split(values, 3), strict=True))
            continue
        if other == "v.patch_embed.weight":
            values = values.reshape(-1, *values.shape[2:])
        elif other == "v.patch_embd.weight":  # Gemma 4's
            side = isqrt(values.shape[1] // 3)
            values = values.reshape(-1, side, side, 3).transpose(0, 3, 1, 2)
        made[other] = np.ascontiguousarray(values.reshape(values.shape or 1))
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A tower within a file: the language model's `family`, Ollama's `name`, keys beside."""

    name: str
    family: str
    tensors: Mapping[str, str]
    changed: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, Any] = field(default_factory=dict)


LEVELS = {
    "vision__image_mean": [0.5] * 3,
    "vision__image_std": [0.4, 0.5, 0.6],
    "vision__shortest_edge": 900,
    "vision__longest_edge": 3000,
    "vision__spatial_merge_size": 2,
    "vision__rope__freq_base": 10000.0,
}
SEEN = {
    "qwen3_vl": Seen(
        name="qwen3vl",
        family="qwen3",
        tensors=QWEN_TOWER,
        changed={"num_hidden_layers": 3, "head_dim": 8},
        keys=LEVELS
        | {"vision__deepstack_visual_indexes": [2, 0], "rope__mrope_section": [2, 1, 1]},
    ),
    "qwen3_5": Seen(
        name="qwen35",
        family="qwen3_5_text",
        tensors=QWEN_TOWER,
        changed={"num_hidden_layers": 2, "full_attention_interval": 2},
        keys=LEVELS | {"attention__head_count_kv": [0, 2], "full_attention_interval": 2},
    ),
    "mistral3-ministral3": Seen(
        name="mistral3",
        family="ministral3",
        tensors=PIXTRAL,
        changed={"head_dim": 8},
        keys={"spatial_merge_size": 2, "vision__rope__freq_base": 10000.0},
    ),
    "gemma4-clipped": Seen(
        name="gemma4",
        family="gemma4_text",
        tensors=GEMMA4,
        keys={"vision__projector__scale_factor": 3},
    ),
    "llama4": Seen(
        name="llama4",
        family="llama4_text",
        tensors=LLAMA4,
        changed={"head_dim": 8},
        keys={"vision__pixel_shuffle_ratio": 0.5, "vision__layer_norm_epsilon": 1e-5},
    ),
}


@pytest.mark.parametrize("case_name", SEEN)
def test_its_towers_have_the_values_of_transformers(case_name: str, tmp_path: Path) -> None:
    own, case = SEEN[case_name], CASES[case_name]
    whole = case.make(tmp_path / "whole", **({"hidden_act": "silu"} if "mis" in case_name else {}))
    tower = json.loads((whole / "config.json").read_text())["vision_config"]
    is_qwen = own.tensors is QWEN_TOWER
    sizes = {
        "vision__block_count": tower.get("depth") or tower["num_hidden_layers"],
        "vision__embedding_length": tower["hidden_size"],
        "vision__attention__head_count": tower.get("num_heads") or tower["num_attention_heads"],
        "vision__patch_size": tower["patch_size"],
        "vision__image_size": None if is_qwen else tower.get("image_size"),
        "vision__feed_forward_length": None if is_qwen else tower["intermediate_size"],
    }
    source = make_decoder(tmp_path / "text", own.family, **own.changed)
    file = write_gguf(
        source,
        tmp_path / "model.gguf",
        architecture=own.name,
        extra=tower_of(whole, own.tensors),
        **sizes,
        **own.keys,
    )
    ours = open_pictures(Checkpoint.open(file), token_id)
    theirs = open_pictures(Checkpoint.open(whole), token_id)
    assert ours.table == theirs.table
    for name, shape in theirs.table.items():  # DeepStack's are counted by layers, [2, 0]
        its = re.sub(r"(?<=_list\.)\d", lambda found: str(1 - int(found[0])), name)
        read, made = ours.checkpoint.read(name), theirs.checkpoint.read(its)
        if name.endswith("patch_embedder.input_proj.weight"):  # colours last
            made = made.view(len(made), -1, 3).transpose(1, 2).reshape(shape)
        assert torch.equal(read.view(shape), made.view(shape)), name
    picture = random_picture(37, 53)
    if is_qwen:
        again = ours.processor.prepare(picture)
        assert np.array_equal(again.pixels, theirs.processor.prepare(picture).pixels)
    found, apart = encoder_of(file), encoder_of(whole)
    prepared = found.processor.prepare(picture, "low")
    if case_name != "gemma4-clipped":  # whose kernel takes the colours in another order
        assert torch.equal(rows_of(found, prepared), rows_of(apart, prepared))
    else:
        reference = apart.processor.prepare(picture, "low")
        torch.testing.assert_close(rows_of(found, prepared), rows_of(apart, reference))


def test_a_towers_values_may_be_packed_where_queries_are_not(tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.Q8_0

    def pack(name: str, values: Any) -> tuple[Any, gguf.GGMLQuantizationType | None]:
        is_packed = name.startswith("v.") and name.endswith("attn_v.weight")
        return (quantize(values, kind), kind) if is_packed else (values, None)

    own, case = SEEN["qwen3_5"], CASES["qwen3_5"]
    whole = case.make(tmp_path / "whole", **case.wide)
    sizes = {"block_count": 3, "embedding_length": 64, "attention__head_count": 4, "patch_size": 3}
    file = write_gguf(
        make_decoder(tmp_path / "text", own.family, **own.changed),
        tmp_path / "model.gguf",
        pack=pack,
        architecture=own.name,
        extra=tower_of(whole, own.tensors),
        **{f"vision__{key}": size for key, size in sizes.items()},
        **own.keys,
    )
    ours = open_pictures(Checkpoint.open(file), token_id).checkpoint
    theirs = open_pictures(Checkpoint.open(whole), token_id).checkpoint
    name = "visual.blocks.0.attn.qkv.weight"
    read, made = (one.read(name, torch.float32) for one in (ours, theirs))
    assert torch.equal(read[:128], made[:128])
    torch.testing.assert_close(read[128:], made[128:], rtol=0, atol=1e-3)
    assert not torch.equal(read[128:], made[128:])


@pytest.mark.parametrize(
    ("family", "name", "plain", "message"),
    [
        (
            "qwen3_5_text",
            "qwen35",
            {"ssm__v_head_reordered": False},
            "ssm.v_head_reordered = False is not implemented",
        ),
        (
            "qwen3_5_text",
            "qwen35",
            {"vision__block_count": 3}
            | {"extra": {"blk.0.ssm_ba.weight": np.zeros((8, 48), np.float32)}},
            "ssm_ba tensors are not implemented in qwen35",
        ),
        (
            "olmo3",
            "olmo3",
            {"attention__sliding_window_pattern": [True, False, True, False]},
            "sliding_window_pattern = ",
        ),
        ("olmo3", "olmo3", {"rope__freq_base": None}, "rope.freq_base is missing"),
        (
            "gemma3_text",
            "gemma3",
            {"attention__sliding_window_pattern": [True, False, False, True]}
            | {"rope__local__freq_base": 10000.0},
            "sliding_window_pattern = ",
        ),
        (
            "nemotron_h",
            "nemotron_h_moe",
            {"extra": {"blk.1.ffn_latent_in.weight": np.zeros((8, 48), np.float32)}},
            "latent projections",
        ),
    ],
)
def test_what_is_not_read_is_named(
    family: str, name: str, plain: dict[str, Any], message: str, tmp_path: Path
) -> None:
    source = make_decoder(tmp_path / "text", family)
    file = write_gguf(source, tmp_path / "model.gguf", architecture=name, **plain)
    with pytest.raises(UnsupportedModelError, match=f"{file}: .*{re.escape(message)}"):
        Checkpoint.open(file)


def test_limits_of_a_tower_in_one_tensor_are_named(tmp_path: Path) -> None:
    source = make_decoder(tmp_path / "text", "gemma4_text")
    limits = {"v.clamp_data": np.zeros(60, np.float32)}
    file = write_gguf(source, tmp_path / "model.gguf", extra=limits)
    with pytest.raises(UnsupportedModelError, match=r"v\.clamp_data"):
        open_pictures(Checkpoint.open(file), token_id)


def test_gemma_4s_tokenizer_has_bytes_and_no_space_in_front() -> None:
    right = {"general.architecture": "gemma4"} | trained.gguf_pieces_with_merges()
    key = "tokenizer.ggml.token_type"
    written = right | {
        "tokenizer.ggml.model": "llama",
        key: [1 if kind == 6 else kind for kind in right[key]],
    }
    del written["tokenizer.ggml.add_space_prefix"]
    header = GgufHeader(metadata=written, tensors=(), head_bytes=0, size_bytes=0)
    assert written[key] != right[key]
    assert language_of(header, "a.gguf").metadata == right


def test_gemma_3s_tokens_around_pictures_are_no_text() -> None:
    """Else a template's would be read as words, and no picture find its place."""
    key = "tokenizer.ggml.token_type"
    written: dict[str, MetadataValue] = {
        "general.architecture": "gemma3",
        "gemma3.mm.tokens_per_image": 256,
        "tokenizer.ggml.tokens": ["<pad>", "<start_of_image>", "<end_of_image>", "of_image"],
        key: [3, 1, 1, 1],
    }
    header = GgufHeader(metadata=written, tensors=(), head_bytes=0, size_bytes=0)
    assert language_of(header, "a.gguf").metadata[key] == [3, 3, 3, 1]


@pytest.mark.parametrize(("end", "found"), [("<|eot_id|>", "llama-bpe"), ("other", "default")])
def test_llama_3s_words_are_split_as_its_own(end: str, found: str) -> None:
    said = {"general.architecture": "llama", "tokenizer.ggml.pre": "default"}
    tokens: MetadataValue = [""] * 128009 + [end]
    metadata = said | {"tokenizer.ggml.tokens": tokens}
    header = GgufHeader(metadata=metadata, tensors=(), head_bytes=0, size_bytes=0)
    assert language_of(header, "a.gguf").metadata["tokenizer.ggml.pre"] == found


def test_its_tokens_that_end_a_text(tmp_path: Path) -> None:
    source = make_decoder(tmp_path / "text", "qwen3", num_hidden_layers=1, head_dim=8)
    ends = {"tokenizer.ggml.eos_token_id": 3, "tokenizer.ggml.eos_token_ids": [3, 5, 7]}
    file = write_gguf(source, tmp_path / "model.gguf", tokenizer=ends)
    assert Checkpoint.open(file).config.eos_token_ids == (3, 5, 7)


YARN = {
    "rope__scaling__type": "yarn",
    "rope__scaling__factor": 4.0,
    "rope__scaling__original_context_length": 16,
}


@pytest.mark.parametrize(
    ("family", "theirs", "own"),
    [
        (
            "llama4_text",
            {"attention__sliding_window": 256},
            {"attention__chunk_size": 256, "attention__head_dim": 8, "use_qk_norm": True},
        ),
        (
            "ministral3",
            YARN
            | {"rope__scaling__yarn_log_multiplier": 1.0, "attention__temperature_scale": 0.5}
            | {"rope__scaling__yarn_beta_fast": 16.0},
            YARN
            | {"rope__scaling__mscale": 1.0, "rope__scaling__mscale_all_dim": 1.0}
            | {"rope__scaling__beta_fast": 16.0, "rope__scaling_beta": 0.5}
            | {"image_token_index": 10},
        ),
        (
            "ministral3",
            {},
            {"rope__scaling__type": "", "rope__scaling__factor": 0.0}
            | {"rope__scaling__beta_fast": 0.0, "rope__scaling__beta_slow": 0.0},
        ),
    ],
)
def test_its_other_keys(
    family: str, theirs: dict[str, Any], own: dict[str, Any], tmp_path: Path
) -> None:
    source = make_decoder(tmp_path / "text", family, num_hidden_layers=2, head_dim=8)
    plain = write_gguf(source, tmp_path / "plain.gguf", **theirs)
    picture = {"v.patch_embd.weight": np.zeros((4, 4), dtype=np.float32)}
    joined = write_gguf(source, tmp_path / "joined.gguf", extra=picture, **own)
    assert Checkpoint.open(joined).config == Checkpoint.open(plain).config
