"""Added tokens: as the library adds them one by one, in a few calls however many there are."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, cast

import tokenizers
from tokenizers import models, normalizers

from shardnet.tokenizers.backends.added_tokens import NamedToken, add_tokens

FLAGS = ("special", "lstrip", "rstrip", "single_word", "normalized")
MARKED = [
    NamedToken(text=f"<T{number}>", token_id=number, **dict(zip(FLAGS, flags, strict=True)))
    for number, flags in enumerate(itertools.product((False, True), repeat=len(FLAGS)))
]
"""One for each combination of flags: special ones and others in turns of 16."""
NESTED = [
    NamedToken(text=text, token_id=len(MARKED) + place, special=special)
    for place, (text, special) in enumerate(
        [("ab", False), ("abc", True), ("bcd", False), ("a b", False), ("<t1>", True)]
    )
]
"""Texts that begin inside others, or are another in small letters."""
TOKENS = [*MARKED[::2], *reversed(NESTED), *MARKED[1::2]]
TEXTS = (
    *(f"a {token.text} b{token.text}c  {token.text.lower()}" for token in TOKENS),
    "abcd a bcd abc a b <t1><T1>",
    "".join(token.text for token in TOKENS),
)


def backend() -> tokenizers.Tokenizer:
    """A tokenizer of single letters that writes all text small, without added tokens."""
    words = {token.text: token.token_id for token in TOKENS}
    letters = dict.fromkeys("abcdt<>0123456789 " + "".join(words))
    words |= {text: len(words) + place for place, text in enumerate(letters) if text not in words}
    made = tokenizers.Tokenizer(models.BPE(vocab=words, merges=[]))
    made.normalizer = normalizers.Lowercase()
    return made


def test_they_are_those_that_the_library_adds_one_by_one() -> None:
    ours, theirs = backend(), backend()
    add_tokens(ours, TOKENS)
    for token in sorted(TOKENS, key=lambda token: token.token_id):
        flags = {flag: getattr(token, flag) for flag in FLAGS}
        add = theirs.add_special_tokens if token.special else theirs.add_tokens
        add([tokenizers.AddedToken(token.text, **flags)])
    read = tokenizers.Tokenizer.from_str(ours.to_str())
    assert ours.to_str() == theirs.to_str() == read.to_str()
    found = ours.get_added_tokens_decoder()
    assert list(found) == sorted(token.token_id for token in TOKENS)
    for token in TOKENS:
        kept = found[token.token_id]
        assert kept.content == token.text
        assert [getattr(kept, flag) for flag in FLAGS] == [getattr(token, f) for f in FLAGS]
    for text in TEXTS:
        for skips in (True, False):
            for one in (ours, theirs, read):
                one.encode_special_tokens = skips
            ids = ours.encode(text).ids
            assert ids == theirs.encode(text).ids == read.encode(text).ids
            assert ours.decode(ids) == theirs.decode(ids) == read.decode(ids)


class Counting:
    """A backend that only counts: after each call the library would build its matchers anew."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def add_tokens(self, tokens: Sequence[object]) -> None:
        """Count them."""
        self.sizes.append(len(tokens))

    add_special_tokens = add_tokens


def test_thousands_are_added_in_two_calls() -> None:
    """Gemma's tokenizer has 6414."""
    many = [NamedToken(text=f"<{n}>", token_id=n, special=n % 9 == 0) for n in range(6414)]
    counting = Counting()
    add_tokens(cast(Any, counting), many)
    assert sorted(counting.sizes) == [713, 5701]
