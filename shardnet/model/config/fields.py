"""The keys of config.json, each taken once, checked, and named in every error.

Knows types and bounds, and the keys that cannot change what any supported family computes. Must not
know what a family's keys mean.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from shardnet.errors import CheckpointError, UnsupportedModelError, shown
from shardnet.model.config.limits import SCALES, Range

TEXT: Final = "text_config"
"""The key of the language model's own config in that of a multimodal checkpoint."""

MAX_SIZE = 2**31 - 1
"""Cap on what a config may claim, so that a damaged one cannot make us fill the memory."""

MAX_KEY = 200
"""Characters of an unknown key that a message repeats."""

MAX_UNKNOWN = 64
"""Unknown keys that are noted; a config with more is of another model."""

_MAX_FLOAT_INT = 2**1000
"""Larger integers do not fit a float."""


_BOOKKEEPING = """
_auto_class _commit_hash _model_name_or_path _name_or_path _num_labels auto_map base_model
finetuned finetuning_task id2label is_llama_config label2id license model_name model_name_or_path
name_or_path num_labels problem_type processor_class task_specific_params torchscript
transformers.js_config transformers_version"""
_TRAINING_ONLY = """
activation_dropout attention_dropout attention_dropout_prob attention_probs_dropout_prob attn_pdrop
classifier_dropout classifier_dropout_prob dropout dropout_rate embd_pdrop embedding_dropout
ffn_dropout hidden_dropout hidden_dropout_prob layerdrop mlp_dropout resid_dropout resid_pdrop
residual_dropout
gradient_checkpointing init_std initializer_factor initializer_range
aux_loss_alpha aux_loss_coef router_aux_loss_coef router_jitter_noise router_z_loss_coef seq_aux"""
_OTHER_OUTPUTS = """
classifier_activation classifier_bias is_decoder n_special output_attentions output_hidden_states
output_router_logits output_scores predict_special_tokens return_dict return_dict_in_generate
summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
tie_encoder_decoder use_cache"""
_FURTHER_AHEAD = """
mtp_num_hidden_layers mtp_use_dedicated_embeddings num_mtp_layers num_nextn_predict_layers"""
_SAME_MATHS = """
_flash_attn_2_enabled attn_implementation cache_implementation chunk_size_feed_forward ep_size
experts_implementation flash_attn kernel_options n_ctx pretraining_tp reorder_and_upcast_attn
tf_legacy_loss use_bfloat16 use_flash_attention use_flash_attention_2 use_flash_attn use_kernels
xla_device"""
"""How other programs compute the same, and in which dtype."""
_TOKENIZER = """
add_bos_token add_eos_token additional_special_tokens bos_token chat_template
clean_up_tokenization_spaces cls_token cls_token_id eos_token legacy mask_token mask_token_id
max_seq_len max_seq_length max_sequence_length model_max_length pad_token pad_token_id padding_side
sep_token sep_token_id seq_length tokenizer_class truncation_side unk_token unk_token_id"""
"""What tokenizer_config.json says, if it counts."""
_GENERATION_DEFAULTS = """
bad_words_ids begin_suppress_tokens decoder_start_token_id diversity_penalty do_sample
early_stopping encoder_no_repeat_ngram_size epsilon_cutoff eta_cutoff
exponential_decay_length_penalty guidance_scale length_penalty low_memory max_length max_new_tokens
min_length min_new_tokens min_p no_repeat_ngram_size num_assistant_tokens num_beam_groups num_beams
num_return_sequences penalty_alpha prefix remove_invalid_values renormalize_logits
repetition_penalty stop_strings suppress_tokens temperature top_k top_p typical_p"""
_KEYS: Final = frozenset(
    " ".join(
        (
            *(_BOOKKEEPING, _TRAINING_ONLY, _OTHER_OUTPUTS, _FURTHER_AHEAD, _SAME_MATHS),
            *(_TOKENIZER, _GENERATION_DEFAULTS),
        )
    ).split()
)
_PREFIXES: Final = ("_attn_implementation", "_experts_implementation", "forced_", "unsloth_")


class Fields:
    """The keys of one JSON object. What nobody has taken is noted by name.

    `where` names the object in messages, `prefix` the keys above it, with their dots. Unknown keys
    are noted in the list `unknown`, which the objects inside share; without one they are refused by
    `refuse_unknown`. What takes a value raises
    CheckpointError for one that is malformed, or missing and without a default.
    """

    def __init__(
        self,
        raw: Mapping[str, Any],
        where: str,
        prefix: str = "",
        unknown: list[str] | None = None,
    ) -> None:
        self.where = where
        self._refuses = unknown is None
        self.unknown = [] if unknown is None else unknown
        """Keys that nobody knows, each with its value: `logit_scale = 0.1`."""
        self._raw = raw
        self._prefix = prefix
        self._taken: set[str] = set()

    def given(self, key: str) -> bool:
        """Whether the key is present, null or not."""
        return key in self._raw

    def take_the_rest(self) -> dict[str, Any]:
        """Return what nobody has taken, of any type."""
        rest = {key: value for key, value in self._raw.items() if key not in self._taken}
        self._taken.update(rest)
        return rest

    def inner(self, key: str, raw: Mapping[str, Any]) -> Fields:
        """Make a reader of the object `raw`, which stands under `key`."""
        return Fields(raw, self.where, f"{self._prefix}{key}.", self.unknown)

    def missing(self, key: str) -> bool:
        """Whether the key is absent or null. It counts as taken."""
        self._taken.add(key)
        return self._raw.get(key) is None

    def take(self, key: str, kind: Any, *default: Any) -> Any:
        """Return the value of `key`, checked to be of type `kind`; absent or null: the default."""
        self._taken.add(key)
        value = self._raw.get(key)
        if value is None:
            if default:
                return default[0]
            raise self.damaged(f"{self._prefix}{key} is missing")
        if kind is float and isinstance(value, int) and abs(value) <= _MAX_FLOAT_INT:
            value = value if isinstance(value, bool) else float(value)
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            names = [k.__name__ for k in kinds]
            raise self.damaged(
                f"{self._prefix}{key} is {shown(value)}, expected {' or '.join(names)}"
            )
        return value

    def positive(self, key: str, *default: int, at_most: int = MAX_SIZE) -> int:
        """Return an integer from 1 to `at_most`."""
        value: int = self.take(key, int, *default)
        if not 1 <= value <= at_most:
            raise self.damaged(f"{self._prefix}{key} is {shown(value)}, expected 1 to {at_most}")
        return value

    def optional(self, key: str) -> int | None:
        """Return an integer above 0, None where the key is absent or null."""
        return None if self.missing(key) else self.positive(key)

    def number(self, key: str, *default: float, within: Range = SCALES) -> float:
        """Return a number in the range `within`, so that nothing computed with it overflows."""
        value: float = self.take(key, float, *default)
        if not within.least <= value <= within.most:
            raise self.damaged(f"{self._prefix}{key} is {value}, expected {within}")
        return value

    def optional_number(self, key: str) -> float | None:
        """Return a number in the range SCALES, None where the key is absent or null."""
        return None if self.missing(key) else self.number(key, within=SCALES)

    def nonzero(self, key: str) -> float | None:
        """Return a number in the range SCALES, None where the key is absent, null or 0."""
        return self.optional_number(key) if self.take(key, float, None) else None

    def numbers(self, key: str, count: int, *, within: Range) -> tuple[float, ...]:
        """Return a list of `count` numbers in the range `within`."""
        values: list[Any] = self.take(key, list)
        if len(values) != count:
            raise self.damaged(f"{self._prefix}{key} has {len(values)} numbers, expected {count}")
        for value in values:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not within.least <= value <= within.most:
                raise self.damaged(f"{self._prefix}{key} holds {shown(value)}, expected {within}")
        return tuple(float(value) for value in values)

    def one_of(self, key: str, choices: Collection[Any], *default: Any) -> Any:
        """Return one of the `choices`, which are of one type; UnsupportedModelError for others."""
        value = self.take(key, type(next(iter(choices))), *default)
        if value not in choices:
            raise self.unsupported(key, value, ", ".join(map(str, choices)))
        return value

    def require(self, key: str, only: bool | float | str) -> None:
        """Raise UnsupportedModelError for any value but `only`; an absent key counts as `only`."""
        value = self.take(key, type(only), only)
        if value != only:
            raise self.unsupported(key, value, only if isinstance(only, str) else repr(only))

    def ignore(self, *keys: str) -> None:
        """Take the keys, whatever their value."""
        self._taken.update(keys)

    def take_all(self) -> Mapping[str, Any]:
        """Take every key, for a reader that knows them all."""
        self._taken.update(self._raw)
        return self._raw

    def note_the_rest(self) -> None:
        """Note every key that nobody took in `unknown`, unless it cannot change what is computed.

        Raises UnsupportedModelError for more than MAX_UNKNOWN of them.
        """
        for key, value in self._raw.items():
            if key in self._taken or is_harmless(key) or _says_nothing(value):
                continue
            if len(self.unknown) == MAX_UNKNOWN:
                raise UnsupportedModelError(
                    f"{self.where}: more than {MAX_UNKNOWN} keys are not known to shardnet, "
                    f"{self.unknown[0]} among them",
                    remedy="use a checkpoint of a supported model",
                )
            named = key if key.isprintable() and len(key) <= MAX_KEY else shown(key)
            self.unknown.append(f"{self._prefix}{named} = {shown(value)}")

    def refuse_unknown(self) -> None:
        """Raise UnsupportedModelError, which names all unknown keys, unless a list was given."""
        if self._refuses and self.unknown:
            raise unknown_keys_error(self.where, self.unknown)

    def damaged(self, what: str) -> CheckpointError:
        """Make the error for a value that is malformed; `what` says which and how."""
        return CheckpointError(
            f"{self.where}: {what}", remedy="fetch or export the checkpoint again"
        )

    def unsupported(self, key: str, value: object, supported: str) -> UnsupportedModelError:
        """Make the error for a value that is not implemented; `supported` lists those that are."""
        return UnsupportedModelError(
            f"{self.where}: {self._prefix}{key} = {shown(value)} is not supported; "
            f"supported: {supported}"
        )


def unknown_keys_error(where: str, unknown: Sequence[str]) -> UnsupportedModelError:
    """Make the error for `unknown` keys, at least one, of the config `where`: it names them all."""
    one = f"{unknown[0]} is" if len(unknown) == 1 else f"{len(unknown)} keys are"
    names = "" if len(unknown) == 1 else f": {', '.join(unknown)}"
    return UnsupportedModelError(
        f"{where}: {one} not known to shardnet and may change what the model computes{names}",
        remedy="use another checkpoint, or --ignore-unknown-config to compute as if they were not "
        "there",
    )


def _says_nothing(value: object) -> bool:
    return value is None or value is False or value in ("", [], {})


def is_harmless(key: str) -> bool:
    """Say whether a key changes nothing in the logits, whatever its value."""
    return key in _KEYS or key.startswith(_PREFIXES)
