"""Tiny random drafters as their makers write them, and what the published modules compute of them.

Nothing is cached: every draft is computed from all positions before it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

WIDTH, VOCAB, KNOWN, MASK = 48, 320, 90, 319
_LLAMA: dict[str, Any] = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": WIDTH,
    "initializer_range": 0.02,
    "intermediate_size": 80,
    "max_position_embeddings": 512,
    "model_type": "llama",
    "num_attention_heads": 6,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "use_cache": True,
    "vocab_size": VOCAB,
    "draft_vocab_size": KNOWN,
}
EAGLE3: dict[str, dict[str, Any]] = {
    "authors": _LLAMA | {"architectures": ["LlamaForCausalLM"], "transformers_version": "4.28.1"},
    "specforge": _LLAMA
    | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [0, 3, 6],
            "use_aux_hidden_state": True,
        },
        "fc_norm": True,
        "norm_output": True,
        "head_dim": 16,
        "max_window_layers": 36,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "speculators": {
        "architectures": ["Eagle3Speculator"],
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "draft_vocab_size": KNOWN,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 7],
        "norm_before_residual": True,
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "speculators_config": {"algorithm": "eagle3"},
        "target_hidden_size": None,
        "torch_dtype": "bfloat16",
        "transformer_layer_config": {
            key: value
            for key, value in _LLAMA.items()
            if key not in ("draft_vocab_size", "torch_dtype")
        },
    },
}
"""By maker: the config."""
READ = {"authors": (2, 4, 5), "specforge": (1, 4, 7), "speculators": (1, 2, 7), "dflash": (2, 6)}
"""After how many of the model's 8 layers a drafter reads states."""
DFLASH: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 6,
    "bos_token_id": 1,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 5]},
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": WIDTH,
    "initializer_range": 0.02,
    "intermediate_size": 80,
    "layer_types": ["full_attention", "full_attention"],
    "max_position_embeddings": 40960,
    "max_window_layers": 2,
    "model_type": "qwen3",
    "num_attention_heads": 6,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_target_layers": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": VOCAB,
}
SLIDING = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 20,
    "use_sliding_window": True,
}
"""What is other where a layer of DFlash has a window."""


def make_eagle3(folder: Path, maker: str, *, with_embedding: bool = True, **config: Any) -> Path:
    """Write a head as the `maker` does: safetensors or pytorch_model.bin. Return `folder`."""
    raw = EAGLE3[maker] | config
    own = {**raw, **raw.get("transformer_layer_config", {})}
    heads, n = own.get("head_dim", 8), WIDTH
    layer = "layers.0" if maker == "speculators" else "midlayer"
    shapes = _attention(layer, own, heads, 2 * n) | _mlp(layer, own)
    shapes |= {f"{layer}.{name}.weight": (n,) for name in (*_NORMS, "hidden_norm")}
    shapes |= {"fc.weight": (n, 3 * n), "norm.weight": (n,), "lm_head.weight": (KNOWN, n)}
    if own.get("fc_norm"):
        shapes |= {f"fc_norm.{at}.weight": (n,) for at in range(3)}
    if with_embedding:
        shapes["embed_tokens.weight"] = (VOCAB, n)
    tensors = _random(shapes)
    known = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))[:KNOWN].sort().values
    tensors["d2t"] = known - torch.arange(KNOWN)
    tensors["t2d"] = torch.isin(torch.arange(VOCAB), known)
    return _write(folder, raw, tensors, in_torch=maker == "authors")


def make_dflash(folder: Path, **config: Any) -> Path:
    """Write a block drafter. Return `folder`."""
    raw, n = DFLASH | config, WIDTH
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (n, 2 * n)}
    shapes |= {"norm.weight": (n,), "hidden_norm.weight": (n,)}
    for number in range(raw["num_hidden_layers"]):
        layer = f"layers.{number}"
        shapes |= _attention(layer, raw, raw["head_dim"], n) | _mlp(layer, raw)
        shapes |= {f"{layer}.{name}.weight": (n,) for name in _NORMS}
        heads = {f"{layer}.self_attn.{name}_norm.weight": (raw["head_dim"],) for name in "qk"}
        shapes |= heads
    return _write(folder, raw, _random(shapes))


_NORMS = ("input_layernorm", "post_attention_layernorm")


def _attention(layer: str, raw: dict[str, Any], size: int, n_in: int) -> dict[str, tuple[int, ...]]:
    queries, keys = raw["num_attention_heads"] * size, raw["num_key_value_heads"] * size
    attn = f"{layer}.self_attn"
    inputs = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    made = {f"{attn}.{name}.weight": (n, n_in) for name, n in inputs.items()}
    return made | {f"{attn}.o_proj.weight": (WIDTH, queries)}


def _mlp(layer: str, raw: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    inner = raw["intermediate_size"]
    made = {f"{layer}.mlp.{name}_proj.weight": (inner, WIDTH) for name in ("gate", "up")}
    return made | {f"{layer}.mlp.down_proj.weight": (WIDTH, inner)}


def _random(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        name: 1 + 0.1 * torch.randn(shape, generator=generator)
        if len(shape) == 1
        else torch.randn(shape, generator=generator) / shape[1] ** 0.5
        for name, shape in shapes.items()
    }


def _write(
    folder: Path, raw: dict[str, Any], tensors: dict[str, Tensor], *, in_torch: bool = False
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    if in_torch:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class Target:
    """The model, by transformers."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def states(self, tokens: Sequence[int], layers: Sequence[int]) -> Tensor:
        """Return what is given after so many layers: [T, layers x E]."""
        found = self.model(torch.tensor([list(tokens)]), output_hidden_states=True).hidden_states
        return torch.cat([found[layer][0] for layer in layers], -1)


class PlainDrafter:
    """The parts that both modules share."""

    def __init__(self, folder: Path, target: Target) -> None:
        raw = json.loads((folder / "config.json").read_text())
        self.raw = {**raw, **raw.get("transformer_layer_config", {})}
        binary = folder / "pytorch_model.bin"
        stored = torch.load(binary) if binary.exists() else load_file(folder / "model.safetensors")
        self.tensors = dict(stored)
        self.model = target.model

    def norm(self, rows: Tensor, name: str) -> Tensor:
        mean = rows.pow(2).mean(-1, keepdim=True)
        return self.tensors[f"{name}.weight"] * rows * torch.rsqrt(mean + self.raw["rms_norm_eps"])

    def linear(self, rows: Tensor, name: str) -> Tensor:
        return rows @ self.tensors[f"{name}.weight"].T

    def mlp(self, rows: Tensor, name: str) -> Tensor:
        gate = F.silu(self.linear(rows, f"{name}.gate_proj"))
        return self.linear(gate * self.linear(rows, f"{name}.up_proj"), f"{name}.down_proj")

    def heads(self, rows: Tensor) -> Tensor:
        size = self.raw.get("head_dim", WIDTH // self.raw["num_attention_heads"])
        return rows.view(len(rows), -1, size)

    def rotate(self, heads: Tensor, positions: Tensor) -> Tensor:
        size = heads.shape[-1]
        steps = torch.arange(0, size, 2).float() / size
        angles = torch.outer(positions.float(), 1 / self.raw.get("rope_theta", 10000.0) ** steps)
        cos, sin = (torch.cat((x, x), -1)[:, None] for x in (angles.cos(), angles.sin()))
        one, two = heads.chunk(2, -1)
        return heads * cos + torch.cat((-two, one), -1) * sin

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        n_each = queries.shape[1] // keys.shape[1]
        wide = [x.repeat_interleave(n_each, 1).transpose(0, 1) for x in (keys, values)]
        scores = queries.transpose(0, 1) @ wide[0].transpose(1, 2) / queries.shape[-1] ** 0.5
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        return (weights @ wide[1]).transpose(0, 1).flatten(1)


class PlainEagle3(PlainDrafter):
    """What the authors' module computes, and SpecForge's where it has more."""

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], states: Tensor, n: int) -> tuple[list[int], Tensor]:
        """Draft `n` tokens behind `tokens`; the states are those of all but the last of them.

        Returns them, and what the head gives of its own vocabulary: [n, KNOWN].
        """
        known = self.tensors["d2t"] + torch.arange(KNOWN)
        if self.raw.get("fc_norm"):
            parts = enumerate(states.chunk(3, -1))
            states = torch.cat([self.norm(part, f"fc_norm.{at}") for at, part in parts], -1)
        features, ids, rows = self.linear(states, "fc"), list(tokens[1:]), []
        for _ in range(n):
            hidden = self._layer(features, torch.tensor(ids))
            rows.append(self.linear(self.norm(hidden[-1], "norm"), "lm_head"))
            ids.append(int(known[rows[-1].argmax()]))
            features = torch.cat((features, hidden[-1:]))
        return ids[len(tokens) - 1 :], torch.stack(rows)

    def _layer(self, features: Tensor, ids: Tensor) -> Tensor:
        layer = "midlayer" if "midlayer.hidden_norm.weight" in self.tensors else "layers.0"
        attn, positions = f"{layer}.self_attn", torch.arange(len(ids))
        table = self.tensors.get("embed_tokens.weight", self.model.model.embed_tokens.weight)
        normed = self.norm(features, f"{layer}.hidden_norm")
        residual = normed if self.raw.get("norm_before_residual") else features
        rows = torch.cat((self.norm(table[ids], f"{layer}.input_layernorm"), normed), -1)
        q, k, v = (self.heads(self.linear(rows, f"{attn}.{name}_proj")) for name in "qkv")
        q, k = self.rotate(q, positions), self.rotate(k, positions)
        mask = positions[:, None] >= positions
        hidden = residual + self.linear(self.attend(q, k, v, mask), f"{attn}.o_proj")
        normed = self.norm(hidden, f"{layer}.post_attention_layernorm")
        return hidden + self.mlp(normed, f"{layer}.mlp")


class PlainDFlash(PlainDrafter):
    """What the published module computes, with SpecForge's masks."""

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], states: Tensor, n: int) -> tuple[list[int], Tensor]:
        """Draft `n` tokens behind `tokens`, as PlainEagle3 does; logits are of all tokens."""
        fused = self.norm(self.linear(states, "fc"), "hidden_norm")
        start, size = len(fused), self.raw["block_size"]
        own, seen = torch.arange(start, start + size), torch.arange(start + size)
        block = torch.tensor([tokens[-1], *[MASK] * (size - 1)])
        hidden = self.model.model.embed_tokens(block)
        for number, kind in enumerate(self.raw["layer_types"]):
            layer = f"layers.{number}"
            attn, normed = f"{layer}.self_attn", self.norm(hidden, f"{layer}.input_layernorm")
            both = torch.cat((fused, normed))
            q = self.norm(self.heads(self.linear(normed, f"{attn}.q_proj")), f"{attn}.q_norm")
            k = self.norm(self.heads(self.linear(both, f"{attn}.k_proj")), f"{attn}.k_norm")
            v = self.heads(self.linear(both, f"{attn}.v_proj"))
            mask = torch.ones(size, start + size, dtype=torch.bool)
            if kind == "sliding_attention":
                back = own[:, None] - seen
                mask = (back >= 0) & (back < self.raw["sliding_window"])
            inner = self.attend(self.rotate(q, own), self.rotate(k, seen), v, mask)
            hidden = hidden + self.linear(inner, f"{attn}.o_proj")
            normed = self.norm(hidden, f"{layer}.post_attention_layernorm")
            hidden = hidden + self.mlp(normed, f"{layer}.mlp")
        rows = self.model.lm_head(self.norm(hidden, "norm"))[1 : n + 1]
        return rows.argmax(-1).tolist(), rows
