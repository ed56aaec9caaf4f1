"""The layer of Gemma 2 and of Gemma 3's text models: norms before and after both halves.

Knows the forward passes of Gemma2ForCausalLM and Gemma3ForCausalLM (transformers,
modeling_gemma2.py and modeling_gemma3.py), with Hugging Face's parameter names. Windows, soft caps,
scales and rotary positions follow from the config. Must not know files, wire or scheduling.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shardnet.model.attention import Step
from shardnet.model.blocks import GatedMlp, SelfAttention
from shardnet.model.config import ModelConfig
from shardnet.model.layers import Norm
from shardnet.model.rotary import Rotary
from shardnet.model.weights import WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaLayer:
    """Norm, attention, norm, added to what went in; the same with the MLP."""

    input_layernorm: Norm
    self_attn: SelfAttention
    post_attention_layernorm: Norm
    pre_feedforward_layernorm: Norm
    mlp: GatedMlp
    post_feedforward_layernorm: Norm

    @classmethod
    def load(
        cls, config: ModelConfig, weights: WeightSource, layer: int, *, with_head_norm: bool = False
    ) -> GemmaLayer:
        """Take the parameters of the absolute `layer`."""
        prefix = f"model.layers.{layer}"

        def norm(name: str) -> Norm:
            return weights.norm(f"{prefix}.{name}", config.norm_eps, config.norm_offset)

        return cls(
            input_layernorm=norm("input_layernorm"),
            self_attn=SelfAttention.load(config, weights, layer, with_head_norm=with_head_norm),
            post_attention_layernorm=norm("post_attention_layernorm"),
            pre_feedforward_layernorm=norm("pre_feedforward_layernorm"),
            mlp=GatedMlp.load(config, weights, f"{prefix}.mlp"),
            post_feedforward_layernorm=norm("post_feedforward_layernorm"),
        )

    def __call__(self, hidden: Tensor, index: int, rotary: Rotary, step: Step) -> Tensor:
        """Run the layer, `index` within the stage: [T, E] in and out."""
        attended = self.self_attn(self.input_layernorm(hidden), index, rotary, step)
        hidden = hidden + self.post_attention_layernorm(attended)
        inner = self.mlp(self.pre_feedforward_layernorm(hidden))
        return hidden + self.post_feedforward_layernorm(inner)


def load_gemma3_layer(config: ModelConfig, weights: WeightSource, layer: int) -> GemmaLayer:
    """Take the parameters of the absolute `layer`: Gemma 2's, and norms over heads."""
    return GemmaLayer.load(config, weights, layer, with_head_norm=True)
