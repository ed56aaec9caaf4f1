"""Follows one output through its grammar: masks, also behind drafts, and forced text.

Knows llguidance's matchers. Must not know constraints, sequences or threads.
"""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLMatcher, LLTokenizer

from shardnet.constraints import MaskForm, TokenMask
from shardnet.errors import RemoteProtocolError, UsageError
from shardnet.model.sampling.token_masks import pack_mask
from shardnet.tokenizers.grammar.vocabulary import NO_TOKEN, parser_limits

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
