"""Granite's layer: Llama's, with each half multiplied before it is added.

Knows the forward pass of GraniteForCausalLM (transformers, modeling_granite.py), with Hugging
Face's parameter names. The multipliers of scores, embedding and logits follow from the config. Must
not know files, wire or scheduling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardnet.model.attention import Step
from shardnet.model.config import ModelConfig
from shardnet.model.llama import LlamaLayer
from shardnet.model.rotary import Rotary
from shardnet.model.weights import WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteLayer:
    """Norm, attention, norm, MLP, each half multiplied and added to what went in."""

    parts: LlamaLayer
    multiplier: float

    @classmethod
    def load(cls, config: ModelConfig, weights: WeightSource, layer: int) -> GraniteLayer:
        """Take the parameters of the absolute `layer`."""
        parts = LlamaLayer.load(config, weights, layer)
        return cls(parts=parts, multiplier=config.residual_multiplier)

    def __call__(self, hidden: Tensor, index: int, rotary: Rotary, step: Step) -> Tensor:
        """Run the layer, `index` within the stage: [T, E] in and out."""
        parts = self.parts
        attended = parts.self_attn(parts.input_layernorm(hidden), index, rotary, step)
        hidden = torch.add(hidden, attended, alpha=self.multiplier)
        inner = parts.mlp(parts.post_attention_layernorm(hidden))
        return torch.add(hidden, inner, alpha=self.multiplier)
