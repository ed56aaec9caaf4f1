"""Reading the keys of params.json, Meta's and Mistral's own config, that all their models share.

Knows what these keys are called in config.json. Must not know files, nor which family reads them.
"""

from __future__ import annotations

from typing import Any

from shardnet.model.config.fields import Fields
from shardnet.model.config.limits import NORM_EPS, THETAS


def read_params_decoder(fields: Fields) -> dict[str, Any]:
    """Read what all models say in the same words, as config.json would."""
    dim, n_heads = fields.positive("dim"), fields.positive("n_heads")
    return {
        "hidden_size": dim,
        "num_hidden_layers": fields.positive("n_layers"),
        "num_attention_heads": n_heads,
        "num_key_value_heads": fields.positive("n_kv_heads", n_heads),
        "head_dim": fields.positive("head_dim", dim // n_heads),
        "rms_norm_eps": fields.number("norm_eps", within=NORM_EPS),
        "rope_theta": fields.number("rope_theta", 10000.0, within=THETAS),
    }


def has_params_experts(fields: Fields) -> bool:
    """Whether params.json describes experts."""
    return bool(fields.take("moe", dict, {}))
