"""What a checkpoint's config.json says about the maths of its model.

Knows the keys that transformers writes, in the spellings of versions 4 and 5. Must not know
tensors: it imports no torch. What is not understood is refused by name, never ignored.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from shardnet.errors import CheckpointError, UnsupportedModelError
from shardnet.types import DType

Family = Literal["llama", "gpt2"]

MAX_LAYERS = 10_000
MAX_SIZE = 2**31 - 1
"""Caps on what a config may claim, so that a damaged one cannot make us fill the memory."""

DEFAULT_CONTEXT = 8192
"""Positions of one sequence where nothing else is asked and the model allows more."""


class Activation(enum.Enum):
    """The nonlinearity of the MLP. The value is transformers' name."""

    SILU = "silu"
    GELU = "gelu"
    GELU_NEW = "gelu_new"
    GELU_TANH = "gelu_pytorch_tanh"
    RELU = "relu"


class RopeKind(enum.Enum):
    """How the rotary frequencies are scaled. The value is transformers' `rope_type`."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary position embedding. The last three fields are used by LLAMA3 only."""

    kind: RopeKind = RopeKind.DEFAULT
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The maths of one model.

    `rope` is None for a family with learned positions. `checkpoint_dtype` is what the config says
    the weights are stored in, None where it does not say. `eos_token_ids` is empty where the
    config names none.
    """

    family: Family
    n_layers: int
    hidden_size: int
    n_heads: int
    n_kv_heads: int
    head_size: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    activation: Activation
    attention_bias: bool
    mlp_bias: bool
    rope: Rope | None
    tie_word_embeddings: bool
    checkpoint_dtype: DType | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def default_context(self) -> int:
        """Positions of one sequence where no `--context` is given."""
        return min(self.max_positions, DEFAULT_CONTEXT)


def parse_config(raw: Mapping[str, Any], where: str) -> ModelConfig:
    """Read the parsed config.json `raw`; `where` is its path, for messages.

    Raises CheckpointError for a missing or malformed field, UnsupportedModelError for an
    architecture, a value or an unknown key that would change the maths.
    """
    fields = _Fields(raw, where)
    family = _family(fields)
    config = _llama(fields) if family == "llama" else _gpt2(fields)
    fields.refuse_the_rest()
    return config


_FAMILIES: dict[str, tuple[Family, str]] = {
    "llama": ("llama", "LlamaForCausalLM"),
    "gpt2": ("gpt2", "GPT2LMHeadModel"),
}


def _family(fields: _Fields) -> Family:
    model_type = fields.take("model_type", str)
    known = _FAMILIES.get(model_type)
    if known is None:
        raise fields.unsupported("model_type", model_type, " and ".join(sorted(_FAMILIES)))
    family, architecture = known
    architectures = fields.take("architectures", list, [architecture])
    if architectures != [architecture]:
        raise fields.unsupported("architectures", architectures, f'["{architecture}"]')
    return family


def _llama(fields: _Fields) -> ModelConfig:
    hidden_size = fields.positive("hidden_size")
    n_heads = fields.positive("num_attention_heads")
    n_kv_heads = fields.positive("num_key_value_heads", n_heads)
    head_size = fields.positive("head_dim", _share(fields, hidden_size, n_heads))
    if n_heads % n_kv_heads:
        raise fields.damaged(
            f"num_attention_heads {n_heads} is no multiple of num_key_value_heads {n_kv_heads}"
        )
    if head_size % 2:
        raise fields.damaged(f"head_dim {head_size} is odd: rotary positions need an even size")
    max_positions = fields.positive("max_position_embeddings", 2048)
    return ModelConfig(
        family="llama",
        n_layers=fields.positive("num_hidden_layers", at_most=MAX_LAYERS),
        hidden_size=hidden_size,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_size=head_size,
        intermediate_size=fields.positive("intermediate_size"),
        vocab_size=fields.positive("vocab_size"),
        max_positions=max_positions,
        norm_eps=fields.positive_number("rms_norm_eps", 1e-6),
        activation=_activation(fields, "hidden_act", "silu"),
        attention_bias=fields.take("attention_bias", bool, False),
        mlp_bias=fields.take("mlp_bias", bool, False),
        rope=_rope(fields),
        tie_word_embeddings=fields.take("tie_word_embeddings", bool, False),
        checkpoint_dtype=_checkpoint_dtype(fields),
        bos_token_id=_bos(fields),
        eos_token_ids=_eos(fields),
    )


def _gpt2(fields: _Fields) -> ModelConfig:
    hidden_size = fields.positive("n_embd")
    n_heads = fields.positive("n_head")
    fields.require("scale_attn_weights", True)
    fields.require("scale_attn_by_inverse_layer_idx", False)
    return ModelConfig(
        family="gpt2",
        n_layers=fields.positive("n_layer", at_most=MAX_LAYERS),
        hidden_size=hidden_size,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_size=_share(fields, hidden_size, n_heads),
        intermediate_size=fields.positive("n_inner", 4 * hidden_size),
        vocab_size=fields.positive("vocab_size"),
        max_positions=fields.positive("n_positions", 1024),
        norm_eps=fields.positive_number("layer_norm_epsilon", 1e-5),
        activation=_activation(fields, "activation_function", "gelu_new"),
        attention_bias=True,
        mlp_bias=True,
        rope=None,
        tie_word_embeddings=fields.take("tie_word_embeddings", bool, True),
        checkpoint_dtype=_checkpoint_dtype(fields),
        bos_token_id=_bos(fields),
        eos_token_ids=_eos(fields),
    )


def _share(fields: _Fields, hidden_size: int, n_heads: int) -> int:
    """The head size where the config names none; 0, which `positive` refuses, if there is none."""
    if hidden_size % n_heads and fields.missing("head_dim"):
        raise fields.damaged(f"hidden size {hidden_size} is no multiple of {n_heads} heads")
    return hidden_size // n_heads


def _activation(fields: _Fields, key: str, default: str) -> Activation:
    name = fields.take(key, str, default)
    try:
        return Activation(name)
    except ValueError:
        supported = ", ".join(kind.value for kind in Activation)
        raise fields.unsupported(key, name, supported) from None


def _checkpoint_dtype(fields: _Fields) -> DType | None:
    old, new = fields.take("torch_dtype", str, None), fields.take("dtype", str, None)
    name = new or old
    if name is None:
        return None
    try:
        return DType(name.removeprefix("torch."))
    except ValueError:
        supported = ", ".join(kind.value for kind in DType)
        raise fields.unsupported("dtype" if new else "torch_dtype", name, supported) from None


def _bos(fields: _Fields) -> int | None:
    value: int | None = fields.take("bos_token_id", int, None)
    return value


def _eos(fields: _Fields) -> tuple[int, ...]:
    value = fields.take("eos_token_id", (int, list), None)
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(token_id, int) for token_id in ids):
        raise fields.damaged(f"eos_token_id {value!r} is neither a token id nor a list of them")
    return tuple(ids)


_ROPE_KEYS = {
    RopeKind.DEFAULT: frozenset[str](),
    RopeKind.LINEAR: frozenset({"factor"}),
    RopeKind.LLAMA3: frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
}


def _rope(fields: _Fields) -> Rope:
    """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4)."""
    new = fields.take("rope_parameters", dict, None)
    old = fields.take("rope_scaling", dict, None)
    theta = fields.positive_number("rope_theta", 10000.0)
    if new and old and new != old:
        raise fields.damaged("rope_parameters and rope_scaling disagree; keep one of them")
    which = "rope_parameters" if new else "rope_scaling"
    rope = _Fields(new or old or {}, fields.where, prefix=f"{which}.")
    inner_theta = rope.positive_number("rope_theta", theta)
    kind = _rope_kind(rope)
    values = {key: rope.positive_number(key) for key in sorted(_ROPE_KEYS[kind])}
    rope.require("partial_rotary_factor", 1.0)
    if kind is RopeKind.DEFAULT:  # leftovers of a scaling that is switched off
        rope.ignore("factor", "original_max_position_embeddings")
    rope.refuse_the_rest()
    fields.require("partial_rotary_factor", 1.0)
    original = values.pop("original_max_position_embeddings", None)
    if original is not None:
        values["original_max_positions"] = int(original)
    return Rope(kind=kind, theta=inner_theta, **values)  # type: ignore[arg-type]


def _rope_kind(rope: _Fields) -> RopeKind:
    old, new = rope.take("type", str, None), rope.take("rope_type", str, None)
    name = new or old or "default"
    try:
        return RopeKind(name)
    except ValueError:
        supported = ", ".join(kind.value for kind in RopeKind)
        raise rope.unsupported("rope_type" if new else "type", name, supported) from None


class _Fields:
    """The keys of one JSON object, each taken once; what nobody took is refused by name."""

    def __init__(self, raw: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self.where = where
        self._raw = raw
        self._prefix = prefix
        self._taken: set[str] = set()

    def missing(self, key: str) -> bool:
        """Whether the key is absent or null."""
        return self._raw.get(key) is None

    def take(self, key: str, kind: Any, *default: Any) -> Any:
        """Return the value of `key`, checked to be of type `kind`; absent or null: the default."""
        self._taken.add(key)
        value = self._raw.get(key)
        if value is None:
            if default:
                return default[0]
            raise self.damaged(f"{self._prefix}{key} is missing")
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            names = [k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,))]
            raise self.damaged(f"{self._prefix}{key} is {value!r}, expected {' or '.join(names)}")
        return value

    def positive(self, key: str, *default: int, at_most: int = MAX_SIZE) -> int:
        """Return an integer from 1 to `at_most`."""
        value: int = self.take(key, int, *default)
        if not 1 <= value <= at_most:
            raise self.damaged(f"{self._prefix}{key} is {value}, expected 1 to {at_most}")
        return value

    def positive_number(self, key: str, *default: float) -> float:
        """Return a finite number above 0."""
        value: float = self.take(key, float, *default)
        if not 0 < value < math.inf:
            raise self.damaged(f"{self._prefix}{key} is {value}, expected a number above 0")
        return value

    def require(self, key: str, only: bool | float) -> None:
        """Refuse any value but the one that is implemented."""
        value = self.take(key, type(only), only)
        if value != only:
            raise self.unsupported(key, value, repr(only))

    def ignore(self, *keys: str) -> None:
        """Let the keys be, whatever their value."""
        self._taken.update(keys)

    def refuse_the_rest(self) -> None:
        """Raise UnsupportedModelError for a key nobody knows, unless its value says nothing."""
        for key, value in self._raw.items():
            if key in self._taken or key in _HARMLESS or _says_nothing(value):
                continue
            raise UnsupportedModelError(
                f"{self.where}: {self._prefix}{key} = {value!r} is not known to shardnet and may "
                "change what the model computes; use a checkpoint without it"
            )

    def damaged(self, what: str) -> CheckpointError:
        """Make the error for a field that no checkpoint should have."""
        return CheckpointError(f"{self.where}: {what}; fetch or export the checkpoint again")

    def unsupported(self, key: str, value: object, supported: str) -> UnsupportedModelError:
        """Make the error for a value that is not implemented."""
        return UnsupportedModelError(
            f"{self.where}: {self._prefix}{key} = {value!r} is not supported; "
            f"supported: {supported}"
        )


def _says_nothing(value: object) -> bool:
    return value is None or value is False or value in ("", [], {})


_BOOKKEEPING = """
_name_or_path _attn_implementation_autoset _commit_hash transformers_version attn_implementation
_flash_attn_2_enabled _num_labels finetuning_task id2label is_llama_config label2id license
max_sequence_length name_or_path num_labels problem_type task_specific_params tokenizer_class
torchscript transformers.js_config unsloth_fixed unsloth_version"""

_TRAINING_ONLY = """
attention_dropout attn_pdrop embd_pdrop embedding_dropout gradient_checkpointing hidden_dropout
initializer_range resid_dropout resid_pdrop"""

_OTHER_OUTPUTS = """
n_special output_attentions output_hidden_states output_scores predict_special_tokens return_dict
return_dict_in_generate summary_activation summary_first_dropout summary_proj_to_labels
summary_type summary_use_proj use_cache"""

_SAME_MATHS = """
chunk_size_feed_forward n_ctx pretraining_tp reorder_and_upcast_attn use_bfloat16"""

_GENERATION_DEFAULTS = """
bad_words_ids begin_suppress_tokens decoder_start_token_id diversity_penalty do_sample
early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id
forced_eos_token_id length_penalty max_length min_length no_repeat_ngram_size num_beam_groups
num_beams num_return_sequences pad_token_id prefix remove_invalid_values repetition_penalty
sep_token_id suppress_tokens temperature top_k top_p typical_p"""

_HARMLESS = frozenset(
    " ".join(
        (_BOOKKEEPING, _TRAINING_ONLY, _OTHER_OUTPUTS, _SAME_MATHS, _GENERATION_DEFAULTS)
    ).split()
)
"""Keys that change nothing in the logits, whatever their value."""
