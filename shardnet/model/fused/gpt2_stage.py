"""The forward pass of GPT-2 (transformers, modeling_gpt2.py), top to bottom.

Knows Hugging Face's parameter names, without the `transformer.` prefix. Must not know files, wire
or scheduling.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from shardnet.model.cache.kv_cache import KvCache
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.layers.attention import ForwardStep, attention
from shardnet.model.layers.native_attention import can_attend
from shardnet.model.layers.norms import activate
from shardnet.model.layers.weight_source import Table, WeightSource
from shardnet.model.shards.cut import Axis
from shardnet.types import LayerRange


class Gpt2Stage:
    """The layers `layers` of a GPT-2, with the embedding and the head where they belong."""

    def __init__(self, config: ModelConfig, layers: LayerRange, weights: WeightSource) -> None:
        self._embedding: _Embedding | None = None
        self._head: _Head | None = None
        if layers.start == 0:
            self._embedding = _Embedding(wte=weights.table("wte"), wpe=weights.table("wpe"))
        self.mtp: None = None
        if layers.end == config.n_layers:
            self._head = _Head(config, weights)
        self._layers = [_Layer(config, weights, layer) for layer in layers]

    def embed(self, step: ForwardStep) -> Tensor:
        """Look up token ids and positions: hidden states [T, E]."""
        assert self._embedding is not None
        tokens = self._embedding.wte.rows(step.token_ids)
        return tokens + self._embedding.wpe.rows(step.positions)

    def walk(self, hidden: Tensor, step: ForwardStep) -> Iterator[Tensor]:
        """Run the layers one by one, each when its output is asked for: [T, E] in and out."""
        for index, layer in enumerate(self._layers):
            hidden = step.after_layer(layer(hidden, index, step))
            yield hidden

    def is_exact(self, kv: KvCache) -> bool:
        """Whether the compiled library attends."""
        return can_attend(self._layers[0].head_size, kv)

    def normed(self, hidden: Tensor) -> Tensor:
        """Apply the final norm: [R, E] in and out."""
        assert self._head is not None
        return self._head.ln_f(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply final norm and LM head: [R, E] to [R, V] in the compute dtype."""
        assert self._head is not None
        return self._head(hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Embedding:
    wte: Table  # [V, E]
    wpe: Table  # [P, E]


class _Head:
    def __init__(self, config: ModelConfig, weights: WeightSource) -> None:
        table = "wte" if config.tie_word_embeddings else "lm_head"
        self.ln_f = weights.norm("ln_f", config.norm_eps)
        self.lm_head = weights.linear(table)

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.ln_f(hidden))


class _Layer:
    def __init__(self, config: ModelConfig, weights: WeightSource, layer: int) -> None:
        prefix = f"h.{layer}"
        self.n_heads = config.n_heads
        self.head_size = config.head_size
        self.activation = config.activation
        self.ln_1 = weights.norm(f"{prefix}.ln_1", config.norm_eps)
        self.c_attn = weights.linear(
            f"{prefix}.attn.c_attn", transposed=True, outputs=(Axis.HEADS,) * 3
        )
        self.attn_c_proj = weights.linear(
            f"{prefix}.attn.c_proj", transposed=True, inputs=Axis.HEADS
        )
        self.ln_2 = weights.norm(f"{prefix}.ln_2", config.norm_eps)
        self.c_fc = weights.linear(f"{prefix}.mlp.c_fc", transposed=True, outputs=(Axis.INNER,))
        self.mlp_c_proj = weights.linear(f"{prefix}.mlp.c_proj", transposed=True, inputs=Axis.INNER)

    def __call__(self, hidden: Tensor, index: int, step: ForwardStep) -> Tensor:
        """Run the layer, `index` within the stage: [T, E] in and out."""
        hidden = hidden + self._attend(self.ln_1(hidden), index, step)
        inner = activate(self.activation, self.c_fc(self.ln_2(hidden)))
        return hidden + self.mlp_c_proj(inner)

    def _attend(self, hidden: Tensor, index: int, step: ForwardStep) -> Tensor:
        heads = self.c_attn(hidden).view(hidden.shape[0], 3, self.n_heads, self.head_size)
        queries, keys, values = heads.unbind(1)  # [T, H, D] each
        return self.attn_c_proj(attention(queries, keys, values, index, step))
