"""The layer of Llama, and of what differs from it by constants only: Mistral, Qwen2.

Knows the forward pass of LlamaForCausalLM (transformers, modeling_llama.py), with Hugging Face's
parameter names. Biases and windows follow from tensor table and config. Must not know files, wire
or scheduling.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shardnet.model.attention import Step
from shardnet.model.blocks import Attention, GatedMlp, Mlp, SelfAttention
from shardnet.model.config import ModelConfig
from shardnet.model.layers import Norm
from shardnet.model.rotary import Rotary
from shardnet.model.weights import WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaLayer:
    """Norm, attention, norm, MLP, each half added to what went in."""

    input_layernorm: Norm
    self_attn: Attention
    post_attention_layernorm: Norm
    mlp: Mlp

    @classmethod
    def load(cls, config: ModelConfig, weights: WeightSource, layer: int) -> LlamaLayer:
        """Take the parameters of the absolute `layer`."""
        self_attn = SelfAttention.load(config, weights, layer)
        mlp = GatedMlp.load(config, weights, f"model.layers.{layer}.mlp")
        return cls.of(config, weights, layer, self_attn, mlp)

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        weights: WeightSource,
        layer: int,
        self_attn: Attention,
        mlp: Mlp,
    ) -> LlamaLayer:
        """Put the norms of the absolute `layer` before other halves than Llama's own."""
        prefix = f"model.layers.{layer}"
        return cls(
            input_layernorm=weights.norm(f"{prefix}.input_layernorm", config.norm_eps),
            self_attn=self_attn,
            post_attention_layernorm=weights.norm(
                f"{prefix}.post_attention_layernorm", config.norm_eps
            ),
            mlp=mlp,
        )

    def __call__(self, hidden: Tensor, index: int, rotary: Rotary, step: Step) -> Tensor:
        """Run the layer, `index` within the stage: [T, E] in and out."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), index, rotary, step)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))
