"""LoRA adapters in GGUF files, as llama.cpp's convert_lora_to_gguf.py writes them.

Knows their metadata and which tensor is for which linear. Must not know kernels.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

from shardnet.checkpoint.adapters.stored_adapter import (
    StoredAdapter,
    StoredPair,
    check_pairs,
    linear_shapes,
    unsupported,
)
from shardnet.checkpoint.formats.gguf import read_tensor_file
from shardnet.checkpoint.formats.gguf_header import GgufHeader, read_gguf_header
from shardnet.checkpoint.formats.gguf_parameters import interleaved_heads, stored_names
from shardnet.checkpoint.tensors.stored_tensor import FileState, StoredTensor
from shardnet.errors import CheckpointError
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families.registry import family_of

_TENSOR = re.compile(r"(.+)\.weight\.lora_([ab])")


def open_gguf_adapter(path: Path, config: ModelConfig) -> StoredAdapter:
    """Read the header of a GGUF adapter for the model of `config`. Reads no matrix.

    Raises CheckpointError, UnsupportedModelError for what is not implemented.
    """
    opened = FileState.of(path)
    header = read_gguf_header(path)
    architecture = _check_metadata(path, header, config)
    linears = _linears(config, architecture)
    found: dict[tuple[int, str], dict[str, StoredTensor]] = {}
    for name, tensor in read_tensor_file(path, header).tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None or match[1] not in linears:
            raise unsupported(path, f"it has {name}, and only the linears of attention and MLP")
        found.setdefault(linears[match[1]], {})[match[2]] = tensor
    alpha = _alpha(path, header.metadata)
    pairs: dict[int, dict[str, StoredPair]] = {}
    for (layer, linear), matrices in sorted(found.items()):
        if len(matrices) < 2:
            raise CheckpointError(f"{path}: {linear} of layer {layer} has only one of A and B")
        rank = max(1, matrices["a"].shape[0])
        pairs.setdefault(layer, {})[linear] = StoredPair(
            a=matrices["a"],
            b=matrices["b"],
            factor=alpha / rank if alpha else 1.0,
            n_heads=interleaved_heads(config, f".{linear}."),
        )
    check_pairs(path, config, pairs)
    return StoredAdapter(path=path, opened=opened, pairs=pairs)


def _check_metadata(path: Path, header: GgufHeader, config: ModelConfig) -> str:
    """Return the architecture. Raises unless it is a LoRA adapter for this kind of model."""
    said = header.metadata
    if said.get("general.type") != "adapter" or said.get("adapter.type") != "lora":
        raise unsupported(path, "it is a GGUF, and no LoRA adapter")
    for key in said:
        if key.startswith("adapter.") and key not in ("adapter.type", "adapter.lora.alpha"):
            raise unsupported(path, f"{key} is not known here")
    gguf = family_of(config).gguf
    known = () if gguf is None else (gguf.architecture, *gguf.multimodal)
    architecture = said.get("general.architecture")
    if gguf is None or architecture not in known:
        raise CheckpointError(
            f"{path}: the adapter is for {architecture!r} models, and this one is {config.family}",
            remedy="use the adapter with the model that it was trained for",
        )
    return gguf.architecture


def _alpha(path: Path, metadata: Mapping[str, object]) -> float:
    """Return alpha; 0 means that B(A x) is added as it is."""
    alpha = metadata.get("adapter.lora.alpha", 0.0)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise CheckpointError(f"{path}: adapter.lora.alpha is {alpha!r}, not a number")
    return float(alpha)


def _linears(config: ModelConfig, architecture: str) -> dict[str, tuple[int, str]]:
    """Return layer and linear by what a GGUF calls it."""
    named = {
        f"model.layers.{layer}.{linear}": (layer, linear)
        for layer in range(config.n_layers)
        for linear in linear_shapes(config, layer)
    }
    found = stored_names(config, architecture, named)
    return {stored: named[name] for stored, name in found.items()}
