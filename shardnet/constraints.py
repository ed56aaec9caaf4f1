"""What the output of a request must match, and which tokens may come next because of it.

Knows the kinds of constraints and the forms of masks. Must not know grammars, tokenizers or
tensors: tokenizers/grammar makes masks of constraints, model/sampling/token_masks.py reads them.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Self, get_args

from shardnet.errors import UsageError
from shardnet.json_schemas import close_objects, relax

ConstraintKind = Literal["json", "json_schema", "regex", "lark", "choice"]
CONSTRAINT_KINDS: Final[tuple[str, ...]] = get_args(ConstraintKind)
MAX_CONSTRAINT_CHARACTERS: Final = 1 << 18
"""A schema of 3000 properties has 90 000."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """What an output must match from its first token to its last.

    By `kind`, `text` is a JSON schema (`json_schema`), a regular expression (`regex`), a grammar in
    llguidance's form of Lark (`lark`), or a JSON list of texts of which it must be one (`choice`).
    Any JSON object will do for `json`, which has no text. `left_out` are keywords of a schema that
    only narrow it, and are not kept.
    """

    kind: ConstraintKind
    text: str = ""
    left_out: tuple[str, ...] = ()

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str, *, is_strict: bool = True) -> Self:
        """Ask for JSON that is valid by `schema`, an object or its text.

        Objects have only the properties that it names, unless it says `additionalProperties`.
        Without `is_strict` keywords that no grammar keeps and that only narrow are left out; with
        it such a schema is refused when it is compiled. Raises UsageError for a reference that
        leads nowhere, and for a number that no grammar keeps.
        """
        text = _text(schema)
        if len(text) > MAX_CONSTRAINT_CHARACTERS:
            return cls(kind="json_schema", text=text)  # check refuses it
        left_out: tuple[str, ...] = ()
        try:
            read = json.loads(text)
            if isinstance(read, dict):
                relaxed, left_out = (read, ()) if is_strict else relax(read)
                text = _text(close_objects(relaxed))
        except (ValueError, RecursionError):
            pass  # the compiler says what is wrong
        return cls(kind="json_schema", text=text, left_out=left_out)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Self:
        """Ask for one of these texts."""
        return cls(kind="choice", text=_text(list(texts)))

    def check(self) -> None:
        """Raise UsageError for an unknown kind, and for a text that is missing or too long."""
        if self.kind not in CONSTRAINT_KINDS:
            raise UsageError(
                f"constraint: the kind is {self.kind!r}",
                remedy=f"give one of {', '.join(CONSTRAINT_KINDS)}",
            )
        if not isinstance(self.text, str):
            raise UsageError(
                f"constraint: the text is of type {type(self.text).__name__}", remedy="give text"
            )
        if len(self.text) > MAX_CONSTRAINT_CHARACTERS:
            raise UsageError(
                f"constraint: the {self.kind} has {len(self.text)} characters",
                remedy=f"give at most {MAX_CONSTRAINT_CHARACTERS}",
            )
        if bool(self.text) == (self.kind == "json"):
            raise UsageError(
                "constraint: json takes no text"
                if self.text
                else f"constraint: the {self.kind} is empty",
                remedy="give json_schema with a schema, json without",
            )


def _text(value: object) -> str:
    """Write a JSON value as text; text is one already. Raises UsageError for no JSON value."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"constraint: this is not JSON: {error}") from error


class MaskForm(enum.IntEnum):
    """How a mask is written. The numbers stand in docs/protocol.md section 11."""

    BITS = 0
    """Bit `t % 8` of byte `t // 8` is 1 where token `t` is allowed."""
    ALLOWED = 1
    """The ids of the allowed tokens, u32 each."""
    FORBIDDEN = 2
    """The ids of the forbidden ones; all others are allowed."""


@dataclass(frozen=True, slots=True)
class TokenMask:
    """Which tokens may be drawn for a row."""

    form: MaskForm
    data: bytes

    @property
    def is_empty(self) -> bool:
        """Whether it allows no token."""
        return self.form is MaskForm.ALLOWED and not self.data

    def allows(self, token_id: int) -> bool:
        """Say whether a token may be drawn."""
        if self.form is MaskForm.BITS:
            byte = self.data[token_id // 8 : token_id // 8 + 1]
            return bool(byte) and bool(byte[0] >> token_id % 8 & 1)
        is_listed = token_id in memoryview(self.data).cast("I")
        return is_listed is (self.form is MaskForm.ALLOWED)


@dataclass(frozen=True, slots=True)
class RowMask:
    """The mask of sampled row number `row` of a step, counted over sampled rows from 0."""

    row: int
    mask: TokenMask


MAX_MASK_BYTES: Final = 1 << 17
"""Of one mask: the bits of a million tokens."""
MAX_STEP_MASK_BYTES: Final = 4 << 20
"""Of all masks of a step's decode rows: a quarter of what an EXTRAS frame carries."""
