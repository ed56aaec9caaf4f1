"""DeepSeek-V4 (transformers, modeling_deepseek_v4.py): compressed attention, several streams.

Experts are chosen by the roots of softpluses, in the first layers by the token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from shardnet.errors import CheckpointError
from shardnet.model.config.decoder_config import read_decoder, read_expert_counts
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import (
    GgufFields,
    read_gguf_clamp,
    read_gguf_indexer,
    read_gguf_sizes,
    read_gguf_streams,
)
from shardnet.model.config.limits import NORM_EPS, THETAS
from shardnet.model.config.model_config import (
    Compressed,
    Experts,
    Indexer,
    ModelConfig,
    Rope,
    StreamKind,
    Streams,
)
from shardnet.model.config.rope import read_scaling
from shardnet.model.families import deepseek_v2
from shardnet.model.families.expert_parts import EXPERTS, RENAMED_BIAS, load_experts
from shardnet.model.families.family import GgufFormat, MtpNames
from shardnet.model.families.layout import Layout, record
from shardnet.model.families.parts import Part
from shardnet.model.families.tensor_shapes import STREAM_NAMES, Table, gated, linears, sparse_mlp

if TYPE_CHECKING:
    from shardnet.model.layers.experts import SparseMlp
    from shardnet.model.layers.weight_source import WeightSource
    from shardnet.model.mixers.compressed_attention import CompressedAttention

_SLIDING, _CHOSEN, _HEAVY = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
_OLD_RATES: Final = {"0": _SLIDING, "4": _CHOSEN, "128": _HEAVY}
"""Kinds of layers by how many positions make an entry, in older configs."""
_MOST_GROUPS: Final = 256
"""Of heads, each with a linear of its own: far more than any model has."""


ReadAttention = Callable[[Fields, ModelConfig], Compressed]


def _read_config(fields: Fields) -> ModelConfig:
    """Read a DeepseekV4Config."""
    return read_config(fields, _read_attention)


def read_config(
    fields: Fields, read_attention: ReadAttention, *, n_hashed: int = 3, is_lagged: bool = False
) -> ModelConfig:
    """Read what the configs of DeepSeek-V4 and V4.1 have in common."""
    ropes: dict[str, Rope] = {}

    def read_ropes(fields: Fields, max_positions: int, head_size: int) -> Rope:
        ropes.update(_read_ropes(fields, max_positions, head_size))
        return ropes["compress"]

    inner = fields.positive("moe_intermediate_size", fields.optional("intermediate_size") or 2048)
    config = read_decoder(
        fields,
        n_kv_heads=1,
        max_positions=1048576,
        head_size=512,
        intermediate_size=inner,
        rope=read_ropes,
        attention_bias=None,
    )
    if config.n_kv_heads != 1:
        raise fields.unsupported("num_key_value_heads", config.n_kv_heads, "1")
    for key in ("attention_bias", "mlp_bias"):
        fields.require(key, only=False)
    fields.require("norm_topk_prob", only=True)
    fields.require("scoring_func", "sqrtsoftplus")
    fields.ignore("num_nextn_predict_layers", "topk_method", "n_group", "topk_group")
    fields.ignore("expert_dtype")  # their tensors say so
    for what in ("block_size", "noise_token_id", "target_layer_ids", "markov_rank"):
        fields.ignore(f"dspark_{what}")  # predicts further tokens
    return replace(
        config,
        local_rope=ropes["main"],
        compressed=read_attention(fields, config),
        experts=_read_experts(fields, config, inner, n_hashed),
        streams=Streams(
            count=fields.positive("hc_mult", 4),
            kind=StreamKind.BALANCED,
            eps=fields.number("hc_eps", 1e-6, within=NORM_EPS),
            n_rounds=fields.positive("hc_sinkhorn_iters", 20, at_most=1000),
            has_head=not is_lagged,
            in_mtp=True,
            is_lagged=is_lagged,
        ),
    )


def _read_ropes(fields: Fields, max_positions: int, head_size: int) -> dict[str, Rope]:
    """Read the positions of layers without entries and with them, of which yarn scales no more."""
    theta = fields.number("rope_theta", 10000.0)
    longer = fields.number("compress_rope_theta", 160000.0)
    share = fields.optional_number("partial_rotary_factor")
    rotated = fields.optional("qk_rope_head_dim")
    share = share or (rotated / head_size if rotated else 64 / 512)
    given = fields.take("rope_parameters", dict, None) or fields.take("rope_scaling", dict, None)
    own = given or {}
    if not {"main", "compress"} <= own.keys():  # what is said of all is of layers with entries
        of_all = ("rope_theta", "partial_rotary_factor")
        own = {"main": {}, "compress": {key: own[key] for key in own if key not in of_all}}
    found = {}
    for name, base in (("main", theta), ("compress", longer)):
        raw = own[name]
        if raw.get("rope_type", raw.get("type")) == "yarn":
            raw = raw | {"attention_factor": raw.get("attention_factor") or 1.0}
        rope = fields.inner("rope_parameters", raw)
        plain = Rope(
            theta=rope.number("rope_theta", base), share=rope.number("partial_rotary_factor", share)
        )
        found[name] = read_scaling(rope, plain, max_positions=max_positions, head_size=head_size)
    return found


def _read_attention(fields: Fields, config: ModelConfig) -> Compressed:
    given = fields.take("compress_rates", dict, None) or {}
    rates = {_SLIDING: 0, _CHOSEN: 4, _HEAVY: 128} | given
    for key, kind in (("compress_rate_csa", _CHOSEN), ("compress_rate_hca", _HEAVY)):
        rates[kind] = fields.optional(key) or rates[kind]
    old = fields.take("compress_ratios", list, None)
    n = config.n_layers
    kinds = (
        [_OLD_RATES.get(str(rate)) for rate in old]
        if old
        else [_HEAVY] * min(n, 2) + [(_HEAVY, _CHOSEN)[layer % 2] for layer in range(n - 2)]
    )
    kinds = (fields.take("layer_types", list, None) or kinds)[:n]
    if len(kinds) != n or not set(map(str, kinds)) <= rates.keys():
        raise fields.damaged(f"layer_types {kinds} do not say the kinds of {n} layers")
    own = [rate for kind, rate in rates.items() if kind != _SLIDING]
    if rates[_SLIDING] != 0 or not all(
        type(rate) is int and 1 <= rate <= 128 and 256 % rate == 0 for rate in own
    ):
        raise fields.damaged(f"compress_rates {rates} do not divide a block of 256 positions")
    choosing = tuple(layer for layer, kind in enumerate(kinds) if kind == _CHOSEN)
    return read_compressed(fields, config, (*(rates[kind] for kind in kinds), 0), choosing)


def read_compressed(
    fields: Fields, config: ModelConfig, rates: tuple[int, ...], choosing: tuple[int, ...]
) -> Compressed:
    """Read attention with entries of so many positions, among which some layers choose."""
    assert config.rope is not None
    n_groups = fields.positive("o_groups", 8, at_most=_MOST_GROUPS)
    if config.n_heads * config.head_size % n_groups:
        raise fields.damaged(f"o_groups {n_groups} do not divide the columns of the heads")
    return Compressed(
        window=fields.positive("sliding_window", 128),
        rates=rates,
        indexer=Indexer(
            n_heads=fields.positive("index_n_heads", 64),
            head_size=fields.positive("index_head_dim", 128),
            n_chosen=fields.positive("index_topk", 512),
            interleaved=True,
            rotates_last=True,
            layers=choosing,
        ),
        head_size=config.head_size,
        rope_size=config.rope.rotated(config.head_size),
        query_rank=fields.positive("q_lora_rank", 1024),
        n_groups=n_groups,
        output_rank=fields.positive("o_lora_rank", 1024),
    )


def _read_experts(fields: Fields, config: ModelConfig, inner: int, n_hashed: int) -> Experts:
    n = config.n_layers
    n_experts, top_k = read_expert_counts(fields, ("n_routed_experts", "num_local_experts"), 256, 6)
    n_hashed = fields.take("num_hash_layers", int, n_hashed)
    kinds = fields.take("mlp_layer_types", list, None) or ["hash_moe"] * min(n, n_hashed) + [
        "moe"
    ] * max(0, n - n_hashed)
    if len(kinds) != n or not set(map(str, kinds)) <= {"hash_moe", "moe"}:
        raise fields.damaged(f"mlp_layer_types {kinds} do not say the kinds of {n} layers")
    return Experts(
        n_experts=n_experts,
        top_k=top_k,
        intermediate_size=inner,
        normalize_top_k=True,
        shared_intermediate_size=inner * fields.positive("n_shared_experts", 1),
        swiglu_limit=fields.number("swiglu_limit", 10.0),
        output_scale=fields.number("routed_scaling_factor", 1.5),
        hashed_layers=tuple(layer for layer, kind in enumerate(kinds) if kind == "hash_moe"),
        layers=tuple(range(n)),
    )


def attention_tensors(config: ModelConfig, layer: int) -> Table:
    """Name the projections, the norms, the sinks, and what makes entries and chooses them."""
    own, attn, hidden = config.compressed, f"model.layers.{layer}.self_attn", config.hidden_size
    assert own is not None
    size = own.head_size
    shapes = {
        "q_a_proj": (own.query_rank, hidden),
        "q_b_proj": (config.n_heads * size, own.query_rank),
        "kv_proj": (size, hidden),
        "o_b_proj": (hidden, own.n_groups * own.output_rank),
    }
    of_group = (own.output_rank, config.n_heads * size // own.n_groups)
    shapes |= {f"o_a_proj.{group}": of_group for group in range(own.n_groups)}
    made = linears(attn, shapes) | {f"{attn}.sinks": (config.n_heads,)}
    made |= {f"{attn}.q_a_norm.weight": (own.query_rank,), f"{attn}.kv_norm.weight": (size,)}
    rate, name = own.rates[layer], f"{attn}.compressor"
    chooses = layer in own.indexer.layers
    if own.sources:
        made |= _shared_compressor(config, layer, name)
    elif rate:
        made |= _compressor(name, rate, size, hidden, twice=chooses)
    if chooses:
        index = own.indexer
        if not own.sources:
            made |= _compressor(f"{name}.indexer", rate, index.head_size, hidden, twice=True)
        queries = {"q_b_proj": (index.n_heads * index.head_size, own.query_rank)}
        made |= linears(f"{name}.indexer", queries)
        made |= linears(f"{name}.indexer.scorer", {"weights_proj": (index.n_heads, hidden)})
    return made


def _compressor(name: str, rate: int, size: int, hidden: int, *, twice: bool) -> Table:
    width = (1 + twice) * size
    made = linears(name, {"kv_proj": (width, hidden), "gate_proj": (width, hidden)})
    return made | {f"{name}.position_bias": (rate, width), f"{name}.kv_norm.weight": (size,)}


def _shared_compressor(config: ModelConfig, layer: int, name: str) -> Table:
    """Name what makes the entries of several layers, in that whose they are."""
    own = config.compressed
    assert own is not None
    if not own.rates[layer] or own.sources[layer] != layer:
        return {}
    gates = ("gate_proj",) if own.rates[layer] > 1 else ()
    shape, key = (own.head_size, config.hidden_size), own.indexer.head_size
    made = linears(name, dict.fromkeys(("kv_proj", *gates), shape))
    made |= {f"{name}.kv_norm.weight": (own.head_size,), f"{name}.indexer.k_norm.weight": (key,)}
    return made | linears(f"{name}.indexer", {"wk": (key, own.head_size)})


def load_attention(config: ModelConfig, weights: WeightSource, layer: int) -> CompressedAttention:
    """Take the parameters of the attention of the absolute `layer`."""
    from shardnet.model.mixers.compressed_attention import CompressedAttention

    return CompressedAttention(config, weights, layer)


def expert_tensors(config: ModelConfig, layer: int) -> Table:
    """Name the router, its experts and the shared one, and what the choice goes by."""
    experts, block = config.experts, f"model.layers.{layer}.mlp"
    assert experts is not None
    inner = experts.shared_intermediate_size
    made = sparse_mlp(config, layer, EXPERTS)
    made |= gated(config, f"{block}.shared_experts", inner, with_bias=False)
    if layer in experts.hashed_layers:
        return made | {f"{block}.gate.tid2eid": (config.vocab_size, experts.top_k)}
    return made | {f"{block}.gate.e_score_correction_bias": (experts.n_experts,)}


def load_deepseek_experts(config: ModelConfig, weights: WeightSource, layer: int) -> SparseMlp:
    """Take the parameters of the router, the experts and the shared one of the absolute `layer`."""
    import torch

    from shardnet.model.layers.experts import ClampedMlp, SparseMlp, SqrtSoftplusRouter
    from shardnet.model.layers.modules import GatedMlp

    experts, block = config.experts, f"model.layers.{layer}.mlp"
    assert experts is not None
    limit = experts.swiglu_limit
    assert limit is not None
    is_hashed = layer in experts.hashed_layers
    name = "tid2eid" if is_hashed else "e_score_correction_bias"
    said = weights.parameter(f"{block}.gate.{name}")
    of_tokens = said.to(torch.int32) if is_hashed else None
    if of_tokens is not None and not 0 <= of_tokens.min() <= of_tokens.max() < experts.n_experts:
        raise CheckpointError(
            f"{block}.gate.{name} names experts that are none of {experts.n_experts}",
            remedy="fetch the checkpoint again",
        )
    each = load_experts(config, weights, f"{block}.experts", experts.n_experts)
    common = GatedMlp.load(config, weights, f"{block}.shared_experts")
    *clamped, shared = (
        ClampedMlp(limit=limit, gate_up_proj=one.gate_up_proj, down_proj=one.down_proj)
        for one in (*each, common)
    )
    router = SqrtSoftplusRouter(
        experts=experts,
        gate=weights.linear(f"{block}.gate", wide=True),
        bias=None if is_hashed else said,
        of_tokens=of_tokens,
    )
    return SparseMlp(router=router, experts=clamped, shared=shared, by_token=is_hashed)


def _read_gguf(fields: GgufFields) -> dict[str, Any]:
    """Read the metadata."""
    fields.require("expert_gating_func", 4)  # roots of softpluses
    fields.ignore("embedding_length_out")
    experts = deepseek_v2.read_gguf_experts(fields)
    del experts["first_k_dense_replace"]  # there is none
    inner = experts["moe_intermediate_size"]
    sizes = read_gguf_sizes(fields, intermediate_size=inner)
    counts = {
        "num_key_value_heads": "attention.head_count_kv",
        "head_dim": "attention.key_length",
        "qk_rope_head_dim": "rope.dimension_count",
        "q_lora_rank": "attention.q_lora_rank",
        "sliding_window": "attention.sliding_window",
        "o_groups": "attention.output_group_count",
        "o_lora_rank": "attention.output_lora_rank",
        "hc_sinkhorn_iters": "hyper_connection.sinkhorn_iterations",
    }
    made = {key: fields.positive(name) for key, name in counts.items()}
    fields.require("attention.value_length", made["head_dim"])
    clamps = ("swiglu_clamp_exp", "swiglu_clamp_shexp")
    return {
        **(sizes | experts | made | read_gguf_streams(fields) | read_gguf_indexer(fields)),
        "compress_ratios": fields.take("attention.compress_ratios", list),
        "compress_rope_theta": fields.number("attention.compress_rope_freq_base", within=THETAS),
        "num_hash_layers": fields.take("hash_layer_count", int),
        "swiglu_limit": read_gguf_clamp(fields, sizes["num_hidden_layers"], *clamps),
    }


_GGUF_NAMES: Final = (
    *STREAM_NAMES,
    *(
        (f"self_attn.compressor.{begin}{own}", f"{stored}_compressor_{kind}.weight")
        for begin, stored in (("", "attn"), ("indexer.", "indexer"))
        for own, kind in (
            ("kv_proj.weight", "kv"),
            ("gate_proj.weight", "gate"),
            ("position_bias", "ape"),
            ("kv_norm.weight", "norm"),
        )
    ),
    ("self_attn.compressor.indexer.q_b_proj.weight", "indexer.attn_q_b.weight"),
    ("self_attn.compressor.indexer.scorer.weights_proj.weight", "indexer.proj.weight"),
    ("self_attn.q_a_norm.weight", "attn_q_a_norm.weight"),
    ("self_attn.kv_proj.weight", "attn_kv.weight"),
    ("self_attn.kv_norm.weight", "attn_kv_a_norm.weight"),
    ("self_attn.o_b_proj.weight", "attn_output_b.weight"),
    ("self_attn.sinks", "attn_sinks.weight"),
    ("mlp.gate.tid2eid", "ffn_gate_tid2eid.weight"),
)
RENAMED: Final = (
    (".attn.indexer.compressor.", ".attn.compressor.indexer."),
    (".attn.indexer.weights_proj.", ".attn.compressor.indexer.scorer.weights_proj."),
    (".attn.indexer.wq_b.", ".attn.compressor.indexer.q_b_proj."),
    (".attn.", ".self_attn."),
    (".ffn.", ".mlp."),
    (".attn_norm.", ".input_layernorm."),
    (".ffn_norm.", ".post_attention_layernorm."),
    (".self_attn.norm.", ".self_attn.kv_norm."),
    (".compressor.norm.", ".compressor.kv_norm."),
    (".indexer.norm.", ".indexer.kv_norm."),
    (".hc_attn_", ".attn_hc."),
    (".hc_ffn_", ".ffn_hc."),
    (".attn_sink", ".sinks"),
    (".ape", ".position_bias"),
    (".wq_a.", ".q_a_proj."),
    (".wq_b.", ".q_b_proj."),
    (".wkv.", ".kv_proj."),
    (".wgate.", ".gate_proj."),
    (".wo_a.", ".o_a_proj."),
    (".wo_b.", ".o_b_proj."),
    (".q_norm.", ".q_a_norm."),
    (".gate.bias", ".gate.e_score_correction_bias"),
    (".w1.", ".gate_proj."),
    (".w2.", ".down_proj."),
    (".w3.", ".up_proj."),
    ("^embed.", "model.embed_tokens."),
    ("^layers.", "model.layers."),
    ("^norm.", "model.norm."),
    ("^hc_head_", "model.hc_head.hc_"),
    ("^head.", "lm_head."),
    (".hc_head_", ".hc_head.hc_"),
)
"""What the published files call tensors."""
FAMILY = record(
    "deepseek_v4",
    "DeepseekV4ForCausalLM",
    _read_config,
    Layout(
        attention=Part(tensors=attention_tensors, load=load_attention),
        mlp=Part(tensors=expert_tensors, load=load_deepseek_experts),
    ),
    renamed_tensors=RENAMED,
    mtp=MtpNames.PREFIX,
    ignored_tensors=r"blk\.\d+\.exp_probs_b_vl\.bias",
    experts=EXPERTS,
    gguf=GgufFormat(
        architecture="deepseek4",
        named_as="deepseek2",
        read=_read_gguf,
        renamed=RENAMED_BIAS,
        block_names=_GGUF_NAMES,
    ),
    has_whole_heads=True,
)
