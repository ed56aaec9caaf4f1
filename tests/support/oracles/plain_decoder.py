"""A second oracle: the families in plain formulas, in float64, one sequence at a time.

Written from the papers and the published configs, with nothing of shardnet's or transformers' code.
Each `twist` is a mistake that is easy to make; a test shows that its model would notice.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

NORMS_AFTER = {"gemma2", "gemma3_text", "olmo2"}
HEAD_NORMS = {"qwen3", "qwen3_moe", "gemma3_text", "olmo2"}
EXPERT_NAMES = {"mixtral": ("w1", "w3", "w2")}


class PlainDecoder:
    """One checkpoint with default rotary scaling, computed with or without a mistake."""

    def __init__(self, folder: Path, twist: str = "") -> None:
        self.raw: dict[str, Any] = json.loads((folder / "config.json").read_text())
        stored = load_file(folder / "model.safetensors")
        self.weights = {name: tensor.double() for name, tensor in stored.items()}
        self.twist = twist
        self.family = self.raw["model_type"]
        self.is_gemma = self.family.startswith("gemma")
        self.n_heads = self.raw["num_attention_heads"]
        self.head_size = self.raw.get("head_dim") or self.raw["hidden_size"] // self.n_heads

    def logits(self, ids: list[int]) -> Tensor:
        """Run the whole sequence: [T, V]."""
        table = self.weights["model.embed_tokens.weight"]
        hidden = table[ids]
        if self.twist != "embedding as it is":
            usual = math.sqrt(self.raw["hidden_size"]) if self.is_gemma else 1.0
            hidden = hidden * self.raw.get("embedding_multiplier", usual)
        for layer in range(self.raw["num_hidden_layers"]):
            hidden = self.layer(hidden, layer)
        hidden = self.norm(hidden, "model.norm")
        logits = hidden @ self.weights.get("lm_head.weight", table).T
        if self.twist != "logits as they are":
            logits = logits / self.raw.get("logits_scaling", 1.0)
        cap = self.raw.get("final_logit_softcapping")
        return cap * torch.tanh(logits / cap) if cap and self.twist != "no logit cap" else logits

    def layer(self, hidden: Tensor, layer: int) -> Tensor:
        """Two halves, each added to what went in."""
        prefix = f"model.layers.{layer}"
        share = self.raw.get("residual_multiplier", 1.0)
        if self.twist == "residuals as they are":
            share = 1.0
        if self.family == "olmo2":
            attended = self.attention(hidden, layer)
        else:
            attended = self.attention(self.norm(hidden, f"{prefix}.input_layernorm"), layer)
        if self.family not in NORMS_AFTER:
            hidden = hidden + share * attended
            inner = self.mlp(self.norm(hidden, f"{prefix}.post_attention_layernorm"), layer)
            return hidden + share * inner
        hidden = hidden + self.norm(attended, f"{prefix}.post_attention_layernorm")
        before = f"{prefix}.pre_feedforward_layernorm"
        inner = hidden if self.family == "olmo2" else self.norm(hidden, before)
        inner = self.mlp(inner, layer)
        return hidden + self.norm(inner, f"{prefix}.post_feedforward_layernorm")

    def norm(self, rows: Tensor, name: str) -> Tensor:
        """Divide by the root mean square, multiply by the weight, Gemma by 1 + weight."""
        offset = 1.0 if self.is_gemma and self.twist != "norms without 1" else 0.0
        size = rows.square().mean(-1, keepdim=True) + self.raw["rms_norm_eps"]
        return rows / size.sqrt() * (self.weights[f"{name}.weight"] + offset)

    def head_norm(self, heads: Tensor, name: str) -> Tensor:
        """The norm of each head of [T, heads, D], in OLMo-2 of all of them together."""
        if self.family != "olmo2":
            return self.norm(heads, name)
        axes = (-1,) if self.twist == "norms by head" else (-2, -1)
        size = heads.square().mean(axes, keepdim=True) + self.raw["rms_norm_eps"]
        return heads / size.sqrt() * self.weights[f"{name}.weight"].view(-1, self.head_size)

    def mlp(self, rows: Tensor, layer: int) -> Tensor:
        """down(act(gate) * up)."""
        mlp = f"model.layers.{layer}.mlp"
        if self.family == "gpt_oss":
            return torch.stack([self.visit(row, mlp) for row in rows])
        router = mlp if self.family != "mixtral" else f"model.layers.{layer}.block_sparse_moe"
        if f"{router}.gate.weight" in self.weights:
            return torch.stack([self.visit(row, router) for row in rows])
        if self.family == "phi3":
            gate, up = (rows @ self.weights[f"{mlp}.gate_up_proj.weight"].T).chunk(2, -1)
        else:
            gate, up = (self.linear(rows, f"{mlp}.{name}_proj") for name in ("gate", "up"))
        return self.gated(gate, up) @ self.weights[f"{mlp}.down_proj.weight"].T

    def visit(self, row: Tensor, prefix: str) -> Tensor:
        """Ask the experts with the largest shares, add their answers up by these shares."""
        gate = "router" if self.family == "gpt_oss" else "gate"
        scores = self.weights[f"{prefix}.{gate}.weight"] @ row
        if self.family == "gpt_oss" and self.twist != "router without bias":
            scores = scores + self.weights[f"{prefix}.router.bias"]
        if self.family.startswith("deepseek"):
            return self.visit_groups(row, scores, prefix)
        shares = scores.exp() / scores.exp().sum()
        ranked = sorted(range(len(shares)), key=lambda expert: (-float(shares[expert]), expert))
        if self.twist == "worst experts":
            ranked.reverse()
        top_k = self.raw["num_experts_per_tok"] - (self.twist == "an expert fewer")
        chosen = ranked[:top_k]
        normalized = self.raw.get("norm_topk_prob", True)
        whole = float(shares[chosen].sum())
        if normalized == (self.twist == "normalized the other way"):
            whole = 1.0
        answer = torch.zeros_like(row)
        for place, expert in enumerate(chosen):
            asked = ranked[place + 1] if self.twist == "experts off by one" else expert
            share = 1 / top_k if self.twist == "equal shares" else shares[expert] / whole
            answer += share * self.expert(row, f"{prefix}.experts.{asked}")
        return answer + self.shared(row, prefix)

    def visit_groups(self, row: Tensor, scores: Tensor, prefix: str) -> Tensor:
        """DeepSeek's: experts of the best groups, times a factor, beside the shared ones."""
        shares, wanted = scores.softmax(0), scores.softmax(0)
        if self.family == "deepseek_v3":
            shares = 1 / (1 + torch.exp(-scores))
            bias = self.weights[f"{prefix}.gate.e_score_correction_bias"]
            wanted = shares if self.twist == "no bias of the choice" else shares + bias
            if self.twist == "bias of the weights":
                shares = wanted
        best = 2 if self.family == "deepseek_v3" else 1
        if self.twist == "groups by another number":
            best = 3 - best
        groups = list(enumerate(wanted.view(self.raw["n_group"], -1).tolist()))
        groups.sort(key=lambda group: -sum(sorted(group[1])[-best:]))
        n_left = len(groups) if self.twist == "no groups" else self.raw["topk_group"]
        size = len(groups[0][1])
        left = [number * size + n for number, _ in groups[:n_left] for n in range(size)]
        chosen = sorted(left, key=lambda expert: -float(wanted[expert]))
        chosen = chosen[: self.raw["num_experts_per_tok"]]
        whole = shares[chosen].sum() if self.raw["norm_topk_prob"] else 1.0
        if self.twist == "normalized the other way":
            whole = 1.0 if self.raw["norm_topk_prob"] else shares[chosen].sum()
        scale = 1.0 if self.twist == "answers unscaled" else self.raw["routed_scaling_factor"]
        answer = torch.zeros_like(row)
        for expert in chosen:
            answer += (
                scale * shares[expert] / whole * self.expert(row, f"{prefix}.experts.{expert}")
            )
        if self.twist == "no shared expert":
            return answer
        shared = self.expert(row, f"{prefix}.shared_experts")
        return answer + (scale * shared if self.twist == "shared answers scaled" else shared)

    def latent_heads(self, rows: Tensor, attn: str) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys, values of all heads from latents, the last columns still unrotated."""
        rank, nope = self.raw["kv_lora_rank"], self.raw["qk_nope_head_dim"]
        if self.raw["q_lora_rank"] is None:
            queries = self.linear(rows, f"{attn}.q_proj")
        else:
            few = self.norm(self.linear(rows, f"{attn}.q_a_proj"), f"{attn}.q_a_layernorm")
            queries = self.linear(few, f"{attn}.q_b_proj")
        cached = self.linear(rows, f"{attn}.kv_a_proj_with_mqa")
        latents, turning = cached[:, :rank], cached[:, rank:]
        if self.twist != "latents without norm":
            latents = self.norm(latents, f"{attn}.kv_a_layernorm")
        both = self.linear(latents, f"{attn}.kv_b_proj").unflatten(-1, (self.n_heads, -1))
        own, values = both[..., :nope], both[..., nope:]
        turning = turning[:, None].expand(-1, self.n_heads, -1)
        return queries.unflatten(-1, (self.n_heads, -1)), torch.cat((own, turning), -1), values

    def rotate_pairs(self, heads: Tensor) -> Tensor:
        """Turn the last columns, 2 i and 2 i + 1 together, by position x theta ** (-2 i / R)."""
        size = self.raw["qk_rope_head_dim"]
        own, turning = heads[..., :-size], heads[..., -size:]
        powers = torch.arange(size // 2, dtype=torch.float64) / (size // 2)
        theta = self.raw["rope_parameters"]["rope_theta"]
        angles = torch.arange(len(heads))[:, None] * theta**-powers
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second = turning[..., 0::2], turning[..., 1::2]
        if self.twist == "halves rotated":
            first, second = turning.chunk(2, -1)
        return torch.cat((own, first * cos - second * sin, second * cos + first * sin), -1)

    def latent_attention(self, rows: Tensor, attn: str) -> Tensor:
        """Every head by itself, every row by itself."""
        queries, keys, values = self.latent_heads(rows, attn)
        queries, keys = self.rotate_pairs(queries), self.rotate_pairs(keys)
        scale = queries.shape[-1] ** -0.5
        if self.twist == "scaled by own columns":
            scale = self.raw["qk_nope_head_dim"] ** -0.5
        scores = torch.einsum("thd,shd->hts", queries, keys) * scale
        hidden = torch.ones(len(rows), len(rows), dtype=torch.bool).triu(1)
        shares = scores.masked_fill(hidden, -math.inf).softmax(-1)
        attended = torch.einsum("hts,shv->thv", shares, values)
        return self.linear(attended.flatten(1), f"{attn}.o_proj")

    def shared(self, row: Tensor, prefix: str) -> Tensor:
        """The expert that every row visits, times a gate's sigmoid; 0 where there is none."""
        if self.family != "qwen2_moe" or self.twist == "no shared expert":
            return torch.zeros_like(row)
        gate = 1 / (1 + torch.exp(-self.weights[f"{prefix}.shared_expert_gate.weight"] @ row))
        if self.twist == "shared expert ungated":
            gate = torch.ones(1)
        return gate * self.expert(row, f"{prefix}.shared_expert")

    def expert(self, row: Tensor, prefix: str) -> Tensor:
        """One expert: down(act(gate) * up)."""
        if self.family == "gpt_oss":
            return self.clamped_expert(row, *prefix.rsplit(".", 1))
        names = EXPERT_NAMES.get(self.family, ("gate_proj", "up_proj", "down_proj"))
        gate, up, down = (self.weights[f"{prefix}.{name}.weight"] for name in names)
        return down @ self.gated(gate @ row, up @ row)

    def clamped_expert(self, row: Tensor, prefix: str, number: str) -> Tensor:
        """One of the stacked experts: every other column is the gate's."""
        gate_up, gate_up_bias, down, down_bias = (
            self.weights[f"{prefix}.{name}"][int(number)]
            for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
        )
        both = row @ gate_up + (0 if self.twist == "no biases" else gate_up_bias)
        gate, up = both[0::2], both[1::2]
        if self.twist == "gate and up in halves":
            gate, up = both.chunk(2)
        limit, alpha = self.raw["swiglu_limit"], self.raw["swiglu_alpha"]
        if self.twist != "gates unclamped":
            gate = gate.clamp(-limit if self.twist == "gates clamped below" else None, limit)
        if self.twist != "up unclamped":
            up = up.clamp(-limit, limit)
        alpha = 1 if self.twist == "alpha of 1" else alpha
        up = up if self.twist == "up without 1" else up + 1
        return (gate / (1 + torch.exp(-alpha * gate)) * up) @ down + down_bias

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """act(gate) * up."""
        if self.twist == "gate and up swapped":
            gate, up = up, gate
        if self.is_gemma:
            cubic = gate + 0.044715 * gate**3
            active = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * cubic))
        else:
            active = gate / (1 + torch.exp(-gate))
        return active * up

    def attention(self, rows: Tensor, layer: int) -> Tensor:
        """Every head by itself, every row by itself."""
        attn = f"model.layers.{layer}.self_attn"
        if self.family.startswith("deepseek"):
            return self.latent_attention(rows, attn)
        queries, keys, values = self.heads(rows, attn)
        if self.family in HEAD_NORMS and self.twist == "rotated before head norms":
            queries, keys = self.rotate(queries, layer), self.rotate(keys, layer)
        if self.family in HEAD_NORMS and self.twist != "no head norms":
            queries = self.head_norm(queries, f"{attn}.q_norm")
            keys = self.head_norm(keys, f"{attn}.k_norm")
        if self.twist != "rotated before head norms":
            queries, keys = self.rotate(queries, layer), self.rotate(keys, layer)
        scale = self.raw.get("query_pre_attn_scalar", self.head_size) ** -0.5
        scale = self.raw.get("attention_multiplier", scale)
        if self.twist == "scaled by head size":
            scale = self.head_size**-0.5
        cap = self.raw.get("attn_logit_softcapping")
        window = self.window(layer) or len(rows)
        out = torch.empty_like(queries)
        group = self.n_heads // keys.shape[1]
        for row in range(len(rows)):
            seen = slice(max(0, row - window + 1), row + 1)
            for head in range(self.n_heads):
                scores = keys[seen, head // group] @ queries[row, head] * scale
                if cap and self.twist != "no score cap":
                    scores = cap * torch.tanh(scores / cap)
                out[row, head] = self.shares(scores, attn, head) @ values[seen, head // group]
        return self.linear(out.flatten(1), f"{attn}.o_proj")

    def shares(self, scores: Tensor, attn: str, head: int) -> Tensor:
        """How much a head looks at each position; with a sink they add up to less than 1."""
        if self.family != "gpt_oss" or self.twist == "no sinks":
            return scores.softmax(0)
        sinks = self.weights[f"{attn}.sinks"]
        sink = sinks[-1 - head if self.twist == "sinks swapped" else head]
        return scores.exp() / (scores.exp().sum() + sink.exp())

    def heads(self, rows: Tensor, attn: str) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys, values: [T, heads, D] each."""
        n_keys = self.raw["num_key_value_heads"] * self.head_size
        if self.family == "phi3":
            joined = rows @ self.weights[f"{attn}.qkv_proj.weight"].T
            parts = joined.split((self.n_heads * self.head_size, n_keys, n_keys), -1)
        else:
            parts = tuple(self.linear(rows, f"{attn}.{name}_proj") for name in "qkv")
        queries, keys, values = (part.unflatten(-1, (-1, self.head_size)) for part in parts)
        return queries, keys, values

    def linear(self, rows: Tensor, name: str) -> Tensor:
        """A product with the bias that the checkpoint has, or none."""
        bias = self.weights.get(f"{name}.bias", torch.zeros(()))
        return rows @ self.weights[f"{name}.weight"].T + (0 if self.twist == "no biases" else bias)

    def rotate(self, heads: Tensor, layer: int) -> Tensor:
        """Turn column i and column i + R / 2 by position x theta ** (-2 i / R)."""
        rope = self.raw["rope_parameters"]
        if self.family == "gemma3_text":
            is_local = self.is_local(layer) != (self.twist == "thetas swapped")
            rope = rope["sliding_attention" if is_local else "full_attention"]
        share = 1.0 if self.twist == "whole heads" else rope.get("partial_rotary_factor", 1.0)
        half = int(self.head_size * share) // 2
        powers = torch.arange(half, dtype=torch.float64) / half
        angles = torch.arange(len(heads))[:, None] * rope["rope_theta"] ** -powers
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second, rest = heads.split((half, half, self.head_size - 2 * half), -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)

    def is_local(self, layer: int) -> bool:
        """Whether the layer has a window, by what is published of each family."""
        match self.family:
            case "gemma2" | "gpt_oss":
                local = layer % 2 == 0
            case "gemma3_text":
                local = layer % 6 != 5
            case "qwen2" | "qwen3":
                local = self.raw["use_sliding_window"] and layer >= self.raw["max_window_layers"]
            case "qwen2_moe":
                is_used = self.raw["use_sliding_window"]
                local = is_used and layer % 2 == 0 and layer < self.raw["max_window_layers"]
            case "qwen3_moe":
                local = self.raw["use_sliding_window"]
            case _:
                local = True
        return local != (self.twist == "windows swapped")

    def window(self, layer: int) -> int | None:
        """How many positions a row sees, None for all."""
        window: int | None = self.raw.get("sliding_window") if self.is_local(layer) else None
        wider = self.twist == "windows wider by one"
        return window + wider if window else None
