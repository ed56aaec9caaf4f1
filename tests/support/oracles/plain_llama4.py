"""The second oracle's Llama 4: what it has that no other family has, in plain formulas."""

from __future__ import annotations

import math

import torch
from support.oracles.plain_decoder import PlainDecoder
from torch import Tensor


class PlainLlama4(PlainDecoder):
    """One checkpoint of `llama4_text`, computed with or without a mistake."""

    def is_turned(self, layer: int) -> bool:
        """Whether a layer has rotary positions: all but the last of each interval."""
        is_last = (layer + 1) % self.raw["no_rope_layer_interval"] == 0
        return not is_last or self.twist == "rotated everywhere"

    def attention(self, rows: Tensor, layer: int) -> Tensor:
        """Pairs turned and heads of unit size, or queries that grow with their position."""
        attn = f"model.layers.{layer}.self_attn"
        queries, keys, values = self.heads(rows, attn)
        if self.is_turned(layer):
            queries, keys = self.turn(queries), self.turn(keys)
            if self.twist != "heads of any size":
                queries, keys = self.unit(queries), self.unit(keys)
        elif self.twist != "one temperature":
            steps = torch.floor((torch.arange(len(rows)) + 1.0) / self.raw["floor_scale"])
            queries = queries * (1 + self.raw["attn_scale"] * torch.log(1 + steps))[:, None, None]
        keys, values = (
            part.repeat_interleave(self.n_heads // part.shape[1], 1) for part in (keys, values)
        )
        scores = torch.einsum("thd,shd->hts", queries, keys) * self.head_size**-0.5
        hidden = torch.ones(len(rows), len(rows), dtype=torch.bool).triu(1)
        if self.is_turned(layer) and self.twist != "chunks attended across":
            chunks = torch.arange(len(rows)) // self.raw["attention_chunk_size"]
            hidden |= chunks[:, None] != chunks
        shares = scores.masked_fill(hidden, -math.inf).softmax(-1)
        return self.linear(
            torch.einsum("hts,shd->thd", shares, values).flatten(1), f"{attn}.o_proj"
        )

    def turn(self, heads: Tensor) -> Tensor:
        """Turn column 2 i and column 2 i + 1 by position x theta ** (-2 i / D)."""
        half = self.head_size // 2
        powers = torch.arange(half, dtype=torch.float64) / half
        theta = self.raw["rope_parameters"]["rope_theta"]
        angles = torch.arange(len(heads))[:, None, None] * theta**-powers
        first, second = heads[..., 0::2], heads[..., 1::2]
        if self.twist == "halves rotated":
            first, second = heads.chunk(2, -1)
        one = first * angles.cos() - second * angles.sin()
        return torch.cat((one, second * angles.cos() + first * angles.sin()), -1)

    def unit(self, heads: Tensor) -> Tensor:
        """Divide each head by its root mean square."""
        return heads / (heads.square().mean(-1, keepdim=True) + self.raw["rms_norm_eps"]).sqrt()

    def mlp(self, rows: Tensor, layer: int) -> Tensor:
        """An MLP, or experts that are given their share of a row, and one that is given all."""
        block = f"model.layers.{layer}.feed_forward"
        if f"{block}.router.weight" not in self.weights:
            return torch.stack([self.expert(row, block) for row in rows])
        return torch.stack([self.visit(row, block) for row in rows])

    def visit(self, row: Tensor, prefix: str) -> Tensor:
        """Ask the experts with the best scores; what they are given is weighted."""
        scores = self.weights[f"{prefix}.router.weight"] @ row
        shares = 1 / (1 + torch.exp(-scores))
        if self.twist == "shares that add up":
            shares = scores.softmax(0)
        ranked = sorted(range(len(scores)), key=lambda expert: -float(scores[expert]))
        if self.twist == "worst experts":
            ranked.reverse()
        answer = self.expert(row, f"{prefix}.shared_expert")
        if self.twist == "no shared expert":
            answer = torch.zeros_like(row)
        for number in ranked[: self.raw["num_experts_per_tok"]]:
            if self.twist == "answers weighted":
                answer = answer + shares[number] * self.stacked(row, prefix, number)
            else:
                answer = answer + self.stacked(shares[number] * row, prefix, number)
        return answer

    def stacked(self, row: Tensor, prefix: str, number: int) -> Tensor:
        """One of the stacked experts: the gate's columns, then those of up."""
        both = row @ self.weights[f"{prefix}.experts.gate_up_proj"][number]
        gate, up = (both[0::2], both[1::2]) if self.twist == "gate and up apart" else both.chunk(2)
        return self.gated(gate, up) @ self.weights[f"{prefix}.experts.down_proj"][number]
