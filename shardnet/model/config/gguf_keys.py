"""Translate the GGUF metadata that most architectures share to the keys of config.json.

Knows the keys of GGUF (the `gguf` package's constants.py), without the architecture's prefix. Must
not know files, nor which architectures there are.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, Final

from shardnet.errors import shown
from shardnet.model.config.decoder_config import FULL, LINEAR
from shardnet.model.config.fields import Fields
from shardnet.model.config.limits import MAX_LAYERS, NORM_EPS, THETAS

Factors = Mapping[str, tuple[float, ...]]
"""Factors of rotary frequencies, which GGUF stores as tensors, by tensor name."""

FREQS: Final = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
RMS_NORM: Final = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
FACTOR_TENSORS: Final = (FREQS, LONG, SHORT)


class GgufFields(Fields):
    """The metadata of a file, without the architecture's prefix, and what its tensors add to it.

    `tensors` are the names in the file, `factors` what divides rotary frequencies.
    """

    def __init__(self, *of_fields: Any, tensors: Container[str], factors: Factors) -> None:
        super().__init__(*of_fields)
        self.tensors = tensors
        self.factors = factors


def read_gguf_decoder(
    fields: GgufFields,
    *,
    intermediate_size: int | None = None,
    norm: tuple[str, str] = RMS_NORM,
    may_be_partial: bool = False,
    has_biases: bool = False,
) -> dict[str, Any]:
    """Read the metadata that all architectures but GPT-2 share, as config.json has it.

    `intermediate_size` is a default (None: it must be there), `norm` the keys of the norms'
    epsilon, in the file and in config.json. With `may_be_partial` a rotary factor of 1 is written
    out too, for families whose default rotates a part of each head; with `has_biases` it says too
    which biases there are, for families that may have some.
    Raises CheckpointError for a missing or malformed key, UnsupportedModelError for a value that is
    not implemented.
    """
    config = read_gguf_sizes(fields, intermediate_size=intermediate_size, norm=norm)
    n_heads = config["num_attention_heads"]
    even = config["hidden_size"] // n_heads
    head_size = fields.positive("attention.key_length", even)
    value_size = fields.positive("attention.value_length", head_size)
    if value_size != head_size:
        raise fields.unsupported("attention.value_length", value_size, f"key_length, {head_size}")
    rotated = fields.positive("rope.dimension_count", head_size)
    is_silent = rotated == head_size and not may_be_partial
    share = {} if is_silent else {"partial_rotary_factor": rotated / head_size}
    n_kv_heads = _read_even_kv_heads(fields, config["num_hidden_layers"], n_heads)
    biases = gguf_biases(fields) if has_biases else {}
    return config | share | biases | {"num_key_value_heads": n_kv_heads, "head_dim": head_size}


def read_gguf_sizes(
    fields: GgufFields,
    *,
    intermediate_size: int | None = None,
    norm: tuple[str, str] = RMS_NORM,
) -> dict[str, Any]:
    """Read the sizes that do not depend on the heads' layout. Raises as `read_gguf_decoder`."""
    return {
        "num_hidden_layers": fields.positive("block_count", at_most=MAX_LAYERS),
        "max_position_embeddings": fields.positive("context_length"),
        "hidden_size": fields.positive("embedding_length"),
        "intermediate_size": fields.positive(
            "feed_forward_length", *([] if intermediate_size is None else [intermediate_size])
        ),
        "num_attention_heads": fields.positive("attention.head_count"),
        norm[1]: fields.number(norm[0], within=NORM_EPS),
        "rope_theta": fields.number("rope.freq_base", 10000.0, within=THETAS),
        "rope_scaling": _read_scaling(fields),
    }


def _read_even_kv_heads(fields: Fields, n_layers: int, default: int) -> int:
    """Read the number of KV heads, stored once or per layer, which must be equal in all layers."""
    key = "attention.head_count_kv"
    each: int | list[int] = fields.take(key, (int, list), default)
    if isinstance(each, int):
        return fields.positive(key, default)
    is_even = len(each) == n_layers and each == each[:1] * n_layers
    if not is_even or type(each[0]) is not int or each[0] < 1:
        raise fields.unsupported(key, each, f"one number, the same in all {n_layers} layers")
    return each[0]


def read_gguf_kv_heads(fields: Fields, n_layers: int) -> tuple[int, list[bool]]:
    """Read a hybrid's number of KV heads, and which layers have attention."""
    each = fields.take("attention.head_count_kv", list)
    of_attention = {count for count in each if count}
    if len(each) != n_layers or len(of_attention) != 1 or type(each[0]) is not int:
        raise fields.damaged(
            f"attention.head_count_kv is {shown(each)}, expected one number in layers with "
            f"attention and 0 in the others, for {n_layers} layers"
        )
    return of_attention.pop(), [bool(count) for count in each]


def read_gguf_each(fields: Fields, key: str, kind: type, n_layers: int) -> list[Any]:
    """Read one value for each layer, or one for all."""
    value = fields.take(key, (kind, list))
    each = value if isinstance(value, list) else [value] * n_layers
    if len(each) != n_layers or any(type(one) is not kind for one in each):
        raise fields.damaged(f"{key} is {shown(value)}, expected {n_layers} of {kind.__name__}")
    return each


def read_gguf_clamp(fields: Fields, n_layers: int, *keys: str) -> float:
    """Read what clamps the insides of experts, the same in all layers; 0 for nothing."""
    given = [read_gguf_each(fields, key, float, n_layers) for key in keys if fields.given(key)]
    found: set[float] = {one for each in given for one in each} or {0.0}
    if len(found) > 1:
        raise fields.unsupported(keys[0], given, f"one number, the same in all {n_layers} layers")
    return found.pop()


def read_gguf_streams(fields: Fields) -> dict[str, Any]:
    """Read how many residual streams there are, as config.json has it."""
    return {
        "hc_mult": fields.positive("hyper_connection.count"),
        "hc_eps": fields.number("hyper_connection.epsilon", within=NORM_EPS),
    }


def read_gguf_indexer(fields: Fields) -> dict[str, Any]:
    """Read the sizes of what chooses positions, as config.json has them."""
    names = {"index_n_heads": "head_count", "index_head_dim": "key_length", "index_topk": "top_k"}
    return {key: fields.positive(f"attention.indexer.{name}") for key, name in names.items()}


def has_gguf_experts(fields: Fields) -> bool:
    """Whether the metadata counts experts."""
    return bool(fields.take("expert_count", int, 0))


def read_gguf_experts(fields: Fields) -> dict[str, Any]:
    """Read how many experts there are and how many a token uses, as config.json has it.

    Raises UnsupportedModelError unless the router uses softmax.
    """
    fields.require("expert_gating_func", 1)  # softmax
    return {
        "num_local_experts": fields.positive("expert_count"),
        "num_experts_per_tok": fields.positive("expert_used_count"),
        "sliding_window": None,
    }


def read_gguf_delta_net(fields: Fields, *, takes_turns: bool = False) -> dict[str, Any]:
    """Read the sizes of gated DeltaNets, as config.json has them.

    With `takes_turns` value heads take turns over the key heads, where transformers has those of
    one key head side by side. The gate is a linear of its own.
    """
    inner, n_heads = fields.positive("ssm.inner_size"), fields.positive("ssm.time_step_rank")
    if inner % n_heads:
        raise fields.damaged(f"ssm.inner_size {inner} is no multiple of {n_heads} value heads")
    kinds = fields.take("attention.recurrent_layers", list, None)
    return {
        "linear_conv_kernel_dim": fields.positive("ssm.conv_kernel"),
        "linear_key_head_dim": fields.positive("ssm.state_size"),
        "linear_num_key_heads": fields.positive("ssm.group_count"),
        "linear_num_value_heads": n_heads,
        "linear_value_head_dim": inner // n_heads,
        "linear_heads_take_turns": takes_turns,
        "linear_gate_is_split": True,
        "full_attention_interval": fields.positive("full_attention_interval", 4),
    } | ({} if kinds is None else {"layer_types": [LINEAR if own else FULL for own in kinds]})


def gguf_biases(fields: GgufFields) -> dict[str, bool]:
    """Derive from the tensors' names which biases the model has: no key of the metadata says it."""
    return {
        "attention_bias": "blk.0.attn_q.bias" in fields.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in fields.tensors,
    }


def _read_scaling(fields: GgufFields) -> dict[str, Any] | None:
    """Read how rotary positions are scaled, as config.json has it in `rope_scaling`.

    Stored factors divide the frequencies, as longrope's do. Those of Llama 3, in `rope_freqs`, are
    the same for every length.
    """
    kind = fields.take("rope.scaling.type", str, "none")
    original = fields.optional("rope.scaling.original_context_length")
    magnitude = fields.optional_number("rope.scaling.attn_factor")
    factor = fields.optional_number("rope.scaling.factor")
    if factors := fields.factors:
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
            fields.require("rope.scaling.yarn_ext_factor", 1.0)
            fields.ignore("rope.scaling.yarn_attn_factor")  # llama.cpp computes it from the factor
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
