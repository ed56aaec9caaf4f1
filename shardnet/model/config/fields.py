"""The keys of config.json, each taken once, checked, and named in every error.

Knows types, bounds and which keys change nothing in the logits. Must not know what a family's keys
mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from shardnet.errors import CheckpointError, UnsupportedModelError, shown

MAX_SIZE = 2**31 - 1
"""Cap on what a config may claim, so that a damaged one cannot make us fill the memory."""

MAX_KEY = 200
"""Characters of an unknown key that a message repeats."""

_MAX_FLOAT_INT = 2**1000
"""Larger integers do not fit a float."""


class Fields:
    """The keys of one JSON object. What nobody has taken is refused by name.

    `where` names the object in messages, `prefix` the keys above it, with their dots. What takes a
    value raises CheckpointError for one that is malformed, or missing and without a default.
    """

    def __init__(self, raw: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self.where = where
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
        return Fields(raw, self.where, prefix=f"{self._prefix}{key}.")

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

    def positive_number(self, key: str, *default: float) -> float:
        """Return a finite number above 0."""
        value: float = self.take(key, float, *default)
        if not 0 < value < math.inf:
            raise self.damaged(f"{self._prefix}{key} is {value}, expected a number above 0")
        return value

    def optional_number(self, key: str) -> float | None:
        """Return a finite number above 0, None where the key is absent or null."""
        return None if self.missing(key) else self.positive_number(key)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """Return a list of `count` finite numbers above 0."""
        values: list[Any] = self.take(key, list)
        if len(values) != count:
            raise self.damaged(f"{self._prefix}{key} has {len(values)} numbers, expected {count}")
        for value in values:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 < value < _MAX_FLOAT_INT:
                raise self.damaged(
                    f"{self._prefix}{key} holds {shown(value)}, expected numbers above 0"
                )
        return tuple(float(value) for value in values)

    def require(self, key: str, only: bool | float) -> None:
        """Raise UnsupportedModelError for any value but `only`; an absent key counts as `only`."""
        value = self.take(key, type(only), only)
        if value != only:
            raise self.unsupported(key, value, repr(only))

    def ignore(self, *keys: str) -> None:
        """Take the keys, whatever their value."""
        self._taken.update(keys)

    def refuse_the_rest(self) -> None:
        """Raise UnsupportedModelError for a key that nobody took, unless its value says nothing."""
        for key, value in self._raw.items():
            if key in self._taken or key in HARMLESS or _says_nothing(value):
                continue
            named = key if key.isprintable() and len(key) <= MAX_KEY else shown(key)
            raise UnsupportedModelError(
                f"{self.where}: {self._prefix}{named} = {shown(value)} is not known to shardnet "
                "and may change what the model computes",
                remedy="use a checkpoint without it",
            )

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


def _says_nothing(value: object) -> bool:
    return value is None or value is False or value in ("", [], {})


_BOOKKEEPING = """
_name_or_path _attn_implementation_autoset _commit_hash transformers_version attn_implementation
cache_implementation _flash_attn_2_enabled _num_labels finetuning_task id2label is_llama_config
label2id license max_sequence_length name_or_path num_labels problem_type task_specific_params
tokenizer_class torchscript transformers.js_config unsloth_fixed unsloth_version"""

_TRAINING_ONLY = """
attention_dropout attn_pdrop embd_pdrop embedding_dropout gradient_checkpointing hidden_dropout
initializer_range resid_dropout resid_pdrop router_aux_loss_coef"""

_OTHER_OUTPUTS = """
n_special output_attentions output_hidden_states output_router_logits output_scores
predict_special_tokens return_dict return_dict_in_generate summary_activation
summary_first_dropout summary_proj_to_labels summary_type summary_use_proj use_cache"""

_FURTHER_AHEAD = """
mtp_num_hidden_layers mtp_use_dedicated_embeddings num_mtp_layers num_nextn_predict_layers"""

_SAME_MATHS = """
chunk_size_feed_forward n_ctx pretraining_tp reorder_and_upcast_attn use_bfloat16"""

_GENERATION_DEFAULTS = """
bad_words_ids begin_suppress_tokens decoder_start_token_id diversity_penalty do_sample
early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id
forced_eos_token_id length_penalty max_length min_length no_repeat_ngram_size num_beam_groups
num_beams num_return_sequences pad_token_id prefix remove_invalid_values repetition_penalty
sep_token_id suppress_tokens temperature top_k top_p typical_p"""

HARMLESS = frozenset(
    " ".join(
        (
            *(_BOOKKEEPING, _TRAINING_ONLY, _OTHER_OUTPUTS, _FURTHER_AHEAD),
            *(_SAME_MATHS, _GENERATION_DEFAULTS),
        )
    ).split()
)
"""Keys that change nothing in the logits, whatever their value."""
