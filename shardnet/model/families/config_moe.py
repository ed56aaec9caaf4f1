"""Reading config.json of the families with experts: one function per family.

Knows each family's keys and transformers' defaults for them. Must not know tensors.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import MappingProxyType

from shardnet.model.config.fields import Fields
from shardnet.model.config.limits import MAX_EXPERTS
from shardnet.model.config.model_config import Experts, Latent, ModelConfig, Rope
from shardnet.model.config.rope import read_rope, read_scaling, rope_object, yarn_magnitude
from shardnet.model.families.config_decoder import read_decoder, read_windows

_GPT_OSS_THETA = 150000.0
_GPT_OSS_YARN = MappingProxyType(
    {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }
)


def read_mixtral(fields: Fields) -> ModelConfig:
    """Read a MixtralConfig: experts in every layer, a window in all or none."""
    fields.ignore("router_jitter_noise")  # of training
    rope = partial(read_rope, theta=1e6)
    config = read_decoder(
        fields, "mixtral", n_kv_heads=8, max_positions=131072, norm_eps=1e-5, rope=rope
    )
    n_experts, top_k = _counts(fields, ("num_local_experts", "num_experts"), 8, 2)
    return replace(
        config,
        windows=(fields.optional("sliding_window"),) * config.n_layers,
        experts=Experts(
            n_experts=n_experts,
            top_k=top_k,
            intermediate_size=config.intermediate_size,
            normalize_top_k=True,
            layers=tuple(range(config.n_layers)),
        ),
    )


def read_qwen3_moe(fields: Fields) -> ModelConfig:
    """Read a Qwen3MoeConfig. A window that is switched on is in all layers, unlike Qwen3's."""
    config = read_decoder(fields, "qwen3_moe", n_kv_heads=4, max_positions=32768)
    fields.ignore("max_window_layers")
    window = fields.optional("sliding_window") if fields.given("sliding_window") else 4096
    is_used = fields.take("use_sliding_window", bool, False)
    n_experts, top_k = _counts(fields, ("num_experts", "num_local_experts"), 128, 8)
    layers = _sparse_layers(fields, config.n_layers)
    experts = Experts(
        n_experts=n_experts,
        top_k=top_k,
        intermediate_size=fields.positive("moe_intermediate_size", 768),
        normalize_top_k=fields.take("norm_topk_prob", bool, False),
        layers=layers,
    )
    return replace(
        config,
        attention_bias=fields.take("attention_bias", bool, False),
        windows=(window if is_used else None,) * config.n_layers,
        experts=experts if layers else None,
    )


def read_qwen2_moe(fields: Fields) -> ModelConfig:
    """Read a Qwen2MoeConfig. Windows, where they are switched on, are in every other layer."""
    config = read_decoder(fields, "qwen2_moe", n_kv_heads=16, max_positions=32768)
    window = fields.take("sliding_window", int, None if fields.given("sliding_window") else 4096)
    most = fields.take("max_window_layers", int, 28)
    is_used = fields.take("use_sliding_window", bool, False)
    if is_used and window is not None and window < 1:
        raise fields.damaged(f"sliding_window is {window}, expected 1 or more")
    window = window if is_used else None
    n_experts, top_k = _counts(fields, ("num_experts", "num_local_experts"), 60, 4)
    layers = _sparse_layers(fields, config.n_layers)
    experts = Experts(
        n_experts=n_experts,
        top_k=top_k,
        intermediate_size=fields.positive("moe_intermediate_size", 1408),
        normalize_top_k=fields.take("norm_topk_prob", bool, False),
        shared_intermediate_size=fields.positive("shared_expert_intermediate_size", 5632),
        layers=layers,
    )
    return replace(
        config,
        attention_bias=fields.take("qkv_bias", bool, True),
        windows=read_windows(
            fields,
            config.n_layers,
            window,
            lambda layer: window is not None and layer % 2 == 0 and layer < most,
        ),
        experts=experts if layers else None,
    )


def read_gpt_oss(fields: Fields) -> ModelConfig:
    """Read a GptOssConfig: windows in every other layer, clamped gates, biases everywhere."""
    fields.ignore("initial_context_length")  # says again what rope_scaling says
    config = read_decoder(
        fields,
        "gpt_oss",
        n_kv_heads=8,
        max_positions=131072,
        norm_eps=1e-5,
        head_size=64,
        rope=_gpt_oss_rope,
    )
    window = fields.optional("sliding_window") if fields.given("sliding_window") else 128
    n_experts, top_k = _counts(fields, ("num_local_experts", "num_experts"), 128, 4)
    if fields.positive("experts_per_token", top_k) != top_k:
        raise fields.damaged("num_experts_per_tok and experts_per_token disagree")
    return replace(
        config,
        attention_bias=fields.take("attention_bias", bool, True),
        has_sinks=True,
        windows=read_windows(fields, config.n_layers, window, lambda layer: layer % 2 == 0),
        experts=Experts(
            n_experts=n_experts,
            top_k=top_k,
            intermediate_size=config.intermediate_size,
            normalize_top_k=True,
            swiglu_limit=fields.positive_number("swiglu_limit", 7.0),
            swiglu_alpha=fields.positive_number("swiglu_alpha", 1.702),
            layers=tuple(range(config.n_layers)),
        ),
    )


def read_deepseek_v2(fields: Fields) -> ModelConfig:
    """Read a DeepseekV2Config. Weights that add up to 1 are refused: transformers ignores them."""
    config = _read_latent(fields, "deepseek_v2", interleaved=True)
    _require_text(fields, "scoring_func", "softmax")
    fields.require("norm_topk_prob", False)
    method = fields.take("topk_method", str, "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise fields.unsupported("topk_method", method, "greedy, group_limited_greedy")
    if method == "greedy":
        fields.ignore("n_group", "topk_group")
    defaults = Experts(
        n_experts=64,
        top_k=0,  # there is none
        intermediate_size=1407,
        normalize_top_k=False,
        shared_intermediate_size=2,
        layers=(0,),
    )
    return _deepseek_experts(fields, config, defaults, is_grouped=method != "greedy")


def read_deepseek_v3(fields: Fields) -> ModelConfig:
    """Read a DeepseekV3Config. What predicts further tokens ahead is left out."""
    interleaved = fields.take("rope_interleave", bool, True)
    config = _read_latent(fields, "deepseek_v3", interleaved=interleaved, max_positions=4096)
    _require_text(fields, "scoring_func", "sigmoid")
    _require_text(fields, "topk_method", "noaux_tc")
    fields.ignore("num_nextn_predict_layers", "num_mtp_layers")
    defaults = Experts(
        n_experts=256,
        top_k=8,
        intermediate_size=2048,
        normalize_top_k=fields.take("norm_topk_prob", bool, True),
        shared_intermediate_size=1,
        n_groups=8,
        top_groups=4,
        answer_scale=2.5,
        layers=(3,),
    )
    return _deepseek_experts(fields, config, defaults, is_grouped=True)


def _read_latent(
    fields: Fields,
    family: str,
    *,
    interleaved: bool,
    max_positions: int = 2048,
) -> ModelConfig:
    """Read what both say, but for the experts."""
    fields.ignore("auto_map", "ep_size", "aux_loss_alpha", "seq_aux")  # of training, or of programs
    fields.require("moe_layer_freq", 1)
    latent = Latent(
        rank=fields.positive("kv_lora_rank", 512),
        rope_size=fields.positive("qk_rope_head_dim", 64),
        nope_size=fields.positive("qk_nope_head_dim", 128),
        value_size=fields.positive("v_head_dim", 128),
        query_rank=fields.optional("q_lora_rank") if fields.given("q_lora_rank") else 1536,
        interleaved=interleaved,
    )
    config = read_decoder(fields, family, max_positions=max_positions, head_size=latent.rope_size)
    whole = latent.nope_size + latent.rope_size
    sizes = {"head_dim": (config.head_size, latent.rope_size)}
    sizes["qk_head_dim"] = (fields.positive("qk_head_dim", whole), whole)
    sizes["num_key_value_heads"] = (config.n_kv_heads, config.n_heads)
    for key, (found, only) in sizes.items():
        if found != only:
            raise fields.unsupported(key, found, str(only))
    all_dim = rope_object(fields).optional_number("mscale_all_dim")
    magnitude = yarn_magnitude(config.rope.factor, all_dim) if config.rope and all_dim else 1.0
    return replace(
        config,
        n_kv_heads=1,
        attention_bias=fields.take("attention_bias", bool, False),
        mlp_bias=fields.take("mlp_bias", bool, False) if family == "deepseek_v2" else False,
        attention_scale=whole**-0.5 * magnitude**2,
        latent=latent,
    )


def _deepseek_experts(
    fields: Fields, config: ModelConfig, defaults: Experts, *, is_grouped: bool
) -> ModelConfig:
    """Read the experts; shared ones are stored as one that is as wide as all of them."""
    n_experts, top_k = _counts(
        fields, ("n_routed_experts", "num_experts"), defaults.n_experts, defaults.top_k
    )
    inner = fields.positive("moe_intermediate_size", defaults.intermediate_size)
    n_groups = top_groups = 1
    if is_grouped:
        n_groups = fields.positive("n_group", defaults.n_groups)
        top_groups = fields.positive("topk_group", defaults.top_groups)
    of_group = n_experts // n_groups
    least = 2 if config.family == "deepseek_v3" else 1
    if n_experts % n_groups or of_group < least or not top_k <= top_groups * of_group <= n_experts:
        raise fields.damaged(
            f"n_group {n_groups} and topk_group {top_groups} do not go with {n_experts} experts, "
            f"{top_k} for each token"
        )
    first = fields.take("first_k_dense_replace", int, defaults.layers[0])
    layers = tuple(range(max(0, first), config.n_layers))
    experts = Experts(
        n_experts=n_experts,
        top_k=top_k,
        intermediate_size=inner,
        normalize_top_k=defaults.normalize_top_k,
        shared_intermediate_size=inner
        * fields.positive("n_shared_experts", defaults.shared_intermediate_size),
        n_groups=n_groups,
        top_groups=top_groups,
        answer_scale=fields.positive_number("routed_scaling_factor", defaults.answer_scale),
        layers=layers,
    )
    return replace(config, experts=experts if layers else None)


def _require_text(fields: Fields, key: str, only: str) -> None:
    value = fields.take(key, str, only)
    if value != only:
        raise fields.unsupported(key, value, only)


def _gpt_oss_rope(fields: Fields, max_positions: int, head_size: int) -> Rope:
    """Read the rotary positions: where none are given they are scaled as in the published ones."""
    if fields.missing("rope_parameters") and fields.missing("rope_scaling"):
        theta = fields.positive_number("rope_theta", _GPT_OSS_THETA)
        published = fields.inner("rope_parameters", _GPT_OSS_YARN)
        return read_scaling(
            published, Rope(theta=theta), max_positions=max_positions, head_size=head_size
        )
    return read_rope(fields, max_positions, head_size, theta=_GPT_OSS_THETA)


def _counts(fields: Fields, keys: tuple[str, str], n_experts: int, top_k: int) -> tuple[int, int]:
    """Read how many experts there are, under either key, and how many of them a row visits."""
    key = next((key for key in keys if not fields.missing(key)), keys[0])
    found = fields.positive(key, n_experts, at_most=MAX_EXPERTS)
    if any(not fields.missing(other) and fields.positive(other) != found for other in keys):
        raise fields.damaged(f"{keys[0]} and {keys[1]} disagree")
    chosen = fields.positive("num_experts_per_tok", *([top_k] if top_k else []))
    if chosen > found:
        raise fields.damaged(f"num_experts_per_tok is {chosen}, there are {found} experts")
    return found, chosen


def _sparse_layers(fields: Fields, n_layers: int) -> tuple[int, ...]:
    """Read which layers have experts: each `decoder_sparse_step`-th, but for those listed."""
    step = fields.positive("decoder_sparse_step", 1)
    dense = fields.take("mlp_only_layers", list, [])
    if not all(isinstance(layer, int) and not isinstance(layer, bool) for layer in dense):
        raise fields.damaged(f"mlp_only_layers is {dense!r}, expected numbers of layers")
    return tuple(n for n in range(n_layers) if n not in dense and (n + 1) % step == 0)
