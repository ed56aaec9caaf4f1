"""EXAONE 4 (transformers, modeling_exaone4.py): OLMo-2's order of norms, Qwen3's norms over heads.

Where layers have windows, those without one have no positions.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardnet.model.config.decoder_config import read_decoder, read_window, read_windows
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import Factors, read_gguf_decoder
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families import olmo2
from shardnet.model.families.family import Family, GgufFormat, decoder_stage
from shardnet.model.families.tensor_shapes import Table, attention, head_norms, mlp

if TYPE_CHECKING:
    from shardnet.model.layers.decoder_layer import Layer
    from shardnet.model.layers.weight_source import WeightSource


def read_config(fields: Fields) -> ModelConfig:
    """Read an Exaone4Config."""
    config = read_decoder(fields, n_kv_heads=32, norm_eps=1e-5, intermediate_size=16384)
    window = read_window(fields, 4096)
    period = _read_period(fields)
    windows = read_windows(
        fields, config.n_layers, window, lambda n: window is not None and (n + 1) % period != 0
    )
    full = tuple(n for n in range(config.n_layers) if windows[n] is None)
    return replace(config, windows=windows, nope_layers=full if window else ())


def _read_period(fields: Fields) -> int:
    """Read every how many layers one has no window: a number, or L and G for each of them."""
    key = "sliding_window_pattern"
    pattern = fields.take(key, (int, str), 4)
    if isinstance(pattern, int):
        return fields.positive(key, 4) if pattern else 1
    if pattern != "L" * (len(pattern) - 1) + "G":
        raise fields.unsupported(key, pattern, "LLLG, a number")
    return len(pattern)


def layer_tensors(config: ModelConfig, layer: int) -> Table:
    """Name Llama's linears, norms over heads, and norms after sub-layers."""
    return (
        attention(config, layer)
        | head_norms(config, layer)
        | mlp(config, layer)
        | olmo2.post_norms(config, layer)
    )


def load_layer(config: ModelConfig, weights: WeightSource, layer: int) -> Layer:
    """Take the parameters of the absolute `layer`."""
    from shardnet.model.layers.modules import SelfAttention

    self_attn = SelfAttention.load(config, weights, layer, with_head_norm=True)
    return olmo2.post_norm_layer(config, weights, layer, self_attn)


def read_gguf(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    """Read the metadata; which layers have windows is llama.cpp's own."""
    fields.ignore("attention.sliding_window_pattern")
    window = fields.optional("attention.sliding_window")
    return read_gguf_decoder(fields, tensors, factors) | {"sliding_window": window}


FAMILY = Family(
    model_type="exaone4",
    architecture="Exaone4ForCausalLM",
    read_config=read_config,
    layer_tensors=layer_tensors,
    load_stage=decoder_stage(load_layer),
    gguf=GgufFormat(architecture="exaone4", read=read_gguf),
)
