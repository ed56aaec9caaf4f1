"""Which tokens begin and end a text, by the files beside a tokenizer.

Knows the few keys of generation_config.json, config.json and tokenizer_config.json that name them.
Must not know tokenizers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from shardnet.errors import CheckpointError, shown
from shardnet.model.config.limits import MAX_EOS
from shardnet.model.families.wrappers import TEXT
from shardnet.tokenizers.backends.token_files import read_object
from shardnet.tokenizers.formats.tokenizer_files import tokenizer_place

_IdOf = Callable[[str], int | None]


def read_eos_ids(path: Path) -> tuple[int, ...]:
    """Read the eos ids of a checkpoint that may have no tokenizer.

    They come from generation_config.json, else from config.json: one id or a list. Empty if neither
    has any. Raises CheckpointError if a file cannot be read. `Tokenizer.eos_ids` also considers
    tokenizer_config.json.
    """
    return find_eos_ids(tokenizer_place(path), lambda token: None)


def find_eos_ids(folder: Path, id_of: _IdOf) -> tuple[int, ...]:
    """Read the eos ids beside a tokenizer; `id_of` looks up a token's text."""
    for name in ("generation_config.json", "config.json"):
        ids = _ids_under(folder / name, "eos_token_id")
        if ids:
            return ids
    token_id = _named_token(folder, "eos_token", id_of)
    return () if token_id is None else (token_id,)


def find_bos_id(folder: Path, id_of: _IdOf) -> int | None:
    """Read the bos id beside a tokenizer; `id_of` looks up a token's text."""
    named = _named_token(folder, "bos_token", id_of)
    if named is not None:
        return named
    for name in ("generation_config.json", "config.json"):
        ids = _ids_under(folder / name, "bos_token_id")
        if ids:
            return ids[0]
    return None


def adds_bos(folder: Path, by_default: bool | None) -> bool | None:
    """Say whether to prepend bos; None leaves it to the backend, as with tokenizer.json."""
    if by_default is None:
        return None
    path = folder / "tokenizer_config.json"
    value = read_object(path).get("add_bos_token")
    if not isinstance(value, bool | None):
        raise CheckpointError(f"{path}: add_bos_token must be true or false, not {shown(value)}")
    return by_default if value is None else value


def _ids_under(path: Path, key: str) -> tuple[int, ...]:
    """Read the ids of a file, or of the language model's own config in a multimodal one."""
    outer = read_object(path)
    inner = outer.get(TEXT)
    value = outer.get(key)
    if value is None and isinstance(inner, dict):
        value = inner.get(key)
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if len(ids) > MAX_EOS or not all(type(id_) is int and 0 <= id_ < 1 << 31 for id_ in ids):
        raise CheckpointError(
            f"{path}: {key} must be a token id or a list of at most {MAX_EOS}, not {shown(value)}"
        )
    return tuple(ids)


def _named_token(folder: Path, key: str, id_of: _IdOf) -> int | None:
    """Look up a token named in tokenizer_config.json: a string, or an object with `content`."""
    path = folder / "tokenizer_config.json"
    value = read_object(path).get(key)
    if isinstance(value, dict):
        value = value.get("content")
    if value is None:
        return None
    if not isinstance(value, str):
        raise CheckpointError(f"{path}: {key} must be a token's text, not {shown(value)}")
    return id_of(value)
