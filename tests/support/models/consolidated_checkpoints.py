"""Checkpoints in Meta's and Mistral's own layout, made from tiny Hugging Face ones."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.models.gguf_files import interleaved

SCALE = 0.0078125
"""Of FP8 weights: a power of two, so that rounding them twice changes nothing."""
NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "block_sparse_moe.": "feed_forward.",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


def own_tensors(source: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint folder under their own names, rows of rotary pairs together."""
    config = json.loads((source / "config.json").read_text())
    made = {}
    for name, values in load_file(source / "model.safetensors").items():
        own = name
        for theirs, ours in NAMES.items():
            own = own.replace(theirs, ours)
        if ".q_proj." in name:
            values = torch.from_numpy(interleaved(values.numpy(), config["num_attention_heads"]))
        if ".k_proj." in name:
            values = torch.from_numpy(interleaved(values.numpy(), config["num_key_value_heads"]))
        made[own.removeprefix("model.")] = values
    return made


def to_mistral(source: Path, folder: Path, *, narrow: bool = False, **params: Any) -> Path:
    """Write params.json and consolidated.safetensors. `params` go over what follows of `source`.

    Where it is `narrow` the products of layers are in FP8, and `source` gets the same values.
    """
    config = json.loads((source / "config.json").read_text())
    folder.mkdir()
    own = {
        "dim": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "head_dim": config["head_dim"],
        "hidden_dim": config["intermediate_size"],
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"],
        "norm_eps": config["rms_norm_eps"],
        "vocab_size": config["vocab_size"],
        "rope_theta": config["rope_parameters"]["rope_theta"],
        "sliding_window": config["sliding_window"],
    }
    if narrow:
        own |= {"quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}}
        _round_to_fp8(source)
    (folder / "params.json").write_text(json.dumps(own | params))
    tensors = own_tensors(source)
    if narrow:
        tensors = {
            name: values.clone()
            for name, part in tensors.items()
            for name, values in _fp8(name, part)
        }
    save_file(tensors, folder / "consolidated.safetensors")
    return folder


def _is_product(name: str) -> bool:
    return name.endswith(".weight") and (
        "_proj" in name or re.search(r"\.w[\dqkvo]\.", name) is not None
    )


def _round_to_fp8(source: Path) -> None:
    """Give the products of a checkpoint folder values that FP8 has, times a scale."""
    tensors = load_file(source / "model.safetensors")
    for name, values in tensors.items():
        if _is_product(name):
            tensors[name] = (values / SCALE).to(torch.float8_e4m3fn).float() * SCALE
    save_file(tensors, source / "model.safetensors", {"format": "pt"})


def _fp8(name: str, values: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """What is stored of one tensor."""
    if not _is_product(name):
        yield name, values
        return
    stem = name.removesuffix("weight")
    yield name, (values / SCALE).to(torch.float8_e4m3fn)
    yield f"{stem}qscale_weight", torch.tensor(SCALE)
    yield f"{stem}qscale_act", torch.tensor(0.5)


def to_meta(
    source: Path, folder: Path, n_parts: int, *, cut_embedding_columns: bool, **params: Any
) -> Path:
    """Write params.json and consolidated.NN.pth, cut as Meta's model parallel training cuts."""
    config = json.loads((source / "config.json").read_text())
    folder.mkdir()
    own = {
        "dim": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"],
        "norm_eps": config["rms_norm_eps"],
        "vocab_size": -1,
        "multiple_of": 16,
    }
    (folder / "params.json").write_text(json.dumps(own | params))
    tensors = own_tensors(source)
    for number in range(n_parts):
        part: dict[str, torch.Tensor] = {"rope.freqs": torch.ones(4)}
        for name, values in tensors.items():
            by_columns = name.endswith(("wo.weight", "w2.weight"))
            by_columns |= cut_embedding_columns and name.startswith("tok_embeddings")
            axis = None if "norm" in name else int(by_columns)
            cut = values if axis is None else values.chunk(n_parts, axis)[number]
            part[name] = cut.clone()
        torch.save(part, folder / f"consolidated.{number:02}.pth")
    return folder
