"""OLMo Hybrid (transformers, modeling_olmo_hybrid.py): OLMo-2's attention in every fourth layer.

The others have a gated DeltaNet, with norms before the sub-layers instead of after them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from shardnet.model.config.decoder_config import read_decoder, read_delta_net
from shardnet.model.config.fields import Fields
from shardnet.model.config.model_config import Activation, ModelConfig
from shardnet.model.families import kimi_linear, olmo
from shardnet.model.families.family import Family, decoder_stage
from shardnet.model.families.layout import Layout
from shardnet.model.families.parts import Part
from shardnet.model.families.tensor_shapes import Table

if TYPE_CHECKING:
    from shardnet.model.layers.decoder_layer import Layer
    from shardnet.model.layers.modules import Attention
    from shardnet.model.layers.weight_source import WeightSource

_NORM_EPS: Final = 1e-5
"""Of outputs of a DeltaNet, whatever the config says."""
_OF_TRAINING: Final = (
    *("linear_a_log_max", "linear_a_log_min", "linear_dt_init_floor", "linear_dt_max"),
    "linear_dt_min",
)


def _read_config(fields: Fields) -> ModelConfig:
    """Read an OlmoHybridConfig: without a base for positions there are none."""
    fields.ignore(*_OF_TRAINING)
    rope = fields.take("rope_parameters", dict, {})
    has_positions = (rope.get("rope_theta") or fields.take("rope_theta", float, None)) is not None
    config = read_decoder(fields, max_positions=65536)
    if config.activation is not Activation.SILU:
        raise fields.unsupported("hidden_act", config.activation.value, "silu")
    heads = (config.n_heads, config.n_heads)
    key_size = int(0.75 * config.hidden_size / config.n_heads)
    own = read_delta_net(fields, config.n_layers, heads, (key_size, 2 * key_size))
    writes_twice = fields.take("linear_allow_neg_eigval", bool, True)
    return replace(
        config,
        nope_layers=() if has_positions else tuple(range(config.n_layers)),
        delta_net=own and replace(own, write_scale=2.0 if writes_twice else 1.0),
    )


def _net_tensors(config: ModelConfig, layer: int) -> Table:
    own, hidden, prefix = config.delta_net, config.hidden_size, f"model.layers.{layer}.linear_attn"
    assert own is not None
    gates = {"g_proj": (own.value_width, hidden), "a_proj": (own.n_value_heads, hidden)}
    decays = dict.fromkeys(("A_log", "dt_bias"), (own.n_value_heads,))
    return kimi_linear.delta_tensors(config, own, prefix, gates, decays)


def _load_net(config: ModelConfig, weights: WeightSource, layer: int) -> Attention:
    from shardnet.model.mixers.gated_delta import Projections

    own, prefix = config.delta_net, f"model.layers.{layer}.linear_attn"
    assert own is not None
    project = Projections(
        config=own,
        qkvz_proj=weights.linear(*(f"{prefix}.{name}_proj" for name in "qkvg")),
        ba_proj=weights.linear(f"{prefix}.b_proj", f"{prefix}.a_proj", precise=True),
    )
    own_numbers: dict[str, Any] = {"norm_eps": _NORM_EPS, "write_scale": own.write_scale}
    return kimi_linear.load_delta_net(config, weights, prefix, project, **own_numbers)


_NET: Final = Layout(attention=Part(tensors=_net_tensors, load=_load_net))


def _layout(config: ModelConfig, layer: int) -> Layout:
    own = config.delta_net
    return olmo.LAYOUT if own is None or layer not in own.layers else _NET


def _layer_tensors(config: ModelConfig, layer: int) -> Table:
    """Name a DeltaNet or attention, an MLP and the norms."""
    return _layout(config, layer).layer_tensors(config, layer)


def _load_layer(config: ModelConfig, weights: WeightSource, layer: int) -> Layer:
    return _layout(config, layer).load_layer(config, weights, layer)


FAMILY = Family(
    model_type="olmo_hybrid",
    architecture="OlmoHybridForCausalLM",
    read_config=_read_config,
    layer_tensors=_layer_tensors,
    load_stage=decoder_stage(_load_layer),
    renamed_tensors=(
        ("feedforward_layer_norm", "post_attention_layernorm"),
        ("attention_layer_norm", "input_layernorm"),
    ),
    has_whole_heads=True,
)
