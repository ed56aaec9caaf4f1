"""Reading the keys of config.json that families share: most with Llama, experts, gated DeltaNets.

Knows what these keys mean, and what those of params.json are called here. Must not know which
family reads them, nor its defaults, which come as arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from shardnet.errors import shown
from shardnet.model.config.fields import MAX_SIZE, Fields
from shardnet.model.config.limits import (
    MAX_EOS,
    MAX_EXPERTS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_STATE_COLUMNS,
    NORM_EPS,
    THETAS,
)
from shardnet.model.config.model_config import Activation, DeltaNet, ModelConfig, Rope
from shardnet.model.config.rope import reach, read_rope, read_scaling, rope_object
from shardnet.types import DType

FULL = "full_attention"
SLIDING = "sliding_attention"


LINEAR: Final = "linear_attention"
_MOST_TAPS = 64
_INTERVAL = 4


def read_decoder(
    fields: Fields,
    *,
    n_layers: int | None = None,
    n_kv_heads: int | None = None,
    max_positions: int = 2048,
    norm_eps: float = 1e-6,
    norm_key: str = "rms_norm_eps",
    head_size: int | None = None,
    intermediate_size: int | None = None,
    activation_key: str | None = "hidden_act",
    activation: str = "silu",
    is_tied: bool = False,
    attention_bias: bool | None = False,
    mlp_bias: bool | None = None,
    rope: Callable[[Fields, int, int], Rope] = read_rope,
) -> ModelConfig:
    """Read a config with Llama's keys, without windows or experts.

    The arguments are names of keys, and what transformers takes where one is missing. `n_kv_heads`
    None stands for as many as heads, `head_size` None for the hidden size divided by the heads,
    `n_layers` and `intermediate_size` None for no default, `activation_key`, `attention_bias` and
    `mlp_bias` None where no such key counts. `rope` reads the rotary positions, given `fields`, the
    number of positions and the head size. Raises CheckpointError for a missing or malformed key,
    UnsupportedModelError for a value that is not implemented.
    """
    hidden_size = fields.positive("hidden_size")
    n_heads = fields.positive("num_attention_heads")
    kv_heads = fields.positive("num_key_value_heads", n_kv_heads or n_heads)
    if n_heads % kv_heads:
        raise fields.damaged(
            f"num_attention_heads {n_heads} is no multiple of num_key_value_heads {kv_heads}"
        )
    size = fields.positive("head_dim", head_size or even_head_size(fields, hidden_size, n_heads))
    positions = fields.positive("max_position_embeddings", max_positions, at_most=MAX_POSITIONS)
    rotary = rope(fields, positions, size)
    return ModelConfig(
        family=fields.take("model_type", str),
        n_layers=n_layers
        if n_layers and fields.missing("num_hidden_layers")
        else fields.positive("num_hidden_layers", at_most=MAX_LAYERS),
        hidden_size=hidden_size,
        n_heads=n_heads,
        n_kv_heads=kv_heads,
        head_size=size,
        intermediate_size=fields.positive(
            "intermediate_size", *([] if intermediate_size is None else [intermediate_size])
        ),
        vocab_size=fields.positive("vocab_size"),
        max_positions=reach(rotary, positions),
        norm_eps=fields.number(norm_key, norm_eps, within=NORM_EPS),
        activation=read_activation(fields, activation_key, activation)
        if activation_key
        else Activation(activation),
        attention_bias=_read_bias(fields, "attention_bias", attention_bias),
        mlp_bias=_read_bias(fields, "mlp_bias", mlp_bias),
        rope=rotary,
        tie_word_embeddings=fields.take("tie_word_embeddings", bool, is_tied),
        checkpoint_dtype=read_dtype(fields),
        bos_token_id=fields.take("bos_token_id", int, None),
        eos_token_ids=read_eos(fields),
    )


def _read_bias(fields: Fields, key: str, default: bool | None) -> bool:
    return default is not None and fields.take(key, bool, default)


def read_layer_kinds(fields: Fields, n_layers: int, *kinds: str) -> list[str] | None:
    """Read `layer_types`, one of the `kinds` for each layer, None where the key is missing.

    Raises CheckpointError for a list of another length than `n_layers`, UnsupportedModelError for
    other kinds.
    """
    given: list[str] | None = fields.take("layer_types", list, None)
    if given is not None and len(given) != n_layers:
        raise fields.damaged(f"layer_types has {len(given)} entries for {n_layers} layers")
    for kind in given or ():
        if kind not in kinds:
            raise fields.unsupported("layer_types", kind, ", ".join(kinds))
    return given


def read_windows(
    fields: Fields, n_layers: int, window: int | None, is_local: Callable[[int], bool]
) -> tuple[int | None, ...]:
    """Read `layer_types`: `window` for each sliding layer, None for the others.

    Where the key is missing, the layers slide for which `is_local` is true. Raises CheckpointError
    for a list of another length than `n_layers`, and where layers slide and `window` is None.
    """
    kinds = read_layer_kinds(fields, n_layers, FULL, SLIDING)
    if kinds is None:
        kinds = [SLIDING if is_local(layer) else FULL for layer in range(n_layers)]
    if SLIDING in kinds and window is None:
        raise fields.damaged(f"layer_types names {SLIDING}, and there is no sliding_window")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def read_nope_layers(fields: Fields, n_layers: int) -> tuple[int, ...]:
    """Read which layers have no rotary positions: 0 in a list, or every so many.

    Raises CheckpointError for a list of another length than `n_layers` or of other numbers.
    """
    interval = fields.positive("no_rope_layer_interval", 4)
    marks = read_marks(fields, "no_rope_layers", n_layers)
    marks = marks or [(n + 1) % interval != 0 for n in range(n_layers)]
    return tuple(n for n in range(n_layers) if not marks[n])


def read_marks(fields: Fields, key: str, n_layers: int) -> list[bool] | None:
    """Read 0 or 1 for each layer, None where no list is given.

    Raises CheckpointError for a list of another length than `n_layers` or of other numbers.
    """
    marks = fields.take(key, list, [])
    if marks and (len(marks) != n_layers or not all(type(mark) in (int, bool) for mark in marks)):
        raise fields.damaged(f"{key} is {shown(marks)}, expected {n_layers} of 0 and 1")
    return [bool(mark) for mark in marks] or None


def read_window(fields: Fields, default: int) -> int | None:
    """Read `sliding_window`, a number of positions: null is None, a missing key the default."""
    return fields.optional("sliding_window") if fields.given("sliding_window") else default


def read_full_rope(fields: Fields, max_positions: int, head_size: int, *, theta: float) -> Rope:
    """Read the positions of layers without a window, the only ones that transformers 4 scales.

    `theta` is the default of the base. Raises as `read_rope`.
    """
    theta = fields.number("rope_theta", theta, within=THETAS)
    inner = _rope_of_layers(fields, FULL) or rope_object(fields)
    plain = Rope(theta=inner.number("rope_theta", theta, within=THETAS))
    return read_scaling(inner, plain, max_positions=max_positions, head_size=head_size)


def read_sliding_rope(fields: Fields, config: ModelConfig, *, theta: float) -> Rope:
    """Read the positions of layers with a window, where they have their own; else the `theta`.

    Raises as `read_rope`.
    """
    inner = _rope_of_layers(fields, SLIDING)
    if inner is None:
        return Rope(theta=theta)
    plain = Rope(theta=inner.number("rope_theta", theta, within=THETAS))
    positions = config.max_positions
    return read_scaling(inner, plain, max_positions=positions, head_size=config.head_size)


def _rope_of_layers(fields: Fields, kind: str) -> Fields | None:
    """Find one layer kind's object in the `rope_parameters` that transformers 5 nests."""
    if fields.missing("rope_parameters"):
        return None
    outer = fields.inner("rope_parameters", fields.take("rope_parameters", dict))
    outer.ignore(FULL, SLIDING)
    outer.note_the_rest()
    return outer.inner(kind, outer.take(kind, dict, {}))


def even_head_size(fields: Fields, hidden_size: int, n_heads: int) -> int:
    """Divide the hidden size by the heads, which gives the head size where no `head_dim` is given.

    Raises CheckpointError where that leaves a remainder and `head_dim` is missing.
    """
    if hidden_size % n_heads and fields.missing("head_dim"):
        raise fields.damaged(f"hidden size {hidden_size} is no multiple of {n_heads} heads")
    return hidden_size // n_heads


def read_activation(fields: Fields, key: str, default: str) -> Activation:
    """Read the MLP's nonlinearity; UnsupportedModelError for one that is not implemented."""
    name = fields.take(key, str, default)
    try:
        return Activation(name)
    except ValueError:
        supported = ", ".join(kind.value for kind in Activation)
        raise fields.unsupported(key, name, supported) from None


def read_dtype(fields: Fields) -> DType | None:
    """Read the dtype that the weights are stored in, None where the config does not say."""
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
    """Read the token ids that end a text: one, several or none."""
    value = fields.take("eos_token_id", (int, list), None)
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if len(ids) > MAX_EOS or not all(_is_token_id(token_id) for token_id in ids):
        raise fields.damaged(
            f"eos_token_id {shown(value)} is neither a token id nor a list of at most {MAX_EOS}"
        )
    return tuple(ids)


def _is_token_id(value: object) -> bool:
    """Whether `value` is an id, or one of the negative numbers that stand for none."""
    return isinstance(value, int) and abs(value) <= MAX_SIZE


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


def read_expert_counts(
    fields: Fields,
    keys: tuple[str, str],
    n_experts: int,
    top_k: int | None,
    top_k_key: str = "num_experts_per_tok",
) -> tuple[int, int]:
    """Read the number of experts, under either of `keys`, and the number of them per token.

    The latter is under `top_k_key`. `n_experts` and `top_k` are the defaults; `top_k` None where
    there is none. Raises CheckpointError where the keys disagree or a token would use more experts
    than there are.
    """
    key = next((key for key in keys if not fields.missing(key)), keys[0])
    found = fields.positive(key, n_experts, at_most=MAX_EXPERTS)
    if any(not fields.missing(other) and fields.positive(other) != found for other in keys):
        raise fields.damaged(f"{keys[0]} and {keys[1]} disagree")
    chosen = fields.positive(top_k_key, *([] if top_k is None else [top_k]))
    if chosen > found:
        raise fields.damaged(f"{top_k_key} is {chosen}, there are {found} experts")
    return found, chosen


def read_sparse_layers(fields: Fields, n_layers: int) -> tuple[int, ...]:
    """Read which layers have experts: each `decoder_sparse_step`-th, but for `mlp_only_layers`."""
    step = fields.positive("decoder_sparse_step", 1)
    dense = fields.take("mlp_only_layers", list, [])
    if not all(isinstance(layer, int) and not isinstance(layer, bool) for layer in dense):
        raise fields.damaged(f"mlp_only_layers is {shown(dense)}, expected numbers of layers")
    if len(dense) > n_layers:
        raise fields.damaged(f"mlp_only_layers has {len(dense)} entries for {n_layers} layers")
    kept_dense = frozenset(dense)
    return tuple(n for n in range(n_layers) if n not in kept_dense and (n + 1) % step == 0)


def read_mlp_kinds(fields: Fields, n_layers: int, first: int) -> tuple[int, ...]:
    """Read which layers have experts, by name; where no key says it, those from `first` on."""
    kinds = fields.take("mlp_layer_types", list, None)
    if kinds is None:
        return tuple(range(max(0, first), n_layers))
    if len(kinds) != n_layers:
        raise fields.damaged(f"mlp_layer_types has {len(kinds)} entries for {n_layers} layers")
    for kind in kinds:
        if kind not in ("dense", "sparse"):
            raise fields.unsupported("mlp_layer_types", kind, "dense, sparse")
    return tuple(n for n in range(n_layers) if kinds[n] == "sparse")


def read_delta_net(
    fields: Fields,
    n_layers: int,
    heads: tuple[int, int] = (16, 32),
    sizes: tuple[int, int] = (128, 128),
    attention: str = FULL,
) -> DeltaNet | None:
    """Read the sizes of the gated DeltaNets; None where every layer has attention.

    `heads` of keys and values and their `sizes` are defaults. Layers with attention may be called
    so too.

    Raises CheckpointError for sizes that do not fit together or would fill the memory,
    UnsupportedModelError for another kind of layer.
    """
    layers = _read_layers(fields, n_layers, attention)
    read = DeltaNet(
        n_key_heads=fields.positive("linear_num_key_heads", heads[0]),
        n_value_heads=fields.positive("linear_num_value_heads", heads[1]),
        key_size=fields.positive("linear_key_head_dim", sizes[0]),
        value_size=fields.positive("linear_value_head_dim", sizes[1]),
        n_taps=fields.positive("linear_conv_kernel_dim", 4, at_most=_MOST_TAPS),
        takes_turns=fields.take("linear_heads_take_turns", bool, False),
        has_split_gate=fields.take("linear_gate_is_split", bool, False),
        layers=layers,
    )
    if read.n_value_heads % read.n_key_heads:
        raise fields.damaged(
            f"linear_num_value_heads {read.n_value_heads} is no multiple of linear_num_key_heads "
            f"{read.n_key_heads}"
        )
    check_state_size(fields, read)
    return read if layers else None


def check_state_size(fields: Fields, read: DeltaNet) -> None:
    """Raise CheckpointError for states that would fill the memory."""
    n_columns = max(read.key_size * read.value_width, read.n_taps * read.mixed_width)
    if n_columns > MAX_STATE_COLUMNS:
        raise fields.damaged(
            f"linear attention claims {n_columns} numbers of state in a layer, expected at most "
            f"{MAX_STATE_COLUMNS}"
        )


def _read_layers(fields: Fields, n_layers: int, attention: str) -> tuple[int, ...]:
    """Read `layer_types`, or by default all layers but each `full_attention_interval`-th."""
    interval = fields.positive("full_attention_interval", _INTERVAL)
    kinds = read_layer_kinds(fields, n_layers, *dict.fromkeys((LINEAR, FULL, attention)))
    if kinds is None:
        kinds = [LINEAR if (layer + 1) % interval else FULL for layer in range(n_layers)]
    return tuple(layer for layer, kind in enumerate(kinds) if kind == LINEAR)
