"""The bytes of every token and how they join to a text; which tokens begin and end one.

Made in the process that reads the tokenizer (text_backend.py); a node decodes with it by look-ups
alone.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Literal

from shardnet.errors import CheckpointError, shown
from shardnet.model.config.fields import TEXT
from shardnet.model.config.limits import MAX_EOS
from shardnet.tokenizers.backends.token_files import read_object
from shardnet.tokenizers.formats.tokenizer_files import tokenizer_place

Bos = Literal["auto", "on", "off"]
"""Whether a bos is prepended: see `Tokenizer.encode`."""

HAS_TOKEN: Final = 1
IS_SPECIAL: Final = 2
IS_BYTE: Final = 4
IS_ADDED: Final = 8
"""Bits of a token's flags. A byte piece such as `<0xE2>` is decoded as part of its run.
An added token is matched whole before text is split into tokens; all special ones are."""

MAX_TABLE_BYTES = 64 << 20
"""Limit of all tokens' bytes; the largest known vocabularies have 3 MB."""
MAX_TOKEN_BYTES = 64 << 10
MAX_SPECIAL = 1 << 16

_SPECIAL_FLAGS = re.compile(b"[\x02\x03\x06\x07\x0a\x0b\x0e\x0f]")
_ADDED_FLAGS = re.compile(b"[\x08-\x0f]")
_NO_FLAGS = re.compile(b"\x00")


class Joins(StrEnum):
    """How a decoder joins tokens to a text."""

    BYTES = "bytes"
    """All bytes in a row, as in GPT-2."""
    PIECES = "pieces"
    """All pieces in a row, as in sentencepiece; a run of byte pieces is valid or not as a whole."""
    WORDS = "words"
    """With a space between two."""
    OTHERWISE = "otherwise"
    """In a way that only the library knows."""


class ByteStrings(Sequence[bytes]):
    """Byte strings in one block: a quarter of the memory of a list."""

    def __init__(self, ends: array[int], data: bytes) -> None:
        """`ends[n]` is where string `n` begins and string `n - 1` ends in `data`."""
        self.ends = ends
        self.data = data

    @classmethod
    def of(cls, strings: Iterable[bytes]) -> ByteStrings:
        """Join strings. Raises CheckpointError if they exceed the table's limits."""
        ends, data = array("I", [0]), bytearray()
        for string in strings:
            if len(string) > MAX_TOKEN_BYTES or len(data) + len(string) > MAX_TABLE_BYTES:
                raise CheckpointError(
                    f"token {len(ends) - 1} has {len(string)} bytes; expected at most "
                    f"{MAX_TOKEN_BYTES}, and {MAX_TABLE_BYTES} in all"
                )
            data += string
            ends.append(len(data))
        return cls(ends, bytes(data))

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, place: Any) -> Any:
        return self.data[self.ends[place] : self.ends[place + 1]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTable:
    """Every token's flags and bytes by id.

    `later` is what a token adds behind others; `first`, where it differs, what it adds at the start
    of a text. Characters `mark` that a run of byte pieces spells become spaces, and are dropped at
    the start of a text if `drops_first`. Up to `n_stripped` characters `stripped` are dropped from
    the start of the text. `is_byte_level`: the characters of a piece stand for bytes, as in GPT-2.
    `longest` is the length of the longest token, in characters.
    """

    joins: Joins
    flags: bytes
    later: ByteStrings
    first: ByteStrings | None = None
    mark: str = ""
    drops_first: bool = False
    stripped: str = ""
    n_stripped: int = 0
    is_byte_level: bool = False
    longest: int = 1

    @property
    def n_tokens(self) -> int:
        """One more than the largest id with a token."""
        return len(self.flags)

    def special_ids(self) -> frozenset[int]:
        """Return the ids of special tokens."""
        return frozenset(found.start() for found in _SPECIAL_FLAGS.finditer(self.flags))

    def added_ids(self) -> tuple[int, ...]:
        """Return the ids of added tokens, special ones among them."""
        return tuple(found.start() for found in _ADDED_FLAGS.finditer(self.flags))

    def ids_without_token(self, n_rows: int) -> tuple[int, ...]:
        """List the ids below `n_rows` that have no token."""
        holes = (found.start() for found in _NO_FLAGS.finditer(self.flags[:n_rows]))
        return (*holes, *range(len(self.flags), n_rows))

    def decode(self, token_ids: Iterable[int], *, keep_special_tokens: bool) -> str:
        """Decode ids as the tokenizer's own decoder does; not for `Joins.OTHERWISE`."""
        flags, n_tokens = self.flags, len(self.flags)
        mask = HAS_TOKEN if keep_special_tokens else HAS_TOKEN | IS_SPECIAL
        ids = [n for n in token_ids if 0 <= n < n_tokens and flags[n] & mask == HAS_TOKEN]
        if self.joins is Joins.PIECES:
            text = self._joined_pieces(ids, is_first=True)
            start = 0
            while start < self.n_stripped and text.startswith(self.stripped, start, start + 1):
                start += 1
            return text[start:]
        ends, data = self.later.ends, self.later.data
        parts = [data[ends[n] : ends[n + 1]] for n in ids]
        return (b" " if self.joins is Joins.WORDS else b"").join(parts).decode("utf-8", "replace")

    def decode_behind(self, token_ids: Sequence[int]) -> str:
        """Decode ids that have a token, behind a text of whole characters that is not empty."""
        if self.joins is Joins.PIECES:
            return self._joined_pieces(token_ids, is_first=False)
        ends, data = self.later.ends, self.later.data
        parts = [data[ends[n] : ends[n + 1]] for n in token_ids]
        if self.joins is Joins.WORDS:
            parts = [b" " + part for part in parts]
        return b"".join(parts).decode("utf-8", "replace")

    def _joined_pieces(self, ids: Sequence[int], *, is_first: bool) -> str:
        flags, ends, data = self.flags, self.later.ends, self.later.data
        parts: list[str] = []
        run = b""
        for n in ids:
            if flags[n] & IS_BYTE:
                run += data[ends[n] : ends[n + 1]]
                continue
            if run:
                parts.append(self._run_text(run, is_first=is_first))
                run, is_first = b"", False
            if is_first and self.first is not None:
                parts.append(self.first[n].decode())
            else:
                parts.append(data[ends[n] : ends[n + 1]].decode())
            is_first = False
        if run:
            parts.append(self._run_text(run, is_first=is_first))
        return "".join(parts)

    def _run_text(self, run: bytes, *, is_first: bool) -> str:
        try:
            text = run.decode()
        except UnicodeDecodeError:
            text = "\ufffd" * len(run)
        if not self.mark:
            return text
        return text.replace(self.mark, "" if is_first and self.drops_first else " ")

    def pack(self) -> tuple[dict[str, Any], bytes]:
        """Write the table as a JSON object and a block of bytes."""
        strings = [self.later, *([self.first] if self.first is not None else [])]
        blocks = [self.flags]
        for each in strings:
            blocks += [each.ends.tobytes(), each.data]
        names = ("mark", "drops_first", "stripped", "n_stripped", "is_byte_level", "longest")
        header: dict[str, Any] = {name: getattr(self, name) for name in names}
        header |= {"joins": self.joins.value, "sizes": [len(block) for block in blocks]}
        return header, b"".join(blocks)

    @classmethod
    def unpack(cls, header: Mapping[str, Any], block: bytes) -> TokenTable:
        """Read what `pack` wrote."""
        fields = dict(header)
        blocks, start = [], 0
        for size in fields.pop("sizes"):
            blocks.append(block[start : start + size])
            start += size
        flags, *rest = blocks
        strings = []
        for ends, data in zip(rest[::2], rest[1::2], strict=True):
            numbers = array("I")
            numbers.frombytes(ends)
            strings.append(ByteStrings(numbers, data))
        later, first = strings[0], strings[1] if len(strings) > 1 else None
        joins = Joins(fields.pop("joins"))
        return cls(joins=joins, flags=flags, later=later, first=first, **fields)


_IdOf = Callable[[str], int | None]


def read_eos_ids(path: Path) -> tuple[int, ...]:
    """Read the eos ids of a checkpoint that may have no tokenizer.

    They come from generation_config.json, else from config.json: one id or a list. Empty if neither
    has any. Raises CheckpointError if a file cannot be read. `Tokenizer.eos_ids` also has those of
    the tokenizer.
    """
    return find_eos_ids(tokenizer_place(path), lambda token: None)


def find_eos_ids(folder: Path, id_of: _IdOf, own: Sequence[int] = ()) -> tuple[int, ...]:
    """Read the eos ids beside a tokenizer, and join that of the tokenizer.

    That is the one named beside it, whose id `id_of` looks up, else its `own` ones. Fine-tunes name
    a new one in one place and leave the old one in the other, and may write either.
    """
    files = (folder / name for name in ("generation_config.json", "config.json"))
    ids = next(filter(None, (_ids_under(file, "eos_token_id") for file in files)), ())
    named = _named_token(folder, "eos_token", id_of)
    return tuple(dict.fromkeys([*ids, *(own if named is None else (named,))]))


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
    """Look up a token named beside a tokenizer: a string, or an object with `content`."""
    for path in (folder / "tokenizer_config.json", folder / "special_tokens_map.json"):
        value = read_object(path).get(key)
        if isinstance(value, dict):
            value = value.get("content")
        if not isinstance(value, str | None):
            raise CheckpointError(f"{path}: {key} must be a token's text, not {shown(value)}")
        if value is not None:
            return id_of(value)
    return None
