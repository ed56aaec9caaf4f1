"""DeepSeek-V4.1 in plain formulas, as transformers 5.24 has no class of it.

Whole tensors and masks; of what came before only the inputs of attention are remembered, and all is
made of them anew. What it has in common with DeepSeek-V4 is held against transformers' modules, as
are its rotary positions. Each `twist` is a mistake that is easy to make.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from support.oracles.plain_engram import compressed_ids, looked_up
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

TWISTS = (
    *("no engram", "engram without history", "mixes at once", "comb the other way"),
    *("no window", "no entries", "all entries", "first entries", "choices unshared"),
    *("all candidates", "newest block dropped", "entries of the next position", "keys unrotated"),
    *("halves rotated", "output as rotated", "no yarn", "heads normed", "no sinks"),
    *("router without bias", "bias in weights", "experts unclamped", "no shared expert"),
)
_WIDE = (".attn_sink", ".gate.bias", ".gate.bias_vl")
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def is_wide(name: str) -> bool:
    """Whether a tensor is stored and computed in float32, whatever the others are."""
    return name.endswith(_WIDE) or ".hc_" in name


def dequantized(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Multiply by powers of two per block of 32 x 32, or per 32 columns of a row."""
    made = {}
    for name, tensor in stored.items():
        scales = stored.get(name.removesuffix("weight") + "scale")
        if name.endswith(".scale"):
            continue
        if scales is not None:
            if tensor.dtype is torch.int8:
                codes = tensor.view(torch.uint8)
                tensor = _E2M1[torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()]
            rows, columns = tensor.shape
            if scales.shape[0] != rows:
                scales = scales.float().repeat_interleave(32, 0)[:rows]
            tensor = tensor.float() * scales.float().repeat_interleave(32, 1)[:, :columns]
        made[name] = tensor
    return made


@dataclass(slots=True)
class Past:
    """What came before: the tokens, and the inputs [T, E] of each layer's attention."""

    ids: list[int] = field(default_factory=list)
    inputs: dict[int, Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class Shared:
    """What layers read of the last source before them: of positions, of rows, of blocks."""

    entries: Tensor
    keys: Tensor
    chosen: Tensor
    kept: Tensor


class PlainDeepseekV41:
    """One checkpoint, called as transformers' models are, with or without a mistake."""

    def __init__(
        self,
        config: dict[str, Any],
        weights: Mapping[str, Tensor],
        tokenizer: Tokenizer,
        dtype: torch.dtype = torch.float32,
        twist: str = "",
    ) -> None:
        assert twist in ("", *TWISTS)
        self.text: dict[str, Any] = config["text_config"]
        self.weights = {
            name: tensor.to(torch.float32 if is_wide(name) else dtype)
            for name, tensor in dequantized(weights).items()
        }
        self.dtype, self.twist = dtype, twist
        self.compressed = compressed_ids(tokenizer)
        self.eps: float = self.text["rms_norm_eps"]
        self.rotary = DeepseekV4RotaryEmbedding(rotary_config(self.text))
        if twist == "no yarn":
            rope = rotary_config(self.text | {"rope_scaling": {"rope_type": "default"}})
            self.rotary = DeepseekV4RotaryEmbedding(rope)

    @classmethod
    def load(
        cls, folder: Path, dtype: torch.dtype = torch.float32, twist: str = ""
    ) -> PlainDeepseekV41:
        """Read a folder, quantised as published or not."""
        config = json.loads((folder / "config.json").read_text())
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        return cls(config, load_file(folder / "model.safetensors"), tokenizer, dtype, twist)

    def __call__(
        self, input_ids: Tensor, cache: Past | None = None, use_cache: bool = False
    ) -> SimpleNamespace:
        """Run the tokens [1, T] behind those of `cache`: logits [1, T, V]."""
        [new] = input_ids.tolist()
        past = cache or Past()
        logits = self.logits(new, past)
        return SimpleNamespace(logits=logits[None], past_key_values=past if use_cache else None)

    def logits(self, new: list[int], past: Past | None = None) -> Tensor:
        """Run tokens behind those of `past`, and put them there: [T, V]."""
        past, text = past or Past(), self.text
        begin, n_streams = len(past.ids), text["hc_mult"]
        past.ids = [*past.ids, *new]
        embedded = self.weights["embed.weight"][new]
        hidden = embedded[:, None].repeat(1, n_streams, 1)
        pre = torch.eye(n_streams)[0].repeat(len(new), 1)
        shared = Shared(*(torch.empty(0) for _ in range(4)))
        for layer in range(text["num_hidden_layers"]):
            block = f"layers.{layer}"
            if layer in text["engram_layer_ids"] and self.twist != "no engram":
                hidden = self.engram(hidden, past.ids, layer)
            of_attention, post, comb = self.mixes(hidden, f"{block}.hc_attn")
            if self.twist == "mixes at once":
                pre = of_attention
            rows = self.norm(self.joined(pre, hidden), f"{block}.attn_norm")
            if begin:
                rows = torch.cat((past.inputs[layer], rows))
            past.inputs[layer] = rows
            hidden = self.spread(self.attention(rows, begin, layer, shared), hidden, post, comb)
            pre, post, comb = self.mixes(hidden, f"{block}.hc_ffn")
            if self.twist == "mixes at once":
                of_attention = pre
            rows = self.norm(self.joined(of_attention, hidden), f"{block}.ffn_norm")
            hidden = self.spread(self.experts(rows, f"{block}.ffn"), hidden, post, comb)
        return self.linear(self.norm(self.joined(pre, hidden), "norm"), "head")

    def linear(self, rows: Tensor, name: str) -> Tensor:
        """Multiply rows [T, K] by a weight [N, K]."""
        return functional.linear(rows, self.weights[f"{name}.weight"])

    def norm(self, rows: Tensor, name: str) -> Tensor:
        """Divide by the root mean square, multiply by the weight, in float32."""
        wide = rows.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weights[f"{name}.weight"].float()).to(rows.dtype)

    def mixes(self, hidden: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """How streams [T, n, E] are joined [T, n], spread [T, n] and mixed [T, from, to]."""
        n, eps = hidden.shape[1], self.text["hc_eps"]
        flat = hidden.flatten(1).float()
        flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.eps)
        parts = (flat @ self.weights[f"{name}_fn"].T).split((n, n, n * n), -1)
        scale = self.weights[f"{name}_scale"]
        base = self.weights[f"{name}_base"].split((n, n, n * n))
        pre, post, comb = (parts[i] * scale[i] + base[i] for i in range(3))
        comb = comb.unflatten(-1, (n, n)).softmax(-1) + eps
        for number in range(self.text["hc_sinkhorn_iters"]):
            if number:
                comb = comb / (comb.sum(-1, keepdim=True) + eps)
            comb = comb / (comb.sum(-2, keepdim=True) + eps)
        if self.twist == "comb the other way":
            comb = comb.mT
        return pre.sigmoid() + eps, 2 * post.sigmoid(), comb

    def joined(self, pre: Tensor, hidden: Tensor) -> Tensor:
        """Add weighted streams up: [T, E]."""
        return (pre[..., None] * hidden).sum(1).to(hidden.dtype)

    def spread(self, rows: Tensor, hidden: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """Give what a sub-layer made [T, E] to each stream, and mix what they were."""
        mixed = torch.einsum("tij,tie->tje", comb.to(hidden.dtype), hidden)
        return post.to(hidden.dtype)[..., None] * rows[:, None] + mixed

    def rotated(self, rows: Tensor, positions: Tensor, ratio: int, *, back: bool = False) -> Tensor:
        """Turn the last columns of rows [T, ..., D], in neighbouring pairs."""
        kind = "compress" if ratio else "main"
        size = self.text["qk_rope_head_dim"]
        cos, sin = self.rotary(torch.empty(0), positions[None], kind)
        shape = (len(rows), *[1] * (rows.ndim - 2), size // 2)
        cos, sin = cos[0].view(shape), sin[0].view(shape) * (-1 if back else 1)
        first, second = rows[..., -size::2].float(), rows[..., 1 - size :: 2].float()
        if self.twist == "halves rotated":
            first, second = rows[..., -size:].float().chunk(2, -1)
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), -1)
        return torch.cat((rows[..., :-size], turned.flatten(-2).to(rows.dtype)), -1)

    def attention(self, inputs: Tensor, begin: int, layer: int, shared: Shared) -> Tensor:
        """Attend from the rows [begin, T) of inputs [T, E] to a window and to entries."""
        text, attn = self.text, f"layers.{layer}.attn"
        ratio, window = text["compress_ratios"][layer], text["sliding_window"]
        n_heads, size = text["num_attention_heads"], text["head_dim"]
        every = torch.arange(len(inputs))
        rows, at = inputs[begin:], every[begin:]
        latent = self.norm(self.linear(rows, f"{attn}.wq_a"), f"{attn}.q_norm")
        queries = self.linear(latent, f"{attn}.wq_b").unflatten(-1, (n_heads, size))
        if self.twist == "heads normed":
            queries = queries / queries.float().square().mean(-1, keepdim=True).sqrt().to(
                rows.dtype
            )
        queries = self.rotated(queries, at, ratio)
        found = self.norm(self.linear(inputs, f"{attn}.wkv"), f"{attn}.kv_norm")
        found = self.rotated(found, every, ratio)
        ages = at[:, None] - every
        seen = (ages >= 0) & ((ages < window) | (self.twist == "no window"))
        if ratio:
            if layer in text["kv_source_layer_ids"]:
                shared.entries, shared.keys = self.entries(inputs, ratio, attn)
            if layer in text["index_source_layer_ids"]:
                shared.chosen = self.choose(rows, latent, at, layer, shared)
            elif self.twist == "choices unshared":
                shared.chosen = torch.arange(len(shared.keys)) < (at[:, None] + 1) // ratio
            if self.twist != "no entries":
                found = torch.cat((found, shared.entries))
                seen = torch.cat((seen, shared.chosen), -1)
        scores = torch.einsum("thd,sd->hts", queries, found) * size**-0.5
        scores = scores.float().masked_fill(~seen, -torch.inf)
        sinks = self.weights[f"{attn}.attn_sink"][:, None, None].expand(-1, len(rows), 1)
        if self.twist == "no sinks":
            sinks = torch.full_like(sinks, -torch.inf)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1].to(rows.dtype)
        heads = torch.einsum("hts,sd->thd", weights, found)
        if self.twist != "output as rotated":
            heads = self.rotated(heads, at, ratio, back=True)
        groups = heads.reshape(len(rows), text["o_groups"], -1)
        parts = self.weights[f"{attn}.wo_a.weight"].unflatten(0, (text["o_groups"], -1))
        return self.linear(torch.einsum("tgi,goi->tgo", groups, parts).flatten(1), f"{attn}.wo_b")

    def entries(self, inputs: Tensor, ratio: int, attn: str) -> tuple[Tensor, Tensor]:
        """Make an entry [D] and its key of each `ratio` positions, as far as they are whole."""
        n_entries = len(inputs) // ratio
        whole = inputs[: n_entries * ratio]
        latents = self.linear(whole, f"{attn}.compressor.wkv").unflatten(0, (-1, ratio))
        if ratio > 1:
            gates = self.linear(whole, f"{attn}.compressor.wgate").unflatten(0, (-1, ratio))
            latents = latents * gates.float().softmax(1).to(latents.dtype)
        latents = self.norm(latents.sum(1), f"{attn}.compressor.norm")
        keys = self.norm(self.linear(latents, f"{attn}.indexer.wk"), f"{attn}.indexer.k_norm")
        at = torch.arange(n_entries) * ratio
        if self.twist == "entries of the next position":
            at = at + 1
        if self.twist != "keys unrotated":
            keys = self.rotated(keys, at, ratio)
        return self.rotated(latents, at, ratio), keys

    def choose(
        self, rows: Tensor, latent: Tensor, at: Tensor, layer: int, shared: Shared
    ) -> Tensor:
        """Say which entries each row attends to: [T, entries]."""
        text, index = self.text, f"layers.{layer}.attn.indexer"
        ratio, n_heads = text["compress_ratios"][layer], text["index_n_heads"]
        size, n_chosen = text["index_head_dim"], text["index_topk"]
        n_seen = (at + 1) // ratio
        seen = torch.arange(len(shared.keys)) < n_seen[:, None]
        queries = self.linear(latent, f"{index}.wq_b").unflatten(-1, (n_heads, size))
        queries = self.rotated(queries, at, ratio)
        weights = self.linear(rows, f"{index}.weights_proj").float() * (size * n_heads) ** -0.5
        scores = torch.einsum("thd,sd->ths", queries.float(), shared.keys.float()).relu()
        scores = torch.einsum("ths,th->ts", scores, weights).masked_fill(~seen, -torch.inf)
        if layer == text["candidate_source_layer_id"]:
            shared.kept = self.candidates(scores, n_seen)
        elif layer > text["candidate_source_layer_id"] and self.twist != "all candidates":
            scores = scores.masked_fill(~shared.kept, -torch.inf)
        if self.twist == "all entries":
            return seen
        if self.twist == "first entries":
            return seen & (torch.arange(len(shared.keys)) < n_chosen)
        best = scores.topk(min(n_chosen, scores.shape[1])).indices
        return torch.zeros_like(seen).scatter(1, best, True) & (scores > -torch.inf)

    def candidates(self, scores: Tensor, n_seen: Tensor) -> Tensor:
        """Keep the blocks of entries with the best ones, and that of the newest: [T, entries]."""
        size, n_rows = self.text["candidate_block_size"], len(scores)
        n_blocks = -(-scores.shape[1] // size)
        padded = functional.pad(scores, (0, n_blocks * size - scores.shape[1]), value=-torch.inf)
        best = padded.view(n_rows, n_blocks, size).amax(-1)
        newest = (n_seen - 1)[:, None] // size == torch.arange(n_blocks)
        if self.twist != "newest block dropped":
            best = best.masked_fill(newest, torch.inf)
        kept = best.topk(min(self.text["candidate_topk_blocks"], n_blocks)).indices
        blocks = torch.zeros_like(newest).scatter(1, kept, True)
        return blocks.repeat_interleave(size, 1)[:, : scores.shape[1]]

    def experts(self, rows: Tensor, ffn: str) -> Tensor:
        """Ask the experts with the best scores, and the one that all ask."""
        logits = self.linear(rows, f"{ffn}.gate")
        scores = functional.softplus(logits.float()).sqrt()
        biased = scores + self.weights[f"{ffn}.gate.bias"]
        ranked = scores if self.twist == "router without bias" else biased
        chosen = ranked.topk(self.text["num_experts_per_tok"]).indices
        weights = (biased if self.twist == "bias in weights" else scores).gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True) * self.text["routed_scaling_factor"]
        made = torch.zeros_like(rows)
        for number in chosen.unique().tolist():
            row, place = (chosen == number).nonzero().unbind(1)
            one = self.gated(rows[row], f"{ffn}.experts.{number}") * weights[row, place, None]
            made.index_add_(0, row, one.to(rows.dtype))
        if self.twist == "no shared expert":
            return made
        return made + self.gated(rows, f"{ffn}.shared_experts")

    def gated(self, rows: Tensor, name: str) -> Tensor:
        """w2(silu(w1 rows) * w3 rows), both clamped."""
        limit = torch.inf if self.twist == "experts unclamped" else self.text["swiglu_limit"]
        gate = self.linear(rows, f"{name}.w1").clamp(max=limit)
        up = self.linear(rows, f"{name}.w3").clamp(-limit, limit)
        return self.linear(functional.silu(gate) * up, f"{name}.w2")

    def engram(self, hidden: Tensor, ids: list[int], layer: int) -> Tensor:
        """Add what a table has of the last tokens to each of the streams [T, n, E]."""
        name, (n_rows, n_streams, width) = f"layers.{layer}.engram", hidden.shape
        texts = [[token_id] for token_id in ids]
        if self.twist != "engram without history":
            texts = [ids]
        rows = [looked_up(self.text, self.compressed, layer, each) for each in texts]
        places = torch.from_numpy(np.concatenate(rows)[-n_rows:])
        found = self.weights[f"{name}.embed.weight"][places].flatten(1)
        both = self.linear(found, f"{name}.wkv").split((n_streams * width, width), -1)
        keys, value = both[0].unflatten(-1, (n_streams, width)).float(), both[1]
        wide = hidden.float()
        q_weight, k_weight = (self.weights[f"{name}.{kind}_weight"].float() for kind in "qk")
        dot = (wide * q_weight * k_weight * keys).sum(-1) * width**-0.5
        for part in (wide, keys):
            dot = dot * torch.rsqrt(part.square().mean(-1) + self.eps)
        gate = (dot.sign() * dot.abs().clamp(min=1e-6).sqrt()).sigmoid()
        return hidden + (gate[..., None] * value[:, None]).to(hidden.dtype)


def rotary_config(text: dict[str, Any]) -> DeepseekV4Config:
    """Say DeepSeek-V4.1's rotary positions in the words of transformers' DeepSeek-V4."""
    share = text["qk_rope_head_dim"] / text["head_dim"]
    main = {"rope_type": "default", "rope_theta": float(text["rope_theta"])}
    longer = text["rope_scaling"] | {"rope_theta": float(text["compress_rope_theta"])}
    longer["attention_factor"] = 1.0
    ropes = {"main": main, "compress": longer}
    return DeepseekV4Config(
        head_dim=text["head_dim"],
        max_position_embeddings=text["max_position_embeddings"],
        partial_rotary_factor=share,
        rope_parameters={
            name: rope | {"partial_rotary_factor": share} for name, rope in ropes.items()
        },
    )
