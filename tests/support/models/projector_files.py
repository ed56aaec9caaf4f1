"""Projector files (mmproj), as llama.cpp's converter makes them of multimodal checkpoints."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize, quantize
from safetensors.numpy import load_file
from support.models.gguf_files import interleaved

Kind = gguf.GGMLQuantizationType
PIXTRAL = {
    "vision_tower.patch_conv": "v.patch_embd",
    "vision_tower.ln_pre": "v.pre_ln",
    "multi_modal_projector.norm": "mm.input_norm",
    "multi_modal_projector.patch_merger.merging_layer": "mm.patch_merger",
    "multi_modal_projector.linear_1": "mm.1",
    "multi_modal_projector.linear_2": "mm.2",
    "vision_tower.transformer.layers.N.attention_norm": "v.blk.N.ln1",
    "vision_tower.transformer.layers.N.ffn_norm": "v.blk.N.ln2",
    "vision_tower.transformer.layers.N.attention.q_proj": "v.blk.N.attn_q",
    "vision_tower.transformer.layers.N.attention.k_proj": "v.blk.N.attn_k",
    "vision_tower.transformer.layers.N.attention.v_proj": "v.blk.N.attn_v",
    "vision_tower.transformer.layers.N.attention.o_proj": "v.blk.N.attn_out",
    "vision_tower.transformer.layers.N.feed_forward.gate_proj": "v.blk.N.ffn_gate",
    "vision_tower.transformer.layers.N.feed_forward.up_proj": "v.blk.N.ffn_up",
    "vision_tower.transformer.layers.N.feed_forward.down_proj": "v.blk.N.ffn_down",
}
SIGLIP = {
    "vision_tower.embeddings.patch_embedding": "v.patch_embd",
    "vision_tower.embeddings.position_embedding": "v.position_embd",
    "vision_tower.post_layernorm": "v.post_ln",
    "multi_modal_projector.mm_input_projection": "mm.input_projection",
    "multi_modal_projector.mm_soft_emb_norm": "mm.soft_emb_norm",
    "vision_tower.encoder.layers.N.layer_norm1": "v.blk.N.ln1",
    "vision_tower.encoder.layers.N.layer_norm2": "v.blk.N.ln2",
    "vision_tower.encoder.layers.N.self_attn.q_proj": "v.blk.N.attn_q",
    "vision_tower.encoder.layers.N.self_attn.k_proj": "v.blk.N.attn_k",
    "vision_tower.encoder.layers.N.self_attn.v_proj": "v.blk.N.attn_v",
    "vision_tower.encoder.layers.N.self_attn.out_proj": "v.blk.N.attn_out",
    "vision_tower.encoder.layers.N.mlp.fc1": "v.blk.N.ffn_up",
    "vision_tower.encoder.layers.N.mlp.fc2": "v.blk.N.ffn_down",
}
NAMES = {"mistral3": PIXTRAL, "gemma3": SIGLIP}
PROJECTORS = {"mistral3": "pixtral", "gemma3": "gemma3"}


def write_mmproj(source: Path, path: Path, kind: Kind, *, is_rounded: bool = False) -> Path:
    """Write tower and projector of the checkpoint folder `source`, matrices as `kind`.

    With `is_rounded` all is float32 instead, with the values that `kind` has. Return `path`.
    """
    config = json.loads((source / "config.json").read_text())
    wrapper, tower = config["model_type"], config["vision_config"]
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", PROJECTORS[wrapper])
    for key, value in _metadata(wrapper, config, tower).items():
        _add(writer, key, value)
    for name, values in load_file(source / "model.safetensors").items():
        name = name.removeprefix("model.").replace("_weight", ".weight")
        stem, _, suffix = name.rpartition(".")
        numbers = re.findall(r"\.(\d+)\.", name)
        found = NAMES[wrapper].get(re.sub(r"\.\d+\.", ".N.", stem))
        if found is None:
            continue
        if wrapper == "mistral3" and stem.endswith(("q_proj", "k_proj")):
            values = interleaved(values, tower["num_attention_heads"])
        if "soft_emb_norm" in stem:
            values = values + 1
        stored = kind if values.ndim > 1 and "position_embedding" not in stem else Kind.F32
        is_odd = values.ndim > 2 or values.shape[-1] % 32 or "input_projection" in stem
        if stored is Kind.Q8_0 and is_odd:
            stored = Kind.F16
        packed = quantize(values.astype(np.float32), stored)
        if is_rounded:
            packed, stored = dequantize(packed, stored), Kind.F32
        to = found.replace("N", *numbers[:1]) if numbers else found
        writer.add_tensor(f"{to}.{suffix}", np.ascontiguousarray(packed), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _metadata(wrapper: str, config: dict[str, Any], tower: dict[str, Any]) -> dict[str, Any]:
    act = tower["hidden_act"]
    own: dict[str, Any] = {
        "clip.vision.spatial_merge_size": config.get("spatial_merge_size", 1),
        "clip.vision.image_mean": [0.48145466, 0.4578275, 0.40821073],
        "clip.vision.image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    if wrapper == "gemma3":
        n_high, side = (
            tower["image_size"] / tower["patch_size"],
            config["mm_tokens_per_image"] ** 0.5,
        )
        own = {
            "clip.vision.projector.scale_factor": int(n_high / side),
            "clip.vision.image_mean": [0.5] * 3,
            "clip.vision.image_std": [0.5] * 3,
        }
    return own | {
        "clip.use_silu": act == "silu",
        "clip.use_gelu": act != "silu",
        "clip.vision.embedding_length": tower["hidden_size"],
        "clip.vision.feed_forward_length": tower["intermediate_size"],
        "clip.vision.block_count": tower["num_hidden_layers"],
        "clip.vision.attention.head_count": tower["num_attention_heads"],
        "clip.vision.attention.layer_norm_epsilon": tower.get("layer_norm_eps", 1e-5),
        "clip.vision.patch_size": tower["patch_size"],
        "clip.vision.image_size": tower["image_size"],
        "clip.vision.projection_dim": config["text_config"]["hidden_size"],
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case _:
            writer.add_array(key, value)
