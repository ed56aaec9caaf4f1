"""Dense families of Llama's attention, around which little differs: a reader and a record each.

Knows their keys, defaults and parts (transformers, modeling_*.py). Must not know files, nor torch.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Final

from shardnet.model.config.decoder_config import (
    read_decoder,
    read_nope_layers,
    read_window,
    read_windows,
)
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import GgufFields, gguf_biases, read_gguf_decoder
from shardnet.model.config.limits import MAX_LAYERS
from shardnet.model.config.model_config import Activation, ModelConfig
from shardnet.model.config.rope import read_rope
from shardnet.model.families import gemma2, granite, llama
from shardnet.model.families.family import GgufFormat
from shardnet.model.families.layout import POST_NORMS, Layout, record
from shardnet.model.families.parts import JOINED_MLP, UP_DOWN, attention_part, plain_part

_NO_OUTPUT_BIAS: Final = attention_part(has_output_bias=False)


# Other defaults


def _read_helium(fields: Fields) -> ModelConfig:
    config = read_decoder(
        fields,
        max_positions=4096,
        norm_eps=1e-8,
        head_size=128,
        mlp_bias=False,
        rope=partial(read_rope, theta=1e5),
    )
    return replace(config, has_pairs=True)


def _read_iquestcoder(fields: Fields) -> ModelConfig:
    fields.require("use_sliding_window", False)
    return read_decoder(
        fields, n_kv_heads=8, max_positions=131072, norm_eps=1e-5, head_size=128, mlp_bias=False
    )


def _read_exaone(fields: Fields) -> ModelConfig:
    """Read an ExaoneConfig, also with the keys of its makers."""
    is_own = fields.given("num_layers")
    fields.ignore("embed_dropout")
    return read_decoder(
        fields,
        n_layers=fields.positive("num_layers", at_most=MAX_LAYERS) if is_own else None,
        n_kv_heads=8,
        max_positions=4096,
        norm_key="layer_norm_epsilon" if is_own else "rms_norm_eps",
        norm_eps=1e-5,
        activation_key="activation_function" if is_own else "hidden_act",
        mlp_bias=False,
        rope=partial(read_rope, theta=500000.0),
    )


def _read_seed_oss(fields: Fields) -> ModelConfig:
    fields.require("attention_out_bias", False)
    return read_decoder(
        fields,
        n_kv_heads=8,
        max_positions=524288,
        head_size=128,
        intermediate_size=27648,
        attention_bias=True,
        mlp_bias=False,
    )


def read_ernie(fields: Fields, *, n_kv_heads: int = 2, head_size: int | None = 128) -> ModelConfig:
    """Read what ERNIE's models without experts and with them say alike; arguments are defaults."""
    config = read_decoder(
        fields,
        n_kv_heads=n_kv_heads,
        max_positions=131072,
        norm_eps=1e-5,
        head_size=head_size,
        is_tied=True,
        rope=partial(read_rope, theta=500000.0),
        attention_bias=None,
    )
    has_bias = fields.take("use_bias", bool, False)
    return replace(config, attention_bias=has_bias, mlp_bias=has_bias, has_pairs=True)


def read_ernie_gguf(fields: GgufFields) -> dict[str, Any]:
    """Read the metadata of either."""
    bias = {"use_bias": gguf_biases(fields)["attention_bias"]}
    return read_gguf_decoder(fields) | bias


def _read_gemma(fields: Fields) -> ModelConfig:
    """Read a GemmaConfig, in which `gelu` stands for its approximation."""
    fields.ignore("hidden_activation")
    fields.require("use_bidirectional_attention", False)
    config = read_decoder(
        fields,
        n_kv_heads=16,
        max_positions=8192,
        head_size=256,
        activation="gelu_pytorch_tanh",
        is_tied=True,
    )
    is_gelu = config.activation is Activation.GELU
    return replace(
        config,
        activation=Activation.GELU_TANH if is_gelu else config.activation,
        norm_offset=1.0,
        embedding_multiplier=config.hidden_size**0.5,
    )


def _read_hyperclovax(fields: Fields) -> ModelConfig:
    """Read a HyperCLOVAXConfig: Granite's, with norms behind sub-layers too."""
    fields.require("use_post_norm", True)
    scale = fields.optional_number("attention_multiplier")
    config = granite.read_config(fields)
    return replace(
        config,
        attention_scale=config.head_size**-0.5 if scale is None else scale,
        logit_divisor=1 / config.logit_divisor,
    )


# Windows, and layers without positions


def _read_cwm(fields: Fields) -> ModelConfig:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 1e6,
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = read_decoder(
        fields,
        n_kv_heads=8,
        max_positions=131072,
        norm_eps=1e-5,
        head_size=128,
        mlp_bias=False,
        rope=partial(read_rope, theta=1e6, scaling=scaling),
        attention_bias=None,
    )
    window = read_window(fields, 8192)
    windows = read_windows(fields, config.n_layers, window, lambda n: n % 4 != 0)
    return replace(config, windows=windows)


def _read_ministral(fields: Fields) -> ModelConfig:
    config = read_decoder(fields, n_kv_heads=8, max_positions=131072, attention_bias=None)
    window = read_window(fields, 4096)
    windows = read_windows(fields, config.n_layers, window, lambda n: window is not None)
    return replace(config, windows=windows)


def _read_smollm3(fields: Fields) -> ModelConfig:
    """Read a SmolLM3Config: windows are switched off as a rule."""
    config = read_decoder(
        fields,
        n_kv_heads=4,
        max_positions=32768,
        mlp_bias=False,
        is_tied=True,
        rope=partial(read_rope, theta=2000000.0),
    )
    nope = read_nope_layers(fields, config.n_layers)
    is_used = fields.take("use_sliding_window", bool, False)
    window = fields.optional("sliding_window") if is_used else None
    windows = read_windows(
        fields, config.n_layers, window, lambda n: window is not None and n in nope
    )
    return replace(config, nope_layers=nope, windows=windows)


def read_exaone4(fields: Fields) -> ModelConfig:
    """Read an Exaone4Config: where layers have windows, those without one have no positions."""
    config = read_decoder(
        fields, n_kv_heads=32, norm_eps=1e-5, intermediate_size=16384, attention_bias=None
    )
    window = read_window(fields, 4096)
    period = _read_period(fields)
    windows = read_windows(
        fields, config.n_layers, window, lambda n: window is not None and (n + 1) % period != 0
    )
    full = tuple(n for n in range(config.n_layers) if windows[n] is None)
    nope = full if window else ()
    return replace(config, windows=windows, nope_layers=nope, has_head_norms=True)


def _read_period(fields: Fields) -> int:
    """Read every how many layers one has no window: a number, or L and G for each of them."""
    key = "sliding_window_pattern"
    pattern = fields.take(key, (int, str), 4)
    if isinstance(pattern, int):
        return fields.positive(key, 4) if pattern else 1
    if pattern != "L" * (len(pattern) - 1) + "G":
        raise fields.unsupported(key, pattern, "LLLG, a number")
    return len(pattern)


def _read_exaone4_gguf(fields: GgufFields) -> dict[str, Any]:
    """Read the metadata; which layers have windows is llama.cpp's own."""
    fields.ignore("attention.sliding_window_pattern")
    window = fields.optional("attention.sliding_window")
    return read_gguf_decoder(fields) | {"sliding_window": window}


# Heads of which a part turns


def _read_glm(fields: Fields) -> ModelConfig:
    """Read a GlmConfig or a Glm4Config."""
    config = read_decoder(
        fields,
        n_kv_heads=2,
        max_positions=131072,
        norm_eps=1.5625e-7,
        head_size=128,
        attention_bias=True,
        rope=partial(read_rope, may_be_partial=True, share=0.5),
    )
    return replace(config, has_pairs=True)


def _read_glm4(fields: Fields) -> ModelConfig:
    has_pairs = fields.take("rope_interleave", bool, True)
    return replace(_read_glm(fields), has_pairs=has_pairs)


def _read_glm4_gguf(fields: GgufFields) -> dict[str, Any]:
    """Read the metadata. Pairs with axes (GLM-4.1V) do not stand side by side there."""
    own = {
        "attention_bias": "blk.0.attn_q.bias" in fields.tensors,
        "rope_interleave": fields.missing("rope.dimension_sections"),
    }
    return read_gguf_decoder(fields, may_be_partial=True) | own


def _read_nemotron(fields: Fields) -> ModelConfig:
    """Read a NemotronConfig: norms store what exceeds 1."""
    config = read_decoder(
        fields,
        max_positions=4096,
        norm_eps=1e-5,
        norm_key="norm_eps",
        intermediate_size=24576,
        activation="relu2",
        mlp_bias=False,
        rope=partial(read_rope, may_be_partial=True, share=0.5),
    )
    return replace(config, norm_offset=1.0)


# An MLP without a gate


def _read_starcoder2(fields: Fields) -> ModelConfig:
    """Read a Starcoder2Config, with the published keys that transformers goes without."""
    fields.ignore("activation_function", "layer_norm_epsilon", "mlp_type", "norm_type")
    for key in ("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"):
        fields.require(key, only=True)
    fields.require("scale_attn_weights", only=True)
    config = read_decoder(
        fields,
        n_kv_heads=2,
        max_positions=4096,
        norm_eps=1e-5,
        norm_key="norm_epsilon",
        intermediate_size=12288,
        activation="gelu_pytorch_tanh",
        is_tied=True,
        attention_bias=None,
    )
    has_bias = fields.take("use_bias", bool, True)
    windows = (fields.optional("sliding_window"),) * config.n_layers
    return replace(config, attention_bias=has_bias, mlp_bias=has_bias, windows=windows)


def _read_starcoder2_gguf(fields: GgufFields) -> dict[str, Any]:
    """Read the metadata; windows are left out, as llama.cpp does."""
    norm = ("attention.layer_norm_epsilon", "norm_epsilon")
    bias = {"use_bias": gguf_biases(fields)["attention_bias"]}
    return read_gguf_decoder(fields, norm=norm) | bias


FAMILIES: Final = (
    record("helium", "HeliumForCausalLM", _read_helium, Layout(attention=_NO_OUTPUT_BIAS)),
    record(
        "iquestcoder",
        "IQuestCoderForCausalLM",
        _read_iquestcoder,
        same_architectures=("LlamaForCausalLM",),
    ),
    record(
        "exaone",
        "ExaoneForCausalLM",
        _read_exaone,
        same_architectures=("LlamaForCausalLM",),
        ignored_tensors=r".*\.rotary\.inv_freq",
        renamed_tensors=(
            ("transformer.wte.", "model.embed_tokens."),
            ("transformer.ln_f.", "model.norm."),
            ("transformer.h.", "model.layers."),
            (".attn.attention.out_proj.", ".self_attn.o_proj."),
            (".attn.attention.", ".self_attn."),
            (".ln_1.", ".input_layernorm."),
            (".ln_2.", ".post_attention_layernorm."),
            (".mlp.c_fc_0.", ".mlp.gate_proj."),
            (".mlp.c_fc_1.", ".mlp.up_proj."),
            (".mlp.c_proj.", ".mlp.down_proj."),
        ),
        gguf=GgufFormat(architecture="exaone"),
    ),
    record(
        "seed_oss",
        "SeedOssForCausalLM",
        _read_seed_oss,
        Layout(attention=_NO_OUTPUT_BIAS),
        gguf=GgufFormat(architecture="seed_oss", read=partial(read_gguf_decoder, has_biases=True)),
    ),
    record(
        "ernie4_5",
        "Ernie4_5ForCausalLM",
        read_ernie,
        gguf=GgufFormat(architecture="ernie4_5", read=read_ernie_gguf),
    ),
    record("gemma", "GemmaForCausalLM", _read_gemma, gguf=GgufFormat(architecture="gemma")),
    record(
        "vaultgemma",
        "VaultGemmaForCausalLM",
        gemma2.read_config,
        Layout(norms=("input_layernorm", "", "pre_feedforward_layernorm", "")),
    ),
    record(
        "hyperclovax",
        "HyperCLOVAXForCausalLM",
        _read_hyperclovax,
        Layout(norms=("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2")),
    ),
    record("cwm", "CwmForCausalLM", _read_cwm),
    record("ministral", "MinistralForCausalLM", _read_ministral),
    record(
        "smollm3",
        "SmolLM3ForCausalLM",
        _read_smollm3,
        gguf=GgufFormat(
            architecture="smollm3",
            read=partial(read_gguf_decoder, has_biases=True),
            interleaved_rotary=True,
        ),
    ),
    record(
        "exaone4",
        "Exaone4ForCausalLM",
        read_exaone4,
        Layout(norms=POST_NORMS),
        gguf=GgufFormat(architecture="exaone4", read=_read_exaone4_gguf),
    ),
    record("glm", "GlmForCausalLM", _read_glm, Layout(attention=_NO_OUTPUT_BIAS, mlp=JOINED_MLP)),
    record(
        "glm4",
        "Glm4ForCausalLM",
        _read_glm4,
        Layout(
            attention=_NO_OUTPUT_BIAS,
            mlp=JOINED_MLP,
            norms=(
                *("input_layernorm", "post_self_attn_layernorm"),
                *("post_attention_layernorm", "post_mlp_layernorm"),
            ),
        ),
        gguf=GgufFormat(architecture="glm4", read=_read_glm4_gguf),
    ),
    record(
        "nemotron",
        "NemotronForCausalLM",
        _read_nemotron,
        Layout(mlp=UP_DOWN, has_norm_bias=True),
        gguf=GgufFormat(
            architecture="nemotron",
            read=partial(
                read_gguf_decoder,
                norm=("attention.layer_norm_epsilon", "norm_eps"),
                may_be_partial=True,
                has_biases=True,
            ),
        ),
    ),
    record(
        "arcee",
        "ArceeForCausalLM",
        partial(
            read_decoder,
            max_positions=4096,
            norm_eps=1e-5,
            intermediate_size=18432,
            activation="relu2",
            attention_bias=False,
            mlp_bias=False,
        ),
        Layout(mlp=UP_DOWN),
        gguf=GgufFormat(architecture="arcee", read=llama.read_gguf, interleaved_rotary=True),
    ),
    record(
        "starcoder2",
        "Starcoder2ForCausalLM",
        _read_starcoder2,
        Layout(mlp=plain_part("c_fc", "c_proj"), has_norm_bias=True),
        gguf=GgufFormat(architecture="starcoder2", read=_read_starcoder2_gguf),
    ),
)
