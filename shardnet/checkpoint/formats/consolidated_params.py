"""From params.json, Meta's and Mistral's own config, to what config.json of the model would say.

Knows their keys (github.com/meta-llama/llama-models, github.com/mistralai/mistral-inference), and
what their code knows by itself because no key says it. A key that nobody takes is refused by name.
Must not know files or tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardnet.model.config.fields import Fields

MISTRAL_POSITIONS = 32768
"""Where params.json of Mistral does not say."""
_SCALED_POSITIONS, _LLAMA3_POSITIONS, _LLAMA2_POSITIONS = 131072, 8192, 4096
_LLAMA3_THETA = 500000.0
_MIXTRAL_THETA = 1e6
_SMALLEST_DIM_OF_3_1 = 4096
"""The text models of Llama 3.2 are narrower, and their positions are stretched by 32, not by 8."""


def config_of_params(
    params: Mapping[str, Any], vocab_size: int, is_tied: bool, dtype: str, where: str
) -> dict[str, Any]:
    """Say in the words of config.json what the params.json at `where` says.

    `vocab_size` and `is_tied` follow from the tensors, and `dtype`, which they are stored in.
    Raises UnsupportedModelError for a key that is not known, CheckpointError for a value that
    cannot be.
    """
    fields = Fields(params, where)
    fields.ignore("vocab_size", "tied_embeddings", "max_batch_size", "model_parallel_size")
    is_meta = fields.given("multiple_of")
    config = _common(fields) | (_meta(fields) if is_meta else _mistral(fields))
    fields.refuse_the_rest()
    return config | {
        "vocab_size": vocab_size,
        "tie_word_embeddings": is_tied,
        "torch_dtype": dtype,
    }


def _common(fields: Fields) -> dict[str, Any]:
    dim, n_heads = fields.positive("dim"), fields.positive("n_heads")
    return {
        "hidden_size": dim,
        "num_hidden_layers": fields.positive("n_layers"),
        "num_attention_heads": n_heads,
        "num_key_value_heads": fields.positive("n_kv_heads", n_heads),
        "head_dim": fields.positive("head_dim", dim // n_heads),
        "rms_norm_eps": fields.positive_number("norm_eps"),
        "rope_theta": fields.positive_number("rope_theta", 10000.0),
    }


def _mistral(fields: Fields) -> dict[str, Any]:
    positions = fields.positive("max_seq_len", MISTRAL_POSITIONS)
    narrow = fields.take("quantization", dict, {})
    if narrow:
        _check_quantization(fields.inner("quantization", narrow))
    moe = fields.take("moe", dict, {})
    return (_experts(fields, moe) if moe else {"model_type": "mistral"}) | {
        "intermediate_size": fields.positive("hidden_dim"),
        "max_position_embeddings": fields.positive("max_position_embeddings", positions),
        "sliding_window": fields.optional("sliding_window"),
    }


def _experts(fields: Fields, moe: Mapping[str, Any]) -> dict[str, Any]:
    """Read what makes a model Mixtral."""
    inner = fields.inner("moe", moe)
    config = {
        "model_type": "mixtral",
        "num_local_experts": inner.positive("num_experts"),
        "num_experts_per_tok": inner.positive("num_experts_per_tok"),
        "rope_theta": fields.positive_number("rope_theta", _MIXTRAL_THETA),
    }
    inner.refuse_the_rest()
    return config


def _check_quantization(fields: Fields) -> None:
    """Refuse weights that are stored in anything but FP8 with a scale for each."""
    kind = fields.take("qformat_weight", str)
    if kind != "fp8_e4m3":
        raise fields.unsupported("qformat_weight", kind, "fp8_e4m3")
    fields.ignore("qscheme_act")  # activations are not rounded here
    fields.refuse_the_rest()


def _meta(fields: Fields) -> dict[str, Any]:
    is_scaled = fields.take("use_scaled_rope", bool, False)
    theta = fields.positive_number("rope_theta", 10000.0)
    positions = _LLAMA3_POSITIONS if theta >= _LLAMA3_THETA else _LLAMA2_POSITIONS
    return {
        "model_type": "llama",
        "intermediate_size": _inner_size(fields),
        "max_position_embeddings": _SCALED_POSITIONS
        if is_scaled
        else fields.positive("max_seq_len", positions),
        "rope_scaling": _scaling(fields) if is_scaled else None,
    }


def _inner_size(fields: Fields) -> int:
    """The width of the MLP: 8/3 of the hidden size, stretched, rounded up (Meta's FeedForward)."""
    if not fields.missing("hidden_dim"):
        return fields.positive("hidden_dim")
    width = int(2 * (4 * fields.positive("dim")) / 3)
    width = int(fields.positive_number("ffn_dim_multiplier", 1.0) * width)
    multiple = fields.positive("multiple_of")
    return -(-width // multiple) * multiple


def _scaling(fields: Fields) -> dict[str, Any]:
    factor = 8.0 if fields.positive("dim") >= _SMALLEST_DIM_OF_3_1 else 32.0
    return {
        "rope_type": "llama3",
        "factor": fields.positive_number("rope_scaling_factor", factor),
        "low_freq_factor": 1.0,
        "high_freq_factor": fields.positive_number("rope_high_freq_factor", 4.0),
        "original_max_position_embeddings": _LLAMA3_POSITIONS,
    }
