"""Reads Mistral's `tekken.json`: a block of special tokens, then byte-string ranks.

Knows the file (github.com/mistralai/mistral-common, tokens/tokenizers/tekken.py), and the special
tokens that files before version 7 omit. Must not know the other tokenizers of Mistral.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardnet.errors import CheckpointError
from shardnet.tokenizers.backends.added_tokens import MAX_ID, NamedToken
from shardnet.tokenizers.backends.byte_level import ranked_backend
from shardnet.tokenizers.backends.pretokenizers import TEKKEN
from shardnet.tokenizers.backends.token_files import read_object
from shardnet.tokenizers.formats.loaded_tokenizer import LoadedTokenizer

_MAX_PATTERN_CHARACTERS = 10_000
_UNNAMED = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "[TOOL_CONTENT]",
)
"""The special tokens of a file that lists none, from id 0 on."""


def read_tekken(path: Path) -> LoadedTokenizer:
    """Read a tekken.json. Raises CheckpointError, which names the file and the field."""
    document = read_object(path)
    config = document.get("config")
    if not isinstance(config, dict):
        raise CheckpointError(
            f"{path}: config is missing",
            remedy="fetch the file again",
        )
    n_tokens = _count(config, "default_vocab_size", path)
    n_special = _count(config, "default_num_special_tokens", path)
    if n_special >= n_tokens:
        raise CheckpointError(
            f"{path}: config.default_num_special_tokens is {n_special}, of {n_tokens} tokens"
        )
    pattern = config.get("pattern")
    if not isinstance(pattern, str) or not 0 < len(pattern) <= _MAX_PATTERN_CHARACTERS:
        raise CheckpointError(
            f"{path}: config.pattern must be a text of 1 to {_MAX_PATTERN_CHARACTERS} characters"
        )
    ranks = _ranks(document.get("vocab"), n_tokens - n_special, path)
    special = _special_tokens(document.get("special_tokens"), n_special, path)
    ids = {token.text: token_id for token_id, token in special.items()}
    backend = ranked_backend(
        ranks,
        special.values(),
        replace(TEKKEN, patterns=(pattern,)),
        first_id=n_special,
        where=f"{path}: vocab",
    )
    return LoadedTokenizer(
        backend=backend,
        bos_id=ids.get("<s>"),
        eos_ids=tuple(ids[text] for text in ("</s>",) if text in ids),
        adds_bos=True,
    )


def _count(config: Mapping[str, Any], key: str, path: Path) -> int:
    value = config.get(key)
    if type(value) is not int or not 0 < value <= MAX_ID:
        raise CheckpointError(f"{path}: config.{key} must be 1 to {MAX_ID}, not {value!r:.80}")
    return value


def _ranks(vocab: object, n_ranks: int, path: Path) -> list[bytes]:
    """Read the first `n_ranks` entries; a file may list more than the model has."""
    if not isinstance(vocab, list) or len(vocab) < n_ranks:
        n_listed = len(vocab) if isinstance(vocab, list) else 0
        raise CheckpointError(
            f"{path}: vocab lists {n_listed} tokens, config.default_vocab_size needs {n_ranks}"
        )
    ranks = []
    for place, entry in enumerate(vocab[:n_ranks]):
        match entry:
            case {"rank": int(rank), "token_bytes": str(text)} if rank == place:
                pass
            case _:
                raise CheckpointError(f"{path}: vocab[{place}] is not a token of rank {place}")
        try:
            ranks.append(base64.b64decode(text, validate=True))
        except (binascii.Error, ValueError) as error:
            raise CheckpointError(f"{path}: vocab[{place}].token_bytes: {error}") from error
    return ranks


def _special_tokens(listed: object, n_special: int, path: Path) -> dict[int, NamedToken]:
    """Read the special tokens; unnamed ones become <SPECIAL_n>."""
    named: dict[int, NamedToken] = {}
    if listed is None:
        listed = [
            {"rank": place, "token_str": text, "is_control": True}
            for place, text in enumerate(_UNNAMED[:n_special])
        ]
    if not isinstance(listed, list):
        raise CheckpointError(f"{path}: special_tokens must be a list")
    for place, entry in enumerate(listed):
        match entry:
            case {"rank": int(rank), "token_str": str(text)} if (
                0 <= rank < n_special and rank not in named and text
            ):
                is_control = entry.get("is_control", True) is not False
                named[rank] = NamedToken(text=text, token_id=rank, special=is_control)
            case _:
                raise CheckpointError(
                    f"{path}: special_tokens[{place}] needs token_str and a rank of its own below "
                    f"{n_special}"
                )
    for rank in range(n_special):
        if rank not in named:
            named[rank] = NamedToken(text=f"<SPECIAL_{rank}>", token_id=rank, special=True)
    return named
