"""gpt-oss's layer: attention sinks, windows in every other layer, experts with clamped gates.

Knows the forward pass of GptOssForCausalLM (transformers, modeling_gpt_oss.py), with Hugging Face's
parameter names. Must not know files, wire or scheduling.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families.llama import llama_layer
from shardnet.model.kernels.linear import Linear
from shardnet.model.layers.decoder_layer import Layer
from shardnet.model.layers.experts import SoftmaxRouter, SparseMlp
from shardnet.model.layers.modules import SelfAttention
from shardnet.model.layers.norms import row_sigmoid
from shardnet.model.layers.weight_source import WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampedMlp:
    """An expert: gate and up, both clamped, the gate times its own sigmoid, up plus 1."""

    limit: float
    alpha: float
    gate_up_proj: Linear
    down_proj: Linear

    def __call__(self, hidden: Tensor) -> Tensor:
        """Run every row: [T, E] in and out."""
        gate, up = self.gate_up_proj(hidden).chunk(2, -1)  # [T, intermediate] each
        gate = gate.clamp(max=self.limit)
        up = up.clamp(-self.limit, self.limit)
        return self.down_proj(row_sigmoid(gate * self.alpha).mul_(gate) * up.add_(1))


def load_gpt_oss_layer(config: ModelConfig, weights: WeightSource, layer: int) -> Layer:
    """Take the parameters of the absolute `layer`."""
    experts = config.experts
    assert experts is not None
    assert experts.swiglu_limit is not None
    prefix = f"model.layers.{layer}"
    plain = SelfAttention.load(config, weights, layer)
    sinks = weights.parameter(f"{prefix}.self_attn.sinks").view(config.n_kv_heads, -1, 1)
    names = [f"{prefix}.mlp.experts.{number}" for number in range(experts.n_experts)]
    sparse = SparseMlp(
        router=SoftmaxRouter.of(experts, weights.linear(f"{prefix}.mlp.router", precise=True)),
        experts=[
            ClampedMlp(
                limit=experts.swiglu_limit,
                alpha=experts.swiglu_alpha,
                gate_up_proj=weights.linear(f"{expert}.gate_up_proj"),
                down_proj=weights.linear(f"{expert}.down_proj"),
            )
            for expert in names
        ],
    )
    self_attn = replace(plain, kind=replace(plain.kind, sinks=sinks))
    return llama_layer(config, weights, layer, self_attn, sparse)
