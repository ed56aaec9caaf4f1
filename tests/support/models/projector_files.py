"""Projector files (mmproj), as llama.cpp's converter makes them of multimodal checkpoints."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
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
QWEN = {
    "visual.patch_embed.proj": "v.patch_embd",
    "visual.pos_embed": "v.position_embd",
    "visual.merger.ln_q": "v.post_ln",
    "visual.merger.norm": "v.post_ln",
    "visual.merger.mlp.N": "mm.N",
    "visual.merger.linear_fc1": "mm.0",
    "visual.merger.linear_fc2": "mm.2",
    "visual.deepstack_merger_list.N.norm": "v.deepstack.N.norm",
    "visual.deepstack_merger_list.N.linear_fc1": "v.deepstack.N.fc1",
    "visual.deepstack_merger_list.N.linear_fc2": "v.deepstack.N.fc2",
    "visual.blocks.N.norm1": "v.blk.N.ln1",
    "visual.blocks.N.norm2": "v.blk.N.ln2",
    "visual.blocks.N.attn.qkv": "v.blk.N.attn_qkv",
    "visual.blocks.N.attn.proj": "v.blk.N.attn_out",
    "visual.blocks.N.mlp.gate_proj": "v.blk.N.ffn_gate",
    "visual.blocks.N.mlp.up_proj": "v.blk.N.ffn_up",
    "visual.blocks.N.mlp.down_proj": "v.blk.N.ffn_down",
    "visual.blocks.N.mlp.fc1": "v.blk.N.ffn_up",
    "visual.blocks.N.mlp.fc2": "v.blk.N.ffn_down",
    "visual.blocks.N.mlp.linear_fc1": "v.blk.N.ffn_up",
    "visual.blocks.N.mlp.linear_fc2": "v.blk.N.ffn_down",
}
GEMMA4 = {
    "vision_tower.patch_embedder.input_proj": "v.patch_embd",
    "vision_tower.patch_embedder.position_embedding_table": "v.position_embd",
    "vision_tower.std_bias": "v.std_bias",
    "vision_tower.std_scale": "v.std_scale",
    "embed_vision.embedding_projection": "mm.input_projection",
    "vision_tower.encoder.layers.N.input_layernorm": "v.blk.N.ln1",
    "vision_tower.encoder.layers.N.post_attention_layernorm": "v.blk.N.attn_post_norm",
    "vision_tower.encoder.layers.N.pre_feedforward_layernorm": "v.blk.N.ln2",
    "vision_tower.encoder.layers.N.post_feedforward_layernorm": "v.blk.N.ffn_post_norm",
    "vision_tower.encoder.layers.N.self_attn.q_proj": "v.blk.N.attn_q",
    "vision_tower.encoder.layers.N.self_attn.k_proj": "v.blk.N.attn_k",
    "vision_tower.encoder.layers.N.self_attn.v_proj": "v.blk.N.attn_v",
    "vision_tower.encoder.layers.N.self_attn.o_proj": "v.blk.N.attn_out",
    "vision_tower.encoder.layers.N.self_attn.q_norm": "v.blk.N.attn_q_norm",
    "vision_tower.encoder.layers.N.self_attn.k_norm": "v.blk.N.attn_k_norm",
    "vision_tower.encoder.layers.N.mlp.gate_proj": "v.blk.N.ffn_gate",
    "vision_tower.encoder.layers.N.mlp.up_proj": "v.blk.N.ffn_up",
    "vision_tower.encoder.layers.N.mlp.down_proj": "v.blk.N.ffn_down",
}
GLM = QWEN | {
    "visual.embeddings.position_embedding": "v.position_embd",
    "visual.post_conv_layernorm": "v.norm_embd",
    "visual.post_layernorm": "v.post_ln",
    "visual.downsample": "mm.patch_merger",
    "visual.merger.proj": "mm.model.fc",
    "visual.merger.post_projection_norm": "mm.post_norm",
    "visual.merger.gate_proj": "mm.gate",
    "visual.merger.up_proj": "mm.up",
    "visual.merger.down_proj": "mm.down",
}
LLAMA4 = {
    "vision_model.class_embedding": "v.class_embd",
    "vision_model.positional_embedding_vlm": "v.position_embd",
    "vision_model.patch_embedding": "v.patch_embd",
    "vision_model.layernorm_pre": "v.pre_ln",
    "vision_model.layernorm_post": "v.post_ln",
    "vision_model.vision_adapter.mlp.fc1": "mm.model.mlp.1",
    "vision_model.vision_adapter.mlp.fc2": "mm.model.mlp.2",
    "multi_modal_projector.linear_1": "mm.model.fc",
    "vision_model.model.layers.N.input_layernorm": "v.blk.N.ln1",
    "vision_model.model.layers.N.post_attention_layernorm": "v.blk.N.ln2",
    "vision_model.model.layers.N.self_attn.q_proj": "v.blk.N.attn_q",
    "vision_model.model.layers.N.self_attn.k_proj": "v.blk.N.attn_k",
    "vision_model.model.layers.N.self_attn.v_proj": "v.blk.N.attn_v",
    "vision_model.model.layers.N.self_attn.o_proj": "v.blk.N.attn_out",
    "vision_model.model.layers.N.mlp.fc1": "v.blk.N.ffn_up",
    "vision_model.model.layers.N.mlp.fc2": "v.blk.N.ffn_down",
}
NAMES = {
    "llama4": LLAMA4,
    "glm4v": GLM,
    "glm46v": GLM,
    "glm4v_moe": GLM,
    "mistral3": PIXTRAL,
    "gemma3": SIGLIP,
    "gemma4": GEMMA4,
}
PROJECTORS = {
    "mistral3": "pixtral",
    "gemma3": "gemma3",
    "gemma4": "gemma4v",
    "llama4": "llama4",
    "glm4v": "glm4v",
    "glm46v": "glm4v",
    "glm4v_moe": "glm4v",
    "qwen2_vl": "qwen2vl_merger",
    "qwen2_5_vl": "qwen2.5vl_merger",
    "qwen3_vl": "qwen3vl_merger",
    "qwen3_5": "qwen3vl_merger",
    "qwen4_exp": "qwen3vl_merger",
}


def write_mmproj(
    source: Path,
    path: Path,
    kind: Kind,
    *,
    is_rounded: bool = False,
    rename: Callable[[str], str] = lambda name: name,
) -> Path:
    """Write tower and projector of the checkpoint folder `source`, matrices as `kind`.

    With `is_rounded` all is float32 instead, with the values that `kind` has. `rename` returns
    what a tensor is called in this file, "" for one that it lacks. Return `path`.
    """
    config = json.loads((source / "config.json").read_text())
    wrapper, tower = config["model_type"], config["vision_config"]
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", PROJECTORS[wrapper])
    for key, value in _metadata(source, wrapper, config, tower).items():
        _add(writer, key, value)
    if wrapper == "mistral3":  # the embedding of the token between lines, which shardnet looks up
        width = config["text_config"]["hidden_size"]
        writer.add_tensor("v.token_embd.img_break", np.zeros(width, np.float32))
    for name, values in load_file(source / "model.safetensors").items():
        name = (
            name.removeprefix("model.")
            .replace("_weight", ".weight")
            .replace(".linear.weight", ".weight")
        )
        name += ".weight" if name.endswith(("position_embedding_table", "_vlm")) else ""
        stem, _, suffix = name.rpartition(".")
        if ".std_" in name or name.endswith("class_embedding"):  # these end without a kind
            stem, suffix = name, ""
        if stem.endswith("patch_embedder.input_proj"):
            shape = (len(values), tower["patch_size"], tower["patch_size"], 3)
            values = values.reshape(shape).transpose(0, 3, 1, 2)
        numbers = re.findall(r"\.(\d+)\.", name)
        found = NAMES.get(wrapper, QWEN).get(re.sub(r"\.\d+(?=\.|$)", ".N", stem))
        if found is None:
            continue
        if wrapper == "mistral3" and stem.endswith(("q_proj", "k_proj")):
            values = interleaved(values, tower["num_attention_heads"])
        if "soft_emb_norm" in stem:
            values = values + 1
        to = found.replace("N", *numbers[:1]) if numbers else found
        if "deepstack" in stem:
            layer = tower["deepstack_visual_indexes"][int(numbers[0])]
            to = found.replace("N", str(layer))
        to = f"{to}.{suffix}" if suffix else to
        for part, own in _parts(to, values, wrapper):
            if called := rename(part):
                _write(writer, called, own, kind, is_rounded=is_rounded)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _parts(name: str, values: Any, wrapper: str) -> list[tuple[str, Any]]:
    """Cut a parameter as the converter does: kernels to frames, attention of Qwen2 to three."""
    if values.ndim == 5:
        return [(name, values[:, :, 0]), (f"{name}.1", values[:, :, 1])]
    if "attn_qkv" in name and wrapper.startswith("qwen2"):
        names = [name.replace("qkv", part) for part in "qkv"]
        return list(zip(names, np.split(values, 3), strict=True))
    return [(name, values)]


def _write(
    writer: gguf.GGUFWriter, name: str, values: Any, kind: Kind, *, is_rounded: bool
) -> None:
    values = values if values.ndim else values.reshape(1)
    stored = kind if values.ndim > 1 and "position" not in name else Kind.F32
    is_odd = values.ndim > 2 or values.shape[-1] % 32 or "input_projection" in name
    if stored is Kind.Q8_0 and is_odd:
        stored = Kind.F16
    packed = quantize(values.astype(np.float32), stored)
    if is_rounded:
        packed, stored = dequantize(packed, stored), Kind.F32
    writer.add_tensor(name, np.ascontiguousarray(packed), raw_dtype=stored)


def _metadata(
    source: Path, wrapper: str, config: dict[str, Any], tower: dict[str, Any]
) -> dict[str, Any]:
    act = tower.get("hidden_act", "gelu" if wrapper != "qwen2_vl" else "quick_gelu")
    own: dict[str, Any] = {"clip.vision.image_mean": [0.5] * 3, "clip.vision.image_std": [0.5] * 3}
    of_clip: dict[str, Any] = {
        "clip.vision.image_mean": [0.48145466, 0.4578275, 0.40821073],
        "clip.vision.image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    if wrapper == "mistral3":
        own = of_clip | {"clip.vision.spatial_merge_size": config["spatial_merge_size"]}
    if wrapper == "llama4":
        own |= {"clip.vision.projector.scale_factor": 2}
    if wrapper == "gemma3":
        side = config["mm_tokens_per_image"] ** 0.5
        n_high = tower["image_size"] / tower["patch_size"]
        own |= {"clip.vision.projector.scale_factor": int(n_high / side)}
    if wrapper == "qwen2_vl":  # what the converter takes for the inner size is another one
        own = of_clip
        inner = config["text_config"]["hidden_size"]
        tower = tower | {"hidden_size": tower["embed_dim"], "intermediate_size": inner}
    if wrapper == "qwen2_5_vl":
        own = of_clip | {"clip.vision.n_wa_pattern": tower["fullatt_block_indexes"][0] + 1}
        own |= {"clip.vision.window_size": tower["window_size"]}
    if wrapper.startswith(("qwen", "glm")):
        own = of_clip if wrapper.startswith("glm") else own
        settings = json.loads((source / "preprocessor_config.json").read_text())
        own["clip.vision.image_min_pixels"] = settings["size"]["shortest_edge"]
        own["clip.vision.image_max_pixels"] = settings["size"]["longest_edge"]
        levels = [key for key in ("image_mean", "image_std") if key in settings]
        own |= {f"clip.vision.{key}": settings[key] for key in levels}
    if wrapper.startswith(("qwen3", "qwen4")):
        deep = tower.get("deepstack_visual_indexes", ())
        is_deep = [layer in deep for layer in range(tower["depth"])]
        own |= {"clip.vision.is_deepstack_layers": is_deep} if deep else {}
        tower = tower | {
            "image_size": int(tower["num_position_embeddings"] ** 0.5) * tower["patch_size"]
        }
    return own | {
        "clip.use_silu": act == "silu",
        "clip.use_gelu": act not in ("silu", "quick_gelu"),
        "clip.vision.embedding_length": tower["hidden_size"],
        "clip.vision.feed_forward_length": tower["intermediate_size"],
        "clip.vision.block_count": tower.get("num_hidden_layers") or tower["depth"],
        "clip.vision.attention.head_count": tower.get("num_attention_heads") or tower["num_heads"],
        "clip.vision.attention.layer_norm_epsilon": tower.get("layer_norm_eps", 1e-5),
        "clip.vision.patch_size": tower["patch_size"],
        "clip.vision.image_size": tower.get("image_size", 560),
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
