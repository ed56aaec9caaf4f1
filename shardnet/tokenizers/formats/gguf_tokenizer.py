"""Reads the tokenizer and chat template in a GGUF file's metadata.

Knows the keys `tokenizer.*` (github.com/ggml-org/ggml, docs/gguf.md) as llama.cpp's converter
writes them. Must not know the file's bytes: gguf_header.py does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from shardnet.errors import CheckpointError
from shardnet.tokenizers.backends.added_tokens import MAX_ID, NamedToken
from shardnet.tokenizers.backends.byte_level import merged_backend
from shardnet.tokenizers.backends.piece_tokenizer import PieceKind, Pieces, build_backend
from shardnet.tokenizers.backends.pretokenizers import GGUF_NAMES, Pretokenizer
from shardnet.tokenizers.chat.chat_template import MAX_TEMPLATE_BYTES, ChatTemplate
from shardnet.tokenizers.formats.loaded_tokenizer import LoadedTokenizer

_KEY = "tokenizer.ggml."
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_AGAIN = "fetch the file again or choose one that a newer llama.cpp has converted"

_Kind = TypeVar("_Kind", bound=object)


def read_gguf_tokenizer(metadata: Mapping[str, Any], where: str) -> LoadedTokenizer | None:
    """Make the tokenizer from the metadata of the file `where`; None if it has none.

    Raises CheckpointError, which names file and key, for an unsupported kind of tokenizer or
    pretokenizer, and for damaged values.
    """
    values = _Metadata(metadata, where)
    model = values.one("model", str)
    if model is None or model == "none":
        return None
    tokens = values.texts("tokens", MAX_ID)
    match model:
        case "llama":
            loaded = _read_pieces(values, tokens)
        case "gemma4":
            loaded = _read_pieces(values, tokens, merges=_merges(values))
        case "gpt2":
            loaded = _read_bytes(values, tokens)
        case _:
            raise CheckpointError(
                f"{where}: {_KEY}model = {model!r:.80} is not supported; supported: llama, gpt2, "
                "gemma4"
            )
    ends = [values.token_id(key, tokens) for key in _END_KEYS]
    adds_bos = values.one("add_bos_token", bool)
    return LoadedTokenizer(
        backend=loaded.backend,
        bos_id=values.token_id("bos_token_id", tokens),
        eos_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        adds_bos=loaded.adds_bos if adds_bos is None else adds_bos,
        template=_template(values, tokens),
    )


class _Metadata:
    """The values under `tokenizer.ggml.`, type-checked."""

    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        self._metadata = metadata
        self.where = where

    def damaged(self, key: str, why: str) -> CheckpointError:
        """Make the error that names file and key."""
        return CheckpointError(
            f"{self.where}: {_KEY}{key} {why}",
            remedy=_AGAIN,
        )

    def one(self, key: str, kind: type[_Kind]) -> _Kind | None:
        """Return a value of type `kind`, None if the key is missing."""
        value = self._metadata.get(_KEY + key)
        if value is not None and type(value) is not kind:
            raise self.damaged(key, f"must be of type {kind.__name__}, not {value!r:.80}")
        return value

    def many(self, key: str, kinds: tuple[type, ...], most: int) -> list[Any] | None:
        """Return an array with elements of types `kinds`, None if the key is missing."""
        values = self._metadata.get(_KEY + key)
        if values is None:
            return None
        if not isinstance(values, list) or any(type(value) not in kinds for value in values):
            raise self.damaged(key, f"must be an array of {kinds[0].__name__}")
        if len(values) > most:
            raise self.damaged(key, f"has {len(values)} elements, at most {most} are read")
        return values

    def texts(self, key: str, most: int) -> list[str]:
        """Return a required array of texts, all valid UTF-8."""
        texts = self.many(key, (str,), most)
        if not texts:
            raise self.damaged(key, "is missing or empty")
        for place, text in enumerate(texts):
            if not text.isascii() and not _is_unicode(text):
                raise self.damaged(f"{key}[{place}]", "is not UTF-8")
        return texts

    def kinds(self, tokens: list[str]) -> list[int]:
        """Return the types of `tokens`; by default all are normal."""
        kinds = self.many("token_type", (int,), MAX_ID)
        if kinds is None:
            return [PieceKind.NORMAL] * len(tokens)
        if len(kinds) != len(tokens):
            raise self.damaged("token_type", f"has {len(kinds)} elements for {len(tokens)} tokens")
        for place, kind in enumerate(kinds):
            if not PieceKind.NORMAL <= kind <= PieceKind.BYTE:
                raise self.damaged(f"token_type[{place}]", f"is {kind}, expected 1 to 6")
        return kinds

    def token_id(self, key: str, tokens: list[str]) -> int | None:
        """Return the id of one of `tokens`, None if the key is missing."""
        token_id = self.one(key, int)
        if token_id is not None and not 0 <= token_id < len(tokens):
            raise self.damaged(key, f"is {token_id}, but there are {len(tokens)} tokens")
        return token_id

    def template(self) -> str | None:
        """Return the chat template, None if there is none."""
        value = self._metadata.get("tokenizer.chat_template")
        if value is None:
            return None
        if not isinstance(value, str) or not _is_unicode(value) or len(value) > MAX_TEMPLATE_BYTES:
            raise CheckpointError(
                f"{self.where}: tokenizer.chat_template must be a text of at most "
                f"{MAX_TEMPLATE_BYTES} bytes",
                remedy=_AGAIN,
            )
        return value


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _read_pieces(
    values: _Metadata, tokens: list[str], *, merges: list[tuple[str, str]] | None = None
) -> LoadedTokenizer:
    """Read a sentencepiece tokenizer. Tokens of type UNUSED pad the vocabulary and are dropped.

    `merges` are those that the file has beside the scores, if any (Gemma 4).
    """
    scores = values.many("scores", (float, int), MAX_ID)
    if scores is None or len(scores) != len(tokens):
        raise values.damaged("scores", f"must have one number for each of {len(tokens)} tokens")
    prefix, collapses = (
        values.one("add_space_prefix", bool),
        values.one("remove_extra_whitespaces", bool),
    )
    pieces = Pieces(
        where=f"{values.where}: {_KEY}tokens",
        texts=tokens,
        scores=scores,
        kinds=values.kinds(tokens),
        add_dummy_prefix=prefix is not False,
        remove_extra_whitespaces=bool(collapses),
        merges=merges,
    )
    return LoadedTokenizer(backend=build_backend(pieces, {}), adds_bos=True)


def _read_bytes(values: _Metadata, tokens: list[str]) -> LoadedTokenizer:
    """Read a byte-level tokenizer as GPT-2's: tokens in printable characters, and merges."""
    pretokenizer = _pretokenizer(values)
    vocabulary: dict[str, int] = {}
    named = []
    for token_id, (text, kind) in enumerate(zip(tokens, values.kinds(tokens), strict=True)):
        if kind == PieceKind.UNUSED:
            continue
        if text in vocabulary:
            raise values.damaged(
                "tokens", f"{vocabulary[text]} and {token_id} are both {text!r:.80}"
            )
        vocabulary[text] = token_id
        if kind != PieceKind.NORMAL:
            special = kind != PieceKind.USER_DEFINED
            named.append(NamedToken(text=text, token_id=token_id, special=special))
    backend = merged_backend(
        vocabulary, _merges(values), named, pretokenizer, where=f"{values.where}: {_KEY}merges"
    )
    return LoadedTokenizer(backend=backend, adds_bos=pretokenizer.adds_bos)


def _pretokenizer(values: _Metadata) -> Pretokenizer:
    name = values.one("pre", str)
    if name not in GGUF_NAMES:
        what = "is missing" if name is None else f"= {name!r:.80} is not supported"
        raise values.damaged("pre", f"{what}; supported: {', '.join(GGUF_NAMES)}")
    return GGUF_NAMES[name]


def _merges(values: _Metadata) -> list[tuple[str, str]]:
    merges = []
    for place, line in enumerate(values.texts("merges", 4 * MAX_ID)):
        first, _, second = line.partition(" ")
        if not first or not second or " " in second:
            raise values.damaged(f"merges[{place}]", f"is {line!r:.80}, not two tokens")
        merges.append((first, second))
    return merges


def _template(values: _Metadata, tokens: list[str]) -> ChatTemplate | None:
    source = values.template()
    if source is None:
        return None
    ids = {role: values.token_id(f"{role}_token_id", tokens) for role in _ROLES}
    return ChatTemplate(
        source=source,
        where=f"{values.where}: tokenizer.chat_template",
        tokens={
            f"{role}_token": tokens[token_id]
            for role, token_id in ids.items()
            if token_id is not None
        },
    )
