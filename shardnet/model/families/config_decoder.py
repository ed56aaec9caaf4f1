"""Reading config.json of the families that share Llama's keys: one function per family.

Knows each family's keys and transformers' defaults for them. Must not know tensors. What a family
does not know is refused by name (config/fields.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from shardnet.model.config.fields import Fields
from shardnet.model.config.limits import MAX_LAYERS
from shardnet.model.config.model_config import Activation, ModelConfig, Rope
from shardnet.model.config.rope import reach, read_rope
from shardnet.types import DType

FULL = "full_attention"
SLIDING = "sliding_attention"


def read_llama(fields: Fields) -> ModelConfig:
    """Read a LlamaConfig."""
    return replace(
        read_decoder(fields, "llama"),
        attention_bias=fields.take("attention_bias", bool, False),
        mlp_bias=fields.take("mlp_bias", bool, False),
    )


def read_mistral(fields: Fields) -> ModelConfig:
    """Read a MistralConfig: one window for all layers, 4096 unless it says null."""
    config = read_decoder(fields, "mistral", n_kv_heads=8, max_positions=131072)
    window = fields.optional("sliding_window") if fields.given("sliding_window") else 4096
    return replace(config, windows=(window,) * config.n_layers)


def read_qwen2(fields: Fields) -> ModelConfig:
    """Read a Qwen2Config: biases on queries, keys and values; windows in the upper layers."""
    config = read_decoder(fields, "qwen2", n_kv_heads=32, max_positions=32768)
    return replace(config, attention_bias=True, windows=qwen_windows(fields, config.n_layers))


def read_qwen3(fields: Fields) -> ModelConfig:
    """Read a Qwen3Config."""
    config = read_decoder(fields, "qwen3", n_kv_heads=32, max_positions=32768, head_size=128)
    return replace(
        config,
        attention_bias=fields.take("attention_bias", bool, False),
        windows=qwen_windows(fields, config.n_layers),
    )


def read_phi3(fields: Fields) -> ModelConfig:
    """Read a Phi3Config, of Phi-3 and Phi-4: part of each head rotated, long contexts apart."""
    fields.ignore("auto_map")  # code that transformers no longer needs; nothing here runs it
    fields.require("full_attn_mod", 1)
    fields.require("interpolate_factor", 1)
    aliases = {"su": "longrope", "yarn": "longrope"}  # of the first versions
    rope = partial(read_rope, aliases=aliases, may_be_partial=True, original=4096)
    config = read_decoder(fields, "phi3", max_positions=4096, norm_eps=1e-5, rope=rope)
    window = fields.optional("sliding_window")
    return replace(config, windows=(window,) * config.n_layers)


def read_granite(fields: Fields) -> ModelConfig:
    """Read a GraniteConfig: Llama with a multiplier in every place."""
    config = read_decoder(fields, "granite")
    return replace(
        config,
        attention_bias=fields.take("attention_bias", bool, False),
        mlp_bias=fields.take("mlp_bias", bool, False),
        attention_scale=fields.positive_number("attention_multiplier", 1.0),
        embedding_multiplier=fields.positive_number("embedding_multiplier", 1.0),
        residual_multiplier=fields.positive_number("residual_multiplier", 1.0),
        logit_divisor=fields.positive_number("logits_scaling", 1.0),
    )


def read_olmo2(fields: Fields) -> ModelConfig:
    """Read an Olmo2Config."""
    config = read_decoder(fields, "olmo2", norm_eps=1e-5)
    return replace(config, attention_bias=fields.take("attention_bias", bool, False))


def read_decoder(
    fields: Fields,
    family: str,
    *,
    n_kv_heads: int | None = None,
    max_positions: int = 2048,
    norm_eps: float = 1e-6,
    head_size: int | None = None,
    activation_key: str = "hidden_act",
    activation: str = "silu",
    is_tied: bool = False,
    rope: Callable[[Fields, int, int], Rope] = read_rope,
) -> ModelConfig:
    """Read what all these families say in the same words; no biases, no windows.

    The arguments are what transformers takes where a key is missing: `n_kv_heads` None for as many
    as heads, `head_size` None for the hidden size's share. `rope` reads the rotary positions,
    given the positions and the head size.
    """
    hidden_size = fields.positive("hidden_size")
    n_heads = fields.positive("num_attention_heads")
    kv_heads = fields.positive("num_key_value_heads", n_kv_heads or n_heads)
    if n_heads % kv_heads:
        raise fields.damaged(
            f"num_attention_heads {n_heads} is no multiple of num_key_value_heads {kv_heads}"
        )
    size = fields.positive("head_dim", head_size or share_of_heads(fields, hidden_size, n_heads))
    positions = fields.positive("max_position_embeddings", max_positions)
    rotary = rope(fields, positions, size)
    return ModelConfig(
        family=family,
        n_layers=fields.positive("num_hidden_layers", at_most=MAX_LAYERS),
        hidden_size=hidden_size,
        n_heads=n_heads,
        n_kv_heads=kv_heads,
        head_size=size,
        intermediate_size=fields.positive("intermediate_size"),
        vocab_size=fields.positive("vocab_size"),
        max_positions=reach(rotary, positions),
        norm_eps=fields.positive_number("rms_norm_eps", norm_eps),
        activation=read_activation(fields, activation_key, activation),
        attention_bias=False,
        mlp_bias=False,
        rope=rotary,
        tie_word_embeddings=fields.take("tie_word_embeddings", bool, is_tied),
        checkpoint_dtype=read_dtype(fields),
        bos_token_id=fields.take("bos_token_id", int, None),
        eos_token_ids=read_eos(fields),
    )


def read_windows(
    fields: Fields, n_layers: int, window: int | None, is_local: Callable[[int], bool]
) -> tuple[int | None, ...]:
    """Read `layer_types`: the `window` of each sliding layer, None for the others.

    Where the key is missing, `is_local` tells which layers slide.
    """
    kinds = fields.take("layer_types", list, None)
    if kinds is None:
        kinds = [SLIDING if is_local(layer) else FULL for layer in range(n_layers)]
    if len(kinds) != n_layers:
        raise fields.damaged(f"layer_types has {len(kinds)} entries for {n_layers} layers")
    for kind in kinds:
        if kind not in (FULL, SLIDING):
            raise fields.unsupported("layer_types", kind, f"{FULL}, {SLIDING}")
    if SLIDING in kinds and window is None:
        raise fields.damaged(f"layer_types names {SLIDING}, and there is no sliding_window")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def qwen_windows(fields: Fields, n_layers: int) -> tuple[int | None, ...]:
    """Read Qwen's windows: switched off as a rule, else in the layers from a number on."""
    is_used = fields.take("use_sliding_window", bool, False)
    window = fields.optional("sliding_window") if fields.given("sliding_window") else 4096
    first = fields.take("max_window_layers", int, 28)
    window = window if is_used else None
    return read_windows(fields, n_layers, window, lambda n: window is not None and n >= first)


def share_of_heads(fields: Fields, hidden_size: int, n_heads: int) -> int:
    """The head size where the config names none; 0, which `positive` refuses, if there is none."""
    if hidden_size % n_heads and fields.missing("head_dim"):
        raise fields.damaged(f"hidden size {hidden_size} is no multiple of {n_heads} heads")
    return hidden_size // n_heads


def read_activation(fields: Fields, key: str, default: str) -> Activation:
    """Read the MLP's nonlinearity."""
    name = fields.take(key, str, default)
    try:
        return Activation(name)
    except ValueError:
        supported = ", ".join(kind.value for kind in Activation)
        raise fields.unsupported(key, name, supported) from None


def read_dtype(fields: Fields) -> DType | None:
    """Read what the weights are stored in, None where the config does not say."""
    old, new = fields.take("torch_dtype", str, None), fields.take("dtype", str, None)
    name = new or old
    if name is None:
        return None
    try:
        return DType(name.removeprefix("torch."))
    except ValueError:
        supported = ", ".join(kind.value for kind in DType)
        raise fields.unsupported("dtype" if new else "torch_dtype", name, supported) from None


def read_eos(fields: Fields) -> tuple[int, ...]:
    """Read the ids that end a text: one, several or none."""
    value = fields.take("eos_token_id", (int, list), None)
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(token_id, int) for token_id in ids):
        raise fields.damaged(f"eos_token_id {value!r} is neither a token id nor a list of them")
    return tuple(ids)
