"""Kimi Linear (transformers, modeling_kimi_linear.py): KDA in most layers, latents in the others.

KDA is a gated DeltaNet whose state decays by columns of its keys, with gates and decays of a low
rank. DeepSeek-V3's latents have no positions here; its experts are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from shardnet.errors import shown
from shardnet.model.config.decoder_config import FULL, LINEAR, check_state_size, read_layer_kinds
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import GgufFields, read_gguf_each
from shardnet.model.config.limits import MAX_LAYERS
from shardnet.model.config.model_config import DeltaNet, Latent, ModelConfig
from shardnet.model.families import deepseek_v2
from shardnet.model.families.expert_parts import DEEPSEEK_EXPERTS, STACKED
from shardnet.model.families.family import GgufFormat
from shardnet.model.families.layout import Layout, record
from shardnet.model.families.parts import LATENT_HEADS, Part
from shardnet.model.families.tensor_shapes import Shape, Table, linears

if TYPE_CHECKING:
    from shardnet.model.layers.modules import Attention
    from shardnet.model.layers.weight_source import WeightSource
    from shardnet.model.mixers.gated_delta import Project

LATENT: Final = Latent(
    rank=512, rope_size=64, nope_size=128, value_size=128, query_rank=None, interleaved=False
)
_OTHER_NAMES: Final = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
"""What DeepSeek's configs call the same."""
_LEFT_OUT: Final = ("architectures", "head_dim", "tie_word_embeddings")
"""What is looked at elsewhere, or counts for nothing: transformers ties no head."""
_INTERVAL: Final = 4
_NAMES: Final = ("q_conv1d", "k_conv1d", "v_conv1d", "o_norm", "o_proj")
MOST_TAPS: Final = 64


def read_config(fields: Fields) -> ModelConfig:
    """Read a KimiLinearConfig, or what its makers publish."""
    fields = renamed(fields)
    for key in ("use_grouped_topk", "mla_use_nope"):
        fields.require(key, only=True)
    fields.require("moe_router_activation_func", "sigmoid")
    config = deepseek_v2.read_latent_attention(
        fields, interleaved=False, max_positions=1048576, norm_eps=1e-5, defaults=LATENT
    )
    config = replace(
        config,
        nope_layers=tuple(range(config.n_layers)),
        delta_net=_read_delta_net(fields, config.n_layers),
    )
    config = deepseek_v2.read_experts(fields, config, (256, 8), 1024, 1, output_scale=2.446)
    fields.note_the_rest()
    return config


def renamed(fields: Fields) -> Fields:
    """Take all keys, under DeepSeek's names."""
    raw = {
        _OTHER_NAMES.get(key, key): value
        for key, value in fields.take_all().items()
        if key not in _LEFT_OUT
    }
    return Fields(raw, fields.where, unknown=fields.unknown)


def _read_delta_net(fields: Fields, n_layers: int) -> DeltaNet | None:
    """Read the sizes of KDA, which the makers keep in an object; None without such a layer."""
    own = fields.inner("linear_attn_config", fields.take("linear_attn_config", dict, {}))
    n_heads = own.positive("num_heads", fields.positive("linear_num_heads", 32))
    size = own.positive("head_dim", fields.positive("linear_head_dim", 128))
    taps = fields.positive("linear_conv_kernel_dim", 4)
    layers = _read_layers(fields, own, n_layers)
    taps = own.positive("short_conv_kernel_size", taps, at_most=MOST_TAPS)
    own.note_the_rest()
    return kda(fields, layers, n_heads, size, taps)


def kda(
    fields: Fields, layers: Iterable[int], n_heads: int, size: int, taps: int, floor: float = 0.0
) -> DeltaNet | None:
    """Make KDA with heads of `size` columns; None without layers that have it.

    Raises CheckpointError for states that would fill the memory.
    """
    read = DeltaNet(
        n_key_heads=n_heads,
        n_value_heads=n_heads,
        key_size=size,
        value_size=size,
        n_taps=taps,
        layers=tuple(layers),
        has_key_decays=True,
        decay_floor=floor,
    )
    check_state_size(fields, read)
    return read if read.layers else None


def _read_layers(fields: Fields, own: Fields, n_layers: int) -> tuple[int, ...]:
    """Read which layers have KDA: by kinds, by their numbers from 1 on, or all but every fourth."""
    full, linear = (own.take(key, list, []) for key in ("full_attn_layers", "kda_layers"))
    kinds = read_layer_kinds(fields, n_layers, FULL, LINEAR)
    if kinds is None and (full or linear):
        if any(type(n) is not int for n in [*full, *linear]) or sorted([*full, *linear]) != [
            *range(1, n_layers + 1)
        ]:
            raise fields.damaged(
                f"linear_attn_config has full_attn_layers {shown(full)} and kda_layers "
                f"{shown(linear)}, expected each of {n_layers} layers in one of them"
            )
        return tuple(sorted(n - 1 for n in linear))
    if kinds is None:
        return tuple(n for n in range(n_layers) if n == 0 or n % _INTERVAL)
    return tuple(n for n in range(n_layers) if kinds[n] == LINEAR)


def low_rank_part(rates: Callable[[DeltaNet], Shape]) -> Part:
    """Make the part of KDA with gates and decays of a low rank, or of latent attention.

    `rates` is the shape of what KDA decays by.
    """

    def tensors(config: ModelConfig, layer: int) -> Table:
        own = config.delta_net
        if own is None or layer not in own.layers:
            return LATENT_HEADS.tensors(config, layer)
        return _low_rank_tensors(config, own, f"model.layers.{layer}.self_attn", rates(own))

    def load(config: ModelConfig, weights: WeightSource, layer: int) -> Attention:
        own = config.delta_net
        if own is None or layer not in own.layers:
            latent: Attention = LATENT_HEADS.load(config, weights, layer)
            return latent
        return _load_low_rank(config, own, weights, f"model.layers.{layer}.self_attn")

    return Part(tensors=tensors, load=load)


def _low_rank_tensors(config: ModelConfig, own: DeltaNet, prefix: str, rates: Shape) -> Table:
    """Name KDA below `prefix`, with `rates` of the shape."""
    hidden, size, width = config.hidden_size, own.key_size, own.key_width
    ranks = {
        "f_a_proj": (size, hidden),
        "f_b_proj": (width, size),
        "g_a_proj": (size, hidden),
        "g_b_proj": (width, size),
    }
    decays = {"A_log": rates, "dt_bias": (width,)}
    return delta_tensors(config, own, prefix, ranks, decays)


def delta_tensors(
    config: ModelConfig,
    own: DeltaNet,
    prefix: str,
    gates: dict[str, tuple[int, int]],
    decays: Mapping[str, Shape],
) -> Table:
    """Name a recurrence below `prefix`, with linears of its `gates`, and of what `decays` it."""
    hidden = config.hidden_size
    widths = {"q": own.key_width, "k": own.key_width, "v": own.value_width}
    shapes = {f"{name}_proj": (width, hidden) for name, width in widths.items()} | gates
    shapes |= {"b_proj": (own.n_value_heads, hidden), "o_proj": (hidden, own.value_width)}
    return (
        linears(prefix, shapes)
        | {f"{prefix}.{n}_conv1d.weight": (w, 1, own.n_taps) for n, w in widths.items()}
        | {f"{prefix}.{name}": shape for name, shape in decays.items()}
        | {f"{prefix}.o_norm.weight": (own.value_size,)}
    )


def _load_low_rank(
    config: ModelConfig, own: DeltaNet, weights: WeightSource, prefix: str
) -> Attention:
    """Take the KDA below `prefix`, whose gates and decays are of a low rank."""
    from shardnet.model.mixers.gated_delta import LowRankProjections

    names = [f"{prefix}.{name}_proj" for name in ("q", "k", "v", "g_a")]
    small = [f"{prefix}.{name}_proj" for name in ("b", "f_a")]
    project = LowRankProjections(
        config=own,
        qkv_proj=weights.linear(*names),
        gate_proj=weights.linear(f"{prefix}.g_b_proj"),
        small_proj=weights.linear(*small, precise=True),
        decay_proj=weights.linear(f"{prefix}.f_b_proj", precise=True),
    )
    floor = own.decay_floor
    return load_delta_net(config, weights, prefix, project, gates_alone=True, decay_floor=floor)


def load_delta_net(
    config: ModelConfig,
    weights: WeightSource,
    prefix: str,
    project: Project,
    names: Sequence[str] = _NAMES,
    **more: Any,
) -> Attention:
    """Take the recurrence below `prefix`, whose linears `project`.

    `names` are those of the convolutions, the norm and the output, `more` other parameters.
    """
    import torch

    from shardnet.model.kernels.recurrence import RecurrenceParameters
    from shardnet.model.mixers.gated_delta import GatedDeltaNet

    own = config.delta_net
    assert own is not None
    *convolutions, norm, output = names
    taps = torch.cat([weights.parameter(f"{prefix}.{name}.weight") for name in convolutions])
    parameters = RecurrenceParameters(
        taps=taps.squeeze(1).T.contiguous(),
        decay_rate=weights.parameter(f"{prefix}.A_log").view(-1).exp().neg(),
        decay_bias=weights.parameter(f"{prefix}.dt_bias"),
        norm_weight=weights.parameter(f"{prefix}.{norm}.weight"),
        **{"norm_eps": config.norm_eps, **more},
    )
    linear = weights.linear(f"{prefix}.{output}")
    return GatedDeltaNet.of(own, config.activation, project, parameters, linear)


def read_gguf(fields: GgufFields) -> dict[str, Any]:
    """Read the metadata: layers with KDA have no heads of keys, and as many of KDA as others."""
    n_layers = fields.positive("block_count", at_most=MAX_LAYERS)
    each = read_gguf_each(fields, "attention.head_count_kv", int, n_layers)
    fields.require("expert_gating_func", 2)  # sigmoid
    config = deepseek_v2.read_gguf(fields)
    return config | {
        "norm_topk_prob": fields.take("expert_weights_norm", bool, True),
        "layer_types": [FULL if count else LINEAR for count in each],
        "linear_num_heads": config["num_attention_heads"],
        "linear_head_dim": fields.positive("kda.head_dim"),
        "linear_conv_kernel_dim": fields.positive("ssm.conv_kernel"),
    }


GGUF: Final = GgufFormat(
    architecture="kimi-linear",
    read=read_gguf,
    decay=".A_log",
    renamed=(("correction_bias", "correction.bias"), (".dt_bias", ".dt_proj.bias")),
)
FAMILY = record(
    "kimi_linear",
    "KimiLinearForCausalLM",
    read_config,
    Layout(attention=low_rank_part(lambda own: (1, 1, own.n_value_heads, 1)), mlp=DEEPSEEK_EXPERTS),
    renamed_tensors=(
        (".block_sparse_moe.", ".mlp."),
        (".w1.", ".gate_proj."),
        (".w2.", ".down_proj."),
        (".w3.", ".up_proj."),
    ),
    **STACKED,
    gguf=GGUF,
    has_whole_heads=True,
)
