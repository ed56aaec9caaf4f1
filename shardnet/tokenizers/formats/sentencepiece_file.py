"""Reads sentencepiece's `.model` files: pieces with scores, and normalization settings.

Knows sentencepiece_model.proto (github.com/google/sentencepiece, src/) and the form of its bytes
(protobuf.dev/programming-guides/encoding), of which no copies are made. Settings that change ids
but are not implemented are refused by name. Must not know how pieces are used.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from shardnet.errors import CheckpointError
from shardnet.tokenizers.backends.added_tokens import read_added_tokens
from shardnet.tokenizers.backends.piece_tokenizer import PieceKind, Pieces, build_backend
from shardnet.tokenizers.backends.token_files import (
    LoadedTokenizer,
    damaged,
    read_bytes,
    read_object,
)

_PIECES, _TRAINER, _NORMALIZER, _DENORMALIZER = 1, 2, 3, 5
_UNIGRAM, _BPE = 1, 2
_MAX_PIECES = 1 << 19
"""Limit of pieces; the largest known vocabulary has 262 144."""
_MAX_FIELDS = 1 << 14
"""Limit of a message's fields, and of the model's beside its pieces."""
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}
_MAX_VARINT_BYTES = 10

Value = int | memoryview
"""An integer, or the bytes of a text, a message or a fixed-width number."""


def read_sentencepiece(path: Path) -> LoadedTokenizer:
    """Read a `.model` file, and added tokens and prefix settings from the JSON files beside it.

    tokenizer_config.json may disable the space before a text (`add_prefix_space`), or prepend it
    only once to a text with special tokens (`legacy: false`). Raises CheckpointError, which names
    the file and the field.
    """
    config_path = path.parent / "tokenizer_config.json"
    config = read_object(config_path)
    for key in ("add_prefix_space", "legacy"):
        if not isinstance(config.get(key), bool | None):
            raise CheckpointError(f"{config_path}: {key} must be true or false")
    pieces, trainer = _read_model(memoryview(read_bytes(path)), str(path))
    if config.get("add_prefix_space") is False:
        pieces = replace(pieces, add_dummy_prefix=False)
    if config.get("legacy") is False:
        pieces = replace(pieces, prefix_each_part=False)
    ids = {text: token_id for token_id, text in enumerate(pieces.texts)}
    eos_id = _control_id(pieces, trainer.text(47, "</s>"))
    return LoadedTokenizer(
        backend=build_backend(pieces, read_added_tokens(path.parent, ids)),
        bos_id=_control_id(pieces, trainer.text(46, "<s>")),
        eos_ids=() if eos_id is None else (eos_id,),
        adds_bos=True,
    )


class _Message:
    """The singular fields of a message; of duplicates the last counts, as in protobuf."""

    def __init__(self, data: Value, where: str) -> None:
        if isinstance(data, int):
            raise damaged(f"{where} is a number, not a message")
        self.where = where
        self._values: dict[int, Value] = dict(_fields(data, where, _MAX_FIELDS))

    def number(self, field: int, default: int) -> int:
        """Return an integer, enumeration value or boolean."""
        value = self._values.get(field, default)
        if not isinstance(value, int):
            raise self._is_no("number", field)
        return value

    def score(self, field: int) -> float:
        """Return a float32, 0 by default."""
        value = self._values.get(field, memoryview(bytes(4)))
        if isinstance(value, int) or len(value) != 4:
            raise self._is_no("float", field)
        return float(struct.unpack("<f", value)[0])

    def data(self, field: int) -> bytes:
        """Return bytes, b"" by default."""
        value = self._values.get(field, memoryview(b""))
        if isinstance(value, int):
            raise self._is_no("bytes", field)
        return bytes(value)

    def text(self, field: int, default: str = "") -> str:
        """Return a text."""
        if field not in self._values:
            return default
        try:
            return self.data(field).decode()
        except UnicodeDecodeError as error:
            raise self._is_no("UTF-8", field) from error

    def _is_no(self, kind: str, field: int) -> CheckpointError:
        return damaged(f"{self.where}: field {field} is not {kind}")


def _fields(data: memoryview, where: str, most: int) -> Iterator[tuple[int, Value]]:
    try:
        yield from protobuf_fields(data, most)
    except ValueError as error:
        raise damaged(f"{where}: truncated or no sentencepiece model: {error}") from error


def _read_model(data: memoryview, where: str) -> tuple[Pieces, _Message]:
    """Read a ModelProto; return its pieces, and its trainer_spec."""
    texts: list[str] = []
    scores: list[float] = []
    kinds: list[int] = []
    specs: dict[int, Value] = {}
    for number, value in _fields(data, where, _MAX_PIECES + _MAX_FIELDS):
        if number != _PIECES:
            specs[number] = value
            continue
        if len(texts) == _MAX_PIECES:
            raise damaged(f"{where}: more than {_MAX_PIECES} pieces")
        piece = _Message(value, f"{where}: pieces[{len(texts)}]")
        texts.append(piece.text(1))
        scores.append(piece.score(2))
        kinds.append(piece.number(3, PieceKind.NORMAL))
    trainer, normalizer, denormalizer = (
        _Message(specs.get(number, memoryview(b"")), f"{where}: {name}")
        for number, name in (
            (_TRAINER, "trainer_spec"),
            (_NORMALIZER, "normalizer_spec"),
            (_DENORMALIZER, "denormalizer_spec"),
        )
    )
    _refuse_unsupported(trainer, normalizer, denormalizer)
    pieces = Pieces(
        where=where,
        texts=texts,
        scores=scores,
        kinds=kinds,
        is_unigram=trainer.number(3, _UNIGRAM) == _UNIGRAM,
        add_dummy_prefix=bool(normalizer.number(3, 1)),
        remove_extra_whitespaces=bool(normalizer.number(4, 1)),
        charsmap=normalizer.data(2),
    )
    _check_kinds(pieces, falls_back=bool(trainer.number(35, 0)))
    return pieces, trainer


def _refuse_unsupported(trainer: _Message, normalizer: _Message, denormalizer: _Message) -> None:
    refused = [
        (trainer, "model_type", trainer.number(3, _UNIGRAM) not in (_UNIGRAM, _BPE)),
        (trainer, "treat_whitespace_as_suffix", trainer.number(24, 0) != 0),
        (normalizer, "escape_whitespaces", normalizer.number(5, 1) != 1),
        (denormalizer, "precompiled_charsmap", denormalizer.data(2) != b""),
    ]
    for message, field, is_refused in refused:
        if is_refused:
            raise CheckpointError(
                f"{message.where}.{field} has a value that is not supported; supported are unigram "
                "and BPE models whose words begin with ▁"
            )


def _check_kinds(pieces: Pieces, *, falls_back: bool) -> None:
    if PieceKind.UNUSED in pieces.kinds:
        place = pieces.kinds.index(PieceKind.UNUSED)
        raise CheckpointError(
            f"{pieces.where}: pieces[{place}] {pieces.texts[place]!r:.80} is of type UNUSED, "
            "which is not supported"
        )
    if falls_back != (PieceKind.BYTE in pieces.kinds):
        raise damaged(
            f"{pieces.where}: trainer_spec.byte_fallback is {str(falls_back).lower()}, and there "
            f"are {'no ' if falls_back else ''}byte pieces"
        )


def _control_id(pieces: Pieces, text: str) -> int | None:
    """Return the id of the control piece `text`, None if there is none."""
    if text not in pieces.texts:
        return None
    token_id = pieces.texts.index(text)
    return token_id if pieces.kinds[token_id] == PieceKind.CONTROL else None


def protobuf_fields(message: memoryview, most: int) -> Iterator[tuple[int, Value]]:
    """Yield number and value of each field, of at most `most`.

    Raises ValueError, which names the offset, for more of them, for a length beyond the end of the
    message, an unterminated varint, and an unknown wire type or a group.
    """
    at = n_fields = 0
    while at < len(message):
        start = at
        n_fields += 1
        if n_fields > most:
            raise ValueError(f"byte {start}: more than {most} fields")
        key, at = _varint(message, at)
        number, wire_type = key >> 3, key & 7
        if wire_type == _VARINT:
            value, at = _varint(message, at)
            yield number, value
            continue
        if wire_type == _LENGTH:
            length, at = _varint(message, at)
        elif wire_type in _FIXED_BYTES:
            length = _FIXED_BYTES[wire_type]
        else:
            raise ValueError(f"byte {start}: wire type {wire_type} of field {number} is not known")
        if length > len(message) - at:
            raise ValueError(
                f"byte {start}: field {number} claims {length} bytes, but only "
                f"{len(message) - at} remain"
            )
        yield number, message[at : at + length]
        at += length


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """Read a varint at `at`; return it and its end."""
    value = 0
    for place, byte in enumerate(message[at : at + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, at + place + 1
    raise ValueError(f"byte {at}: an unterminated varint")
