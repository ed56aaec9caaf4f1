"""How a family's layers are put together from parts (parts.py), and its record.

Knows the order of parts and norms. Must not know files, nor which parts there are. The families
that need nothing else are records in llama_table.py, dense_table.py, sparse_table.py and mamba2.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardnet.model.config.fields import Fields
from shardnet.model.config.model_config import ModelConfig, NormKind
from shardnet.model.families.family import Family, StageLoader, decoder_stage
from shardnet.model.families.parts import ATTENTION, GATED, Part
from shardnet.model.families.tensor_shapes import Table, decoder_head, stream_mixer

if TYPE_CHECKING:
    from shardnet.model.layers.decoder_layer import Layer
    from shardnet.model.layers.weight_source import WeightSource


Norms = tuple[str, str, str, str]
"""Names of the norms before attention and after it, before the MLP and after it; "" for none."""
PRE_NORMS: Norms = ("input_layernorm", "", "post_attention_layernorm", "")
POST_NORMS: Norms = ("", "post_attention_layernorm", "", "post_feedforward_layernorm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the layers of a family are put together, and its head.

    With `shares_norm` attention and an MLP beside it have one norm. With `has_norm_bias` norms are
    LayerNorms with biases. `final_norm` is "" where there is none.
    """

    attention: Part = ATTENTION
    mlp: Part = GATED
    norms: Norms = PRE_NORMS
    final_norm: str = "model.norm"
    shares_norm: bool = False
    has_norm_bias: bool = False

    @property
    def load_stage(self) -> StageLoader:
        """Builds the forward pass."""
        return decoder_stage(self.load_layer, self.final_norm)

    def layer_tensors(self, config: ModelConfig, layer: int) -> Table:
        """Name the parameters of the absolute `layer`."""
        made = self.attention.tensors(config, layer) | self.mlp.tensors(config, layer)
        for name in filter(None, self._own_norms(config)):
            made |= self._norm(config, f"model.layers.{layer}.{name}")
        for mixer in ("attn_hc", "ffn_hc") if config.layer_streams(layer) is not None else ():
            made |= stream_mixer(config, f"model.layers.{layer}.{mixer}")
        return made

    def head_tensors(self, config: ModelConfig) -> Table:
        """Name the final norm and the LM head."""
        made = decoder_head(config)
        del made["model.norm.weight"]
        bias: Table = {"lm_head.bias": (config.vocab_size,)} if config.has_head_bias else {}
        if config.streams is not None and config.streams.has_head:
            made |= stream_mixer(config, "model.hc_head", "hc_")
        return self._norm(config, self.final_norm) | made | bias

    def load_layer(self, config: ModelConfig, weights: WeightSource, layer: int) -> Layer:
        """Take the parameters of the absolute `layer`."""
        from shardnet.model.layers.decoder_layer import (
            Layer,
            NoSublayer,
            ParallelSublayer,
            Residual,
            stream_layer,
        )
        from shardnet.model.layers.weight_source import load_norm

        self_attn = self.attention.load(config, weights, layer)
        inner = self.mlp.load(config, weights, layer)
        if config.layer_streams(layer) is not None:
            return stream_layer(config, weights, layer, self_attn, inner)
        first, after, second, last = (
            load_norm(config, weights, f"model.layers.{layer}.{name}") if name else None
            for name in self._own_norms(config)
        )
        if config.has_parallel_mlp:
            around = Residual(before=first, multiplier=config.residual_multiplier)
            both = ParallelSublayer(
                residual=around, self_attn=self_attn, mlp=inner, mlp_norm=second
            )
            return Layer(attention=both, mlp=NoSublayer())
        multiplier = config.residual_multiplier
        return Layer.of(
            Residual(before=first, after=after, multiplier=multiplier),
            self_attn,
            Residual(before=second, after=last, multiplier=multiplier),
            inner,
        )

    def _own_norms(self, config: ModelConfig) -> Norms:
        first, after, second, last = self.norms
        is_shared = self.shares_norm and config.has_parallel_mlp
        return (first, after, "" if is_shared else second, last)

    def _norm(self, config: ModelConfig, name: str) -> Table:
        if not name or config.norm_kind in (NormKind.BARE, NormKind.BARE_CENTRED):
            return {}
        kinds = ("weight", "bias") if self.has_norm_bias else ("weight",)
        return {f"{name}.{kind}": (config.hidden_size,) for kind in kinds}


def record(
    model_type: str,
    architecture: str,
    read_config: Callable[[Fields], ModelConfig],
    layout: Layout | None = None,
    **more: Any,
) -> Family:
    """Make the record of a family that a `layout` says all of, None for Llama's."""
    layout = layout or Layout()
    return Family(
        model_type=model_type,
        architecture=architecture,
        read_config=read_config,
        layer_tensors=layout.layer_tensors,
        head_tensors=layout.head_tensors,
        load_stage=layout.load_stage,
        **more,
    )
