"""Where the members of a zip archive lie, read within caps.

Knows the layout (PKWARE's APPNOTE.TXT, sections 4.3.7, 4.3.12, 4.3.14 and 4.3.16), zip64 included.
Members have to be stored as they are, as torch stores them. Must not know what they mean.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from shardnet.checkpoint.tensors.stored_tensor import AGAIN
from shardnet.errors import CheckpointError

MAX_DIRECTORY_BYTES: Final = 16 << 20
"""Cap on the list of members before memory is taken for it."""

_END = struct.Struct("<4sHHHHIIH")
_END64_PLACE = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_ENTRY = struct.Struct("<4sHHHHHHIIIHHHHHII")
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_NARROW = 0xFFFFFFFF
_MAX_COMMENT = 0xFFFF


@dataclass(frozen=True, slots=True)
class Member:
    """A member's bytes in the archive."""

    offset: int
    size_bytes: int


def read_directory(path: Path, file: BinaryIO, size_bytes: int) -> dict[str, Member]:
    """Return the members of the open archive `file`, by name.

    Raises CheckpointError, which names `path`, for what is damaged or compressed; OSError.
    """
    reader = _Reader(path, file, size_bytes)
    begin, n_bytes = reader.directory()
    if n_bytes > MAX_DIRECTORY_BYTES:
        raise reader.damaged(f"a directory of {n_bytes} bytes, at most {MAX_DIRECTORY_BYTES}")
    data = reader.read(begin, n_bytes)
    members: dict[str, Member] = {}
    at = 0
    while at < n_bytes:
        name, header, size, entry_bytes = reader.entry(data, at)
        if name in members:
            raise reader.damaged(f"member {name!r} is there twice")
        members[name] = reader.member(name, header, size)
        at += entry_bytes
    return members


class _Reader:
    def __init__(self, path: Path, file: BinaryIO, size_bytes: int) -> None:
        self._path = path
        self._file = file
        self._size_bytes = size_bytes

    def damaged(self, why: str) -> CheckpointError:
        """Make the error that names the archive."""
        return CheckpointError(f"{self._path}: damaged zip archive: {why}; {AGAIN}")

    def read(self, offset: int, n_bytes: int) -> bytes:
        """Read bytes that have to be there."""
        if offset < 0 or offset + n_bytes > self._size_bytes:
            raise self.damaged(f"{n_bytes} bytes at {offset} of {self._size_bytes}: truncated")
        self._file.seek(offset)
        data = self._file.read(n_bytes)
        if len(data) < n_bytes:
            raise self.damaged("it has become shorter")
        return data

    def directory(self) -> tuple[int, int]:
        """Find the central directory: (offset, bytes)."""
        n_tail = min(self._size_bytes, _END.size + _MAX_COMMENT)
        tail = self.read(self._size_bytes - n_tail, n_tail)
        at = tail.rfind(b"PK\5\6")
        if at < 0 or at + _END.size > n_tail:
            raise self.damaged("its end is missing, so it is truncated")
        *_, n_bytes, begin, _ = _END.unpack_from(tail, at)
        if _NARROW not in (n_bytes, begin):
            return begin, n_bytes
        place = self._size_bytes - n_tail + at - _END64_PLACE.size
        magic, _, end, _ = _END64_PLACE.unpack(self.read(place, _END64_PLACE.size))
        if magic != b"PK\6\7":
            raise self.damaged("its zip64 end is missing")
        magic, *_, n_bytes, begin = _END64.unpack(self.read(end, _END64.size))
        if magic != b"PK\6\6":
            raise self.damaged("its zip64 end is missing")
        return begin, n_bytes

    def entry(self, data: bytes, at: int) -> tuple[str, int, int, int]:
        """Read a directory entry: name, offset of the member's header, size, bytes of the entry."""
        if at + _ENTRY.size > len(data):
            raise self.damaged("its directory is cut short")
        fields = _ENTRY.unpack_from(data, at)
        magic, method, packed, size = fields[0], fields[4], fields[8], fields[9]
        n_name, n_extra, n_comment, header = *fields[10:13], fields[16]
        entry_bytes = _ENTRY.size + n_name + n_extra + n_comment
        if magic != b"PK\1\2" or at + entry_bytes > len(data):
            raise self.damaged("its directory is cut short")
        raw_name = data[at + _ENTRY.size : at + _ENTRY.size + n_name]
        name = raw_name.decode("utf-8", "surrogateescape")
        extra = data[at + _ENTRY.size + n_name : at + _ENTRY.size + n_name + n_extra]
        size, packed, header = self._widened(name, extra, [size, packed, header])
        if method or packed != size:
            raise self.damaged(f"member {name!r} is compressed, which torch never does")
        return name, header, size, entry_bytes

    def _widened(self, name: str, extra: bytes, numbers: list[int]) -> list[int]:
        """Take those that do not fit 32 bits from the zip64 field, where they stand in order."""
        if _NARROW not in numbers:
            return numbers
        at = 0
        while at + 4 <= len(extra):
            kind, n_bytes = struct.unpack_from("<HH", extra, at)
            if kind == 1:
                wide = extra[at + 4 : at + 4 + n_bytes]
                count = numbers.count(_NARROW)
                if len(wide) < 8 * count:
                    break
                found = iter(struct.unpack_from(f"<{count}Q", wide))
                return [next(found) if number == _NARROW else number for number in numbers]
            at += 4 + n_bytes
        raise self.damaged(f"the zip64 sizes of member {name!r} are missing")

    def member(self, name: str, header: int, size: int) -> Member:
        """Find a member's bytes behind its own header."""
        local = _LOCAL.unpack(self.read(header, _LOCAL.size))
        offset = header + _LOCAL.size + local[9] + local[10]
        if local[0] != b"PK\3\4" or offset + size > self._size_bytes:
            raise self.damaged(f"member {name!r} is not where the directory says")
        return Member(offset, size)
