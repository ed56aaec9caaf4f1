"""Files as Ollama's converter writes them give what llama.cpp's give, pictures too."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from support.models.checkpoints import make_decoder
from support.models.gguf_files import write_gguf
from support.models.projector_files import Kind, write_mmproj
from support.models.vision_checkpoints import CASES, random_picture, token_id
from support.rings.stage_chain import CPU, probed

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.pictures import open_pictures
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
    full_layers: Sequence[int] = (),
) -> Path:
    """Join a model's file and its projector's to one, with other names of their tensors and keys.

    Keys that are None are left out.
    """
    writer = gguf.GGUFWriter(path, name)
    if full_layers:
        writer.add_array(f"{name}.vision.fullatt_block_indexes", full_layers)
    for file, tensors in sources:
        reader = gguf.GGUFReader(file)
        said: Any = reader.fields["general.architecture"].contents()
        for key, field in reader.fields.items():
            own = key.removeprefix(f"{said}.")
            is_of_tokenizer = own == key and key.startswith("tokenizer.")
            if said == "clip" and (not own.startswith("vision.") or "image_m" in own):
                continue
            if (own == key and not is_of_tokenizer) or own.endswith(("_std", "n_wa_pattern")):
                continue
            renamed = keys.get(own, own)
            if own == "vision.projector.scale_factor":
                side = reader.fields["clip.vision.image_size"].contents()
                patch = reader.fields["clip.vision.patch_size"].contents()
                n_rows = (side // patch // field.contents()) ** 2
                writer.add_uint32(f"{name}.mm.tokens_per_image", n_rows)
            elif renamed is not None:
                place = key if own == key else f"{name}.{renamed}"
                kind, *inner = field.types
                writer.add_key_value(place, field.contents(), kind, inner[0] if inner else None)
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
    full_layers = case.tower.get("fullatt_block_indexes", ())
    joined = as_ollama(files, tmp_path / "joined.gguf", name, keys, full_layers)
    ours, theirs = Checkpoint.open(joined), Checkpoint.open(plain)
    assert ours.config == theirs.config
    assert {n: t.shape for n, t in ours.tensors.items()} == {
        n: t.shape for n, t in theirs.tensors.items()
    }
    found, apart = encoder_of(joined), encoder_of(plain)
    prepared = apart.processor.prepare(random_picture(37, 53), "low")  # Ollama's knows no limits
    assert torch.equal(rows_of(found, prepared), rows_of(apart, prepared))


def test_gpt_oss_is_read_by_its_other_names(tmp_path: Path) -> None:
    source = make_decoder(tmp_path / "text", "gpt_oss", num_hidden_layers=2, head_dim=8)
    plain = write_gguf(source, tmp_path / "plain.gguf")
    tensors = {
        ".attn_output.": ".attn_out.",
        ".attn_sinks.weight": ".attn_sinks",
        ".post_attention_norm": ".ffn_norm",
    }
    keys = {"expert_feed_forward_length": None}
    joined = as_ollama([(plain, tensors)], tmp_path / "joined.gguf", "gptoss", keys)
    ours, theirs = Checkpoint.open(joined), Checkpoint.open(plain)
    assert ours.config == theirs.config
    for name in theirs.tensors:
        assert torch.equal(ours.read(name), theirs.read(name))


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
