"""Reads the tokenizer and chat template in a GGUF file's metadata.

Knows the keys `tokenizer.*` (github.com/ggml-org/ggml, docs/gguf.md) as llama.cpp's converter
writes them. Must not know the file's bytes: gguf_header.py does.
"""

from __future__ import annotations

import base64
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from shardnet.errors import CheckpointError
from shardnet.model.families.encoders import GGUF_TYPES
from shardnet.tokenizers.backends.added_tokens import MAX_ID, NamedToken, add_tokens
from shardnet.tokenizers.backends.byte_level import merged_backend
from shardnet.tokenizers.backends.piece_tokenizer import SPACE, PieceKind, Pieces, build_backend
from shardnet.tokenizers.backends.pretokenizers import GGUF_NAMES, Pretokenizer
from shardnet.tokenizers.backends.token_files import LoadedTokenizer
from shardnet.tokenizers.chat.chat_template import (
    MAX_TEMPLATE_BYTES,
    OF_TOOLS,
    ChatTemplate,
    ends_turn,
)

_KEY = "tokenizer.ggml."
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_ENDS = (
    *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<|end|>"),
    *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<end_of_turn>", "<end_of_utterance>"),
    *("<eos>", "<turn|>", "<|tool_response>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
)
"""Tokens that end a text or a turn in whatever file has them, as in llama.cpp: converters name one
of several, as Gemma's <eos>, which a model for conversations never writes.
"""
_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_MARKS = (
    *("cls_token_id", "seperator_token_id", "padding_token_id"),  # as the format spells them
    *("unknown_token_id", "mask_token_id"),
)
MAX_CHARSMAP = 1 << 22
"""Limit of a compiled normalization; that of XLM-RoBERTa has 237 539 bytes."""
_AGAIN = "fetch the file again or choose one that a newer llama.cpp has converted"

_POOLINGS: Final = (1, 2, 3)
"""Those that make vectors: mean, first and last."""

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
        case "bert":
            loaded = _read_words(values, tokens)
        case "t5":
            loaded = _read_pieces(values, tokens, is_unigram=True)
        case _:
            raise CheckpointError(
                f"{where}: {_KEY}model = {model!r:.80} is not supported; supported: llama, gpt2, "
                "gemma4, bert, t5"
            )
    if metadata.get("general.architecture") in GGUF_TYPES:
        _mark_ends(values, tokens, loaded.backend)
        return loaded
    adds_bos = values.one("add_bos_token", bool)
    if values.pools and values.one("add_eos_token", bool):
        return _with_end(values, tokens, loaded, adds_bos=adds_bos)
    return LoadedTokenizer(
        backend=loaded.backend,
        bos_id=values.token_id("bos_token_id", tokens),
        eos_ids=_eos_ids(values, tokens),
        adds_bos=loaded.adds_bos if adds_bos is None else adds_bos,
        template=_template(values, tokens),
    )


class _Metadata:
    """The values under `tokenizer.ggml.`, type-checked."""

    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        self._metadata = metadata
        self.where = where
        self.architecture = metadata.get("general.architecture")
        self.pools = metadata.get(f"{self.architecture}.pooling_type") in _POOLINGS
        """Whether vectors are made of texts."""

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
        return None if token_id is None else self.within(key, token_id, tokens)

    def within(self, key: str, token_id: int, tokens: list[str]) -> int:
        """Return the id of one of `tokens` that `key` names."""
        if not 0 <= token_id < len(tokens):
            raise self.damaged(key, f"is {token_id}, but there are {len(tokens)} tokens")
        return token_id

    def template(self, name: str = "") -> str:
        """Return the chat template, or the one of a `name`; "" if there is none."""
        key = f"tokenizer.chat_template{name}"
        value = self._metadata.get(key, "")
        if not isinstance(value, str) or not _is_unicode(value) or len(value) > MAX_TEMPLATE_BYTES:
            raise CheckpointError(
                f"{self.where}: {key} must be a text of at most {MAX_TEMPLATE_BYTES} bytes",
                remedy=_AGAIN,
            )
        return value


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _read_pieces(
    values: _Metadata,
    tokens: list[str],
    *,
    merges: list[tuple[str, str]] | None = None,
    is_unigram: bool = False,
) -> LoadedTokenizer:
    """Read a sentencepiece tokenizer. Tokens of type UNUSED pad the vocabulary and are dropped.

    `merges` are those that the file has beside the scores, if any (Gemma 4). Those that are
    `is_unigram` are XLM-RoBERTa's, which joins spaces whatever the file says.
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
        is_unigram=is_unigram,
        add_dummy_prefix=prefix is not False,
        remove_extra_whitespaces=is_unigram or bool(collapses),
        charsmap=_charsmap(values),
        merges=merges,
    )
    return LoadedTokenizer(backend=build_backend(pieces, {}), adds_bos=True)


def _charsmap(values: _Metadata) -> bytes:
    """Read the compiled normalization: bytes, or as Ollama writes them, in base64 by characters."""
    found = values.many("precompiled_charsmap", (int, str), MAX_CHARSMAP) or []
    if not found or isinstance(found[0], int):
        return bytes(number % 256 for number in found)  # older files have them signed
    try:
        return base64.b64decode("".join(found), validate=True)
    except (ValueError, TypeError):
        raise values.damaged("precompiled_charsmap", "is not base64") from None


def _read_words(values: _Metadata, tokens: list[str]) -> LoadedTokenizer:
    """Read BERT's tokenizer: words begin with ▁, where its own files have ## inside of words.

    No key says whether it lowers and strips accents: no token shows what it has never left.
    """
    kinds, vocabulary = values.kinds(tokens), dict[str, int]()
    roles = {values.token_id(key, tokens) for key in _MARKS}
    special = [
        text
        for token_id, (text, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (PieceKind.CONTROL, PieceKind.UNKNOWN) or token_id in roles
    ]
    for token_id, text in enumerate(tokens):
        is_whole = text in special or (text.startswith("[") and text.endswith("]"))
        word = text if is_whole else text[1:] if text.startswith(SPACE) else f"##{text}"
        vocabulary.setdefault(word, token_id)
    words = [word for word in vocabulary if not word.startswith("[")]
    lowers = _are_few(words, str.lower)
    unknown = values.token_id("unknown_token_id", tokens)
    unknown_token = "[UNK]" if unknown is None else tokens[unknown]
    if unknown_token not in vocabulary:
        raise values.damaged("unknown_token_id", "is missing, and no token is [UNK]")
    backend = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token=unknown_token))
    backend.normalizer = normalizers.BertNormalizer(
        lowercase=lowers,
        strip_accents=lowers and _are_few(words, partial(unicodedata.normalize, "NFD")),
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    add_tokens(
        backend,
        [NamedToken(text=text, token_id=vocabulary[text], special=True) for text in special],
    )
    return LoadedTokenizer(backend=backend)


def _are_few(words: list[str], change: Callable[[str], str]) -> bool:
    """Say whether a change would leave all words but one in a hundred as they are."""
    return 100 * sum(change(word) != word for word in words) < len(words)


def _eos_ids(values: _Metadata, tokens: list[str]) -> tuple[int, ...]:
    """Return the ids that end a text: those that the file names first, then those known by text."""
    named = [values.token_id(key, tokens) for key in _END_KEYS]
    for token_id in values.many("eos_token_ids", (int,), MAX_ID) or []:  # Ollama's
        named.append(values.within("eos_token_ids", token_id, tokens))
    known = {text: token_id for token_id, text in enumerate(tokens) if text in _ENDS}
    ends = (token_id for text, token_id in known.items() if ends_turn(text, known))
    return tuple(dict.fromkeys([*(end for end in named if end is not None), *ends]))


def _mark_ends(values: _Metadata, tokens: list[str], backend: tokenizers.Tokenizer) -> None:
    """Have an encoder's texts, and pairs of them, marked as its family does.

    RoBERTa's families have two marks between a query and a document.
    """
    first, last = (
        next((found for key in keys if (found := values.token_id(key, tokens)) is not None), None)
        for keys in (("cls_token_id", "bos_token_id"), ("seperator_token_id", "eos_token_id"))
    )
    is_words = values.one("model", str) == "bert"
    if is_words:
        first = tokens.index("[CLS]") if first is None and "[CLS]" in tokens else first
        last = tokens.index("[SEP]") if last is None and "[SEP]" in tokens else last
    if first is None or last is None:
        raise values.damaged("cls_token_id or seperator_token_id", "is missing")
    twice = not is_words and values.architecture == "bert"
    backend.post_processor = processors.TemplateProcessing(
        single="first $A last",
        pair=f"first $A last {'last ' if twice else ''}$B:{int(is_words)} last:{int(is_words)}",
        special_tokens=[("first", first), ("last", last)],
    )


def _with_end(
    values: _Metadata, tokens: list[str], loaded: LoadedTokenizer, *, adds_bos: bool | None
) -> LoadedTokenizer:
    """Have the token that ends texts stand behind each, and the one that begins them before it."""
    bos, end = values.token_id("bos_token_id", tokens), values.token_id("eos_token_id", tokens)
    if end is None:
        raise values.damaged("eos_token_id", "is missing, and add_eos_token is true")
    begins = bos is not None and (loaded.adds_bos if adds_bos is None else adds_bos)
    loaded.backend.post_processor = processors.TemplateProcessing(
        single="bos $A end" if begins else "$A end",
        special_tokens=[("end", end), *([("bos", bos)] if begins else [])],
    )
    ends = _eos_ids(values, tokens)
    return replace(loaded, bos_id=bos, eos_ids=ends, adds_bos=None)


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
    if not source:
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
        with_tools=values.template(f".{OF_TOOLS}"),
    )
