"""A checkpoint's tokenizer in this process, by the library: for the process that guards it.

Knows the `tokenizers` library, which may end, block or bloat its process for a hostile file: a node
asks tokenizer.py instead. Must not know processes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, assert_never

from tokenizers import Regex, normalizers, processors

from shardnet.errors import CheckpointError, UsageError
from shardnet.tokenizers.backends.added_tokens import MAX_ID
from shardnet.tokenizers.backends.byte_level import byte_of_character
from shardnet.tokenizers.backends.token_files import LoadedTokenizer
from shardnet.tokenizers.formats.tokenizer_files import read_tokenizer
from shardnet.tokenizers.token_table import (
    HAS_TOKEN,
    IS_ADDED,
    IS_BYTE,
    IS_SPECIAL,
    MAX_SPECIAL,
    Bos,
    ByteStrings,
    Joins,
    TokenTable,
    adds_bos,
    find_bos_id,
    find_eos_ids,
)

_BYTE_PIECE = re.compile(r"<0x(\+?[0-9A-Fa-f]+)>")
_MARK = "\ue000"
_ANCHOR = "a"  # a first piece, so that the probed one is not at the start of the text


@dataclass(eq=False)
class TextBackend:
    """Text to token ids and back, by the library. Not thread-safe."""

    loaded: LoadedTokenizer

    @classmethod
    def load_optional(cls, place: Path) -> TextBackend | None:
        """Load the tokenizer of a GGUF file or of a folder; None if there is none.

        Raises CheckpointError if a file is damaged, or has an invalid entry for bos or eos.
        """
        loaded = read_tokenizer(place)
        if loaded is None:
            return None
        id_of = loaded.backend.token_to_id
        if not loaded.backend.get_vocab_size():
            raise CheckpointError(
                f"{place}: the tokenizer has no tokens", remedy="fetch its files again"
            )
        bos_id = find_bos_id(place, id_of)
        return cls.of(
            replace(
                loaded,
                bos_id=loaded.bos_id if bos_id is None else bos_id,
                eos_ids=find_eos_ids(place, id_of, loaded.eos_ids),
                adds_bos=adds_bos(place, loaded.adds_bos),
            )
        )

    @classmethod
    def of(cls, loaded: LoadedTokenizer) -> TextBackend:
        """Make the tokenizer from its file alone, without the files beside it."""
        if loaded.adds_bos and loaded.bos_id is not None:
            loaded.backend.post_processor = processors.TemplateProcessing(
                single="bos $A", special_tokens=[("bos", loaded.bos_id)]
            )
        return cls(loaded)

    def encode(self, text: str, bos: Bos, parse_special: bool) -> list[int]:
        """Encode as `Tokenizer.encode`. Raises UsageError for bos "on" without a bos token."""
        match bos:
            case "auto":
                token_ids = self._encode(text, add_special=True, parse_special=parse_special)
                return self._without_double_bos(token_ids, text, parse_special)
            case "on":
                if (bos_id := self.loaded.bos_id) is None:
                    raise UsageError(
                        "--bos on: this model's tokenizer has no bos token",
                        remedy="use off",
                    )
                token_ids = self._encode(text, add_special=False, parse_special=parse_special)
                return token_ids if token_ids[:1] == [bos_id] else [bos_id, *token_ids]
            case "off":
                return self._encode(text, add_special=False, parse_special=parse_special)
            case _:
                assert_never(bos)

    def _encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        self.loaded.backend.encode_special_tokens = not parse_special
        token_ids: list[int] = self.loaded.backend.encode(text, add_special_tokens=add_special).ids
        return token_ids

    def encode_input(
        self, text: str, pair: str | None, special_tokens: bool, most_tokens: int | None
    ) -> tuple[list[int], list[int]]:
        """Encode a text, or two as one, for an encoder; return ids, and of which text each is.

        The longer one is cut so that there are at most `most_tokens`, special ones included.
        """
        self.loaded.backend.encode_special_tokens = False
        if most_tokens is not None:
            self.loaded.backend.enable_truncation(most_tokens)
        try:
            found = self.loaded.backend.encode(text, pair, add_special_tokens=special_tokens)
        finally:
            self.loaded.backend.no_truncation()
        return found.ids, found.type_ids

    def _without_double_bos(
        self, token_ids: list[int], text: str, parse_special: bool
    ) -> list[int]:
        """Drop the bos that the post-processor added before one in the text itself."""
        if self.loaded.bos_id is None or token_ids[:2] != [self.loaded.bos_id, self.loaded.bos_id]:
            return token_ids
        plain = self._encode(text, add_special=False, parse_special=parse_special)
        return token_ids[1:] if token_ids[1 : 1 + len(plain)] == plain else token_ids

    def decode(self, token_ids: Sequence[int], keep_special_tokens: bool) -> str:
        """Decode token ids. Ids without a token are skipped; invalid bytes become U+FFFD."""
        text: str = self.loaded.backend.decode(
            list(token_ids), skip_special_tokens=not keep_special_tokens
        )
        return text

    def classes(self, n_tokens: int) -> list[int]:
        """Number what ids' texts are but for case, accents and spaces, in order of appearance.

        As Engram (arXiv 2601.07372) does; an id whose text is not whole characters is by itself.
        Ids behind the last token, which no text has, are of the first class.
        """
        numbers: dict[str | None, int] = {}
        backend, normalize, n_decoded = self.loaded.backend, _alike().normalize_str, 1 << 12
        found, n_known = [], min(n_tokens, backend.get_vocab_size())
        for begin in range(0, n_known, n_decoded):
            ids = range(begin, min(n_known, begin + n_decoded))
            texts = backend.decode_batch([[one] for one in ids], skip_special_tokens=False)
            for token_id, text in zip(ids, texts, strict=True):
                key = backend.id_to_token(token_id) if "\ufffd" in text else normalize(text) or text
                found.append(numbers.setdefault(key, len(numbers)))
        return found + [0] * (n_tokens - n_known)

    def table(self) -> TokenTable:
        """Make the table of all tokens.

        Raises CheckpointError for ids, tokens or a number of special tokens beyond its limits.
        """
        ids = sorted(set(self.loaded.backend.get_vocab(with_added_tokens=True).values()))
        if ids[-1] >= MAX_ID:
            raise CheckpointError(f"{ids[-1]} is not a token id; they go from 0 to {MAX_ID - 1}")
        pieces: list[str | None] = [None] * (ids[-1] + 1)
        for token_id in ids:
            pieces[token_id] = self.loaded.backend.id_to_token(token_id)
        added_tokens = self.loaded.backend.get_added_tokens_decoder().values()
        added = {token.content for token in added_tokens}
        special = {token.content for token in added_tokens if token.special}
        if len(special) > MAX_SPECIAL:
            raise CheckpointError(f"{len(special)} special tokens, at most {MAX_SPECIAL} are read")
        rules = _rules_of(self.loaded.backend.decoder)
        flags = bytearray(len(pieces))
        for token_id, piece in enumerate(pieces):
            if piece is not None:
                is_byte = rules.byte_of(piece) is not None
                flags[token_id] = (
                    HAS_TOKEN
                    | IS_SPECIAL * (piece in special)
                    | IS_BYTE * is_byte
                    | IS_ADDED * (piece in added)
                )
        return TokenTable(
            joins=rules.joins,
            flags=bytes(flags),
            later=ByteStrings.of(b"" if p is None else rules.later(p) for p in pieces),
            first=ByteStrings.of(b"" if p is None else rules.first(p) for p in pieces)
            if rules.drops_first
            else None,
            mark=rules.mark,
            drops_first=rules.drops_first,
            stripped=rules.stripped,
            n_stripped=rules.n_stripped,
            is_byte_level=rules.is_byte_level,
            longest=max(len(piece) for piece in pieces if piece is not None),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rules:
    """What a decoder does with each piece.

    First `replaced` texts are replaced, then byte pieces become bytes (`has_bytes`), then `mark`
    becomes a space, or at the start of a text nothing (`drops_first`); of the joined text up to
    `n_stripped` characters `stripped` are dropped from the start. `is_byte_level`: the characters
    of a piece stand for bytes. `probe` is the library's decoder, where it alone knows.
    """

    joins: Joins
    replaced: tuple[tuple[str, str], ...] = ()
    has_bytes: bool = False
    mark: str = ""
    drops_first: bool = False
    stripped: str = ""
    n_stripped: int = 0
    is_byte_level: bool = False
    probe: Callable[[list[str]], str] | None = None

    def byte_of(self, piece: str) -> int | None:
        """Return the byte that a piece is, None for other pieces."""
        if not self.has_bytes:
            return None
        piece = self._replaced(piece)
        found = _BYTE_PIECE.fullmatch(piece)
        return int(found[1], 16) if found and len(piece) == len("<0x00>") else None

    def later(self, piece: str) -> bytes:
        """Return the bytes that a piece adds when it is not the first of a text."""
        byte = self.byte_of(piece)
        if byte is not None:
            return bytes([byte])
        match self.joins:
            case Joins.BYTES:
                return _spelled_bytes(piece)
            case Joins.WORDS:
                return piece.encode()
            case Joins.PIECES:
                text = self._replaced(piece)
                return (text.replace(self.mark, " ") if self.mark else text).encode()
            case Joins.OTHERWISE:
                assert self.probe is not None
                if self.is_byte_level:
                    return _spelled_bytes(piece)
                return self.probe([_ANCHOR, piece])[len(self.probe([_ANCHOR])) :].encode()
            case _:
                assert_never(self.joins)

    def first(self, piece: str) -> bytes:
        """Return the bytes that a piece adds at the start of a text, where `drops_first`."""
        return self._replaced(piece).replace(self.mark, "").encode()

    def _replaced(self, piece: str) -> str:
        for text, by in self.replaced:
            piece = piece.replace(text, by)
        return piece


def _spelled_bytes(piece: str) -> bytes:
    """Return the bytes that a piece of a byte-level tokenizer spells, one with each character."""
    table = byte_of_character()
    if all(character in table for character in piece):
        return bytes(table[character] for character in piece)
    return piece.encode()


def _rules_of(decoder: Any) -> _Rules:
    """Return what the decoder does if a table can do it, else rules that ask the decoder."""
    if decoder is None:
        return _Rules(joins=Joins.WORDS)
    otherwise = _Rules(
        joins=Joins.OTHERWISE,
        has_bytes=decoder.decode(["<0x41>"]) == "A",
        is_byte_level=decoder.decode(["Ġ"]) == " ",
        probe=decoder.decode,
    )
    try:
        steps = list(_flat(json.loads(decoder.__getstate__())))
    except Exception:  # a decoder written in Python has no state of the library
        return otherwise
    if [step.get("type") for step in steps] == ["ByteLevel"]:
        return _Rules(joins=Joins.BYTES, is_byte_level=True)
    return _pieces_of(steps) or otherwise


def _pieces_of(steps: list[dict[str, Any]]) -> _Rules | None:
    """Return the rules of sentencepiece's kinds, None if the steps are others or in another order.

    Replace texts, ByteFallback, Metaspace, Fuse, Strip from the left; each may be missing, but for
    Fuse before Strip.
    """
    rules, order, last = _Rules(joins=Joins.PIECES), 0, ""
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(text)}, "content": str(by)}:
                place, more = 0, replace(rules, replaced=(*rules.replaced, (text, by)))
            case {"type": "ByteFallback"}:
                place, more = 1, replace(rules, has_bytes=True)
            case {"type": "Metaspace", "replacement": str(mark)} if mark != "\ufffd":
                drops = step.get("prepend_scheme") != "never"
                place, more = 2, replace(rules, mark=mark, drops_first=drops)
            case {"type": "Fuse"}:
                place, more = 3, rules
            case {"type": "Strip", "content": str(text), "start": int(start), "stop": 0} if (
                last == "Fuse"
            ):
                place, more = 4, replace(rules, stripped=text, n_stripped=start)
            case _:
                return None
        if place < order or place == order > 0:
            return None
        rules, order, last = more, place, step["type"]
    return rules


def _alike() -> normalizers.Normalizer:
    """Make what leaves of texts what makes them differ: a single space is kept by a mark."""
    steps = [normalizers.NFKC(), normalizers.NFD(), normalizers.StripAccents()]
    steps += [normalizers.Lowercase(), normalizers.Replace(Regex(r"[ \t\r\n]+"), " ")]
    steps += [normalizers.Replace(Regex("^ $"), _MARK), normalizers.Strip()]
    return normalizers.Sequence([*steps, normalizers.Replace(_MARK, " ")])


def _flat(step: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """List the steps of a decoder that may be a sequence of sequences."""
    if step.get("type") != "Sequence":
        yield dict(step)
        return
    for inner in step["decoders"]:
        yield from _flat(inner)
