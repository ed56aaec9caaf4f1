"""Dense families that are put together from shared parts: a reader of keys and a record each.

Knows their keys, defaults and parts (transformers, modeling_*.py). Must not know files, nor torch.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any, Final

from shardnet.model.config.decoder_config import (
    FULL,
    SLIDING,
    even_head_size,
    read_decoder,
    read_window,
    read_windows,
)
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import (
    GgufFields,
    gguf_biases,
    read_gguf_decoder,
    read_gguf_sizes,
)
from shardnet.model.config.limits import THETAS
from shardnet.model.config.model_config import Latent, ModelConfig, NormKind, Rope, RopeKind
from shardnet.model.config.rope import read_rope, read_scaling
from shardnet.model.families import deepseek_v2
from shardnet.model.families.family import GgufFormat
from shardnet.model.families.layout import Layout, record
from shardnet.model.families.parts import (
    BARE_HEADS,
    COHERE_HEADS,
    JOINED_ATTENTION,
    LATENT_HEADS,
    STABLELM_HEADS,
    UP_DOWN,
    XIELU_MLP,
    attention_part,
    plain_part,
)

_COMPASS_ROPES: Final[dict[str, dict[str, Any]]] = {FULL: {}, SLIDING: {}}
_read_layer_norm_gguf = partial(
    read_gguf_decoder,
    norm=("attention.layer_norm_epsilon", "layer_norm_eps"),
    may_be_partial=True,  # a part of each head turns in some
)


# Other norms


def _read_olmo(fields: Fields) -> ModelConfig:
    """Read an OlmoConfig: norms have no weights, and add what no key says."""
    if not fields.missing("clip_qkv"):
        raise fields.unsupported("clip_qkv", fields.number("clip_qkv"), "null")
    config = read_decoder(fields, norm_key="layer_norm_eps", norm_eps=1e-5)
    return replace(config, norm_kind=NormKind.BARE_CENTRED)


def _read_jais2(fields: Fields) -> ModelConfig:
    return read_decoder(
        fields,
        max_positions=8192,
        norm_key="layer_norm_eps",
        norm_eps=1e-5,
        activation="relu2",
        attention_bias=True,
        mlp_bias=True,
    )


def _read_nanochat(fields: Fields) -> ModelConfig:
    """Read a NanoChatConfig: heads turn the other way round."""
    cap = "final_logit_softcapping"
    config = read_decoder(fields, activation="relu2", rope=_read_reversed_rope)
    return replace(
        config,
        norm_kind=NormKind.BARE,
        has_embedding_norm=True,
        logit_soft_cap=fields.optional_number(cap) if fields.given(cap) else 15.0,
    )


def _read_reversed_rope(fields: Fields, max_positions: int, head_size: int) -> Rope:
    rope = read_rope(fields, max_positions, head_size)
    if rope.kind not in (RopeKind.DEFAULT, RopeKind.LINEAR):
        raise fields.unsupported("rope_type", rope.kind.value, "default, linear")
    return replace(rope, kind=RopeKind.LINEAR, factor=-rope.factor)


# An MLP beside attention


def _read_cohere(
    fields: Fields, theta: float = 500000.0, head_size: int | None = None
) -> ModelConfig:
    config = read_decoder(
        fields,
        max_positions=8192,
        norm_key="layer_norm_eps",
        norm_eps=1e-5,
        head_size=head_size,
        is_tied=True,
        rope=partial(read_rope, theta=theta),
    )
    return replace(
        config,
        norm_kind=NormKind.CENTRED,
        has_parallel_mlp=True,
        has_pairs=True,
        has_head_norms=fields.take("use_qk_norm", bool, False),
        logit_divisor=1 / fields.number("logit_scale", 0.0625),
    )


def read_cohere2(
    fields: Fields, first: int = 0, first_period: int = 1, head_size: int | None = None
) -> ModelConfig:
    """Read a Cohere2Config: layers without a window have no positions.

    Where no list says which have one, the `first` ones and all behind them count by themselves.
    `head_size` is a default.
    """
    for key in ("use_gated_activation", "use_parallel_block", "use_embedding_sharing"):
        fields.require(key, only=True)
    fields.require("rotary_pct", 1.0)
    fields.require("position_embedding_type", "rope_gptj")
    fields.require("order_of_interleaved_layers", "local_attn_first")
    fields.ignore("layer_switch", "use_parallel_embedding", "_sliding_window_pattern")
    fields.require("use_qk_norm", False)
    config = _read_cohere(fields, theta=10000.0, head_size=head_size)
    window, period = read_window(fields, 4096), fields.positive("sliding_window_pattern", 4)

    def is_local(layer: int) -> bool:
        is_first = layer < first
        return (layer + 1 - (0 if is_first else first)) % (first_period if is_first else period) > 0

    windows = read_windows(fields, config.n_layers, window, is_local)
    nope = tuple(n for n in range(config.n_layers) if windows[n] is None)
    return replace(config, windows=windows, nope_layers=nope)


def _read_cohere_gguf(fields: GgufFields) -> dict[str, Any]:
    """Read the metadata of either; of which layers have no window llama.cpp has its own."""
    return _read_layer_norm_gguf(fields) | {
        "logit_scale": fields.number("logit_scale"),
        "attention_bias": gguf_biases(fields)["attention_bias"],
        "use_qk_norm": "blk.0.attn_q_norm.weight" in fields.tensors,
        "sliding_window": fields.optional("attention.sliding_window"),
    }


def _read_compass(fields: Fields) -> ModelConfig:
    """Read a CohereCompassTextConfig: layers with a window and those without turn by objects of
    their own, or not at all, and in halves.
    """
    config = read_decoder(
        fields,
        max_positions=8192,
        norm_key="layer_norm_eps",
        norm_eps=1e-5,
        is_tied=True,
        rope=partial(_read_compass_rope, FULL),
    )
    windows = read_windows(fields, config.n_layers, read_window(fields, 4096), lambda _: False)
    ropes = fields.take("rope_parameters", dict, _COMPASS_ROPES)
    unturned = [ropes.get(kind) is None for kind in (FULL, SLIDING)]
    scale = fields.optional_number("logit_scale")
    return replace(
        config,
        norm_kind=NormKind.CENTRED,
        has_parallel_mlp=True,
        windows=windows,
        local_rope=_read_compass_rope(SLIDING, fields, config.max_positions, config.head_size),
        nope_layers=tuple(
            layer for layer, window in enumerate(windows) if unturned[window is not None]
        ),
        logit_divisor=1.0 if scale is None else 1 / scale,
    )


def _read_compass_rope(kind: str, fields: Fields, max_positions: int, head_size: int) -> Rope:
    """Read the rotary positions of one kind of layers, plain ones where these have none."""
    both = fields.inner("rope_parameters", fields.take("rope_parameters", dict, _COMPASS_ROPES))
    own = both.inner(kind, both.take(kind, dict, {}))
    both.ignore(FULL, SLIDING, "rope_theta", "rope_type")  # those outside are of no layer
    both.note_the_rest()
    plain = Rope(theta=own.number("rope_theta", 10000.0, within=THETAS))
    return read_scaling(own, plain, max_positions=max_positions, head_size=head_size)


def _read_stablelm(fields: Fields) -> ModelConfig:
    config = read_decoder(
        fields,
        n_kv_heads=32,
        max_positions=4096,
        norm_key="layer_norm_eps",
        norm_eps=1e-5,
        rope=partial(read_rope, may_be_partial=True, share=0.25),
        attention_bias=None,
    )
    return replace(
        config,
        attention_bias=fields.take("use_qkv_bias", bool, False),
        has_head_norms=fields.take("qk_layernorm", bool, False),
        has_parallel_mlp=fields.take("use_parallel_residual", bool, False),
    )


def _read_stablelm_gguf(fields: GgufFields) -> dict[str, Any]:
    if "blk.0.attn_q_norm.weight" in fields.tensors:
        raise fields.unsupported("blk.0.attn_q_norm.weight", "a norm", "heads without norms")
    return _read_layer_norm_gguf(fields) | {
        "use_qkv_bias": "blk.0.attn_q.bias" in fields.tensors,
        "use_parallel_residual": fields.take("use_parallel_residual", bool, False),
    }


def _read_phi(fields: Fields) -> ModelConfig:
    fields.require("qk_layernorm", False)
    config = read_decoder(
        fields,
        norm_key="layer_norm_eps",
        norm_eps=1e-5,
        activation="gelu_new",
        rope=partial(read_rope, may_be_partial=True, share=0.5),
        attention_bias=None,
    )
    return replace(
        config, attention_bias=True, mlp_bias=True, has_parallel_mlp=True, has_head_bias=True
    )


def _read_gpt_neox(fields: Fields) -> ModelConfig:
    config = read_decoder(
        fields,
        norm_key="layer_norm_eps",
        norm_eps=1e-5,
        activation="gelu",
        rope=_read_neox_rope,
        attention_bias=True,
    )
    return replace(
        config,
        mlp_bias=True,
        has_joined_heads=fields.take("heads_stand_together", bool, True),
        has_parallel_mlp=fields.take("use_parallel_residual", bool, True),
    )


def _read_neox_gguf(fields: GgufFields) -> dict[str, Any]:
    """Read the metadata; all queries stand before all keys and values."""
    return _read_layer_norm_gguf(fields) | {
        "use_parallel_residual": fields.take("use_parallel_residual", bool, True),
        "attention_bias": "blk.0.attn_qkv.bias" in fields.tensors,
        "heads_stand_together": False,
    }


def _read_neox_rope(fields: Fields, max_positions: int, head_size: int) -> Rope:
    theta, share = fields.number("rotary_emb_base", 10000.0), fields.number("rotary_pct", 0.25)
    read = partial(read_rope, may_be_partial=True, theta=theta, share=share)
    return read(fields, max_positions, head_size)


# Other parts


def _read_youtu(fields: Fields) -> ModelConfig:
    """Read a YoutuConfig: DeepSeek-V3's latents, without experts."""
    interleaved = fields.take("rope_interleave", bool, True)
    config = deepseek_v2.read_latent_attention(
        fields, interleaved=interleaved, max_positions=131072, is_tied=True
    )
    fields.ignore("embedding_initializer_range")
    return config


def _read_minicpm3(fields: Fields) -> ModelConfig:
    """Read a MiniCPM3Config: DeepSeek's latents, and Granite's multipliers."""
    hidden_size, n_heads = (fields.positive(key) for key in ("hidden_size", "num_attention_heads"))
    config = deepseek_v2.read_latent_attention(
        fields,
        interleaved=False,
        max_positions=32768,
        norm_eps=1e-5,
        is_tied=True,
        defaults=Latent(
            rank=256,
            rope_size=32,
            nope_size=64,
            value_size=even_head_size(fields, hidden_size, n_heads),
            query_rank=768,
            interleaved=False,
        ),
    )
    depth, base = _number(fields, "scale_depth", 1.4), _number(fields, "dim_model_base", 256)
    return replace(
        config,
        mlp_bias=fields.take("mlp_bias", bool, False),
        embedding_multiplier=fields.number("scale_emb", 12.0),
        residual_multiplier=1.0 if depth is None else depth / math.sqrt(config.n_layers),
        logit_divisor=1.0 if base is None else hidden_size / base,
    )


def _number(fields: Fields, key: str, default: float) -> float | None:
    """Read a number, where null stands for none."""
    return fields.optional_number(key) if fields.given(key) else default


def _read_minicpm3_gguf(fields: GgufFields) -> dict[str, Any]:
    """Read the metadata, without multipliers and the columns of values: llama.cpp has our own."""
    fields.ignore("attention.head_count_kv")
    rope_size, whole = (
        fields.positive(key) for key in ("rope.dimension_count", "attention.key_length")
    )
    if whole <= rope_size:
        raise fields.damaged(f"attention.key_length is {whole}, expected over {rope_size}")
    return read_gguf_sizes(fields) | {
        "kv_lora_rank": fields.positive("attention.kv_lora_rank"),
        "q_lora_rank": fields.optional("attention.q_lora_rank"),
        "qk_rope_head_dim": rope_size,
        "qk_nope_head_dim": whole - rope_size,
    }


def _read_apertus(fields: Fields) -> ModelConfig:
    fields.require("hidden_act", "xielu")
    fields.require("qk_norm", True)
    for key in ("post_norm", "mlp_bias"):
        fields.require(key, only=False)
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 12e6,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = read_decoder(
        fields,
        max_positions=65536,
        norm_eps=1e-5,
        activation_key=None,
        rope=partial(read_rope, theta=12e6, scaling=scaling),
    )
    return replace(config, has_head_norms=True)


COHERE: Final = Layout(attention=COHERE_HEADS, shares_norm=True)


FAMILIES: Final = (
    record(
        "olmo",
        "OlmoForCausalLM",
        _read_olmo,
        gguf=GgufFormat(architecture="olmo", read=_read_layer_norm_gguf, interleaved_rotary=True),
    ),
    record(
        "jais2",
        "Jais2ForCausalLM",
        _read_jais2,
        Layout(mlp=UP_DOWN, has_norm_bias=True),
        gguf=GgufFormat(architecture="jais2", read=partial(_read_layer_norm_gguf, has_biases=True)),
    ),
    record(
        "nanochat",
        "NanoChatForCausalLM",
        _read_nanochat,
        Layout(attention=BARE_HEADS, mlp=plain_part("fc1", "fc2")),
    ),
    record(
        "cohere",
        "CohereForCausalLM",
        _read_cohere,
        COHERE,
        gguf=GgufFormat(architecture="command-r", read=_read_cohere_gguf),
        has_whole_heads=True,
    ),
    record(
        "cohere2",
        "Cohere2ForCausalLM",
        read_cohere2,
        COHERE,
        gguf=GgufFormat(architecture="cohere2", read=_read_cohere_gguf),
        has_whole_heads=True,
    ),
    record(
        "cohere_compass_text",
        "CohereCompassForCausalLM",
        _read_compass,
        COHERE,
        has_whole_heads=True,
    ),
    record(
        "stablelm",
        "StableLmForCausalLM",
        _read_stablelm,
        Layout(attention=STABLELM_HEADS, has_norm_bias=True, shares_norm=True),
        gguf=GgufFormat(architecture="stablelm", read=_read_stablelm_gguf),
        has_whole_heads=True,
    ),
    record(
        "phi",
        "PhiForCausalLM",
        _read_phi,
        Layout(
            attention=attention_part("dense"),
            mlp=plain_part("fc1", "fc2"),
            final_norm="model.final_layernorm",
            shares_norm=True,
            has_norm_bias=True,
        ),
        gguf=GgufFormat(architecture="phi2", read=_read_layer_norm_gguf),
    ),
    record(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        _read_gpt_neox,
        Layout(
            attention=JOINED_ATTENTION,
            mlp=plain_part("dense_h_to_4h", "dense_4h_to_h"),
            has_norm_bias=True,
        ),
        ignored_tensors=r"model\.layers\.\d+\.self_attn\.(bias|masked_bias|rotary_emb\.inv_freq)",
        renamed_tensors=(
            ("gpt_neox.embed_in.", "model.embed_tokens."),
            ("gpt_neox.final_layer_norm.", "model.norm."),
            ("gpt_neox.", "model."),
            (".attention.query_key_value.", ".self_attn.qkv_proj."),
            (".attention.", ".self_attn."),
            ("embed_out.", "lm_head."),
        ),
        gguf=GgufFormat(architecture="gptneox", read=_read_neox_gguf),
        has_whole_heads=True,
    ),
    record("youtu", "YoutuForCausalLM", _read_youtu, Layout(attention=LATENT_HEADS)),
    record(
        "minicpm3",
        "MiniCPM3ForCausalLM",
        _read_minicpm3,
        Layout(attention=LATENT_HEADS),
        gguf=GgufFormat(architecture="minicpm3", read=_read_minicpm3_gguf),
    ),
    record(
        "apertus",
        "ApertusForCausalLM",
        _read_apertus,
        Layout(mlp=XIELU_MLP, norms=("attention_layernorm", "", "feedforward_layernorm", "")),
    ),
)
