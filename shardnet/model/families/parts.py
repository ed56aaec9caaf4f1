"""The attention and the MLPs that layouts are put together from.

Knows the parameters of each, by transformers' names. Must not know which family has them, nor
files; modules, which need torch, are imported when a stage loads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families.tensor_shapes import (
    Table,
    attention,
    gated,
    head_norms,
    linears,
    plain_mlp,
)

if TYPE_CHECKING:
    from shardnet.model.layers.modules import Attention, GatedMlp, PlainMlp, SelfAttention
    from shardnet.model.layers.weight_source import WeightSource
    from shardnet.model.mixers.latent_attention import LatentAttention
    from shardnet.model.mixers.mixed_attention import GatedAttention


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A sub-layer without its norms: the parameters of an absolute layer, and what takes them."""

    tensors: Callable[[ModelConfig, int], Table]
    load: Callable[[ModelConfig, WeightSource, int], Any]


def gated_part(
    block: str = "mlp", names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> Part:
    """Make the part of a gated MLP, whose linears have their `names` below `block`."""

    def tensors(config: ModelConfig, layer: int) -> Table:
        prefix, inner = f"model.layers.{layer}.{block}", config.intermediate_size
        return gated(config, prefix, inner, with_bias=config.mlp_bias, names=names)

    def load(config: ModelConfig, weights: WeightSource, layer: int) -> GatedMlp:
        from shardnet.model.layers.modules import GatedMlp

        return GatedMlp.load(config, weights, f"model.layers.{layer}.{block}", names)

    return Part(tensors=tensors, load=load)


def plain_part(up: str, down: str) -> Part:
    """Make the part of an MLP without a gate, whose linears are called `up` and `down`."""

    def load(config: ModelConfig, weights: WeightSource, layer: int) -> PlainMlp:
        from shardnet.model.layers.modules import PlainMlp

        prefix = f"model.layers.{layer}.mlp"
        return PlainMlp.load(config, weights, f"{prefix}.{up}", f"{prefix}.{down}")

    return Part(tensors=partial(plain_mlp, up=up, down=down), load=load)


def attention_part(
    output: str = "o_proj",
    *,
    has_output_bias: bool = True,
    norms: tuple[str, str] = ("q_norm", "k_norm"),
    norms_rotated: bool = False,
) -> Part:
    """Make the part of Llama's attention with another name of its `output`.

    Without `has_output_bias` the output has none in any case. Where the config has them there are
    `norms` over heads, after the rotation with `norms_rotated`, attention sinks, and queries grow.
    """

    def tensors(config: ModelConfig, layer: int) -> Table:
        made = attention(config, layer, output=output, output_bias=has_output_bias)
        if config.has_sinks:
            made[f"model.layers.{layer}.self_attn.sinks"] = (config.n_heads,)
        return made | (head_norms(config, layer, norms) if config.has_head_norms else {})

    def load(config: ModelConfig, weights: WeightSource, layer: int) -> Attention:
        from shardnet.model.layers.modules import SelfAttention
        from shardnet.model.mixers.mixed_attention import TemperedAttention
        from shardnet.model.shards.cut import Axis

        made = SelfAttention.load(
            config,
            weights,
            layer,
            with_head_norm=config.has_head_norms,
            norm_names=norms,
            output=output,
        )
        if config.has_sinks:
            name = f"model.layers.{layer}.self_attn.sinks"
            sinks = weights.parameter(name, rows=Axis.HEADS).view(made.n_kv_heads, -1, 1)
            made = replace(made, kind=replace(made.kind, sinks=sinks))
        made = replace(made, norms_rotated=norms_rotated)
        if config.temperature is None:
            return made
        return TemperedAttention(inner=made, temperature=config.temperature)

    return Part(tensors=tensors, load=load)


def _gated_heads(*, are_wide: bool) -> Part:
    """Make the part of Qwen3's attention with a gate for each head, or for each of its columns."""

    def tensors(config: ModelConfig, layer: int) -> Table:
        n_columns = config.head_size if are_wide else 1
        gate = {"gate_proj": (config.n_heads * n_columns, config.hidden_size)}
        own = linears(f"model.layers.{layer}.self_attn", gate)
        return attention(config, layer) | head_norms(config, layer) | own

    def load(config: ModelConfig, weights: WeightSource, layer: int) -> GatedAttention:
        from shardnet.model.mixers.mixed_attention import GatedAttention

        n_columns = config.head_size if are_wide else 1
        return GatedAttention.load(config, weights, layer, n_columns)

    return Part(tensors=tensors, load=load)


def _load_bare_heads(config: ModelConfig, weights: WeightSource, layer: int) -> SelfAttention:
    """Take nanochat's attention, whose heads are normed by nothing that is stored."""
    from shardnet.model.layers.modules import SelfAttention
    from shardnet.model.layers.norms import BareNorm

    plain = SelfAttention.load(config, weights, layer)
    return replace(plain, qk_norm=BareNorm(eps=config.norm_eps), norms_rotated=True)


def _cohere_heads(config: ModelConfig, layer: int) -> Table:
    """Name Llama's attention, and norms that have a weight for each head."""
    plain = attention_part().tensors(replace(config, has_head_norms=False), layer)
    if not config.has_head_norms:
        return plain
    attn, size = f"model.layers.{layer}.self_attn", config.head_size
    counts = {"q_norm": config.n_heads, "k_norm": config.n_kv_heads}
    return plain | {f"{attn}.{name}.weight": (n, size) for name, n in counts.items()}


def _load_cohere_heads(config: ModelConfig, weights: WeightSource, layer: int) -> SelfAttention:
    attn = f"model.layers.{layer}.self_attn"
    names = [f"{attn}.{name}_norm.weight" for name in "qk"] if config.has_head_norms else []
    return _load_centred_heads(config, weights, layer, names)


def _stablelm_heads(config: ModelConfig, layer: int) -> Table:
    """Name Llama's attention, and norms of each head by its number."""
    plain = attention_part(has_output_bias=False)
    made = plain.tensors(replace(config, has_head_norms=False), layer)
    return made | dict.fromkeys(_stablelm_norms(config, layer), (config.head_size,))


def _stablelm_norms(config: ModelConfig, layer: int) -> list[str]:
    if not config.has_head_norms:
        return []
    attn, counts = f"model.layers.{layer}.self_attn", {"q": config.n_heads, "k": config.n_kv_heads}
    return [
        f"{attn}.{name}_layernorm.norms.{number}.weight"
        for name, count in counts.items()
        for number in range(count)
    ]


def _load_stablelm_heads(config: ModelConfig, weights: WeightSource, layer: int) -> SelfAttention:
    return _load_centred_heads(config, weights, layer, _stablelm_norms(config, layer))


def _load_centred_heads(
    config: ModelConfig, weights: WeightSource, layer: int, names: list[str]
) -> SelfAttention:
    """Take Llama's attention with LayerNorms of heads, whose weights are called `names`."""
    import torch

    from shardnet.model.layers.modules import SelfAttention
    from shardnet.model.layers.norms import HeadNorm

    attn = f"model.layers.{layer}.self_attn"
    joined = weights.linear(*(f"{attn}.{name}_proj" for name in "qkv"))
    plain = SelfAttention.of(config, layer, joined, weights.linear(f"{attn}.o_proj"))
    if not names:
        return plain
    weight = torch.cat([weights.parameter(n).view(-1, config.head_size) for n in names])
    return replace(plain, qk_norm=HeadNorm(weight=weight, eps=config.norm_eps, is_centred=True))


def _joined_attention(config: ModelConfig, layer: int) -> Table:
    """Name queries, keys and values as one linear."""
    hidden, width = config.hidden_size, config.n_heads * config.head_size
    shapes = {"qkv_proj": (3 * width, hidden), "dense": (hidden, width)}
    prefix = f"model.layers.{layer}.self_attn"
    return linears(prefix, shapes, with_bias=config.attention_bias)


def _load_joined_attention(config: ModelConfig, weights: WeightSource, layer: int) -> SelfAttention:
    from shardnet.model.layers.modules import SelfAttention

    attn = f"model.layers.{layer}.self_attn"
    joined, output = (weights.linear(f"{attn}.{name}") for name in ("qkv_proj", "dense"))
    return SelfAttention.of(config, layer, joined, output)


def latent_attention(config: ModelConfig, layer: int) -> Table:
    """Name the projections to queries and to latents, and those of the heads."""
    assert config.latent is not None
    latent, attn = config.latent, f"model.layers.{layer}.self_attn"
    hidden, bias = config.hidden_size, config.attention_bias
    queries = config.n_heads * (latent.nope_size + latent.rope_size)
    tensors = linears(attn, {"kv_a_proj_with_mqa": (latent.width, hidden)}, with_bias=bias)
    if latent.query_rank is None:
        tensors |= linears(attn, {"q_proj": (queries, hidden)})
    else:
        tensors |= linears(attn, {"q_a_proj": (latent.query_rank, hidden)}, with_bias=bias)
        tensors |= linears(attn, {"q_b_proj": (queries, latent.query_rank)})
        tensors[f"{attn}.q_a_layernorm.weight"] = (latent.query_rank,)
    tensors[f"{attn}.kv_a_layernorm.weight"] = (latent.rank,)
    keys_values = config.n_heads * (latent.nope_size + latent.value_size)
    tensors[f"{attn}.kv_b_proj.weight"] = (keys_values, latent.rank)
    outputs = {"o_proj": (hidden, config.n_heads * latent.value_size)}
    tensors |= linears(attn, outputs, with_bias=bias)
    own = config.indexer
    if own is not None and layer in own.layers:
        assert latent.query_rank is not None
        index = f"{attn}.indexer"
        shapes = {"wq_b": (own.n_heads * own.head_size, latent.query_rank)}
        shapes |= {"wk": (own.head_size, hidden), "weights_proj": (own.n_heads, hidden)}
        if own.n_pooled > 1:
            shapes["pool_gate"] = (own.head_size, hidden)
            tensors[f"{index}.index_kpool_compress_ape"] = (own.n_pooled, own.head_size)
        norm = {f"{index}.k_norm.{part}": (own.head_size,) for part in ("weight", "bias")}
        tensors |= linears(index, shapes) | norm
    return tensors


def _fused_heads(config: ModelConfig, layer: int) -> Table:
    """Name queries, keys and values as one linear, norms over heads, and an output without bias."""
    attn, hidden = f"model.layers.{layer}.self_attn", config.hidden_size
    queries, keys = config.n_heads * config.head_size, config.n_kv_heads * config.head_size
    fused = {"qkv_proj": (queries + 2 * keys, hidden)}
    made = linears(attn, fused, with_bias=config.attention_bias)
    made |= linears(attn, {"o_proj": (hidden, queries)})
    return made | (head_norms(config, layer) if config.has_head_norms else {})


def _load_fused_heads(config: ModelConfig, weights: WeightSource, layer: int) -> SelfAttention:
    from shardnet.model.layers.modules import SelfAttention
    from shardnet.model.layers.norms import HeadNorm
    from shardnet.model.shards.cut import HEADS_EACH, Axis

    attn, norm = f"model.layers.{layer}.self_attn", None
    if config.has_head_norms:
        queries, keys = (weights.norm(f"{attn}.{n}_norm", config.norm_eps) for n in "qk")
        norm = HeadNorm.join(queries, keys, config.n_heads, config.n_kv_heads)
    return SelfAttention.of(
        config,
        layer,
        qkv_proj=weights.linear(f"{attn}.qkv_proj", outputs=HEADS_EACH),
        o_proj=weights.linear(f"{attn}.o_proj", inputs=Axis.HEADS),
        qk_norm=norm,
    )


def whole_attention(config: ModelConfig, layer: int) -> Table:
    """Name Llama's attention, and norms over all queries and all keys."""
    return attention(config, layer) | whole_norms(config, layer)


def whole_norms(config: ModelConfig, layer: int) -> Table:
    """Name the norms over all queries and over all keys."""
    attn = f"model.layers.{layer}.self_attn"
    return {
        f"{attn}.q_norm.weight": (config.n_heads * config.head_size,),
        f"{attn}.k_norm.weight": (config.n_kv_heads * config.head_size,),
    }


def whole_norm_attention(config: ModelConfig, weights: WeightSource, layer: int) -> SelfAttention:
    """Take the parameters of attention in the absolute `layer`."""
    from shardnet.model.layers.modules import SelfAttention
    from shardnet.model.layers.norms import WholeNorm

    attn = f"model.layers.{layer}.self_attn"
    return SelfAttention.of(
        config,
        layer,
        qkv_proj=weights.linear(f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj"),
        o_proj=weights.linear(f"{attn}.o_proj"),
        qk_norm=WholeNorm(
            n_heads=config.n_heads,
            queries=weights.norm(f"{attn}.q_norm", config.norm_eps),
            keys=weights.norm(f"{attn}.k_norm", config.norm_eps),
        ),
    )


def _load_latent(config: ModelConfig, weights: WeightSource, layer: int) -> LatentAttention:
    from shardnet.model.mixers.latent_attention import LatentAttention

    return LatentAttention.load(config, weights, layer)


def _gated_latents(config: ModelConfig, layer: int) -> Table:
    """Name DeepSeek's attention, a gate for each column of a head's output, and sinks."""
    assert config.latent is not None
    attn, width = f"model.layers.{layer}.self_attn", config.n_heads * config.latent.value_size
    gates = linears(attn, {"gate_proj": (width, config.hidden_size)})
    return latent_attention(config, layer) | gates | {f"{attn}.sinks": (config.n_heads,)}


def _load_gated_latents(config: ModelConfig, weights: WeightSource, layer: int) -> LatentAttention:
    from shardnet.model.shards.cut import Axis

    attn, plain = f"model.layers.{layer}.self_attn", _load_latent(config, weights, layer)
    sinks = weights.parameter(f"{attn}.sinks", rows=Axis.HEADS).view(1, -1, 1)
    gates = weights.linear(f"{attn}.gate_proj", outputs=(Axis.HEADS,))
    return replace(plain, kind=replace(plain.kind, sinks=sinks), gate_proj=gates)


_XIELU: Final = ("alpha_p", "alpha_n", "beta", "eps")


def _xielu_mlp(config: ModelConfig, layer: int) -> Table:
    """Name the linears, and the numbers of the nonlinearity between them."""
    shapes = ((1,), (1,), (), ())
    prefix = f"model.layers.{layer}.mlp.act_fn"
    own: Table = {f"{prefix}.{name}": shape for name, shape in zip(_XIELU, shapes, strict=True)}
    return UP_DOWN.tensors(config, layer) | own


def _load_xielu_mlp(config: ModelConfig, weights: WeightSource, layer: int) -> PlainMlp:
    from shardnet.model.layers.norms import Xielu

    prefix = f"model.layers.{layer}.mlp"
    numbers = {name: weights.parameter(f"{prefix}.act_fn.{name}") for name in _XIELU}
    plain: PlainMlp = UP_DOWN.load(config, weights, layer)
    return replace(plain, activation=Xielu(**numbers))


ATTENTION: Final = attention_part()
"""Llama's attention."""
GATED_HEADS: Final = _gated_heads(are_wide=False)
WIDELY_GATED_HEADS: Final = _gated_heads(are_wide=True)
BARE_HEADS: Final = Part(tensors=ATTENTION.tensors, load=_load_bare_heads)
"""Attention whose heads are normed by nothing that is stored (nanochat)."""
COHERE_HEADS: Final = Part(tensors=_cohere_heads, load=_load_cohere_heads)
STABLELM_HEADS: Final = Part(tensors=_stablelm_heads, load=_load_stablelm_heads)
JOINED_ATTENTION: Final = Part(tensors=_joined_attention, load=_load_joined_attention)
"""Attention whose queries, keys and values are one linear (GPT-NeoX)."""
LATENT_HEADS: Final = Part(tensors=latent_attention, load=_load_latent)
"""DeepSeek's attention over latents."""
GATED_LATENTS: Final = Part(tensors=_gated_latents, load=_load_gated_latents)
"""The same with gates and sinks (Hunyuan 4)."""
GATED: Final = gated_part()
"""Llama's MLP."""
WHOLE_HEADS: Final = Part(tensors=whole_attention, load=whole_norm_attention)
"""Attention with norms over all queries and over all keys (OLMo-2)."""
FUSED_HEADS: Final = Part(tensors=_fused_heads, load=_load_fused_heads)
"""Attention whose queries, keys and values are one linear, of grouped heads (Phi-3)."""
JOINED_MLP: Final = gated_part(names=("gate_up_proj", "gate_up_proj", "down_proj"))
"""Phi-3's MLP, whose gate and up are one linear."""
UP_DOWN: Final = plain_part("up_proj", "down_proj")
XIELU_MLP: Final = Part(tensors=_xielu_mlp, load=_load_xielu_mlp)
"""An MLP without a gate whose nonlinearity has numbers of its own (Apertus)."""
