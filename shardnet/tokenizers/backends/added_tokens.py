"""Added tokens: special ones, and words that are never split.

Knows the JSON files that define them: tokenizer_config.json, special_tokens_map.json and
added_tokens.json. Must not know how other tokens are stored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from shardnet.errors import CheckpointError
from shardnet.tokenizers.backends.token_files import damaged, read_object

MAX_ID = 1 << 22
"""Upper limit of token ids, far above any vocabulary."""

_FLAGS = ("special", "lstrip", "rstrip", "single_word", "normalized")
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedToken:
    """A token that is matched as a whole, before a text is split. Flags as in `tokenizers`.

    `special`: omitted from decoded text. `normalized`: matched in the normalized text.
    """

    text: str
    token_id: int
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


def add_tokens(backend: tokenizers.Tokenizer, tokens: Iterable[NamedToken]) -> None:
    """Add tokens to match as a whole. Their texts must be in the model's vocabulary already.

    In two calls, however many there are, since the library builds anew what matches all of them
    after each. Which call a token came in changes nothing: its id is the vocabulary's.
    """
    special: list[tokenizers.AddedToken] = []
    others: list[tokenizers.AddedToken] = []
    for token in sorted(tokens, key=lambda token: token.token_id):
        added = tokenizers.AddedToken(
            token.text,
            special=token.special,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            single_word=token.single_word,
            normalized=token.normalized,
        )
        (special if token.special else others).append(added)
    backend.add_special_tokens(special)
    backend.add_tokens(others)


def read_added_tokens(folder: Path, vocabulary: Mapping[str, int]) -> dict[int, NamedToken]:
    """Read the tokens that a folder's files add to `vocabulary`, or make special there, by id.

    `added_tokens_decoder` of tokenizer_config.json overrides added_tokens.json. Tokens with a role
    in special_tokens_map.json or tokenizer_config.json are special. Raises CheckpointError, which
    names file and field, for invalid and duplicate entries.
    """
    config = read_object(folder / "tokenizer_config.json")
    special = _special_texts(folder, config)
    found: dict[int, NamedToken] = {}
    path = folder / "added_tokens.json"
    for text, token_id in read_object(path, distinct=True).items():
        if type(token_id) is not int:
            raise CheckpointError(f"{path}: {text!r:.80} must be a token id, not {token_id!r:.80}")
        check_id(token_id, f"{path}: {text!r:.80}")
        if token_id in found:
            raise CheckpointError(
                f"{path}: id {token_id} is both {found[token_id].text!r:.80} and {text!r:.80}"
            )
        found[token_id] = NamedToken(text=text, token_id=token_id, special=text in special)
    where = f"{folder / 'tokenizer_config.json'}: added_tokens_decoder"
    decoder = config.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict):
        raise CheckpointError(f"{where} must be an object, not {type(decoder).__name__}")
    for key, entry in decoder.items():
        token = _described(key, entry, f"{where}[{key!r:.80}]", special)
        found[token.token_id] = token
    for text in special & vocabulary.keys():
        named = NamedToken(text=text, token_id=vocabulary[text], special=True)
        found.setdefault(vocabulary[text], named)
    texts = Counter(token.text for token in found.values())
    if len(texts) < len(found):
        twice = texts.most_common(1)[0][0]
        raise CheckpointError(f"{folder}: the added token {twice!r:.80} has two ids")
    return found


def check_id(token_id: int, where: str) -> None:
    """Raise CheckpointError if `token_id` is outside [0, MAX_ID)."""
    if not 0 <= token_id < MAX_ID:
        raise CheckpointError(
            f"{where}: {token_id} is not a token id; they go from 0 to {MAX_ID - 1}"
        )


def _special_texts(folder: Path, config: Mapping[str, Any]) -> set[str]:
    texts = set()
    for source in (read_object(folder / "special_tokens_map.json"), config):
        entries = [source.get(role) for role in _ROLES]
        more = source.get("additional_special_tokens")
        for entry in [*entries, *(more if isinstance(more, list) else [])]:
            text = entry.get("content") if isinstance(entry, dict) else entry
            if isinstance(text, str):
                texts.add(text)
    return texts


def _described(key: str, entry: object, where: str, special: set[str]) -> NamedToken:
    if not key.isascii() or not key.isdigit() or len(key) > len(str(MAX_ID)):
        raise damaged(f"{where}: {key!r:.80} is not a token id")
    check_id(int(key), where)
    fields = entry if isinstance(entry, dict) else {}
    match fields:
        case {"content": str(text)} if text:
            flags = {name: fields.get(name, False) for name in _FLAGS}
            if all(isinstance(flag, bool) for flag in flags.values()):
                flags["special"] |= text in special
                return NamedToken(text=text, token_id=int(key), **flags)
    raise CheckpointError(
        f"{where}: expected an object with `content` and true or false for {', '.join(_FLAGS)}"
    )
