"""Self-attention and a gated MLP, as most families have them.

Knows which linear layers they consist of, not how a family names its parameters. Must not know wire
or scheduling.

Axes in shape comments: T rows of the micro-batch, H query heads, D head size, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shardnet.model.arithmetic.row_functions import activated_rows
from shardnet.model.config.model_config import Activation, ModelConfig
from shardnet.model.kernels.linear import Linear
from shardnet.model.layers.attention import ForwardStep, attention
from shardnet.model.layers.native_attention import AttentionKind
from shardnet.model.layers.norms import HeadNorm, Xielu, activate
from shardnet.model.layers.rotary import Rotary
from shardnet.model.layers.weight_source import WeightSource
from shardnet.model.shards.cut import HEADS_EACH, INNER_EACH, Axis


class QkNorm(Protocol):
    """Normalizes queries and keys together."""

    def __call__(self, heads: Tensor, /) -> Tensor:
        """Normalize concatenated queries and keys: [T, H + KV heads, D] in and out."""

    @property
    def per_head(self) -> HeadNorm | None:
        """This norm, if it normalizes each head by itself; else None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Queries, keys and values of a micro-batch; queries and keys are rotated."""

    queries: Tensor  # [T, H, D]
    keys: Tensor  # [T, KV heads, D]
    values: Tensor  # [T, KV heads, D]


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfAttention:
    """One linear for queries, keys and values, rotary positions, attention, output linear.

    `qk_norm`, if any, is applied before the rotation, with `norms_rotated` after it; with
    `norms_values` it normalizes values too. With `is_value_key` the linear computes no values: the
    keys before norm and rotation are used. With `has_pairs` columns that are rotated together are
    adjacent; with `is_joined` the outputs of the linear are each head's query, key and value in
    turn. A value has `value_size` columns, None for as many as a key.
    """

    n_heads: int
    n_kv_heads: int
    head_size: int
    kind: AttentionKind
    qkv_proj: Linear
    o_proj: Linear
    qk_norm: QkNorm | None = None
    norms_rotated: bool = False
    norms_values: bool = False
    is_value_key: bool = False
    has_pairs: bool = False
    is_joined: bool = False
    value_size: int | None = None

    @classmethod
    def load(
        cls,
        config: ModelConfig,
        weights: WeightSource,
        layer: int,
        *,
        with_head_norm: bool = False,
        norm_names: tuple[str, str] = ("q_norm", "k_norm"),
        output: str = "o_proj",
    ) -> SelfAttention:
        """Load the parameters of the absolute `layer` by Llama's names.

        `norm_names` name the per-head norms of queries and keys, `output` names the output linear.
        """
        attn = f"model.layers.{layer}.self_attn"
        qkv_proj = weights.linear(
            f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj", outputs=HEADS_EACH
        )
        o_proj = weights.linear(f"{attn}.{output}", inputs=Axis.HEADS)
        qk_norm = None
        if with_head_norm:
            queries, keys = (
                weights.norm(f"{attn}.{name}", config.norm_eps, config.norm_offset)
                for name in norm_names
            )
            qk_norm = HeadNorm.join(queries, keys, config.n_heads, config.n_kv_heads)
        return cls.of(config, layer, qkv_proj, o_proj, qk_norm)

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        layer: int,
        qkv_proj: Linear,
        o_proj: Linear,
        qk_norm: QkNorm | None = None,
    ) -> SelfAttention:
        """Build it from its linear layers, as the config says of the absolute `layer`."""
        heads = config.heads(layer)
        return cls(
            n_heads=config.n_heads,
            n_kv_heads=heads.n_kv_heads,
            head_size=heads.key_size,
            kind=AttentionKind.of(config, layer),
            qkv_proj=qkv_proj,
            o_proj=o_proj,
            qk_norm=qk_norm,
            has_pairs=config.has_pairs,
            is_joined=config.has_joined_heads,
            value_size=None if heads.value_size == heads.key_size else heads.value_size,
        )

    def __call__(self, hidden: Tensor, index: int, rotary: Rotary, step: ForwardStep) -> Tensor:
        """Attend in layer `index` within the stage: hidden states [T, E] to [T, E]."""
        return self.o_proj(self.attend(self.heads(hidden, rotary), index, step))

    @property
    def is_fusible(self) -> bool:
        """Whether fused kernels compute it: `qk_norm` before the rotation is its only variant."""
        is_other = self.has_pairs or self.is_joined or self.norms_rotated or self.norms_values
        return not (is_other or self.is_value_key or self.value_size is not None)

    def heads(self, hidden: Tensor, rotary: Rotary) -> Heads:
        """Project hidden states [T, E] to rotated queries and keys, and values."""
        n_rotated, values = self.n_heads + self.n_kv_heads, None
        projected = self.qkv_proj(hidden)
        if self.value_size is not None:
            projected, values = projected.tensor_split([n_rotated * self.head_size], -1)
            values = values.view(hidden.shape[0], -1, self.value_size)
        heads = projected.view(hidden.shape[0], -1, self.head_size)  # [T, Q+K+V, D]
        if self.is_joined:
            heads = heads.view(-1, self.n_heads, 3, self.head_size).transpose(1, 2).flatten(1, 2)
        if self.is_value_key:
            heads = torch.cat((heads, heads[:, self.n_heads :]), 1)
        if self.qk_norm is not None and self.norms_values:
            heads = self.qk_norm(heads)
        queries_keys = heads[:, :n_rotated]
        if self.qk_norm is not None and not (self.norms_rotated or self.norms_values):
            queries_keys = self.qk_norm(queries_keys)
        rotate = rotary.rotate_pairs if self.has_pairs else rotary.rotate
        rotated = rotate(queries_keys)
        if self.qk_norm is not None and self.norms_rotated:
            rotated = self.qk_norm(rotated)
        return Heads(
            queries=rotated[:, : self.n_heads],
            keys=rotated[:, self.n_heads :],
            values=heads[:, n_rotated:] if values is None else values,
        )

    def attend(self, heads: Heads, index: int, step: ForwardStep) -> Tensor:
        """Attend in layer `index` within the stage: the output linear's input [T, H x value
        columns].
        """
        return attention(heads.queries, heads.keys, heads.values, index, step, self.kind)


class Attention(Protocol):
    """Any kind of attention, without norms and residual."""

    def __call__(self, hidden: Tensor, index: int, rotary: Rotary, step: ForwardStep) -> Tensor:
        """Attend in layer `index` within the stage: hidden states [T, E] to [T, E]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BothMixers:
    """Attention and a recurrence over the same hidden states, whose outputs are added."""

    self_attn: Attention
    recurrence: Attention

    def __call__(self, hidden: Tensor, index: int, rotary: Rotary, step: ForwardStep) -> Tensor:
        """Run hidden states [T, E] through layer `index` within the stage: [T, E]."""
        both = self.recurrence(hidden, index, rotary, step)
        return both + self.self_attn(hidden, index, rotary, step)


class Mlp(Protocol):
    """Any kind of MLP, without norms and residual."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """Transform hidden states [T, E] to [T, E], row by row."""


class TwoLayerMlp(Mlp, Protocol):
    """An MLP that ends in a linear."""

    @property
    def down_proj(self) -> Linear:
        """The last linear."""

    def inner(self, hidden: Tensor) -> Tensor:
        """Compute the last linear's input: [T, intermediate] from [T, E], row by row."""


class HasActivation(Protocol):
    """The config of a model or of a vision tower."""

    @property
    def activation(self) -> Activation:
        """The activation of its MLPs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMlp:
    """A gated MLP: one linear for gate and up, another for down."""

    activation: Activation
    gate_up_proj: Linear
    down_proj: Linear

    @classmethod
    def load(
        cls,
        config: HasActivation,
        weights: WeightSource,
        prefix: str,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> GatedMlp:
        """Load gate, up and down below `prefix`, by default under Llama's `names`.

        Where gate and up have the same name they are one linear.
        """
        *both, down = (f"{prefix}.{name}" for name in dict.fromkeys(names))
        return cls(
            activation=config.activation,
            gate_up_proj=weights.linear(*both, outputs=INNER_EACH),
            down_proj=weights.linear(down, inputs=Axis.INNER),
        )

    def __call__(self, hidden: Tensor) -> Tensor:
        """Transform hidden states [T, E] to [T, E], row by row."""
        return self.down_proj(self.inner(hidden))

    def inner(self, hidden: Tensor) -> Tensor:
        """See TwoLayerMlp."""
        gate, up = self.gate_up_proj(hidden).chunk(2, -1)  # [T, intermediate] each
        inner = activated_rows(self.activation, gate, up)
        return activate(self.activation, gate).mul_(up) if inner is None else inner


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainMlp:
    """An MLP without a gate: one linear up, the activation, another down."""

    activation: Activation | Xielu
    up_proj: Linear
    down_proj: Linear

    @classmethod
    def load(cls, config: ModelConfig, weights: WeightSource, up: str, down: str) -> PlainMlp:
        """Load the linears named `up` and `down`."""
        return cls(
            activation=config.activation,
            up_proj=weights.linear(up, outputs=(Axis.INNER,)),
            down_proj=weights.linear(down, inputs=Axis.INNER),
        )

    def __call__(self, hidden: Tensor) -> Tensor:
        """Transform hidden states [T, E] to [T, E], row by row."""
        return self.down_proj(self.inner(hidden))

    def inner(self, hidden: Tensor) -> Tensor:
        """See TwoLayerMlp."""
        return activate(self.activation, self.up_proj(hidden))
