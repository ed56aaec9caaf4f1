"""The two residual sub-layers of a decoder layer: attention, then the MLP.

Knows the norms and residual around a sub-layer in any family. Must not know how a family names its
parameters, wire or scheduling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shardnet.model.cache.slot_blocks import SlotState
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.layers.attention import ForwardStep
from shardnet.model.layers.experts import ClampedMlp, SparseMlp
from shardnet.model.layers.modules import Attention, GatedMlp, PlainMlp
from shardnet.model.layers.norms import BareNorm, Norm
from shardnet.model.layers.rotary import Rotary
from shardnet.model.layers.streams import GatedMixer, Mixer, load_mixer
from shardnet.model.layers.weight_source import WeightSource


class Sublayer(Protocol):
    """A sub-layer with its norms and residual."""

    def __call__(self, hidden: Tensor, index: int, rotary: Rotary, step: ForwardStep) -> Tensor:
        """Run hidden states [T, E] through it in layer `index` within the stage: [T, E]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """The norms before and after a sub-layer, and the factor of its residual addition."""

    before: Norm | BareNorm | None = None
    after: Norm | BareNorm | None = None
    multiplier: float = 1.0

    @property
    def is_rms(self) -> bool:
        """Whether each norm, if any, is an RMSNorm with a weight."""
        return all(
            norm is None or (isinstance(norm, Norm) and norm.bias is None)
            for norm in (self.before, self.after)
        )

    def around(self, hidden: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Run hidden states [T, E] through a sub-layer and what is around it: [T, E]."""
        return self.add(hidden, sublayer(self.normalize(hidden)))

    def normalize(self, hidden: Tensor) -> Tensor:
        """Apply the norm before the sub-layer to hidden states [T, E]."""
        return hidden if self.before is None else self.before(hidden)

    def add(self, hidden: Tensor, inner: Tensor) -> Tensor:
        """Add the sub-layer's output `inner` to its input `hidden`, both [T, E]."""
        if self.after is not None:
            inner = self.after(inner)
        if self.multiplier == 1:
            return hidden + inner
        # of the 16-bit dtypes `alpha` rounds otherwise in the last columns
        return torch.add(hidden.float(), inner.float(), alpha=self.multiplier).to(hidden.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamResidual(Residual):
    """The mixer of several residual streams around a sub-layer, and the norm before it."""

    mixer: Mixer

    def around(self, hidden: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Run rows [T, N x E], of N streams, through a sub-layer of [T, E]: [T, N x E]."""
        return self.mixer.around(hidden, lambda joined: sublayer(self.normalize(joined)))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSublayer:
    """Attention with its norms and residual."""

    residual: Residual
    self_attn: Attention

    def __call__(self, hidden: Tensor, index: int, rotary: Rotary, step: ForwardStep) -> Tensor:
        """Run hidden states [T, E] through it in layer `index` within the stage: [T, E]."""
        return self.residual.around(
            hidden, lambda normed: self.self_attn(normed, index, rotary, step)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSublayer:
    """A dense MLP with its norms and residual."""

    residual: Residual
    mlp: GatedMlp | ClampedMlp | PlainMlp

    def __call__(self, hidden: Tensor, index: int, rotary: Rotary, step: ForwardStep) -> Tensor:
        """Run hidden states [T, E] through it in layer `index` within the stage: [T, E]."""
        return self.residual.around(hidden, self.mlp)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSublayer:
    """A mixture of experts with its norms and residual."""

    residual: Residual
    mlp: SparseMlp

    def __call__(self, hidden: Tensor, index: int, rotary: Rotary, step: ForwardStep) -> Tensor:
        """Run hidden states [T, E] through it in layer `index` within the stage: [T, E]."""

        def recorded(normed: Tensor) -> Tensor:
            inner, experts = self.mlp(normed, step.token_ids if self.mlp.by_token else None)
            step.record_experts(index, experts)
            return inner

        return self.residual.around(hidden, recorded)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelExpertsSublayer:
    """A dense MLP and experts beside it, each with its own norms, in one residual (Gemma 4).

    The router sees the rows as they come. The MLP has a norm before it in `residual`, which also
    norms the sum, and `dense_norm` after it; `around_experts` has those of the experts.
    """

    residual: Residual
    dense: GatedMlp
    dense_norm: Norm
    around_experts: Residual
    experts: SparseMlp

    def __call__(self, hidden: Tensor, index: int, rotary: Rotary, step: ForwardStep) -> Tensor:
        """Run hidden states [T, E] through it in layer `index` within the stage: [T, E]."""
        dense = self.dense_norm(self.dense(self.residual.normalize(hidden)))
        inner, experts = self.experts(self.around_experts.normalize(hidden), routed_by=hidden)
        step.record_experts(index, experts)
        return self.residual.add(hidden, self.around_experts.add(dense, inner))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSublayer:
    """Attention and an MLP, or experts, that see the same hidden states: the whole of a layer.

    With an `mlp_norm` the MLP has a norm of its own, else it sees what attention sees.
    """

    residual: Residual
    self_attn: Attention
    mlp: GatedMlp | ClampedMlp | PlainMlp | SparseMlp
    mlp_norm: Norm | BareNorm | None = None

    def __call__(self, hidden: Tensor, index: int, rotary: Rotary, step: ForwardStep) -> Tensor:
        """Run hidden states [T, E] through both in layer `index` within the stage: [T, E]."""
        normed = self.residual.normalize(hidden)
        attended = self.self_attn(normed, index, rotary, step)
        inner = self.mlp(normed if self.mlp_norm is None else self.mlp_norm(hidden))
        if isinstance(inner, tuple):
            inner, experts = inner
            step.record_experts(index, experts)
        return self.residual.add(hidden, attended + inner)


def _nothing(source: SlotState, target: SlotState, n_rows: int) -> None:
    """Compute a state without numbers again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoSublayer:
    """What stands beside a sub-layer that is a whole layer.

    With `has_slot` it is in the place of what keeps a state, and counts the positions.
    """

    has_slot: bool = False

    def __call__(self, hidden: Tensor, index: int, rotary: Rotary, step: ForwardStep) -> Tensor:
        """Return the hidden states."""
        for span in step.spans if self.has_slot else ():
            state, n_rows = step.kv.state(span.slot, index), span.end - span.start
            state.keep_before(n_rows, span.n_drafts)
            state.count(n_rows, _nothing if state.kept else None)
        return hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A decoder layer: the attention sub-layer, then the MLP sub-layer.

    What it returns is multiplied by `scale`.
    """

    attention: Sublayer
    mlp: Sublayer
    scale: float = 1.0

    @classmethod
    def of(
        cls,
        attention: Residual,
        self_attn: Attention,
        around_mlp: Residual,
        mlp: GatedMlp | ClampedMlp | PlainMlp | SparseMlp,
    ) -> Layer:
        """Build a layer from attention and MLP, and the norms and residual around each."""
        second: Sublayer
        if isinstance(mlp, SparseMlp):
            second = ExpertsSublayer(residual=around_mlp, mlp=mlp)
        else:
            second = MlpSublayer(residual=around_mlp, mlp=mlp)
        return cls(attention=AttentionSublayer(residual=attention, self_attn=self_attn), mlp=second)

    def __call__(self, hidden: Tensor, index: int, rotary: Rotary, step: ForwardStep) -> Tensor:
        """Run the layer, `index` within the stage: [T, E] in and out."""
        out = self.mlp(self.attention(hidden, index, rotary, step), index, rotary, step)
        return out if self.scale == 1 else out * self.scale


def stream_layer(
    config: ModelConfig,
    weights: WeightSource,
    layer: int,
    self_attn: Attention,
    mlp: GatedMlp | ClampedMlp | PlainMlp | SparseMlp,
) -> Layer:
    """Put mixers, and norms but for GATED ones, around the sub-layers of the absolute `layer`."""
    prefix = f"model.layers.{layer}"
    names = (("attn_hc", "input_layernorm"), ("ffn_hc", "post_attention_layernorm"))
    mixers = [(load_mixer(config, weights, f"{prefix}.{mixer}"), norm) for mixer, norm in names]
    first, second = (
        StreamResidual(mixer=mixer)
        if isinstance(mixer, GatedMixer)
        else StreamResidual(mixer=mixer, before=weights.norm(f"{prefix}.{norm}", config.norm_eps))
        for mixer, norm in mixers
    )
    return Layer.of(first, self_attn, second, mlp)
