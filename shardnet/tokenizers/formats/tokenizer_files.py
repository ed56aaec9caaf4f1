"""Finds and reads the tokenizer of a checkpoint.

Knows the names of the files, their order, and how to distinguish two formats with one name. Must
not know their contents: each format has its own module, which is imported when one is read, since
those know the `tokenizers` library and a node looks for files only.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shardnet.checkpoint.tensors.checkpoint_files import has_file
from shardnet.tokenizers.backends.token_files import LoadedTokenizer, read_bytes

MODEL_FILES = (
    "tokenizer.model",
    *(f"tokenizer.model.{version}" for version in ("v7", "v3", "v2", "v1")),
    "tiktoken.model",
)
"""The names of sentencepiece and of Llama 3, Mistral's, the newest version first, and Kimi's."""

TOKENIZER_FILES = ("tokenizer.json", "tekken.json", *MODEL_FILES, "vocab.json", "merges.txt")
"""In order of precedence."""

NAMES = (
    "tokenizer.json, tekken.json, tokenizer.model, tiktoken.model, or vocab.json with merges.txt"
)


def has_tokenizer(name: str) -> bool:
    """Say whether a file of this name has a tokenizer in it, or may be a GGUF that has one."""
    return name in TOKENIZER_FILES or name.endswith(".gguf")


def tokenizer_place(path: Path) -> Path:
    """Return the location of a checkpoint's tokenizer: the first file of a GGUF, else the folder.

    A GGUF holds its own tokenizer, and files beside it are not part of the model.
    """
    from shardnet.checkpoint.checkpoint import gguf_file

    return gguf_file(path) or path


def tokenizer_files(place: Path) -> Iterator[Path]:
    """List a tokenizer's files that are there, the first in order of precedence."""
    if not place.is_dir():
        yield place
    else:
        yield from (place / name for name in TOKENIZER_FILES if has_file(place / name))


def read_tokenizer(place: Path) -> LoadedTokenizer | None:
    """Read the tokenizer of a GGUF file or of a folder; None if there is none.

    Raises CheckpointError, which names file and field, if it is damaged or not supported.
    """
    if not place.is_dir():
        from shardnet.checkpoint.formats.gguf_header import read_gguf_header
        from shardnet.checkpoint.formats.gguf_ollama import language_of
        from shardnet.tokenizers.formats.gguf_tokenizer import read_gguf_tokenizer

        header = language_of(read_gguf_header(place), str(place))
        return read_gguf_tokenizer(header.metadata, str(place))
    folder = place
    if has_file(folder / "tokenizer.json"):
        from shardnet.tokenizers.formats.gpt2_files import read_tokenizer_json

        return read_tokenizer_json(folder / "tokenizer.json")
    if has_file(folder / "tekken.json"):
        from shardnet.tokenizers.formats.tekken_file import read_tekken

        return read_tekken(folder / "tekken.json")
    for name in MODEL_FILES:
        if has_file(folder / name):
            return _read_model_file(folder / name)
    if has_file(folder / "vocab.json") and has_file(folder / "merges.txt"):
        from shardnet.tokenizers.formats.gpt2_files import read_gpt2_files

        return read_gpt2_files(folder)
    return None


def _read_model_file(path: Path) -> LoadedTokenizer:
    from shardnet.tokenizers.formats.sentencepiece_file import read_sentencepiece
    from shardnet.tokenizers.formats.tiktoken_file import looks_like_ranks, read_kimi, read_tiktoken

    if path.name == "tiktoken.model":
        return read_kimi(path)
    beginning = read_bytes(path)[:1024]
    return read_tiktoken(path) if looks_like_ranks(beginning) else read_sentencepiece(path)
