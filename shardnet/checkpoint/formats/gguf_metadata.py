"""From the metadata of a GGUF to what config.json of the same model would say.

Knows the keys of each architecture (the `gguf` package's constants.py), and what llama.cpp knows by
itself because no key says it. A key that nobody takes is refused by name. Must not know files.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any, Final

from shardnet.checkpoint.formats.gguf_header import Value
from shardnet.model.config.fields import Fields

Factors = Mapping[str, tuple[float, ...]]
"""Factors of rotary frequencies, which GGUF stores as tensors, by tensor name."""

FREQS: Final = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
FACTOR_TENSORS: Final = (FREQS, LONG, SHORT)

GEMMA2_27B_LAYERS, GEMMA3_27B_LAYERS = 46, 62
"""The two models whose scores are scaled by another size than their heads'; llama.cpp goes by the
number of layers too."""


def config_of_metadata(
    metadata: Mapping[str, Value],
    tensors: Container[str],
    vocab_size: int,
    factors: Factors,
    dtype: str,
    where: str,
) -> dict[str, Any]:
    """Say in the words of config.json what the metadata of the file `where` says.

    `tensors` are the names in the file, `dtype` what most of it is stored in. Raises
    UnsupportedModelError for an architecture or a key that is not known, CheckpointError for a
    value that cannot be.
    """
    general = Fields(metadata, where)
    arch = general.take("general.architecture", str)
    if arch not in ARCHITECTURES:
        supported = ", ".join(sorted(ARCHITECTURES))
        raise general.unsupported("general.architecture", arch, supported)
    own = {
        key.removeprefix(f"{arch}."): value
        for key, value in metadata.items()
        if key.startswith(f"{arch}.")
    }
    fields = Fields(own, where, prefix=f"{arch}.")
    fields.ignore("vocab_size", "tensor_data_layout", "rope.scaling.finetuned")
    fields.require("attention.causal", True)
    config = ARCHITECTURES[arch](fields, tensors, factors)
    fields.refuse_the_rest()
    ends = ("eos", "eot", "eom")
    eos = [general.take(f"tokenizer.ggml.{end}_token_id", int, None) for end in ends]
    return config | {
        "vocab_size": vocab_size,
        "tie_word_embeddings": "output.weight" not in tensors,
        "torch_dtype": dtype,
        "bos_token_id": general.take("tokenizer.ggml.bos_token_id", int, None),
        "eos_token_id": list(dict.fromkeys(token for token in eos if token is not None)),
    }


def _llama(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    """Read Llama, Mistral and, where there are experts, Mixtral."""
    if fields.take("expert_count", int, 0):
        config = _decoder(fields, "mixtral", factors)
        return config | _experts(fields, inner=config["intermediate_size"])
    fields.ignore("expert_used_count")
    return _decoder(fields, "llama", factors) | _biases(tensors)


def _granite(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    return (
        _decoder(fields, "granite", factors)
        | _biases(tensors)
        | {
            "attention_multiplier": fields.positive_number("attention.scale"),
            "embedding_multiplier": fields.positive_number("embedding_scale"),
            "residual_multiplier": fields.positive_number("residual_scale"),
            "logits_scaling": fields.positive_number("logit_scale"),
        }
    )


def _qwen2(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    return _decoder(fields, "qwen2", factors)


def _qwen3(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    return _decoder(fields, "qwen3", factors)


def _qwen2_moe(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    """Read Qwen2-MoE. Old files do not say how wide experts are; llama.cpp fills in the same."""
    config = _decoder(fields, "qwen2_moe", factors)
    inner, n_used = config["intermediate_size"], fields.positive("expert_used_count")
    return (
        config
        | _experts(fields)
        | {
            "moe_intermediate_size": fields.positive("expert_feed_forward_length", inner // n_used),
            "shared_expert_intermediate_size": fields.positive(
                "expert_shared_feed_forward_length", inner
            ),
            "norm_topk_prob": fields.take("expert_weights_norm", bool, False),
            "qkv_bias": "blk.0.attn_q.bias" in tensors,
        }
    )


def _qwen3_moe(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    return (
        _decoder(fields, "qwen3_moe", factors)
        | _experts(fields)
        | {
            "moe_intermediate_size": fields.positive("expert_feed_forward_length"),
            "norm_topk_prob": fields.take("expert_weights_norm", bool, True),
        }
    )


def _gpt_oss(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    """Read gpt-oss. Its positions are scaled without rounding, which no key says."""
    config = _decoder(fields, "gpt_oss", factors)
    scaling = config["rope_scaling"] or {"rope_type": "default"}
    if scaling["rope_type"] == "yarn":
        scaling["truncate"] = False
    return (
        config
        | _experts(fields)
        | {
            "intermediate_size": fields.positive("expert_feed_forward_length"),
            "sliding_window": fields.positive("attention.sliding_window"),
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "rope_scaling": scaling,
        }
    )


def _experts(fields: Fields, inner: int | None = None) -> dict[str, Any]:
    """Read how many experts there are; each is `inner` wide where the model says it but once."""
    fields.require("expert_gating_func", 1)  # softmax
    width = fields.positive("expert_feed_forward_length", inner) if inner is not None else None
    if width != inner:
        raise fields.unsupported("expert_feed_forward_length", width, str(inner))
    return {
        "num_local_experts": fields.positive("expert_count"),
        "num_experts_per_tok": fields.positive("expert_used_count"),
        "sliding_window": None,
    }


def _olmo2(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    return _decoder(fields, "olmo2", factors)


def _phi3(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    config = _decoder(fields, "phi3", factors)
    window = fields.take("attention.sliding_window", int, 0)
    return config | {"sliding_window": window or None}


def _gemma2(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    config = _gemma(fields, "gemma2", factors, GEMMA2_27B_LAYERS)
    return config | {
        "attn_logit_softcapping": fields.optional_number("attn_logit_softcapping") or 50.0,
        "final_logit_softcapping": fields.optional_number("final_logit_softcapping") or 30.0,
    }


def _gemma3(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    config = _gemma(fields, "gemma3_text", factors, GEMMA3_27B_LAYERS)
    return config | {
        "rope_local_base_freq": fields.positive_number("rope.freq_base_swa", 10000.0),
        "sliding_window_pattern": fields.positive("attention.sliding_window_pattern", 6),
        "final_logit_softcapping": fields.optional_number("final_logit_softcapping"),
    }


def _gemma(fields: Fields, model_type: str, factors: Factors, layers_27b: int) -> dict[str, Any]:
    config = _decoder(fields, model_type, factors)
    scalar = config["head_dim"]
    if config["num_hidden_layers"] == layers_27b:
        scalar = config["hidden_size"] // config["num_attention_heads"]
    return config | {
        "query_pre_attn_scalar": scalar,
        "sliding_window": fields.positive("attention.sliding_window"),
    }


def _gpt2(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "n_layer": fields.positive("block_count"),
        "n_positions": fields.positive("context_length"),
        "n_embd": fields.positive("embedding_length"),
        "n_inner": fields.positive("feed_forward_length"),
        "n_head": fields.positive("attention.head_count"),
        "layer_norm_epsilon": fields.positive_number("attention.layer_norm_epsilon"),
    }


def _decoder(fields: Fields, model_type: str, factors: Factors) -> dict[str, Any]:
    """Read what all but GPT-2 say in the same words."""
    hidden = fields.positive("embedding_length")
    n_heads = fields.positive("attention.head_count")
    head_size = fields.positive("attention.key_length", hidden // n_heads)
    value_size = fields.positive("attention.value_length", head_size)
    if value_size != head_size:
        raise fields.unsupported("attention.value_length", value_size, f"key_length, {head_size}")
    rotated = fields.positive("rope.dimension_count", head_size)
    theta = fields.positive_number("rope.freq_base", 10000.0)
    share = {} if rotated == head_size else {"partial_rotary_factor": rotated / head_size}
    return share | {
        "model_type": model_type,
        "num_hidden_layers": fields.positive("block_count"),
        "max_position_embeddings": fields.positive("context_length"),
        "hidden_size": hidden,
        "intermediate_size": fields.positive("feed_forward_length"),
        "num_attention_heads": n_heads,
        "num_key_value_heads": fields.positive("attention.head_count_kv", n_heads),
        "head_dim": head_size,
        "rms_norm_eps": fields.positive_number("attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": _scaling(fields, factors),
    }


def _biases(tensors: Container[str]) -> dict[str, bool]:
    return {
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }


def _scaling(fields: Fields, factors: Factors) -> dict[str, Any] | None:
    """Read how rotary positions are scaled, as `rope_scaling` would say it.

    Stored factors divide the frequencies, as longrope's do. Those of Llama 3, in `rope_freqs`, are
    the same for every length.
    """
    kind = fields.take("rope.scaling.type", str, "none")
    original = fields.optional("rope.scaling.original_context_length")
    magnitude = fields.optional_number("rope.scaling.attn_factor")
    factor = fields.optional_number("rope.scaling.factor")
    if factors:
        if kind not in ("none", "longrope"):
            raise fields.unsupported("rope.scaling.type", kind, "longrope, none beside factors")
        return {
            "rope_type": "longrope",
            "short_factor": list(_either(factors, SHORT, FREQS)),
            "long_factor": list(_either(factors, LONG, FREQS)),
            "original_max_position_embeddings": original
            if SHORT in factors
            else fields.positive("context_length"),
            "attention_factor": magnitude or 1.0,
        }
    match kind:
        case "none":
            return None
        case "linear":
            return {"rope_type": "linear", "factor": factor}
        case "yarn":
            return {
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": original,
                "attention_factor": magnitude,
                "beta_fast": fields.optional_number("rope.scaling.yarn_beta_fast"),
                "beta_slow": fields.optional_number("rope.scaling.yarn_beta_slow"),
            }
    raise fields.unsupported("rope.scaling.type", kind, "none, linear, yarn, longrope")


def _either(factors: Factors, name: str, other: str) -> tuple[float, ...]:
    return factors.get(name) or factors.get(other) or ()


Architecture = Callable[[Fields, Container[str], Factors], dict[str, Any]]

ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "llama": _llama,
    "granite": _granite,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen2moe": _qwen2_moe,
    "qwen3moe": _qwen3_moe,
    "gpt-oss": _gpt_oss,
    "olmo2": _olmo2,
    "phi3": _phi3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt2": _gpt2,
}
"""By `general.architecture`."""
