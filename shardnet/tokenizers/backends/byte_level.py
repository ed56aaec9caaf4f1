"""Byte-level BPE: tokens are byte strings, joined by merges that are stored or derived."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from functools import cache

import tokenizers
from tokenizers import decoders, models

from shardnet.errors import CheckpointError
from shardnet.tokenizers.backends.added_tokens import MAX_ID, NamedToken, add_tokens
from shardnet.tokenizers.backends.pretokenizers import Pretokenizer


def merges_of(ranked: Iterable[str], known: Container[str]) -> list[tuple[str, str]]:
    """List the pairs of tokens in `known` that merge to tokens of `ranked`, the best first.

    Several pairs may merge to the same token. The pair with the longer first part goes first: where
    two overlap in a text (aa a aa), it is the leftmost.
    """
    return [
        (token[:cut], token[cut:])
        for token in ranked
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in known and token[cut:] in known
    ]


def check_merges(merges: Iterable[tuple[str, str]], vocabulary: Container[str], where: str) -> None:
    """Raise CheckpointError, which names the merge and `where` it is, for one of unknown tokens."""
    for first, second in merges:
        for text in (first, second, first + second):
            if text not in vocabulary:
                raise CheckpointError(
                    f"{where}: the merge {first!r:.80} {second!r:.80} needs {text!r:.80}, which is "
                    "not a token"
                )


MAX_TOKEN_BYTES = 256
"""Limit of a ranked token; the longest of Llama 3 and Mistral have 128."""


@cache
def byte_of_character() -> dict[str, int]:
    """Return the table from printable characters to bytes."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + place): byte for place, byte in enumerate(others)}


@cache
def _character_of_byte() -> dict[int, str]:
    return {byte: character for character, byte in byte_of_character().items()}


def ranked_backend(
    ranks: Sequence[bytes],
    named: Collection[NamedToken],
    pretokenizer: Pretokenizer,
    *,
    first_id: int,
    where: str,
) -> tokenizers.Tokenizer:
    """Make a backend from tiktoken ranks: `ranks[r]` has the id `first_id + r`.

    `named` are matched as a whole, `where` names the source in errors. Raises CheckpointError,
    which names the rank, if one is empty, too long or a duplicate, or a byte has no rank.
    """
    table = _character_of_byte()
    vocabulary: dict[str, int] = {}
    for rank, token in enumerate(ranks):
        if not 0 < len(token) <= MAX_TOKEN_BYTES:
            raise CheckpointError(
                f"{where}: rank {rank} has {len(token)} bytes; expected 1 to {MAX_TOKEN_BYTES}"
            )
        text = "".join([table[byte] for byte in token])
        if text in vocabulary:
            first = vocabulary[text] - first_id
            raise CheckpointError(f"{where}: ranks {first} and {rank} are both {token!r:.80}")
        vocabulary[text] = first_id + rank
    for character, byte in byte_of_character().items():
        if character not in vocabulary:
            raise CheckpointError(f"{where}: no rank is the single byte 0x{byte:02X}")
    merges = merges_of(vocabulary, vocabulary)
    return merged_backend(vocabulary, merges, named, pretokenizer, where=where)


def merged_backend(
    vocabulary: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    named: Collection[NamedToken],
    pretokenizer: Pretokenizer,
    *,
    where: str,
    prefix_space: bool = False,
) -> tokenizers.Tokenizer:
    """Make a backend from tokens in printable characters, and their merges, best first.

    `named` are matched as a whole; they may be in `vocabulary` already. Raises CheckpointError,
    which names the token, for invalid or duplicate ids, and for merges with unknown tokens.
    """
    words = dict(vocabulary)
    for token in named:
        if words.setdefault(token.text, token.token_id) != token.token_id:
            raise CheckpointError(
                f"{where}: the token {token.text!r:.80} has the ids {words[token.text]} and "
                f"{token.token_id}",
                remedy="take all files from one checkpoint",
            )
    _check_ids(words, where)
    check_merges(merges, vocabulary, where)
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=words, merges=list(merges), ignore_merges=pretokenizer.whole_words)
    )
    try:
        backend.pre_tokenizer = pretokenizer.pre_tokenizer(prefix_space=prefix_space)
    except ValueError as error:
        raise CheckpointError(f"{where}: invalid pattern to split words: {error}") from error
    normalizer = pretokenizer.normalizer()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.decoder = decoders.ByteLevel()
    add_tokens(backend, named)
    return backend


def _check_ids(words: Mapping[str, int], where: str) -> None:
    text_of: dict[int, str] = {}
    for text, token_id in words.items():
        if not 0 <= token_id < MAX_ID:
            raise CheckpointError(
                f"{where}: {text!r:.80} has the id {token_id}; ids go from 0 to {MAX_ID - 1}"
            )
        if token_id in text_of:
            raise CheckpointError(
                f"{where}: id {token_id} is both {text_of[token_id]!r:.80} and {text!r:.80}"
            )
        text_of[token_id] = text
