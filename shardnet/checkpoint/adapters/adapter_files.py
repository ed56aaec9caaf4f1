"""LoRA adapters as their makers store them: PEFT's folders, and llama.cpp's GGUF files.

What it does not know is refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from shardnet.checkpoint.adapters.stored_adapter import (
    ADAPTED,
    StoredAdapter,
    StoredPair,
    check_pairs,
    linear_shapes,
    unsupported,
)
from shardnet.checkpoint.formats.gguf import read_tensor_file
from shardnet.checkpoint.formats.gguf_header import GgufHeader, read_gguf_header
from shardnet.checkpoint.formats.gguf_parameters import interleaved_heads, stored_names
from shardnet.checkpoint.formats.safetensors_files import read_safetensors_file
from shardnet.checkpoint.tensors.json_files import read_json
from shardnet.checkpoint.tensors.stored_tensor import FileState, StoredTensor
from shardnet.errors import CheckpointError
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families.registry import family_of

_GGUF_TENSOR = re.compile(r"(.+)\.weight\.lora_([ab])")


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
        match = _GGUF_TENSOR.fullmatch(name)
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


CONFIG: Final = "adapter_config.json"
TENSORS: Final = "adapter_model.safetensors"

_PEFT_TENSOR = re.compile(
    r"base_model\.model\.(?:model\.|language_model\.)*layers\.(\d{1,4})\."
    r"((?:self_attn|mlp)\.\w+)\.lora_([AB])(?:\.default)?\.weight"
)
_PLAIN_PATTERN = re.compile(r"[\w.]{1,256}")
_FLOATS: Final = ("F32", "F16", "BF16")
_MAX_PATTERNS: Final = 4096

_OFF: Final = {
    "use_dora": "DoRA",
    "modules_to_save": "whole modules that were trained too",
    "lora_bias": "biases of its own",
    "layer_replication": "layers that are repeated",
    "trainable_token_indices": "trained rows of the embedding",
    "target_parameters": "adapters of single parameters",
    "megatron_config": "layers of Megatron",
    "alora_invocation_tokens": "activation by tokens (aLoRA)",
    "use_qalora": "QALoRA",
    "use_bdlora": "blocks of its matrices",
    "arrow_config": "routing among adapters (Arrow)",
    "fan_in_fan_out": "matrices that are stored transposed",
}
"""Settings that change what is computed, and are refused where they are not empty."""
_KNOWN: Final = {
    *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "task_type"),
    *("base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "lora_dropout"),
    *("init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    *(
        "runtime_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "ensure_weight_tying",
    ),
    "use_runtime_merging",
}
"""Settings that are read here, or only say how it was trained: what was trained is in the file."""
_INITIAL: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways to begin that change the model's own weights."""


def open_peft(folder: Path, config: ModelConfig) -> StoredAdapter:
    """Read the headers of a PEFT adapter for the model of `config`. Reads no matrix.

    Raises CheckpointError, UnsupportedModelError for what is not implemented.
    """
    settings = read_json(folder / CONFIG)
    _check_settings(folder, settings)
    path = folder / TENSORS
    opened = FileState.of(path)
    found = _matrices(path, read_safetensors_file(path).tensors)
    pairs: dict[int, dict[str, StoredPair]] = {}
    for (layer, name), matrices in sorted(found.items()):
        if len(matrices) < 2:
            raise CheckpointError(f"{path}: {name} of layer {layer} has only one of A and B")
        a, b = matrices["A"], matrices["B"]
        rank = a.shape[0] if a.shape else 0
        linear = a.name.removeprefix("base_model.model.").partition(".lora_")[0]
        factor = _factor(folder, settings, linear, rank)
        pairs.setdefault(layer, {})[name] = StoredPair(a=a, b=b, factor=factor)
    check_pairs(path, config, pairs)
    return StoredAdapter(path=path, opened=opened, pairs=pairs)


def _matrices(
    path: Path, tensors: Mapping[str, StoredTensor]
) -> dict[tuple[int, str], dict[str, StoredTensor]]:
    """Sort the tensors of a file by layer and linear, then by A and B."""
    found: dict[tuple[int, str], dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        match = _PEFT_TENSOR.fullmatch(name)
        if match is None or match[2] not in ADAPTED:
            raise unsupported(path, f"it has {name}, and only the linears of attention and MLP")
        if tensor.dtype not in _FLOATS:
            raise unsupported(path, f"{name} is stored as {tensor.dtype}")
        found.setdefault((int(match[1]), match[2]), {})[match[3]] = tensor
    return found


def _check_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError for settings that are not implemented, or not known."""
    where = folder / CONFIG
    if settings.get("peft_type") != "LORA":
        raise unsupported(where, f"it is {settings.get('peft_type')!r}, not LORA")
    if settings.get("bias", "none") != "none":
        raise unsupported(where, f"bias is {settings['bias']!r}")
    for name, meaning in _OFF.items():
        if settings.get(name):
            raise unsupported(where, f"{name} ({meaning}) is not implemented")
    begun = settings.get("init_lora_weights")
    if isinstance(begun, str) and begun.startswith(_INITIAL):
        raise unsupported(where, f"init_lora_weights {begun!r} has changed the model's own weights")
    unknown = sorted(
        name for name in settings.keys() - _KNOWN - _OFF.keys() if settings[name] not in _NOTHING
    )
    if unknown:
        raise unsupported(where, f"{', '.join(unknown)[:200]} is not known here")


_NOTHING: Final[tuple[object, ...]] = (None, False, {}, [], "")


def _factor(folder: Path, settings: Mapping[str, Any], linear: str, rank: int) -> float:
    """Return what B(A x) is multiplied by: alpha / r, or with rsLoRA alpha / sqrt(r).

    Raises CheckpointError where a matrix has another rank than the settings say.
    """
    said = _setting(folder, settings, "rank_pattern", "r", linear)
    if said != rank or rank < 1:
        raise CheckpointError(
            f"{folder}: the matrices of {linear} have rank {rank}, and {CONFIG} says {said:g}",
            remedy="fetch it again",
        )
    alpha = _setting(folder, settings, "alpha_pattern", "lora_alpha", linear)
    return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _setting(
    folder: Path, settings: Mapping[str, Any], patterns: str, name: str, linear: str
) -> float:
    """Return the number for a linear: the first pattern's that its name ends with, or `name`'s.

    PEFT has patterns as regular expressions; here they are names or ends of names.
    """
    own = settings.get(patterns) or {}
    if not isinstance(own, dict) or len(own) > _MAX_PATTERNS:
        raise CheckpointError(f"{folder / CONFIG}: {patterns} is no table of numbers")
    value = settings.get(name)
    for pattern, number in own.items():
        if not _PLAIN_PATTERN.fullmatch(pattern):
            raise unsupported(folder / CONFIG, f"the pattern {pattern!r} in {patterns}")
        if f".{linear}".endswith(f".{pattern}"):
            value = number
            break
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise CheckpointError(f"{folder / CONFIG}: {name} of {linear} is {value!r}, not a number")
    return float(value)
