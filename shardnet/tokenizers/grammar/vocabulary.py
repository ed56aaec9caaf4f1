"""The tokens of a model as llguidance takes them, and the limits within which it works for us.

Knows token tables and llguidance's tokenizers. Must not know constraints or masks.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from llguidance import LLParserLimits, LLTokenizer, TokenizerWrapper

from shardnet.constraints import MAX_MASK_BYTES
from shardnet.errors import UnsupportedModelError
from shardnet.tokenizers.token_table import HAS_TOKEN, ByteStrings, Joins, TokenTable

MAX_LEXER_STATES = 50_000
"""Of one request: some 100 MB."""


NO_TOKEN = "NoExtensionBias"
"""Why llguidance stops where a grammar goes on and no token can."""


def parser_limits() -> LLParserLimits:
    """Return llguidance's limits on a grammar and on each of its masks, errors without excerpts."""
    return LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The bytes of the tokens that a model can draw, and which of them are special or end a text.

    A grammar never matches special tokens as text. Ids without a token have no bytes.
    """

    tokens: ByteStrings
    special_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]

    @classmethod
    def of(cls, table: TokenTable, n_ids: int, eos_ids: Sequence[int]) -> Self:
        """Take the first `n_ids` ids of a table, the width of the LM head.

        Raises UnsupportedModelError where tokens do not join to a text byte by byte, and for more
        than masks are made of.
        """
        if table.joins not in (Joins.BYTES, Joins.PIECES):
            raise UnsupportedModelError(
                "the tokens of this model's tokenizer change where they join, so no output can be "
                "constrained",
                remedy="leave the constraint out, or take another model",
            )
        if n_ids > 8 * MAX_MASK_BYTES:
            raise UnsupportedModelError(
                f"the model has {n_ids} token ids; output can be constrained for at most "
                f"{8 * MAX_MASK_BYTES}",
                remedy="leave the constraint out, or take another model",
            )
        known = range(min(n_ids, table.n_tokens))
        tokens = [table.later[n] if table.flags[n] & HAS_TOKEN else b"" for n in known]
        return cls(
            tokens=ByteStrings.of(tokens + [b""] * (n_ids - len(tokens))),
            special_ids=tuple(sorted(n for n in table.special_ids() if n < n_ids)),
            eos_ids=tuple(n for n in eos_ids if n < n_ids),
        )

    def pack(self) -> tuple[dict[str, Any], bytes]:
        """Write it as a JSON object and a block of bytes."""
        ends = self.tokens.ends.tobytes()
        said = {"n_ends": len(ends), "special_ids": self.special_ids, "eos_ids": self.eos_ids}
        return said, ends + self.tokens.data

    @classmethod
    def unpack(cls, said: Mapping[str, Any], block: bytes) -> Self:
        """Read what `pack` wrote."""
        ends = array("I")
        ends.frombytes(block[: said["n_ends"]])
        return cls(
            tokens=ByteStrings(ends, block[said["n_ends"] :]),
            special_ids=tuple(said["special_ids"]),
            eos_ids=tuple(said["eos_ids"]),
        )

    def tokenizer(self) -> LLTokenizer:
        """Make llguidance's tokenizer: some 0.2 s for 128 000 tokens.

        Without an id that ends a text it has one id more, which no model draws.
        """
        tokens = [*self.tokens]
        eos_ids = [*self.eos_ids]
        if not eos_ids:
            eos_ids = [len(tokens)]
            tokens.append(b"")
        words = _Words(tokens, self.special_ids, eos_ids[0])
        wrapper = TokenizerWrapper(words)
        made = LLTokenizer(wrapper, n_vocab=len(tokens), eos_token=eos_ids)
        wrapper.tokens = words.tokens = ()  # llguidance has its own, and keeps the wrapper
        return made


class _Words:
    """What TokenizerWrapper wraps."""

    def __init__(self, tokens: Sequence[bytes], special_ids: Sequence[int], eos_id: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special_ids
        self.eos_token_id = eos_id
        self.bos_token_id = None

    def __call__(self, text: bytes | str) -> list[int]:
        """Give no tokens: nobody asks, as grammars force none (compile_program.py)."""
        return []
