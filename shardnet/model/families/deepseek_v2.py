"""DeepSeek-V2 (transformers, modeling_deepseek_v2.py): attention over latents, grouped experts.

What V3 says in the same words is here too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from shardnet.model.config.decoder_config import read_decoder, read_expert_counts, read_mlp_kinds
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import GgufFields, read_gguf_sizes
from shardnet.model.config.model_config import Experts, Latent, ModelConfig
from shardnet.model.config.rope import rope_object, yarn_magnitude
from shardnet.model.families.expert_parts import GROUPED_EXPERTS, STACKED, with_experts
from shardnet.model.families.family import GgufFormat
from shardnet.model.families.layout import Layout, record
from shardnet.model.families.parts import LATENT_HEADS

LATENT = Latent(
    rank=512, rope_size=64, nope_size=128, value_size=128, query_rank=1536, interleaved=True
)
"""What transformers takes where a key is missing."""
_SIGMOID = 2
"""How experts are chosen, by its number in GGUF."""


def read_config(fields: Fields) -> ModelConfig:
    """Read a DeepseekV2Config. Weights that add up to 1 are refused: transformers ignores them."""
    config = replace(
        read_latent_attention(fields, interleaved=True, max_positions=2048),
        mlp_bias=fields.take("mlp_bias", bool, False),
    )
    fields.require("scoring_func", "softmax")
    fields.require("norm_topk_prob", False)
    method = fields.one_of("topk_method", ("greedy", "group_limited_greedy"), "greedy")
    if method == "greedy":
        fields.ignore("n_group", "topk_group")
    smallest = 1 if method == "group_limited_greedy" else None
    return read_experts(
        fields, config, (64, None), 1407, 0, shared=2, normalize_top_k=False, smallest=smallest
    )


def read_latent_attention(
    fields: Fields,
    *,
    interleaved: bool,
    defaults: Latent = LATENT,
    has_whole_heads: bool = False,
    scaling: Mapping[str, Any] = MappingProxyType({}),
    has_kv_heads: bool = True,
    **more: Any,
) -> ModelConfig:
    """Read what V2 and V3 say alike, but for the experts.

    `interleaved`: pairs that are rotated together stand side by side. `defaults` are the family's,
    `more` is as in `read_decoder`. With `has_whole_heads` a `head_dim` counts all of a key's
    columns, else the rotated ones. `scaling` is as in `read_rope`. Without `has_kv_heads` the
    number of KV heads says nothing.
    """
    fields.require("moe_layer_freq", 1)
    query_rank = fields.optional("q_lora_rank")
    latent = Latent(
        rank=fields.positive("kv_lora_rank", defaults.rank),
        rope_size=defaults.rope_size and fields.positive("qk_rope_head_dim", defaults.rope_size),
        nope_size=fields.positive("qk_nope_head_dim", defaults.nope_size),
        value_size=fields.positive("v_head_dim", defaults.value_size),
        query_rank=query_rank if fields.given("q_lora_rank") else defaults.query_rank,
        interleaved=interleaved,
    )
    whole = latent.nope_size + latent.rope_size
    head_size = whole if has_whole_heads else latent.rope_size
    config = read_decoder(fields, head_size=head_size, **more)
    sizes = {"head_dim": (config.head_size, head_size)}
    sizes["qk_head_dim"] = (fields.positive("qk_head_dim", whole), whole)
    if has_kv_heads:
        sizes["num_key_value_heads"] = (config.n_kv_heads, config.n_heads)
    for key, (found, only) in sizes.items():
        if found != only:
            raise fields.unsupported(key, found, str(only))
    all_dim = rope_object(fields, scaling).nonzero("mscale_all_dim")
    magnitude = yarn_magnitude(config.rope.factor, all_dim) if config.rope and all_dim else 1.0
    return replace(
        config,
        n_kv_heads=1,
        head_size=latent.rope_size,
        attention_scale=whole**-0.5 * magnitude**2,
        latent=latent,
    )


def read_experts(
    fields: Fields,
    config: ModelConfig,
    counts: tuple[int, int | None],
    inner: int,
    first: int,
    *,
    shared: int = 1,
    smallest: int | None = 2,
    **more: Any,
) -> ModelConfig:
    """Add the experts to `config`; shared ones are stored as one that is as wide as all of them.

    What the family has where a key is missing: how many experts there are and a token uses, how
    wide each is, the `first` layer with them, how many are `shared` (0 where no key counts them),
    and `more` fields of Experts, whose weights add up to 1. `smallest` is the fewest experts of a
    group, None where experts do not stand in groups.
    """
    usual = Experts(
        n_experts=0, top_k=0, intermediate_size=0, layers=(), **{"normalize_top_k": True, **more}
    )
    n_experts, top_k = read_expert_counts(fields, ("n_routed_experts", "num_experts"), *counts)
    inner = fields.positive("moe_intermediate_size", inner)
    n_groups = top_groups = 1
    if smallest is not None:
        n_groups = fields.positive("n_group", usual.n_groups)
        top_groups = fields.positive("topk_group", usual.top_groups)
    group_size = n_experts // n_groups
    least = smallest or 1
    if (
        n_experts % n_groups
        or group_size < least
        or not top_k <= top_groups * group_size <= n_experts
    ):
        raise fields.damaged(
            f"n_group {n_groups} and topk_group {top_groups} do not go with {n_experts} experts, "
            f"{top_k} for each token"
        )
    first = fields.take("first_k_dense_replace", int, first)
    layers = read_mlp_kinds(fields, config.n_layers, first)
    return with_experts(
        config,
        n_experts,
        top_k,
        intermediate_size=inner,
        normalize_top_k=fields.take("norm_topk_prob", bool, usual.normalize_top_k),
        shared_intermediate_size=inner * (shared and fields.positive("n_shared_experts", shared)),
        n_groups=n_groups,
        top_groups=top_groups,
        output_scale=fields.number("routed_scaling_factor", usual.output_scale),
        layers=layers,
    )


def read_gguf(fields: GgufFields) -> dict[str, Any]:
    """Read the metadata of V2 and V3.

    Newer files count the columns of a cached latent as those of a key, and say what a head's own
    are beside. A file that has no groups of experts is computed without any, as by llama.cpp.
    """
    config = read_gguf_sizes(fields)
    fields.ignore("attention.head_count_kv", "attention.key_length", "attention.value_length")
    own = "_mla" if fields.given("attention.key_length_mla") else ""
    rope_size = fields.take("rope.dimension_count", int)
    whole = fields.positive(f"attention.key_length{own}")
    if not 0 <= rope_size < whole:
        raise fields.damaged(
            f"attention.key_length{own} is {whole}, rope.dimension_count {rope_size}"
        )
    scaling, log = config["rope_scaling"], "rope.scaling.yarn_log_multiplier"
    multiplier = fields.nonzero(log)
    if scaling is not None and multiplier is not None:
        scaling |= {"mscale": 10 * multiplier, "mscale_all_dim": 10 * multiplier}
    return (
        config
        | read_gguf_experts(fields)
        | {
            "kv_lora_rank": fields.positive("attention.kv_lora_rank"),
            "q_lora_rank": fields.optional("attention.q_lora_rank"),
            "qk_rope_head_dim": rope_size,
            "qk_nope_head_dim": whole - rope_size,
            "v_head_dim": fields.positive(f"attention.value_length{own}"),
        }
    )


def read_gguf_experts(fields: Fields, n_shared: int | None = None) -> dict[str, Any]:
    """Read how many experts there are, in how many groups, and what becomes of their outputs.

    `n_shared` is how many are shared in a family that does not count them.
    """
    n_groups = fields.positive("expert_group_count", 1)
    return {
        "n_routed_experts": fields.positive("expert_count"),
        "num_experts_per_tok": fields.positive("expert_used_count"),
        "n_shared_experts": fields.positive("expert_shared_count")
        if n_shared is None
        else n_shared,
        "moe_intermediate_size": fields.positive("expert_feed_forward_length"),
        "first_k_dense_replace": fields.take("leading_dense_block_count", int, 0),
        "routed_scaling_factor": fields.number("expert_weights_scale", 1.0),
        "norm_topk_prob": fields.take("expert_weights_norm", bool, False),
        "n_group": n_groups,
        "topk_group": fields.positive("expert_group_used_count", n_groups),
    }


def read_gguf_v2(fields: GgufFields) -> dict[str, Any]:
    """Read the metadata of V2."""
    config = read_gguf(fields)
    fields.require("expert_gating_func", 1)
    return config | {"topk_method": "group_limited_greedy" if config["n_group"] > 1 else "greedy"}


def has_sigmoid(fields: Fields) -> bool:
    """Whether experts are chosen by sigmoid, as only V3 does."""
    return bool(fields.take("expert_gating_func", int, 0) == _SIGMOID)


FAMILY = record(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    read_config,
    Layout(attention=LATENT_HEADS, mlp=GROUPED_EXPERTS),
    **STACKED,
    gguf=GgufFormat(
        architecture="deepseek2", claims=lambda fields: not has_sigmoid(fields), read=read_gguf_v2
    ),
)
