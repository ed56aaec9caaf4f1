"""Reads Mistral's `tekken.json`: a block of special tokens, then byte-string ranks.

Knows the file (github.com/mistralai/mistral-common, tokens/tokenizers/tekken.py), and the special
tokens that files before version 7 omit. Must not know the other tokenizers of Mistral.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from shardnet.checkpoint.tensors.json_files import bound_counts, parse_value
from shardnet.errors import CheckpointError
from shardnet.tokenizers.backends.added_tokens import MAX_ID, NamedToken
from shardnet.tokenizers.backends.byte_level import ranked_backend
from shardnet.tokenizers.backends.pretokenizers import TEKKEN
from shardnet.tokenizers.backends.token_files import LoadedTokenizer, damaged, read_bytes

_MAX_PATTERN_CHARACTERS = 10_000
_MAX_BYTES = 32 << 20
"""Limit of the file; the largest known has 19 MB."""
_MOST = {b",": 1 << 20, b":": 1 << 20}
"""Limits of characters; 150 000 ranks have 450 000 of each."""
_UNNAMED = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "[TOOL_CONTENT]",
)
"""The special tokens of a file that lists none, from id 0 on."""


class _Rank(msgspec.Struct):
    """An entry of `vocab`."""

    rank: int
    token_bytes: str


_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LIST = msgspec.json.Decoder(list[msgspec.Raw])
_RANK = msgspec.json.Decoder(_Rank)
_NO_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def read_tekken(path: Path) -> LoadedTokenizer:
    """Read a tekken.json. Raises CheckpointError, which names the file and the field."""
    text = read_bytes(path, _MAX_BYTES)
    bound_counts(text, path, _MOST)
    try:
        document = _OBJECT.decode(text)
        vocab = _LIST.decode(document.get("vocab", b"[]"))
    except _NO_JSON as error:
        raise damaged(f"{path}: not readable as JSON, or vocab is no list ({error})") from error
    config, listed = (
        parse_value(bytes(document.get(key, b"null")), path) for key in ("config", "special_tokens")
    )
    if not isinstance(config, dict):
        raise damaged(f"{path}: config is missing")
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
    ranks = _ranks(vocab, n_tokens - n_special, path)
    special = _special_tokens(listed, n_special, path)
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


def _ranks(vocab: Sequence[msgspec.Raw], n_ranks: int, path: Path) -> list[bytes]:
    """Read the first `n_ranks` entries; a file may list more than the model has."""
    if len(vocab) < n_ranks:
        raise CheckpointError(
            f"{path}: vocab lists {len(vocab)} tokens, config.default_vocab_size needs {n_ranks}"
        )
    ranks = []
    for place, raw in enumerate(vocab[:n_ranks]):
        try:
            entry = _RANK.decode(raw)
        except _NO_JSON:
            entry = None
        if entry is None or entry.rank != place:
            raise CheckpointError(f"{path}: vocab[{place}] is not a token of rank {place}")
        try:
            ranks.append(base64.b64decode(entry.token_bytes, validate=True))
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
