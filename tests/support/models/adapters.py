"""Small random LoRA adapters by hand, in PEFT's format and llama.cpp's, and merged models."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file, save_file
from support.models.gguf_files import ARCHITECTURES, INTERLEAVED, interleaved
from torch import Tensor

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_LINEAR = re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\.(\w+)\.weight")


def make_peft(
    folder: Path,
    base: Path,
    *,
    rank: int = 4,
    seed: int = 0,
    targets: Sequence[str] = ALL,
    ranks: Mapping[str, int] | None = None,
    **settings: Any,
) -> Path:
    """Write an adapter of all linears named in `targets` for the checkpoint `base`.

    `ranks` are those of linears with another one; `settings` override its config's. Return
    `folder`.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, weight in sorted(load_file(base / "model.safetensors").items()):
        match = _LINEAR.fullmatch(name)
        if match is None or match[2] not in targets:
            continue
        n_out, n_in = weight.shape
        own = (ranks or {}).get(match[2], rank)
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(own, n_in, generator=generator) / 4
        tensors[f"{prefix}.lora_B.weight"] = torch.randn(n_out, own, generator=generator) / 4
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": str(base),
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(targets),
        "rank_pattern": dict(ranks or {}),
        "bias": "none",
        "task_type": "CAUSAL_LM",
        **settings,
    }
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def deltas(adapter: Path) -> dict[str, Tensor]:
    """Return what a PEFT adapter adds to the weights of each linear, computed plainly."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    found = {}
    for name in (name for name in tensors if name.endswith(".lora_A.weight")):
        linear = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        a, b = tensors[name], tensors[name.replace("lora_A", "lora_B")]
        alpha = config.get("alpha_pattern", {}).get(linear.split(".")[-1], config["lora_alpha"])
        rank = a.shape[0]
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        found[f"{linear}.weight"] = scale * (b @ a)
    return found


def merge(base: Path, adapter: Path, folder: Path, scale: float = 1.0) -> Path:
    """Write the checkpoint `base` with an adapter merged into its weights. Return `folder`."""
    shutil.copytree(base, folder)
    tensors = load_file(base / "model.safetensors")
    for name, delta in deltas(adapter).items():
        tensors[name] = (tensors[name].float() + scale * delta).to(tensors[name].dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def as_gguf(adapter: Path, base: Path, path: Path, **metadata: Any) -> Path:
    """Write a PEFT adapter as llama.cpp's convert_lora_to_gguf.py does. Return `path`."""
    model = json.loads((base / "config.json").read_text())
    family, config = model["model_type"], json.loads((adapter / "adapter_config.json").read_text())
    arch = ARCHITECTURES[family]
    number = next(k for k in gguf.MODEL_ARCH if gguf.MODEL_ARCH_NAMES[k] == arch)
    names = gguf.get_tensor_name_map(number, model["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, arch)
    said = {"general.type": "adapter", "adapter.type": "lora"} | metadata
    for key, value in said.items():
        writer.add_string(key, value)
    writer.add_float32("adapter.lora.alpha", float(config["lora_alpha"]))
    for name, tensor in load_file(adapter / "adapter_model.safetensors").items():
        linear, kind = name.removeprefix("base_model.model.").rsplit(".lora_", 1)
        values = tensor.numpy()
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        n_heads = heads.get(linear.split(".")[-1])
        if kind.startswith("B") and family in INTERLEAVED and n_heads is not None:
            values = interleaved(values, model[n_heads])
        writer.add_tensor(f"{names.get_name(linear)}.weight.lora_{kind[0].lower()}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
