"""The tokenizer of a checkpoint: text to token ids and back, and the ids that begin and end a text.

Knows tokenizer.json (through the `tokenizers` library) and the few keys of the files beside it that
name bos and eos. Must not know prompts, sequences or streams: model/text.py turns single tokens
into text as they come.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, assert_never

import tokenizers

from shardnet.errors import CheckpointError, UsageError

Bos = Literal["auto", "on", "off"]

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
_ANCHOR = "a"  # a first piece, so that the probed one is not treated as the start of the text


class Tokenizer:
    """Text to token ids and back. Safe to use from several threads."""

    def __init__(
        self, backend: tokenizers.Tokenizer, *, bos_id: int | None, eos_ids: tuple[int, ...]
    ) -> None:
        self._backend = backend
        self._lock = threading.Lock()  # encode_special_tokens is a setting of the whole backend
        added = backend.get_added_tokens_decoder()
        decoder = backend.decoder
        self.bos_id = bos_id
        """The id that begins a text, or None."""
        self.eos_ids = eos_ids
        """The ids that end a text, see `read_eos_ids`; may be empty."""
        self.special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        """Ids that `decode` leaves out unless told to keep them."""
        self.n_tokens = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        """One more than the largest id that has a token; a model's vocabulary may be padded."""
        self.is_byte_level = decoder is not None and decoder.decode(["Ġ"]) == " "
        """Whether the characters of a piece stand for bytes, as in GPT-2."""
        self._has_byte_pieces = decoder is not None and decoder.decode(["<0x41>"]) == "A"

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Load the tokenizer of a checkpoint folder.

        Raises CheckpointError when tokenizer.json is missing or damaged, or a file beside it names
        bos or eos in a way that cannot be read.
        """
        tokenizer = cls.load_optional(folder)
        if tokenizer is None:
            raise CheckpointError(
                f"{folder} has no tokenizer.json, so text cannot be read or written; "
                "add the file (transformers' save_pretrained writes it) or use --token-ids"
            )
        return tokenizer

    @classmethod
    def load_optional(cls, folder: Path) -> Tokenizer | None:
        """Load the tokenizer of a checkpoint folder, None when it has no tokenizer.json.

        Raises CheckpointError as `load`, but for the missing file.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            return None
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise CheckpointError(f"{path} is not a usable tokenizer: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        return cls(
            backend,
            bos_id=_read_bos_id(folder, backend.token_to_id),
            eos_ids=_read_eos_ids(folder, backend.token_to_id),
        )

    def encode(self, text: str, *, bos: Bos = "auto", parse_special: bool = True) -> list[int]:
        """Turn text into token ids.

        `bos`: "auto" adds what the tokenizer's post-processor adds; "on" puts exactly one bos in
        front; "off" adds nothing. A bos that the text itself spells is kept and never doubled.
        `parse_special`: whether text like `<|end|>` becomes the special token, as transformers
        does; False encodes it as the plain text it is, for what a user types into a template.

        Raises UsageError when the text is not valid Unicode, or for "on" without a bos token.
        """
        match bos:
            case "auto":
                token_ids = self._encode(text, add_special=True, parse_special=parse_special)
                return self._without_double_bos(token_ids, text, parse_special)
            case "on":
                if self.bos_id is None:
                    raise UsageError("--bos on: this model's tokenizer has no bos token; use off")
                token_ids = self._encode(text, add_special=False, parse_special=parse_special)
                return token_ids if token_ids[:1] == [self.bos_id] else [self.bos_id, *token_ids]
            case "off":
                return self._encode(text, add_special=False, parse_special=parse_special)
            case _:
                assert_never(bos)

    def _encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"the text holds half a surrogate pair at character {error.start}, which is not "
                "valid Unicode; send the whole character"
            ) from error
        with self._lock:
            self._backend.encode_special_tokens = not parse_special
            token_ids: list[int] = self._backend.encode(text, add_special_tokens=add_special).ids
        return token_ids

    def _without_double_bos(
        self, token_ids: list[int], text: str, parse_special: bool
    ) -> list[int]:
        """Drop the bos that the post-processor put before one that the text spells."""
        if self.bos_id is None or token_ids[:2] != [self.bos_id, self.bos_id]:
            return token_ids
        plain = self._encode(text, add_special=False, parse_special=parse_special)
        return token_ids[1:] if token_ids[1 : 1 + len(plain)] == plain else token_ids

    def decode(self, token_ids: Sequence[int], *, keep_special_tokens: bool = False) -> str:
        """Turn token ids into text. Ids without a token give nothing; broken bytes give U+FFFD."""
        text: str = self._backend.decode(
            list(token_ids), skip_special_tokens=not keep_special_tokens
        )
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text that has begun.

        A token may be part of a character. An id without a token gives no bytes.
        """
        piece: str | None = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if self.is_byte_level:
            table = _byte_of_character()
            if all(character in table for character in piece):
                return bytes(table[character] for character in piece)
            return piece.encode()
        if self.is_byte_piece(token_id):
            return bytes([int(piece[3:5], 16)])
        if self._backend.decoder is None:
            return piece.encode()
        decode: Callable[[list[str]], str] = self._backend.decoder.decode
        return decode([_ANCHOR, piece])[len(decode([_ANCHOR])) :].encode()

    def token_text(self, token_id: int) -> str:
        """Return `token_bytes` as text; bytes that are no whole character become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def has_token(self, token_id: int) -> bool:
        """Whether a token stands behind this id."""
        return self._backend.id_to_token(token_id) is not None

    def is_byte_piece(self, token_id: int) -> bool:
        """Whether the token is a fallback byte such as `<0xE2>`, decoded together with its run."""
        if not self._has_byte_pieces:
            return False
        piece = self._backend.id_to_token(token_id)
        return piece is not None and _BYTE_PIECE.fullmatch(piece) is not None


def read_eos_ids(folder: Path) -> tuple[int, ...]:
    """Read the ids that end a text from a checkpoint folder that may have no tokenizer.

    From generation_config.json, one or a list; else from config.json. Empty when neither names
    any. Raises CheckpointError when a file cannot be read. `Tokenizer.eos_ids` also asks
    tokenizer_config.json.
    """
    return _read_eos_ids(folder, lambda token: None)


def check_token_ids(token_ids: Sequence[int], n_tokens: int) -> None:
    """Refuse a prompt that is empty or holds an id outside `[0, n_tokens)`.

    Raises UsageError that names the id, its place and the limit.
    """
    if not token_ids:
        raise UsageError("the prompt is empty and the tokenizer adds no bos; give it some text")
    for place, token_id in enumerate(token_ids):
        if not 0 <= token_id < n_tokens:
            raise UsageError(
                f"token id {token_id} at place {place} of the prompt is outside the vocabulary; "
                f"ids go from 0 to {n_tokens - 1}"
            )


@cache
def _byte_of_character() -> dict[str, int]:
    """Map GPT-2's printable stand-ins to bytes (encoder.py of openai/gpt-2, bytes_to_unicode)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + place): byte for place, byte in enumerate(others)}


def _read_eos_ids(folder: Path, id_of: Callable[[str], int | None]) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        ids = _ids_under(folder / name, "eos_token_id")
        if ids:
            return ids
    token_id = _named_token(folder, "eos_token", id_of)
    return () if token_id is None else (token_id,)


def _read_bos_id(folder: Path, id_of: Callable[[str], int | None]) -> int | None:
    named = _named_token(folder, "bos_token", id_of)
    if named is not None:
        return named
    for name in ("generation_config.json", "config.json"):
        ids = _ids_under(folder / name, "bos_token_id")
        if ids:
            return ids[0]
    return None


def _ids_under(path: Path, key: str) -> tuple[int, ...]:
    value = _read_object(path).get(key)
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(type(id_) is int and id_ >= 0 for id_ in ids):
        raise CheckpointError(f"{path}: {key} must be a token id or a list of them, not {value!r}")
    return tuple(ids)


def _named_token(folder: Path, key: str, id_of: Callable[[str], int | None]) -> int | None:
    """Look up a token that tokenizer_config.json names: a string, or an object with `content`."""
    path = folder / "tokenizer_config.json"
    value = _read_object(path).get(key)
    if isinstance(value, dict):
        value = value.get("content")
    if value is None:
        return None
    if not isinstance(value, str):
        raise CheckpointError(f"{path}: {key} must be a token's text, not {value!r}")
    return id_of(value)


def _read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; a missing file is an empty one."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value
