"""The tokenizer of a checkpoint: text to token ids and back, and its bos and eos ids.

Knows the `tokenizers` library, and the few keys of the files beside a tokenizer that name bos and
eos. Must not know the formats of tokenizer files (tokenizers/formats/tokenizer_files.py), nor
prompts, sequences or streams: tokenizers/detokenizer.py decodes tokens incrementally.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, assert_never

import tokenizers
from tokenizers import processors

from shardnet.errors import CheckpointError, UsageError, shown
from shardnet.model.config.limits import MAX_EOS
from shardnet.tokenizers.backends.byte_level import byte_of_character
from shardnet.tokenizers.backends.token_files import read_object
from shardnet.tokenizers.chat.chat_template import ChatTemplate
from shardnet.tokenizers.formats.loaded_tokenizer import LoadedTokenizer
from shardnet.tokenizers.formats.tokenizer_files import NAMES, read_tokenizer, tokenizer_place

Bos = Literal["auto", "on", "off"]

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
_ANCHOR = "a"  # a first piece, so that the probed one is not at the start of the text


class Tokenizer:
    """Text to token ids and back. Thread-safe."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_id: int | None,
        eos_ids: tuple[int, ...],
        template: ChatTemplate | None = None,
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
        """Ids that `decode` omits by default."""
        self.template = template
        """The chat template in the tokenizer's own file, or None."""
        self._ids = frozenset(backend.get_vocab(with_added_tokens=True).values())
        self.n_tokens = max(self._ids, default=-1) + 1
        """One more than the largest id with a token; a model's vocabulary may be padded."""
        self.is_byte_level = decoder is not None and decoder.decode(["Ġ"]) == " "
        """Whether the characters of a piece stand for bytes, as in GPT-2."""
        self._has_byte_pieces = decoder is not None and decoder.decode(["<0x41>"]) == "A"

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Load the tokenizer of a checkpoint, a folder or a GGUF file.

        Raises CheckpointError if there is none, a file is damaged, or a file beside it has an
        invalid entry for bos or eos.
        """
        tokenizer = cls.load_optional(path)
        if tokenizer is None:
            raise CheckpointError(
                f"{path} has no tokenizer ({NAMES}), so text cannot be read or written",
                remedy="add the files or use --token-ids",
            )
        return tokenizer

    @classmethod
    def load_optional(cls, path: Path) -> Tokenizer | None:
        """Load the tokenizer of a checkpoint; None if it has none.

        Raises CheckpointError as `load` does, except for a missing tokenizer.
        """
        folder = tokenizer_place(path)  # a GGUF file has nothing beside it
        loaded = read_tokenizer(folder)
        if loaded is None:
            return None
        id_of = loaded.backend.token_to_id
        if not loaded.backend.get_vocab_size():
            raise CheckpointError(
                f"{folder}: the tokenizer has no tokens",
                remedy="fetch its files again",
            )
        bos_id = _read_bos_id(folder, id_of)
        return cls.of(
            replace(
                loaded,
                bos_id=loaded.bos_id if bos_id is None else bos_id,
                eos_ids=_read_eos_ids(folder, id_of) or loaded.eos_ids,
                adds_bos=_adds_bos(folder, loaded.adds_bos),
            )
        )

    @classmethod
    def of(cls, loaded: LoadedTokenizer) -> Tokenizer:
        """Make the tokenizer from its file alone, without the files beside it."""
        if loaded.adds_bos and loaded.bos_id is not None:
            loaded.backend.post_processor = processors.TemplateProcessing(
                single="bos $A", special_tokens=[("bos", loaded.bos_id)]
            )
        return cls(
            loaded.backend, bos_id=loaded.bos_id, eos_ids=loaded.eos_ids, template=loaded.template
        )

    def encode(self, text: str, *, bos: Bos = "auto", parse_special: bool = True) -> list[int]:
        """Encode text to token ids.

        `bos`: "auto" adds what the tokenizer's post-processor adds; "on" prepends exactly one bos;
        "off" adds nothing. A bos that the text itself contains is kept and never doubled.
        `parse_special`: True parses text like `<|end|>` as the special token, as transformers does;
        False encodes it as plain text, for user input in a template.

        Raises UsageError if the text is not valid Unicode, or for "on" without a bos token.
        """
        match bos:
            case "auto":
                token_ids = self._encode(text, add_special=True, parse_special=parse_special)
                return self._without_double_bos(token_ids, text, parse_special)
            case "on":
                if self.bos_id is None:
                    raise UsageError(
                        "--bos on: this model's tokenizer has no bos token",
                        remedy="use off",
                    )
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
                "valid Unicode",
                remedy="send the whole character",
            ) from error
        with self._lock:
            self._backend.encode_special_tokens = not parse_special
            token_ids: list[int] = self._backend.encode(text, add_special_tokens=add_special).ids
        return token_ids

    def _without_double_bos(
        self, token_ids: list[int], text: str, parse_special: bool
    ) -> list[int]:
        """Drop the bos that the post-processor added before one in the text itself."""
        if self.bos_id is None or token_ids[:2] != [self.bos_id, self.bos_id]:
            return token_ids
        plain = self._encode(text, add_special=False, parse_special=parse_special)
        return token_ids[1:] if token_ids[1 : 1 + len(plain)] == plain else token_ids

    def decode(self, token_ids: Sequence[int], *, keep_special_tokens: bool = False) -> str:
        """Decode token ids. Ids without a token are skipped; invalid bytes become U+FFFD."""
        text: str = self._backend.decode(
            list(token_ids), skip_special_tokens=not keep_special_tokens
        )
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds when it is not the first of a text.

        They may be a part of a character, and are empty for an id without a token.
        """
        piece: str | None = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if self.is_byte_level:
            table = byte_of_character()
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
        """Return `token_bytes` as text; incomplete characters become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def has_token(self, token_id: int) -> bool:
        """Say whether this id has a token."""
        return token_id in self._ids

    def ids_without_token(self, n_rows: int) -> tuple[int, ...]:
        """List the ids below `n_rows` that have no token."""
        return tuple(id_ for id_ in range(n_rows) if id_ not in self._ids)

    def is_byte_piece(self, token_id: int) -> bool:
        """Say whether the token is a fallback byte such as `<0xE2>`, decoded as part of its run."""
        if not self._has_byte_pieces:
            return False
        piece = self._backend.id_to_token(token_id)
        return piece is not None and _BYTE_PIECE.fullmatch(piece) is not None


def read_eos_ids(path: Path) -> tuple[int, ...]:
    """Read the eos ids of a checkpoint that may have no tokenizer.

    They come from generation_config.json, else from config.json: one id or a list. Empty if neither
    has any. Raises CheckpointError if a file cannot be read. `Tokenizer.eos_ids` also considers
    tokenizer_config.json.
    """
    return _read_eos_ids(tokenizer_place(path), lambda token: None)


def check_token_ids(
    token_ids: Sequence[int], n_rows: int, tokenizer: Tokenizer | None = None
) -> None:
    """Raise UsageError if a prompt is empty or holds an id outside `[0, n_rows)`.

    `n_rows` is the model's vocabulary; a tokenizer may have more tokens. The error names the id,
    its token, its index and the limit.
    """
    if not token_ids:
        raise UsageError(
            "the prompt is empty and the tokenizer adds no bos",
            remedy="give it some text",
        )
    for place, token_id in enumerate(token_ids):
        if 0 <= token_id < n_rows:
            continue
        known = tokenizer is not None and tokenizer.has_token(token_id)
        named = f" ({tokenizer.token_text(token_id)!r})" if tokenizer and known else ""
        raise UsageError(
            f"token id {token_id}{named} at place {place} of the prompt is outside the model's "
            "vocabulary",
            remedy=f"ids go from 0 to {n_rows - 1}",
        )


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


def _adds_bos(folder: Path, by_default: bool | None) -> bool | None:
    """Say whether to prepend bos; None leaves it to the backend, as with tokenizer.json."""
    if by_default is None:
        return None
    path = folder / "tokenizer_config.json"
    value = read_object(path).get("add_bos_token")
    if not isinstance(value, bool | None):
        raise CheckpointError(f"{path}: add_bos_token must be true or false, not {shown(value)}")
    return by_default if value is None else value


def _ids_under(path: Path, key: str) -> tuple[int, ...]:
    value = read_object(path).get(key)
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if len(ids) > MAX_EOS or not all(type(id_) is int and 0 <= id_ < 1 << 31 for id_ in ids):
        raise CheckpointError(
            f"{path}: {key} must be a token id or a list of at most {MAX_EOS}, not {shown(value)}"
        )
    return tuple(ids)


def _named_token(folder: Path, key: str, id_of: Callable[[str], int | None]) -> int | None:
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
