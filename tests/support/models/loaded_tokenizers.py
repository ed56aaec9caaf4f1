"""Tokenizers as shardnet has them, of the small ones that are made on the spot; each made once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from support.models import small_tokenizers as small
from support.models import trained_tokenizers as trained

from shardnet.tokenizers.backends.pretokenizers import LLAMA3, QWEN2, TEKKEN
from shardnet.tokenizers.backends.token_files import LoadedTokenizer
from shardnet.tokenizers.formats.gguf_tokenizer import read_gguf_tokenizer
from shardnet.tokenizers.formats.tokenizer_files import tokenizer_place
from shardnet.tokenizers.text_backend import TextBackend
from shardnet.tokenizers.text_program import described
from shardnet.tokenizers.token_table import Bos
from shardnet.tokenizers.tokenizer import Description, Tokenizer

T = TypeVar("T", bound=Tokenizer)

KINDS = sorted(small.KINDS)
GGUF_WORDS = {
    "llama3": (LLAMA3, "llama-bpe"),
    "qwen2": (QWEN2, "qwen2"),
    "tekken": (TEKKEN, "tekken"),
}
"""Kinds of ranked tokens: how words are cut, and GGUF's name for that."""


class InThisProcess:
    """Encodes as the helper process does, without one."""

    def __init__(self, backend: TextBackend) -> None:
        self.backend = backend

    def ready(self) -> None:
        """It always is."""

    def encode(self, text: str, bos: Bos, parse_special: bool) -> list[int]:
        return self.backend.encode(text, bos, parse_special)

    def decode(self, token_ids: Sequence[int], keep_special_tokens: bool) -> str:
        return self.backend.decode(token_ids, keep_special_tokens)

    def close(self) -> None:
        """Nothing is held."""


def in_this_process(backend: TextBackend, kind: type[T]) -> T:
    """The tokenizer that a node makes of what the helper process says."""
    return kind(Description.of(*described(backend)), InThisProcess(backend))


def made_tokenizer(
    backend: Any, *, bos_id: int | None = None, eos_ids: tuple[int, ...] = ()
) -> Tokenizer:
    """The tokenizer of a backend of the library."""
    loaded = LoadedTokenizer(backend=backend, bos_id=bos_id, eos_ids=eos_ids)
    return in_this_process(TextBackend(loaded), Tokenizer)


def load_here(path: Path) -> Tokenizer:
    """The tokenizer of a checkpoint, read in this process."""
    backend = TextBackend.load_optional(tokenizer_place(path))
    assert backend is not None
    return in_this_process(backend, Tokenizer)


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    """One of KINDS, with bos and eos as in small.SPECIAL."""
    return made_tokenizer(small.KINDS[kind](), bos_id=1, eos_ids=(2,))


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
    return in_this_process(TextBackend.of(read), Tokenizer)
