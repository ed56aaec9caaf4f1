"""GLM-5.3-Flash (transformers, modeling_glm5_next.py): KDA in three of four layers, latents beside.

The KDA is Kimi Linear's, with decays that may have a bound. DeepSeek's latents have no positions;
which ones a row attends to is chosen by entries of several. Residual streams are DeepSeek-V4's, and
all MLPs are clamped.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from shardnet.model.config.decoder_config import FULL, LINEAR, read_layer_kinds
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import (
    GgufFields,
    read_gguf_clamp,
    read_gguf_indexer,
    read_gguf_streams,
)
from shardnet.model.config.limits import NORM_EPS
from shardnet.model.config.model_config import (
    DeltaNet,
    Indexer,
    Latent,
    ModelConfig,
    Rope,
    StreamKind,
    Streams,
)
from shardnet.model.families import bailing_hybrid, deepseek_v2, kimi_linear, latent_table
from shardnet.model.families.expert_parts import DEEPSEEK_EXPERTS, STACKED
from shardnet.model.families.family import MtpNames
from shardnet.model.families.indexed_table import read_choosing, read_indexer
from shardnet.model.families.layout import Layout, record
from shardnet.model.families.tensor_shapes import STREAM_NAMES

_LATENT: Final = Latent(
    rank=512, rope_size=0, nope_size=256, value_size=256, query_rank=1536, interleaved=False
)
_INDEXED: Final = ("indexed_attention", "deepseek_sparse_attention", FULL)
"""What layers with latents are called: by transformers, and by the makers."""
_INTERVAL: Final = 4
_WITHOUT_EFFECT: Final = (
    *("architectures", "first_k_dense_replace", "head_dim", "indexer_rope_interleave", "mlp_bias"),
    *("partial_rotary_factor", "rope_interleave", "rope_parameters", "rope_scaling", "rope_theta"),
)
"""What transformers takes no note of: nothing turns, and kinds of MLPs are listed."""


def _read_config(fields: Fields) -> ModelConfig:
    """Read a Glm5NextTextConfig, or what its makers publish."""
    fields = _without_positions(fields)
    config = deepseek_v2.read_latent_attention(
        fields,
        interleaved=False,
        max_positions=1048576,
        norm_eps=1e-5,
        defaults=_LATENT,
        rope=lambda *_: Rope(),
        has_whole_heads=True,
    )
    latent = config.latent
    if latent is None or latent.query_rank is None:
        raise fields.unsupported("q_lora_rank", None, "a rank, which positions are chosen by")
    fields.require("hidden_act", "silu")
    limit = fields.number("swiglu_limit", 10.0)
    config = latent_table.read_experts(fields, config, (288, 8))
    if config.experts is not None:
        config = replace(config, experts=replace(config.experts, swiglu_limit=limit))
    kinds = read_layer_kinds(fields, config.n_layers, *_INDEXED, LINEAR) or [
        LINEAR if n % _INTERVAL != _INTERVAL - 1 else FULL for n in range(config.n_layers)
    ]
    for key in ("index_kpool_compress", "mhc", "mla_use_nope"):
        fields.require(key, only=True)
    fields.require("moe_router_dtype", "float32")
    fields.ignore("output_router_logits", "router_aux_loss_coef", "num_nextn_predict_layers")
    fields.ignore("index_share_for_mtp_iteration")
    config = replace(
        config,
        latent=replace(latent, norm_eps=config.norm_eps),
        nope_layers=tuple(range(config.n_layers + 1)),
        mlp_limit=limit,
        delta_net=_read_delta_net(fields, kinds),
        indexer=_read_indexer(fields, kinds),
        streams=Streams(
            count=fields.positive("hc_mult", 4),
            kind=StreamKind.BALANCED,
            eps=fields.number("hc_eps", 1e-6, within=NORM_EPS),
            n_rounds=fields.positive("hc_sinkhorn_iters", 20, at_most=1000),
            has_head=False,
        ),
    )
    fields.note_the_rest()
    return config


def _without_positions(fields: Fields) -> Fields:
    """Take all keys but those without effect; refuse latents with a rotated part."""
    fields.require("qk_rope_head_dim", 0)
    raw: dict[str, Any] = {
        "n_routed_experts" if key == "num_local_experts" else key: value
        for key, value in fields.take_all().items()
        if key not in (*_WITHOUT_EFFECT, "qk_rope_head_dim")
    }
    return Fields(raw, fields.where, unknown=fields.unknown)


def _read_delta_net(fields: Fields, kinds: list[str]) -> DeltaNet | None:
    """Read the sizes of KDA, which the makers keep in an object; None without such a layer."""
    own = fields.inner("linear_attn_config", fields.take("linear_attn_config", dict, {}))
    own.ignore("full_attn_layers", "kda_layers")  # the kinds of layers say so
    n_heads = own.positive("num_heads", fields.positive("linear_num_heads", 64))
    size = own.positive("head_dim", fields.positive("linear_head_dim", 128))
    taps = fields.positive("linear_conv_kernel_dim", 4)
    is_open = fields.given("linear_lower_bound") and fields.missing("linear_lower_bound")
    floor = 0.0 if is_open else _read_floor(fields, "linear_lower_bound")
    if own.given("gate_lower_bound"):
        floor = 0.0 if own.missing("gate_lower_bound") else _read_floor(own, "gate_lower_bound")
    if fields.given("linear_attn_config") and own.take("safe_gate", bool, True) and not floor:
        floor = -5.0
    taps = own.positive("short_conv_kernel_size", taps, at_most=kimi_linear.MOST_TAPS)
    own.note_the_rest()
    layers = (n for n, kind in enumerate(kinds) if kind == LINEAR)
    return kimi_linear.kda(fields, layers, n_heads, size, taps, floor)


def _read_floor(fields: Fields, key: str) -> float:
    return fields.number(key, -5.0, within=bailing_hybrid.FLOORS)


def _read_indexer(fields: Fields, kinds: list[str]) -> Indexer | None:
    """Read what chooses positions in layers with latents; None without such a layer.

    One that takes a choice takes that of the layer right before it: transformers hands it no
    further.
    """
    n_pooled = fields.positive("index_kpool", 16)
    fields.require("index_kpool_always_select_tail", True)
    chooses = read_choosing(fields, len(kinds), (1, 2))
    latents = [n for n, kind in enumerate(kinds) if kind != LINEAR]
    choosing = [n for n in latents if chooses[n]]
    if lost := [n for n in latents if n not in choosing and n - 1 not in choosing]:
        before = "a choice of the layer right before"
        raise fields.unsupported("indexer_types", f"shared in layer {lost[0]}", before)
    choosing.append(len(kinds))  # what predicts further tokens
    read = replace(read_indexer(fields, choosing, 32), n_pooled=n_pooled)
    if read.n_chosen % n_pooled:
        raise fields.damaged(f"index_topk {read.n_chosen} is no multiple of index_kpool {n_pooled}")
    return read if latents else None


def _read_gguf(fields: GgufFields) -> dict[str, Any]:
    """Read the metadata: Kimi Linear's, and of what GLM's layers have beside."""
    config = kimi_linear.read_gguf(fields)
    n_layers, n_dense = config["num_hidden_layers"], config["first_k_dense_replace"]
    clamps = ("swiglu_clamp_exp", "swiglu_clamp_shexp")
    chooses = [f"blk.{n}.indexer.proj.weight" in fields.tensors for n in range(n_layers)]
    fields.ignore("attention.indexer.types")  # the tensors say so
    fields.ignore("attention.layer_norm_epsilon")  # of the index, where it is a constant
    fields.require("attention.indexer.kpool_select_tail", only=True)
    return (
        config
        | read_gguf_indexer(fields)
        | read_gguf_streams(fields)
        | {
            "mlp_layer_types": ["dense" if n < n_dense else "sparse" for n in range(n_layers)],
            "linear_lower_bound": fields.take("kda.gate_lower_bound", float, None),
            "index_kpool": fields.positive("attention.indexer.kpool"),
            "indexer_types": ["full" if own else "shared" for own in chooses],
            "swiglu_limit": read_gguf_clamp(fields, n_layers, *clamps),
            "hc_sinkhorn_iters": fields.positive("hyper_connection.sinkhorn_iterations"),
        }
    )


_INDEX: Final = {
    "k_norm.weight": "indexer.k_norm.weight",
    "k_norm.bias": "indexer.k_norm.bias",
    "weights_proj.weight": "indexer.proj.weight",
    "wk.weight": "indexer.attn_k.weight",
    "wq_b.weight": "indexer.attn_q_b.weight",
    "pool_gate.weight": "indexer_compressor_gate.weight",
    "index_kpool_compress_ape": "indexer_compressor_ape.weight",
}
FAMILY = record(
    "glm5_next_text",
    "Glm5NextTextModel",
    _read_config,
    Layout(
        attention=kimi_linear.low_rank_part(lambda own: (own.n_value_heads,)), mlp=DEEPSEEK_EXPERTS
    ),
    renamed_tensors=(
        (".hc_attn_", ".attn_hc."),
        (".hc_ffn_", ".ffn_hc."),
        (".self_attn.forget_gate.", ".self_attn."),
        (".index_kpool_compress_gate", ".pool_gate.weight"),
    ),
    ignored_tensors=r"model\.layers\.(45\..*|\d+\.shared_head\..*)",
    mtp=MtpNames.LAYER,
    **STACKED,
    gguf=replace(
        kimi_linear.GGUF,
        architecture="glm5-next",
        read=_read_gguf,
        named_as="kimi-linear",
        block_names=(
            *STREAM_NAMES,
            *((f"self_attn.indexer.{own}", stored) for own, stored in _INDEX.items()),
        ),
    ),
    has_whole_heads=True,
)
