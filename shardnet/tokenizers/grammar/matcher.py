"""Follows one output through its grammar, over the tokens of a model as llguidance takes them."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from shardnet.constraints import MAX_MASK_BYTES, MaskForm, TokenMask
from shardnet.errors import RemoteProtocolError, UnsupportedModelError, UsageError
from shardnet.model.sampling.token_masks import pack_mask
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


_FEW_BYTES = 256
"""Where one text is forced, no more tokens than this mask has can begin it."""
_TOKEN = b"\xff"
"""How llguidance begins what stands for a token by its id. No text has this byte."""
_FORBIDDEN = "doesn't satisfy the grammar"
"""In llguidance's error for a token that a mask forbids."""


class GrammarMatcher:
    """Follows one output through its grammar. For one thread at a time."""

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, n_ids: int) -> None:
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._n_ids = n_ids
        self._mask: TokenMask | None = None
        self._is_at_end = False

    @classmethod
    def compiled(cls, grammar: str, tokenizer: LLTokenizer, n_ids: int) -> GrammarMatcher:
        """Compile a grammar for a model of `n_ids` token ids, and make the first mask."""
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
        made = cls(matcher, tokenizer, n_ids)
        made.mask()
        if made.is_complete:
            raise UsageError(
                "constraint: no token of this model can begin what it asks for",
                remedy="change the constraint, or leave it out",
            )
        return made

    def copy(self) -> GrammarMatcher:
        """Return another matcher at the same place."""
        copied = GrammarMatcher(self._matcher.deep_copy(), self._tokenizer, self._n_ids)
        copied._mask, copied._is_at_end = self._mask, self._is_at_end
        return copied

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow: the grammar has ended, as far as it has been computed."""
        return self._is_at_end or self._matcher.is_stopped()

    def advance(self, token_id: int) -> None:
        """Take the next token of the output.

        Raises RemoteProtocolError if the grammar forbids it, UsageError if it became too complex.
        """
        self._mask = None
        if self._is_at_end or not self._matcher.consume_token(token_id):
            if self._matcher.is_error() and _FORBIDDEN not in self._matcher.get_error():
                raise self._too_complex()
            raise RemoteProtocolError(
                f"the ring drew token {token_id}, which the constraint forbids",
                remedy="see that all nodes run the same version",
            )

    def mask(self) -> TokenMask:
        """Return which tokens may come next; none where the output `is_complete`.

        Raises UsageError if that became too complex, or if no token of the model may.
        """
        if self._mask is None:
            self._mask = pack_mask(self._matcher.compute_bitmask(), self._n_ids)
            if self._matcher.is_error() and self._matcher.stop_reason() != NO_TOKEN:
                raise self._too_complex()
            if self._mask.is_empty or self._matcher.is_error():
                self._is_at_end = self._matcher.is_accepting()
                if not self._is_at_end:
                    raise UsageError(
                        "constraint: no token of this model can continue the output",
                        remedy="change the constraint, or leave it out",
                    )
        return self._mask

    def masks(self, drafts: Sequence[int]) -> list[TokenMask]:
        """Return which tokens may come next, and after each draft up to the first forbidden one.

        The matcher stays where it is. Raises UsageError as `mask`.
        """
        masks = [self.mask()]
        n_right = self._matcher.validate_tokens([*drafts]) if drafts else 0
        n_taken = 0
        for draft in drafts[:n_right]:
            if self._matcher.is_stopped() or not self._matcher.consume_token(draft):
                break
            n_taken += 1
            mask = pack_mask(self._matcher.compute_bitmask(), self._n_ids)
            if self._matcher.is_error() or mask.is_empty:
                break
            masks.append(mask)
        if n_taken and not self._matcher.rollback(n_taken):
            raise self._too_complex()
        return masks

    def forced(self, limit: int) -> list[int]:
        """Return at most `limit` tokens that write what must follow; none where nothing must.

        Other tokens may write the same, so they are drafts.
        """
        mask = self.mask()
        if mask.form is MaskForm.FORBIDDEN or len(mask.data) > _FEW_BYTES:
            return []
        # Of a copy: where a token is meant by its id, it cannot go on from where it looked.
        said = self._matcher.deep_copy().compute_ff_bytes().partition(_TOKEN)[0]
        text = said.decode("utf-8", "ignore")
        return self._tokenizer.greedy_tokenize(text)[:limit]

    def _too_complex(self) -> UsageError:
        why = self._matcher.get_error().strip().partition("\n")[0][:400]
        return UsageError(
            f"constraint: it became too complex to follow: {why}",
            remedy="make the constraint smaller, or leave it out",
        )
