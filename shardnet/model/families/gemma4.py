"""Gemma 4's text models without embeddings per layer (transformers, modeling_gemma4.py).

Gemma 3 with norms over the heads of values too, and layers without a window of their own kind:
larger heads, values that are the keys, rotary positions for a part of the columns. What a layer
returns is multiplied by a number of its own. In mixtures, experts stand beside a dense MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from shardnet.errors import shown
from shardnet.model.config.decoder_config import (
    FULL,
    SLIDING,
    read_decoder,
    read_expert_counts,
    read_windows,
)
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import (
    FREQS,
    GgufFields,
    has_gguf_experts,
    read_gguf_each,
    read_gguf_sizes,
)
from shardnet.model.config.limits import THETAS
from shardnet.model.config.model_config import Experts, HeadShape, ModelConfig, Rope
from shardnet.model.config.rope import read_scaling
from shardnet.model.families import gemma2
from shardnet.model.families.expert_parts import load_experts
from shardnet.model.families.family import Family, GgufFormat, Stacking, decoder_stage
from shardnet.model.families.parts import Part
from shardnet.model.families.tensor_shapes import ExpertNames, Table, linears, norms, sparse_mlp

if TYPE_CHECKING:
    from shardnet.model.layers.decoder_layer import Layer, Sublayer
    from shardnet.model.layers.modules import SelfAttention
    from shardnet.model.layers.weight_source import WeightSource

EXPERTS: Final = ExpertNames(block="moe")
_PERIOD: Final = 6
_RESTING: Final = 1e29
"""What a frequency is divided by at least where its columns do not turn."""
_SUPPORTED: Final = "0, as in the 12B, 26B-A4B and 31B models"
_ROPES: Final = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
_EXPERT_NORMS: Final = (
    *("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2"),
    "post_feedforward_layernorm_2",
)


def read_config(fields: Fields, max_positions: int = 131072, window: int = 512) -> ModelConfig:
    """Read a Gemma4TextConfig; positions and `window` are defaults.

    Raises UnsupportedModelError for text that sees what follows it.
    """
    if fields.take("use_bidirectional_attention", str, None) == "all":
        raise fields.unsupported("use_bidirectional_attention", "all", "null, vision")
    config = read_decoder(
        fields,
        n_kv_heads=4,
        max_positions=max_positions,
        head_size=256,
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
        is_tied=True,
        rope=partial(read_rope, FULL),
    )
    windows = read_windows(
        fields,
        config.n_layers,
        fields.positive("sliding_window", window),
        lambda layer: (layer + 1) % _PERIOD != 0,
    )
    windows = (*windows[:-1], None)  # whatever the list says, transformers has it so
    is_value_key = fields.take("attention_k_eq_v", bool, False)
    config = replace(config, windows=windows, is_value_key=is_value_key)
    return replace(
        config,
        full_heads=_read_full_heads(fields, config),
        local_rope=read_rope(SLIDING, fields, config.max_positions, config.head_size),
        attention_scale=1.0,
        embedding_multiplier=config.hidden_size**0.5,
        logit_soft_cap=gemma2.read_soft_cap(fields, "final_logit_softcapping", None),
        experts=_read_experts(fields, config.n_layers),
    )


def covers(fields: Fields, per_layer: int = 256) -> bool:
    """Whether a model has neither embeddings per layer nor layers that share keys and values.

    `per_layer` is the default of how wide the embeddings are.
    """
    shared = fields.take("num_kv_shared_layers", int, 0)
    fields.ignore("vocab_size_per_layer_input", "use_double_wide_mlp")
    return not (shared or fields.take("hidden_size_per_layer_input", int, per_layer))


def read_rope(
    kind: str,
    fields: Fields,
    max_positions: int,
    head_size: int,
    ropes: Mapping[str, Any] = _ROPES,
    *,
    may_be_partial: bool = False,
) -> Rope:
    """Read the rotary positions of one kind of layers; `ropes` are those of each by default.

    Those that are not proportional turn a part of each head where they `may_be_partial`.
    """
    both = fields.inner("rope_parameters", fields.take("rope_parameters", dict, ropes))
    own = both.inner(kind, both.take(kind, dict))
    both.ignore(FULL, SLIDING, "rope_theta", "rope_type")  # those outside are of no layer
    both.note_the_rest()
    theta = own.number("rope_theta", 10000.0, within=THETAS)
    share = own.number("partial_rotary_factor", 1.0) if may_be_partial else 1.0
    plain = Rope(theta=theta, share=share)
    return read_scaling(own, plain, max_positions=max_positions, head_size=head_size)


def _read_full_heads(fields: Fields, config: ModelConfig) -> HeadShape:
    """Read the heads of layers without a window: for all of them, or layer by layer."""
    size = fields.positive("global_head_dim", 512)
    n_kv_heads = fields.optional("num_global_key_value_heads")
    usual = {"head_dim": size}
    if config.is_value_key and n_kv_heads is not None:
        usual["num_key_value_heads"] = n_kv_heads
    full = [layer for layer in range(config.n_layers) if config.window(layer) is None]
    each: dict[Any, Any] = fields.take("per_layer_config", dict, dict.fromkeys(full, usual))
    shapes = {_head_shape(fields, str(layer), said, config) for layer, said in each.items()}
    named = sorted(int(layer) if str(layer).isdecimal() else -1 for layer in each)
    if named != full or len(shapes) != 1:
        raise fields.unsupported(
            "per_layer_config",
            each,
            "the same heads in all layers without a window, and only there",
        )
    return shapes.pop()


def _head_shape(fields: Fields, layer: str, said: Any, config: ModelConfig) -> HeadShape:
    if not isinstance(said, dict):
        raise fields.damaged(f"per_layer_config.{layer} is {shown(said)}, expected an object")
    own = fields.inner(f"per_layer_config.{layer}", said)
    size = own.positive("head_dim", config.head_size)
    n_kv_heads = own.positive("num_key_value_heads", config.n_kv_heads)
    own.note_the_rest()
    if size % 2 or config.n_heads % n_kv_heads:
        raise fields.damaged(
            f"per_layer_config.{layer} has {n_kv_heads} heads of {size} columns for "
            f"{config.n_heads} query heads: expected a divisor, and an even number"
        )
    return HeadShape(n_kv_heads=n_kv_heads, key_size=size, value_size=size)


def _read_experts(fields: Fields, n_layers: int) -> Experts | None:
    if not fields.take("enable_moe_block", bool, False):
        fields.ignore("num_experts", "top_k_experts", "moe_intermediate_size")
        return None
    n_experts, top_k = read_expert_counts(
        fields, ("num_experts", "num_local_experts"), 128, 8, top_k_key="top_k_experts"
    )
    return Experts(
        n_experts=n_experts,
        top_k=top_k,
        intermediate_size=fields.positive("moe_intermediate_size"),
        normalize_top_k=True,
        layers=tuple(range(n_layers)),
    )


def layer_tensors(config: ModelConfig, layer: int) -> Table:
    """Name attention with norms over heads, a dense MLP, and experts where the model has them."""
    prefix = f"model.layers.{layer}"
    tensors = _LAYOUT.layer_tensors(config, layer) | {f"{prefix}.layer_scalar": (1,)}
    if config.experts is not None:
        n_experts, hidden = config.experts.n_experts, config.hidden_size
        experts = sparse_mlp(config, layer, EXPERTS)
        tensors |= {name: shape for name, shape in experts.items() if ".experts." in name}
        tensors |= norms(config, layer, *_EXPERT_NORMS)
        tensors |= linears(f"{prefix}.router", {"proj": (n_experts, hidden)})
        tensors |= {f"{prefix}.router.scale": (hidden,)}
        tensors |= {f"{prefix}.router.per_expert_scale": (n_experts,)}
    return tensors


def _attention(config: ModelConfig, layer: int) -> Table:
    attn, heads, hidden = f"model.layers.{layer}.self_attn", config.heads(layer), config.hidden_size
    queries, keys = config.n_heads * heads.key_size, heads.n_kv_heads * heads.key_size
    shapes = {"q_proj": (queries, hidden), "k_proj": (keys, hidden), "o_proj": (hidden, queries)}
    if not _is_value_key(config, layer):
        shapes["v_proj"] = (keys, hidden)
    of_heads: Table = {f"{attn}.{name}_norm.weight": (heads.key_size,) for name in "qk"}
    return linears(attn, shapes, with_bias=config.attention_bias) | of_heads


def _is_value_key(config: ModelConfig, layer: int) -> bool:
    return config.is_value_key and config.window(layer) is None


def load_layer(config: ModelConfig, weights: WeightSource, layer: int) -> Layer:
    """Take the parameters of the absolute `layer`."""
    made = _LAYOUT.load_layer(config, weights, layer)
    if config.experts is not None:
        made = replace(made, mlp=_load_experts(config, config.experts, weights, layer, made.mlp))
    scale = weights.parameter(f"model.layers.{layer}.layer_scalar").item()
    return replace(made, scale=scale)


def _load_attention(config: ModelConfig, weights: WeightSource, layer: int) -> SelfAttention:
    """Take attention whose values are normed too, by nothing that is stored."""
    import torch

    from shardnet.model.layers.modules import SelfAttention
    from shardnet.model.layers.norms import HeadNorm

    attn, is_value_key = f"model.layers.{layer}.self_attn", _is_value_key(config, layer)
    own = ("q_proj", "k_proj") if is_value_key else ("q_proj", "k_proj", "v_proj")
    made = SelfAttention.of(
        config,
        layer,
        weights.linear(*(f"{attn}.{name}" for name in own)),
        weights.linear(f"{attn}.o_proj"),
    )
    queries, keys = (weights.norm(f"{attn}.{name}_norm", config.norm_eps) for name in "qk")
    of_both = HeadNorm.join(queries, keys, made.n_heads, made.n_kv_heads)
    ones = torch.ones_like(of_both.weight[: made.n_kv_heads])
    norm = replace(of_both, weight=torch.cat((of_both.weight, ones)))
    has_tower = config.wrapper != "gemma4_unified"  # else pictures see themselves in all layers
    kind = replace(made.kind, is_causal=has_tower and config.window(layer) is None)
    return replace(made, kind=kind, qk_norm=norm, norms_values=True, is_value_key=is_value_key)


_LAYOUT: Final = replace(gemma2.LAYOUT, attention=Part(tensors=_attention, load=_load_attention))


def _load_experts(
    config: ModelConfig, experts: Experts, weights: WeightSource, layer: int, dense: Sublayer
) -> Sublayer:
    """Take the experts beside a dense MLP."""
    from shardnet.model.layers.decoder_layer import MlpSublayer, ParallelExpertsSublayer, Residual
    from shardnet.model.layers.experts import ScaledRouter, SoftmaxRouter, SparseMlp
    from shardnet.model.layers.modules import GatedMlp
    from shardnet.model.layers.norms import Norm

    assert isinstance(dense, MlpSublayer)
    assert isinstance(dense.mlp, GatedMlp)
    prefix = f"model.layers.{layer}"

    def norm(name: str) -> Norm:
        return weights.norm(f"{prefix}.{name}", config.norm_eps)

    scale = weights.parameter(f"{prefix}.router.scale") * config.hidden_size**-0.5
    router = ScaledRouter(
        norm=Norm(weight=scale, bias=None, eps=config.norm_eps),
        router=SoftmaxRouter.of(experts, weights.linear(f"{prefix}.router.proj", precise=True)),
        scales=weights.parameter(f"{prefix}.router.per_expert_scale"),
    )
    each = load_experts(config, weights, f"{prefix}.{EXPERTS.block}.experts", experts.n_experts)
    return ParallelExpertsSublayer(
        residual=dense.residual,
        dense=dense.mlp,
        dense_norm=norm("post_feedforward_layernorm_1"),
        around_experts=Residual(
            before=norm("pre_feedforward_layernorm_2"), after=norm("post_feedforward_layernorm_2")
        ),
        experts=SparseMlp(router=router, experts=each),
    )


def read_gguf(fields: GgufFields) -> dict[str, Any]:
    """Read the metadata, whose plain keys are those of layers without a window.

    The part of their columns that turns follows from factors of 1 and, for columns that do not, of
    1e30.
    """
    small = ("embedding_length_per_layer_input", "attention.shared_kv_layers")
    for key in small:
        if value := fields.take(key, int, 0):
            raise fields.unsupported(key, value, _SUPPORTED)
    config = read_gguf_sizes(fields)
    if fields.factors:
        config["rope_scaling"] = None
    n_layers = config["num_hidden_layers"]
    is_local = read_gguf_each(fields, "attention.sliding_window_pattern", bool, n_layers)
    kv_heads = read_gguf_each(fields, "attention.head_count_kv", int, n_layers)
    size = fields.positive("attention.key_length")
    local_size = fields.positive("attention.key_length_swa", size)
    for key, only in (
        ("attention.value_length", size),
        ("attention.value_length_swa", local_size),
        ("rope.dimension_count", size),
        ("rope.dimension_count_swa", local_size),
    ):
        fields.require(key, only)
    full = [layer for layer in range(n_layers) if not is_local[layer]]
    local = {kv_heads[layer] for layer in range(n_layers) if is_local[layer]}
    if not full or len(local) > 1:
        raise fields.unsupported(
            "attention.head_count_kv", kv_heads, "one number in all layers with a window"
        )
    theta = fields.number("rope.freq_base_swa", 10000.0, within=THETAS)
    rope = {"rope_theta": config.pop("rope_theta"), "rope_type": "proportional"}
    return config | {
        "head_dim": local_size,
        "num_key_value_heads": local.pop() if local else kv_heads[0],
        "layer_types": [SLIDING if has_window else FULL for has_window in is_local],
        "sliding_window": fields.positive("attention.sliding_window"),
        "per_layer_config": {
            str(layer): {"head_dim": size, "num_key_value_heads": kv_heads[layer]} for layer in full
        },
        "attention_k_eq_v": f"blk.{full[0]}.attn_v.weight" not in fields.tensors,
        "rope_parameters": {
            FULL: rope | {"partial_rotary_factor": _turning_share(fields, size)},
            SLIDING: {"rope_type": "default", "rope_theta": theta},
        },
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": fields.optional_number("final_logit_softcapping"),
        **_read_gguf_experts(fields),
    }


def _turning_share(fields: GgufFields, size: int) -> float:
    """Return the part of a head's columns that turns."""
    divisors = fields.factors.get(FREQS, (1.0,) * (size // 2))
    n_turning = divisors.count(1.0)
    resting = divisors[n_turning:]
    if len(divisors) != size // 2 or any(one < _RESTING for one in resting):
        raise fields.unsupported(
            FREQS, list(divisors), "ones, then 1e30, for half a head's columns"
        )
    return 2 * n_turning / size


def _read_gguf_experts(fields: Fields) -> dict[str, Any]:
    if not has_gguf_experts(fields):
        fields.ignore("expert_used_count", "expert_feed_forward_length")
        return {}
    fields.require("expert_gating_func", 1)  # softmax
    return {
        "enable_moe_block": True,
        "num_experts": fields.positive("expert_count"),
        "top_k_experts": fields.positive("expert_used_count"),
        "moe_intermediate_size": fields.positive("expert_feed_forward_length"),
    }


FAMILY = Family(
    model_type="gemma4_text",
    architecture="Gemma4ForCausalLM",
    read_config=read_config,
    layer_tensors=layer_tensors,
    load_stage=decoder_stage(load_layer),
    covers=covers,
    experts=EXPERTS,
    stacking=Stacking.CONCATENATED,
    gguf=GgufFormat(
        architecture="gemma4",
        read=read_gguf,
        block_names=(
            ("layer_scalar", "layer_output_scale.weight"),
            ("router.scale", "ffn_gate_inp.scale"),
            ("router.per_expert_scale", "ffn_down_exps.scale"),
        ),
    ),
    has_whole_heads=True,
)
_UNIFIED: Final = replace(
    FAMILY,
    model_type="gemma4_unified_text",
    architecture="Gemma4UnifiedForCausalLM",
    read_config=partial(read_config, max_positions=262144, window=1024),
    covers=partial(covers, per_layer=0),
    gguf=None,
)
"""The language model of the 12B by itself, as transformers saves it."""
FAMILIES: Final = (FAMILY, _UNIFIED)
