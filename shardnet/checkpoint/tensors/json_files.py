"""Read the small files of a checkpoint, JSON above all, within bounds that are checked first.

Knows how much a JSON text may hold before any of it is parsed: bytes, values, digits and nesting.
A parser in C keeps all other threads waiting, so it is given small texts only. Must not know
configs, tensors or tokenizers.
"""

from __future__ import annotations

import json
import json.decoder
import json.scanner
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from shardnet.checkpoint.tensors.checkpoint_files import open_file
from shardnet.checkpoint.tensors.stored_tensor import damaged
from shardnet.errors import CheckpointError

MAX_WHOLE_BYTES: Final = 64 << 20
"""Cap on a file that is not parsed here; the largest tokenizer.json known has 33 MB."""
MAX_JSON_BYTES: Final = 16 << 20
"""Cap on a file of JSON; the largest known, a vocab.json, has 7 MB."""
MAX_VALUES: Final = 1 << 18
"""Cap on the commas, colons and brackets of each kind in such a file, those in texts included."""
MAX_DEPTH: Final = 32
MAX_DIGITS: Final = 400
"""Cap on digits in a row: a float64 has at most 309 before its point."""

_AT_ONCE: Final = 1 << 14
"""Commas in a text that is parsed in C, while all other threads wait."""
_NO_JSON: Final = (ValueError, RecursionError)
_LFS_POINTER: Final = b"version https://git-lfs"
_ZEROS: Final = bytes(0x30 if chr(byte).isdigit() and byte < 128 else 0x20 for byte in range(256))
_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_SQUARE: Final = bytes.maketrans(b"{}", b"[]")

_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")


class _YieldingDecoder(json.JSONDecoder):
    """Parses in Python, so that other threads run meanwhile; only texts are scanned in C."""

    def __init__(self) -> None:
        super().__init__()
        self.scan_once = json.scanner.py_make_scanner(self)  # type: ignore[attr-defined]


scan_text: Callable[[str, int], tuple[str, int]] = json.decoder.scanstring  # type: ignore[attr-defined]
"""Maps a JSON text and the place after a quote to the text that begins there, and to its end."""
YIELDING: Final = _YieldingDecoder()
"""Its `raw_decode` parses one value of a text. Threads may share it."""


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises CheckpointError, which names the file, when it is none."""
    return parse_object(read_file(path, MAX_JSON_BYTES), path)


def read_file(path: Path, cap: int = MAX_WHOLE_BYTES) -> bytes:
    """Read a file of at most `cap` bytes.

    Raises CheckpointError when it is missing or larger, is a Git LFS pointer to the file, or is
    refused by `open_file`.
    """
    try:
        with open_file(path) as file:
            size_bytes = file.seek(0, 2)
            if size_bytes > cap:
                raise damaged(f"{path} has {size_bytes} bytes, at most {cap} are read")
            file.seek(0)
            data = file.read(size_bytes)
    except OSError as error:
        raise damaged(f"{path}: {error.strerror}") from error
    if data.startswith(_LFS_POINTER):
        raise CheckpointError(
            f"{path} is a pointer of Git LFS, not the file", remedy="run `git lfs pull`"
        )
    return data


def parse_object(text: bytes, path: Path, *, distinct: bool = False) -> dict[str, Any]:
    """Parse a JSON object, the content of the file `path`, in UTF-8.

    Raises CheckpointError where it is none or exceeds a bound, with `distinct` also for a key that
    comes twice in one object.
    """
    value = parse_value(text, path, distinct=distinct)
    if not isinstance(value, dict):
        raise damaged(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def parse_value(text: bytes, path: Path, *, distinct: bool = False) -> Any:
    """Parse any JSON value of the file `path`. Raises as `parse_object` does."""
    n_pairs = _check_bounds(text, path)
    try:
        value = _parse(text.removeprefix(b"\xef\xbb\xbf"))
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()  # fails for half of a pair
    except _NO_JSON as error:
        raise _unreadable(path, str(error)) from error
    if distinct and sum(len(found) for found in _objects(value)) != n_pairs:
        _name_duplicate(text, path)
    return value


def bound_counts(text: bytes, path: Path, most: dict[bytes, int]) -> None:
    """Raise CheckpointError if a character of `most` occurs more often than it says there."""
    for character, cap in most.items():
        if text.count(character) > cap:
            raise _unreadable(path, f"more than {cap} times {character.decode()!r}")


def _check_bounds(text: bytes, path: Path) -> int:
    """Check the bounds of a text before it is parsed; return its number of key-value pairs."""
    if len(text) > MAX_JSON_BYTES:
        raise _unreadable(path, f"{len(text)} bytes, at most {MAX_JSON_BYTES} are read")
    bound_counts(text, path, dict.fromkeys((b",", b":", b"[", b"{"), MAX_VALUES))
    bound_counts(text, path, {b'"': 4 * MAX_VALUES})
    if b"0" * (MAX_DIGITS + 1) in text.translate(_ZEROS):
        raise _unreadable(path, f"a number of more than {MAX_DIGITS} digits")
    # Without escaped quotes every quote begins or ends a text: what is left lies outside of texts.
    plain = text.replace(b"\\\\", b"  ").replace(b'\\"', b"  ")
    outside = b"".join(plain.split(b'"')[::2])
    brackets = outside.translate(_SQUARE, _NOT_BRACKETS)
    for _ in range(MAX_DEPTH):
        brackets = brackets.replace(b"[]", b"")  # the innermost
    if b"[]" in brackets:
        raise _unreadable(path, f"nested more than {MAX_DEPTH} deep")
    if brackets:
        raise _unreadable(path, "brackets that do not match")
    return outside.count(b":")


def _parse(text: bytes) -> Any:
    """Parse a text within the bounds: in C unless it is large."""
    decoder = json.JSONDecoder() if text.count(b",") <= _AT_ONCE else YIELDING
    return decoder.decode(text.decode())


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yield all objects in a parsed value, itself included."""
    left = [value]
    while left:
        found = left.pop()
        if isinstance(found, dict):
            yield found
            left.extend(found.values())
        elif isinstance(found, list):
            left.extend(found)


def _name_duplicate(text: bytes, path: Path) -> None:
    """Raise CheckpointError, which names the key that an object of `text` has twice."""

    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise damaged(f"{path}: the key {key!r:.80} is there twice")
            found[key] = value
        return found

    json.loads(text, object_pairs_hook=distinct)


def _unreadable(path: Path, why: str) -> CheckpointError:
    return damaged(f"{path}: not readable as JSON ({why})")
