"""GGUF files as Ollama's converter writes them, told as llama.cpp's would be: one file has the
language model and, by other names, what reads pictures.

Applies the records of gguf_dialects.py. Must not know families.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isqrt
from pathlib import Path
from typing import Any, Final

from shardnet.checkpoint.formats.gguf_dialects import (
    DIALECTS,
    GEMMA_EMBEDDING,
    TOKENIZER,
    Dialect,
    Metadata,
    Told,
)
from shardnet.checkpoint.formats.gguf_header import (
    GgufHeader,
    GgufTensor,
    MetadataValue,
    first_texts,
    read_gguf_header,
)

HALVES: Final = "shardnet.rotary_halves"
"""Says that what turns together in a tower stands half a head apart, as transformers has it."""
_ARCHITECTURE: Final = "general.architecture"
_TOWERS: Final = ("v.", "mm.")
_ELSEWHERE: Final = (*_TOWERS, "a.", "model.vision_tower.", "mtp.")
"""Before tensors that the language model does without."""
_OTHER_KEYS: Final = ("vision.", "audio.", "mm.")
_UNUSED: Final = (
    *("image_token_id", "vision_start_token_id", "vision_end_token_id", "rope.mrope_interleaved"),
    *("image_token_index", "spatial_merge_size"),
)
"""Keys that say what the tower or llama.cpp's own name for the architecture does."""
_MARKS: Final = ("ssm.v_head_reordered",)
"""Other keys that llama.cpp never writes."""
_VISION_KEYS: Final = {
    key: key
    for key in (
        *("block_count", "embedding_length", "feed_forward_length", "image_size", "patch_size"),
        *("attention.head_count", "attention.layer_norm_epsilon", "spatial_merge_size"),
        *("image_mean", "image_std", "projector.scale_factor", "window_size"),
    )
} | {
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "shortest_edge": "image_min_pixels",
    "longest_edge": "image_max_pixels",
}
_DEEP = re.compile(r"v\.deepstack_merger\.(\d+)\.(?:linear_)?(.+)")
_THETA: Final = 10000.0
"""The only base of rotary positions that llama.cpp has in towers."""
_EOT: Final = 128009
"""Where Llama 3's tokens have the end of a turn."""


def is_gemma_embedding(metadata: Mapping[str, MetadataValue]) -> bool:
    """Say whether a file is EmbeddingGemma's by Ollama, who has it as a Gemma 3 that is pooled."""
    return metadata.get(_ARCHITECTURE) == "gemma3" and metadata.get("gemma3.pooling_type") == 1


def language_of(header: GgufHeader, where: str) -> GgufHeader:
    """Tell the header of a language model as llama.cpp would write it; others stay as they are.

    Raises UnsupportedModelError, which names the file `where`, for what cannot be told.
    """
    architecture = str(header.metadata.get(_ARCHITECTURE))
    if architecture == "llama" and _is_llama3(header.metadata):
        return replace(header, metadata={**header.metadata, f"{TOKENIZER}pre": "llama-bpe"})
    dialect = GEMMA_EMBEDDING if is_gemma_embedding(header.metadata) else DIALECTS.get(architecture)
    if dialect is None or not _is_ollamas(header, architecture, dialect):
        return header
    prefix, metadata = f"{architecture}.", dict[str, MetadataValue]()
    for key, value in header.metadata.items():
        own = key.removeprefix(prefix)
        if own == key:
            metadata[key] = value
        elif not own.startswith(_OTHER_KEYS) and own not in _UNUSED:
            metadata[f"{dialect.architecture}.{dialect.keys.get(own, own)}"] = value
    metadata[_ARCHITECTURE] = dialect.architecture
    metadata |= {f"{TOKENIZER}{key}": value for key, value in dialect.tokenizer.items()}
    told = Told(
        where=where,
        architecture=dialect.architecture,
        metadata=metadata,
        shapes={tensor.name: tensor.shape for tensor in header.tensors},
    )
    for own in dialect.needs:
        if told.get(own) is None:
            raise told.refused(f"{own} is missing")
    for own, value in dialect.missing.items():
        told.default(own, value)
    dialect.fix(told)
    tensors = [tensor for tensor in header.tensors if not tensor.name.startswith(_ELSEWHERE)]
    return replace(header, metadata=metadata, tensors=_renamed(tensors, dialect.tensors))


def projector_of(path: Path) -> GgufHeader | None:
    """Tell what reads pictures within a language model's file as llama.cpp's projector file would.

    None where the file has nothing of it, or by names that are not known. Raises as
    `read_gguf_header`, and UnsupportedModelError for what cannot be told.
    """
    architecture = first_texts(path, {_ARCHITECTURE}).get(_ARCHITECTURE, "")
    dialect = DIALECTS.get(architecture)
    if dialect is None or dialect.projector is None:
        return None
    header, known = read_gguf_header(path), dialect.projector
    own = [tensor for tensor in header.tensors if tensor.name.startswith(_TOWERS)]
    if not own:
        return None
    told = Told(
        where=str(path), architecture=architecture, metadata=dict(header.metadata), shapes={}
    )
    if "v.clamp_data" in (names := {tensor.name for tensor in own}) and not any(
        name.endswith(".input_max") for name in names
    ):
        raise told.refused("limits of a tower in one tensor (v.clamp_data) are not implemented")
    if (theta := told.get("vision.rope.freq_base")) not in (None, _THETA):
        raise told.refused(f"vision.rope.freq_base = {theta} is not supported")
    layers = told.get("vision.deepstack_visual_indexes")
    deep = layers if isinstance(layers, list) else []
    renamed = _renamed([_deep_named(tensor, deep) for tensor in own], known.tensors)
    metadata: Metadata = {_ARCHITECTURE: "clip", "clip.projector_type": known.kind, **known.keys}
    metadata |= {
        f"clip.vision.{name}": value
        for key, name in _VISION_KEYS.items()
        if (value := told.get(f"vision.{key}")) not in (None, [], 0)
    }
    if known.has_halves:
        metadata[HALVES] = True
    if (merge := told.get("spatial_merge_size")) is not None:
        metadata["clip.vision.spatial_merge_size"] = merge
    shapes = {tensor.name: tensor.shape for tensor in renamed}
    _complete(told, metadata, shapes, deep)
    return replace(header, metadata=metadata, tensors=renamed)


def _complete(
    told: Told, metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], deep: Sequence[Any]
) -> None:
    """Add to a projector's `metadata` what follows from other keys and from shapes."""
    full = told.get("vision.fullatt_block_indexes")
    if isinstance(full, list) and full and isinstance(full[0], int):
        metadata["clip.vision.n_wa_pattern"] = full[0] + 1
    numbers = ("vision.image_size", "vision.patch_size", "mm.tokens_per_image")
    size, patch, n_rows = map(told.get, numbers)
    scale = "clip.vision.projector.scale_factor"
    if isinstance(size, int) and isinstance(patch, int) and isinstance(n_rows, int) and n_rows > 0:
        metadata[scale] = size // max(patch, 1) // isqrt(n_rows)
    ratio = told.get("vision.pixel_shuffle_ratio")
    if isinstance(ratio, float) and ratio > 0:
        metadata[scale] = round(1 / ratio)
    if (shape := shapes.get("v.blk.0.ffn_up.weight")) is not None:
        metadata.setdefault("clip.vision.feed_forward_length", shape[0])
    positions = shapes.get("v.position_embd.weight")
    if positions is not None and len(positions) == 2 and isinstance(patch, int):
        metadata.setdefault("clip.vision.image_size", isqrt(positions[0]) * patch)
    n_layers = told.get("vision.block_count")
    if deep and isinstance(n_layers, int):
        metadata["clip.vision.is_deepstack_layers"] = [
            n in deep for n in range(min(n_layers, len(shapes)))
        ]


def _deep_named(tensor: GgufTensor, layers: Sequence[Any]) -> GgufTensor:
    """Name a tensor of DeepStack by its layer, where the converter counts them."""
    match = _DEEP.fullmatch(tensor.name)
    if match is None or int(match[1]) >= len(layers):
        return tensor
    return replace(tensor, name=f"v.deepstack.{layers[int(match[1])]}.{match[2]}")


def _is_llama3(metadata: Mapping[str, MetadataValue]) -> bool:
    """Whether a file of Llama 3's first weeks does not say how words are split."""
    texts = metadata.get(f"{TOKENIZER}tokens")
    has_its_tokens = isinstance(texts, list) and texts[_EOT:][:1] == ["<|eot_id|>"]
    return has_its_tokens and metadata.get(f"{TOKENIZER}pre") in (None, "", "default")


def _is_ollamas(header: GgufHeader, architecture: str, dialect: Dialect) -> bool:
    """Whether anything in a file is as llama.cpp would not write it."""
    if architecture != dialect.architecture:
        return True
    prefix, marks = f"{architecture}.", {*dialect.keys, *_UNUSED, *_MARKS}
    for key in header.metadata:
        own = key.removeprefix(prefix)
        if own != key and (own in marks or own.startswith(_OTHER_KEYS)):
            return True
    model = dialect.tokenizer.get("model")
    if model is not None and header.metadata.get(f"{TOKENIZER}model") not in (None, model):
        return True
    return any(
        tensor.name.startswith(_ELSEWHERE) or _rename(tensor.name, dialect.tensors) != tensor.name
        for tensor in header.tensors
    )


def _renamed(tensors: Sequence[GgufTensor], patterns: Mapping[str, str]) -> tuple[GgufTensor, ...]:
    return tuple(replace(each, name=_rename(each.name, patterns)) for each in tensors)


def _rename(name: str, patterns: Mapping[str, str]) -> str:
    for pattern, new in patterns.items():
        name = re.sub(pattern, new, name)
    return name
