"""Reading config.json of Gemma 2 and of Gemma 3's text models. Must not know tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shardnet.model.config.fields import Fields
from shardnet.model.config.model_config import ModelConfig, Rope
from shardnet.model.config.rope import read_rope, read_scaling, rope_object
from shardnet.model.families.config_decoder import FULL, SLIDING, read_decoder, read_windows

GLOBAL_THETA = 1_000_000.0
LOCAL_THETA = 10_000.0


def read_gemma2(fields: Fields) -> ModelConfig:
    """Read a Gemma2Config: every other layer has a window, beginning with the first."""
    config = _read_gemma(fields, "gemma2", 8192, read_rope)
    return replace(
        config,
        windows=_windows(fields, config.n_layers, period=2),
        attention_soft_cap=_soft_cap(fields, "attn_logit_softcapping", 50.0),
        logit_soft_cap=_soft_cap(fields, "final_logit_softcapping", 30.0),
    )


def read_gemma3(fields: Fields) -> ModelConfig:
    """Read a Gemma3TextConfig: five layers with a window, then one without, and so on.

    Layers with a window have rotary positions of their own. A soft cap of the scores is refused:
    transformers reads the key and computes without.
    """
    config = _read_gemma(fields, "gemma3_text", 131072, _global_rope)
    period = fields.positive("sliding_window_pattern", 6)
    fields.ignore("_sliding_window_pattern")
    return replace(
        config,
        windows=_windows(fields, config.n_layers, period),
        local_rope=_local_rope(fields, config),
        logit_soft_cap=_soft_cap(fields, "final_logit_softcapping", None),
    )


def _read_gemma(
    fields: Fields,
    family: str,
    max_positions: int,
    rope: Callable[[Fields, int, int], Rope],
) -> ModelConfig:
    """Read what both say: the head size stands alone, norms store what exceeds 1."""
    fields.ignore("hidden_act")  # an older name, which transformers does not look at either
    fields.require("use_bidirectional_attention", False)
    config = read_decoder(
        fields,
        family,
        n_kv_heads=4,
        max_positions=max_positions,
        head_size=256,
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
        is_tied=True,
        rope=rope,
    )
    return replace(
        config,
        attention_bias=fields.take("attention_bias", bool, False),
        attention_scale=fields.positive_number("query_pre_attn_scalar", 256.0) ** -0.5,
        norm_offset=1.0,
        embedding_multiplier=config.hidden_size**0.5,
    )


def _windows(fields: Fields, n_layers: int, period: int) -> tuple[int | None, ...]:
    """The last layer of each period sees everything, the others have the window."""
    window = fields.positive("sliding_window", 4096)
    return read_windows(fields, n_layers, window, lambda layer: (layer + 1) % period != 0)


def _soft_cap(fields: Fields, key: str, default: float | None) -> float | None:
    """Read a cap: null is none, a missing key the default."""
    return fields.optional_number(key) if fields.given(key) else default


def _global_rope(fields: Fields, max_positions: int, head_size: int) -> Rope:
    """Read the positions of layers without a window, the only ones that version 4 scales."""
    theta = fields.positive_number("rope_theta", GLOBAL_THETA)
    inner = _of_layer_kind(fields, FULL) or rope_object(fields)
    plain = Rope(theta=inner.positive_number("rope_theta", theta))
    return read_scaling(inner, plain, max_positions=max_positions, head_size=head_size)


def _local_rope(fields: Fields, config: ModelConfig) -> Rope:
    theta = fields.positive_number("rope_local_base_freq", LOCAL_THETA)
    inner = _of_layer_kind(fields, SLIDING)
    if inner is None:
        return Rope(theta=theta)
    plain = Rope(theta=inner.positive_number("rope_theta", theta))
    positions = config.max_positions
    return read_scaling(inner, plain, max_positions=positions, head_size=config.head_size)


def _of_layer_kind(fields: Fields, kind: str) -> Fields | None:
    """Find one layer kind's object in the `rope_parameters` that transformers 5 nests."""
    if fields.missing("rope_parameters"):
        return None
    outer = fields.inner("rope_parameters", fields.take("rope_parameters", dict))
    outer.ignore(FULL, SLIDING)
    outer.refuse_the_rest()
    return outer.inner(kind, outer.take(kind, dict, {}))
