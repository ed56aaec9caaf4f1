"""GGUF files as Ollama's converter writes them, told as llama.cpp's would be: one file has the
language model and, by other names, what reads pictures.

Knows keys, tensors' names and what that converter leaves out. Must not know families.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import isqrt
from pathlib import Path
from typing import Final

from shardnet.checkpoint.formats.gguf_header import (
    GgufHeader,
    MetadataValue,
    first_texts,
    read_gguf_header,
)

_ARCHITECTURE: Final = "general.architecture"
_TOWERS: Final = ("v.", "mm.")
_ELSEWHERE: Final = (*_TOWERS, "a.", "model.vision_tower.", "mtp.")
"""Before tensors that the language model does without."""
_OTHER_KEYS: Final = ("vision.", "audio.", "mm.")
_UNUSED: Final = (
    *("image_token_id", "vision_start_token_id", "vision_end_token_id", "rope.mrope_interleaved"),
    *("image_token_index", "ssm.v_head_reordered", "spatial_merge_size"),
)
"""Keys that say what the tower or llama.cpp's own name for the architecture does."""
_VISION_KEYS: Final = {
    key: key
    for key in (
        *("block_count", "embedding_length", "feed_forward_length", "image_size", "patch_size"),
        *("attention.head_count", "attention.layer_norm_epsilon", "spatial_merge_size"),
        "window_size",
    )
} | {"layer_norm_epsilon": "attention.layer_norm_epsilon"}
_EPS: Final = 9.999999974752427e-07
"""1e-6 in 32 bits, as files have it."""
_HALF: Final[MetadataValue] = [0.5, 0.5, 0.5]
Metadata = dict[str, MetadataValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Projector:
    """What reads pictures: its type, parts of tensors' names, keys that are missing."""

    kind: str
    tensors: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, MetadataValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dialect:
    """How an architecture is written: llama.cpp's name of it, other names of keys and of parts of
    tensors' names, keys that are left out, those of the tokenizer that are wrong.

    `fix` completes what follows from others, given the metadata and the shapes of tensors.
    """

    architecture: str
    keys: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, MetadataValue] = field(default_factory=dict)
    tokenizer: Mapping[str, str] = field(default_factory=dict)
    fix: Callable[[Metadata, Mapping[str, tuple[int, ...]]], None] = lambda metadata, shapes: None
    projector: _Projector | None = None


def _scale_gemma(metadata: Metadata, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Scale the rotations of all but the 1B, whose context is shorter."""
    context = metadata.get("gemma3.context_length")
    if isinstance(context, int) and context >= 1 << 17:
        metadata.setdefault("gemma3.rope.scaling.type", "linear")
        metadata.setdefault("gemma3.rope.scaling.factor", 8.0)


def _size_experts(metadata: Metadata, shapes: Mapping[str, tuple[int, ...]]) -> None:
    if (shape := shapes.get("blk.0.ffn_gate_exps.weight")) is not None:
        metadata.setdefault("gpt-oss.expert_feed_forward_length", shape[1])


_CLIP_LEVELS: Final[Mapping[str, MetadataValue]] = {
    "clip.vision.image_mean": [0.48145466, 0.4578275, 0.40821073],
    "clip.vision.image_std": [0.26862954, 0.26130258, 0.27577711],
}
_HALF_LEVELS: Final[Mapping[str, MetadataValue]] = {
    "clip.vision.image_mean": _HALF,
    "clip.vision.image_std": _HALF,
    "clip.use_gelu": True,
}
_DIALECTS: Final = {
    "gemma3": _Dialect(
        architecture="gemma3",
        keys={
            "rope.global.freq_base": "rope.freq_base",
            "rope.local.freq_base": "rope.freq_base_swa",
        },
        missing={"attention.layer_norm_rms_epsilon": _EPS, "rope.freq_base": 1e6},
        fix=_scale_gemma,
        projector=_Projector(
            kind="gemma3",
            tensors={
                "v.patch_embedding": "v.patch_embd",
                "v.position_embedding": "v.position_embd",
                "v.post_layernorm": "v.post_ln",
                ".layer_norm1": ".ln1",
                ".layer_norm2": ".ln2",
                ".attn_output": ".attn_out",
                ".mlp.fc1": ".ffn_up",
                ".mlp.fc2": ".ffn_down",
                "mm.mm_input_projection": "mm.input_projection",
                "mm.mm_soft_emb_norm": "mm.soft_emb_norm",
            },
            keys=_HALF_LEVELS,
        ),
    ),
    "gptoss": _Dialect(
        architecture="gpt-oss",
        tensors={
            ".attn_out.": ".attn_output.",
            ".attn_sinks": ".attn_sinks.weight",
            ".ffn_norm": ".post_attention_norm",
        },
        missing={"rope.scaling.type": "yarn"},
        tokenizer={"pre": "gpt-4o"},
        fix=_size_experts,
    ),
    "llama4": _Dialect(
        architecture="llama4", keys={"attention.chunk_size": "attention.sliding_window"}
    ),
    "mistral3": _Dialect(
        architecture="mistral3",
        keys={
            "rope.scaling.beta_fast": "rope.scaling.yarn_beta_fast",
            "rope.scaling.beta_slow": "rope.scaling.yarn_beta_slow",
            "rope.scaling.mscale_all_dim": "rope.scaling.yarn_log_multiplier",
            "rope.scaling_beta": "attention.temperature_scale",
        },
        tokenizer={"pre": "tekken"},
    ),
    "qwen25vl": _Dialect(
        architecture="qwen2vl",
        keys={"rope.mrope_section": "rope.dimension_sections"},
        projector=_Projector(
            kind="qwen2.5vl_merger",
            tensors={
                "v.merger.ln_q": "v.post_ln",
                "v.merger.mlp": "mm",
                "v.patch_embd_0.weight": "v.patch_embd.weight",
                "v.patch_embd_1.weight": "v.patch_embd.weight.1",
            },
            keys={**_CLIP_LEVELS, "clip.use_silu": True, "clip.vision.image_size": 560},
        ),
    ),
}
"""By Ollama's name of an architecture."""


def language_of(header: GgufHeader) -> GgufHeader:
    """Tell the header of a language model as llama.cpp would write it; others stay as they are."""
    architecture = header.metadata.get(_ARCHITECTURE)
    dialect = _DIALECTS.get(str(architecture))
    if dialect is None or not _is_ollamas(header, str(architecture), dialect):
        return header
    prefix, metadata = f"{architecture}.", dict[str, MetadataValue]()
    for key, value in header.metadata.items():
        own = key.removeprefix(prefix)
        if own == key:
            metadata[key] = value
        elif not own.startswith(_OTHER_KEYS) and own not in _UNUSED:
            metadata[f"{dialect.architecture}.{dialect.keys.get(own, own)}"] = value
    metadata[_ARCHITECTURE] = dialect.architecture
    for own, value in dialect.missing.items():
        metadata.setdefault(f"{dialect.architecture}.{own}", value)
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in dialect.tokenizer.items()}
    dialect.fix(metadata, {tensor.name: tensor.shape for tensor in header.tensors})
    tensors = [tensor for tensor in header.tensors if not tensor.name.startswith(_ELSEWHERE)]
    renamed = tuple(replace(each, name=_renamed(each.name, dialect.tensors)) for each in tensors)
    return replace(header, metadata=metadata, tensors=renamed)


def projector_of(path: Path) -> GgufHeader | None:
    """Tell what reads pictures within a language model's file as llama.cpp's projector file would.

    None where the file has nothing of it, or by names that are not known. Raises as
    `read_gguf_header`.
    """
    architecture = first_texts(path, {_ARCHITECTURE}).get(_ARCHITECTURE, "")
    dialect = _DIALECTS.get(architecture)
    if dialect is None or dialect.projector is None:
        return None
    header = read_gguf_header(path)
    own = [tensor for tensor in header.tensors if tensor.name.startswith(_TOWERS)]
    if not own:
        return None
    known, prefix = dialect.projector, f"{architecture}.vision."
    metadata: Metadata = {_ARCHITECTURE: "clip", "clip.projector_type": known.kind, **known.keys}
    for key, value in header.metadata.items():
        if (name := _VISION_KEYS.get(key.removeprefix(prefix))) and key.startswith(prefix):
            metadata[f"clip.vision.{name}"] = value
    full = header.metadata.get(f"{prefix}fullatt_block_indexes")
    if isinstance(full, list) and full and isinstance(full[0], int):
        metadata["clip.vision.n_wa_pattern"] = full[0] + 1
    numbers = (f"{prefix}image_size", f"{prefix}patch_size", f"{architecture}.mm.tokens_per_image")
    size, patch, n_rows = map(header.metadata.get, numbers)
    if isinstance(size, int) and isinstance(patch, int) and isinstance(n_rows, int) and n_rows > 0:
        metadata["clip.vision.projector.scale_factor"] = size // max(patch, 1) // isqrt(n_rows)
    shapes = {tensor.name: tensor.shape for tensor in own}
    if (shape := shapes.get("v.blk.0.ffn_up.weight")) is not None:
        metadata.setdefault("clip.vision.feed_forward_length", shape[0])
    renamed = tuple(replace(each, name=_renamed(each.name, known.tensors)) for each in own)
    return replace(header, metadata=metadata, tensors=renamed)


def _is_ollamas(header: GgufHeader, architecture: str, dialect: _Dialect) -> bool:
    if architecture != dialect.architecture:
        return True
    keys = (f"{architecture}.{key}" for key in dialect.keys)
    has_others = any(tensor.name.startswith(_ELSEWHERE) for tensor in header.tensors)
    return has_others or any(key in header.metadata for key in keys)


def _renamed(name: str, parts: Mapping[str, str]) -> str:
    for old, new in parts.items():
        name = name.replace(old, new)
    return name
