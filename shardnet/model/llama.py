"""The Llama family, top to bottom, with Hugging Face's parameter names.

Knows the forward pass of LlamaForCausalLM (transformers, modeling_llama.py). Must not know files,
wire or scheduling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardnet.model.config import Activation, ModelConfig
from shardnet.model.kernels import Linear
from shardnet.model.layers import (
    Norm,
    Rotary,
    Step,
    activate,
    attention,
    rotary_tables,
)
from shardnet.model.weights import WeightSource
from shardnet.types import LayerRange


class LlamaStage:
    """The layers `layers` of a Llama model, with the embedding and the head where they belong."""

    def __init__(
        self,
        config: ModelConfig,
        layers: LayerRange,
        weights: WeightSource,
        context: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        assert config.rope is not None
        self._embed_tokens: Tensor | None = None
        self._head: _Head | None = None
        if layers.start == 0:
            self._embed_tokens = weights.table("model.embed_tokens")  # [V, E]
        if layers.end == config.n_layers:
            self._head = _Head.load(config, weights)
        self._layers = [_Layer.load(config, weights, layer) for layer in layers]
        self._rotary = rotary_tables(config.rope, config.head_size, context, dtype, device)

    def embed(self, step: Step) -> Tensor:
        """Look the token ids up: [T, E]."""
        assert self._embed_tokens is not None
        return self._embed_tokens.index_select(0, step.token_ids)

    def run_layers(self, hidden: Tensor, step: Step) -> Tensor:
        """Run the stage's layers: [T, E] in and out."""
        rotary = self._rotary.at(step.positions)
        for index, layer in enumerate(self._layers):
            hidden = layer(hidden, index, rotary, step)
        return hidden

    def normed(self, hidden: Tensor) -> Tensor:
        """Final norm: [R, E] in and out."""
        assert self._head is not None
        return self._head.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Norm and LM head: [R, E] to [R, V] in the compute dtype."""
        assert self._head is not None
        return self._head(hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    norm: Norm
    lm_head: Linear

    @classmethod
    def load(cls, config: ModelConfig, weights: WeightSource) -> _Head:
        table = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        return cls(norm=weights.norm("model.norm", config.norm_eps), lm_head=weights.linear(table))

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.norm(hidden))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    n_heads: int
    n_kv_heads: int
    head_size: int
    activation: Activation
    input_layernorm: Norm
    qkv_proj: Linear
    o_proj: Linear
    post_attention_layernorm: Norm
    gate_up_proj: Linear
    down_proj: Linear

    @classmethod
    def load(cls, config: ModelConfig, weights: WeightSource, layer: int) -> _Layer:
        prefix = f"model.layers.{layer}"
        attn, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        return cls(
            n_heads=config.n_heads,
            n_kv_heads=config.n_kv_heads,
            head_size=config.head_size,
            activation=config.activation,
            input_layernorm=weights.norm(f"{prefix}.input_layernorm", config.norm_eps),
            qkv_proj=weights.linear(f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj"),
            o_proj=weights.linear(f"{attn}.o_proj"),
            post_attention_layernorm=weights.norm(
                f"{prefix}.post_attention_layernorm", config.norm_eps
            ),
            gate_up_proj=weights.linear(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
            down_proj=weights.linear(f"{mlp}.down_proj"),
        )

    def __call__(self, hidden: Tensor, index: int, rotary: Rotary, step: Step) -> Tensor:
        """Run the layer, `index` within the stage: [T, E] in and out."""
        hidden = hidden + self._attend(self.input_layernorm(hidden), index, rotary, step)
        return hidden + self._mlp(self.post_attention_layernorm(hidden))

    def _attend(self, hidden: Tensor, index: int, rotary: Rotary, step: Step) -> Tensor:
        n_rotated = self.n_heads + self.n_kv_heads
        heads = self.qkv_proj(hidden).view(hidden.shape[0], -1, self.head_size)  # [T, Q+K+V, D]
        rotated = rotary.rotate(heads[:, :n_rotated])
        attended = attention(
            rotated[:, : self.n_heads],
            rotated[:, self.n_heads :],
            heads[:, n_rotated:],
            index,
            step,
        )
        return self.o_proj(attended)

    def _mlp(self, hidden: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(hidden).chunk(2, -1)  # [T, intermediate] each
        return self.down_proj(activate(self.activation, gate).mul_(up))
