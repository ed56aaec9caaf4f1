"""Tokenizers as shardnet has them, of the small ones that are made on the spot; each made once."""

from __future__ import annotations

from functools import cache
from typing import Any

from support.models import small_tokenizers as small
from support.models import trained_tokenizers as trained

from shardnet.tokenizers.backends.pretokenizers import LLAMA3, QWEN2, TEKKEN
from shardnet.tokenizers.formats.gguf_tokenizer import read_gguf_tokenizer
from shardnet.tokenizers.tokenizer import Tokenizer

KINDS = sorted(small.KINDS)
GGUF_WORDS = {
    "llama3": (LLAMA3, "llama-bpe"),
    "qwen2": (QWEN2, "qwen2"),
    "tekken": (TEKKEN, "tekken"),
}
"""Kinds of ranked tokens: how words are cut, and GGUF's name for that."""


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    """One of KINDS, with bos and eos as in small.SPECIAL."""
    return Tokenizer(small.KINDS[kind](), bos_id=1, eos_ids=(2,))


@cache
def gguf_tokenizer(kind: str) -> Tokenizer:
    """One of trained.KINDS or of GGUF_WORDS, read from GGUF metadata."""
    if kind in trained.KINDS:
        return gguf_tokenizer_of(trained.gguf_pieces(kind))
    return gguf_tokenizer_of(trained.gguf_ranks(*GGUF_WORDS[kind]))


def gguf_tokenizer_of(metadata: dict[str, Any]) -> Tokenizer:
    """The tokenizer that GGUF metadata says."""
    read = read_gguf_tokenizer(metadata, "small.gguf")
    assert read is not None
    return Tokenizer.of(read)
