"""Who else may read or write a file or folder: its mode bits say it, on Windows its access list.

Knows how to ask the system, and how to make what is for this user alone. Administrators are nobody
else: they may do everything anyway. Must not know what is kept there.
"""

from __future__ import annotations

import getpass
import os
import stat
import struct
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

_SYSTEM: Final = "S-1-5-18"
_ADMINISTRATORS: Final = "S-1-5-32-544"
_INSTALLER: Final = "S-1-5-80-956008885-3418522649-1831038044-1853292631-2271478464"
_CREATOR: Final = "S-1-3-0"
_OWNER: Final = "S-1-3-4"
_NOBODY_ELSE: Final = frozenset({_SYSTEM, _ADMINISTRATORS, _INSTALLER, _CREATOR, _OWNER})
_PACKAGES: Final = ("S-1-15-2-", "S-1-15-3-")
"""Programs in a sandbox: they may what their user may, at most."""

_ALL: Final = 0x10000000 | 0x40000 | 0x80000
"""GENERIC_ALL, WRITE_DAC and WRITE_OWNER: who has one of them can have all rights."""
_READ: Final = 0x80000000 | 0x1 | _ALL
"""GENERIC_READ, FILE_READ_DATA."""
_WRITE: Final = 0x40000000 | 0x2 | 0x4 | 0x40 | 0x10000 | _ALL
"""GENERIC_WRITE, FILE_WRITE_DATA (add a file), FILE_APPEND_DATA, FILE_DELETE_CHILD, DELETE."""
_PRESENT: Final = 0x4
_ALLOWED: Final = (0, 9)
_ALLOWED_OBJECT: Final = (5, 11)


@dataclass(frozen=True, slots=True, kw_only=True)
class Others:
    """What users but this one and administrators have of a file or folder.

    `own_it` says that it belongs to one of them.
    """

    own_it: bool
    may_read: bool
    may_write: bool


def read_descriptor(raw: bytes, user: str) -> Others:
    """Read a security descriptor of Windows, self-relative (MS-DTYP 2.4.6).

    `user` is the SID of this user. What an entry denies is not subtracted. An entry that only files
    to come inherit counts as well. Raises ValueError and struct.error for a damaged one.
    """
    control, owner_at, list_at = struct.unpack_from("<2xHI8xI", raw)
    ours = _NOBODY_ELSE | {user}
    own_it = not owner_at or _sid(raw, owner_at) not in ours
    if not control & _PRESENT or not list_at:  # without a list everybody may do everything
        return Others(own_it=own_it, may_read=True, may_write=True)
    given = 0
    (n_entries,) = struct.unpack_from("<4xH", raw, list_at)
    at = list_at + 8
    for _ in range(n_entries):
        kind, n_bytes, rights = struct.unpack_from("<BxHI", raw, at)
        sid_at = at + 8
        if kind in _ALLOWED_OBJECT:
            (has,) = struct.unpack_from("<I", raw, sid_at)
            sid_at += 4 + 16 * (has & 1) + 16 * (has >> 1 & 1)
        if kind in _ALLOWED + _ALLOWED_OBJECT:
            sid = _sid(raw, sid_at)
            given |= 0 if sid in ours or sid.startswith(_PACKAGES) else rights
        at += n_bytes
    return Others(own_it=own_it, may_read=bool(given & _READ), may_write=bool(given & _WRITE))


def _sid(raw: bytes, at: int) -> str:
    """Return the SID (MS-DTYP 2.4.2) at an offset as text."""
    revision, n_parts = raw[at], raw[at + 1]
    parts = struct.unpack_from(f"<{n_parts}I", raw, at + 8)
    numbers = (revision, int.from_bytes(raw[at + 2 : at + 8], "big"), *parts)
    return "S-" + "-".join(map(str, numbers))


if sys.platform == "win32":
    import ctypes
    import msvcrt
    from ctypes import wintypes

    from shardnet.windows import Handle, checked, library

    _QUERY, _USER = 0x8, 1
    _OWNER_AND_LIST: Final = 0x1 | 0x4
    _MOST_BYTES: Final = 1 << 17
    """An access list has 64 KiB at most."""
    _READ_WRITE: Final = 0xC0000000
    _SHARED: Final = 0x7
    _NEW: Final = 1
    _NORMAL: Final = 0x80

    _advapi32, _kernel32 = library("advapi32"), library("kernel32")

    class _Attributes(ctypes.Structure):
        """SECURITY_ATTRIBUTES."""

        _fields_ = (
            ("n_bytes", wintypes.DWORD),
            ("descriptor", ctypes.c_void_p),
            ("inherits", wintypes.BOOL),
        )

    @cache
    def _user() -> str:
        """Return the SID of this process's user."""
        token, came = Handle(), wintypes.DWORD()
        process = _kernel32.GetCurrentProcess()
        checked(_advapi32.OpenProcessToken(process, _QUERY, ctypes.byref(token)))
        try:
            told = ctypes.create_string_buffer(256)
            ask = _advapi32.GetTokenInformation
            checked(ask(token, _USER, told, len(told), ctypes.byref(came)))
        finally:
            _kernel32.CloseHandle(token)
        (address,) = struct.unpack_from("@P", told)
        return _sid(told.raw, address - ctypes.addressof(told))

    @cache
    def _private() -> _Attributes:
        """Make what is given with a new file: full rights for this user and administrators."""
        whom = ("SY", "BA", _user())
        text = "D:P" + "".join(f"(A;OICI;FA;;;{one})" for one in whom)
        made = _Attributes(ctypes.sizeof(_Attributes), None, False)
        into = ctypes.c_void_p()
        parse = _advapi32.ConvertStringSecurityDescriptorToSecurityDescriptorW
        checked(parse(text, 1, ctypes.byref(into), None))
        made.descriptor = into.value
        return made

    def others_at(place: Path | int) -> Others:
        """Say what others have of an open file, or of what a path leads to. Raises OSError."""
        told, came = ctypes.create_string_buffer(_MOST_BYTES), wintypes.DWORD()
        room = (_OWNER_AND_LIST, told, len(told), ctypes.byref(came))
        if isinstance(place, int):
            handle = Handle(msvcrt.get_osfhandle(place))
            checked(_advapi32.GetKernelObjectSecurity(handle, *room))
        else:
            checked(_advapi32.GetFileSecurityW(str(place), *room), str(place))
        return read_descriptor(told.raw[: came.value], _user())

    def make_private_folder(path: Path) -> None:
        """Create a folder for this user alone. Raises OSError, also if it is there."""
        checked(_kernel32.CreateDirectoryW(str(path), ctypes.byref(_private())), str(path))

    def make_private_file(path: Path) -> int:
        """Create a file for this user alone; return its descriptor. Raises as above."""
        handle = _kernel32.CreateFileW(
            str(path), _READ_WRITE, _SHARED, ctypes.byref(_private()), _NEW, _NORMAL, None
        )
        checked(handle.value != Handle(-1).value, str(path))
        return msvcrt.open_osfhandle(handle.value, os.O_RDWR | os.O_BINARY | os.O_NOINHERIT)

    def privacy_command(path: Path) -> str:
        """Return the command that takes a file from all but this user."""
        return f'icacls "{path}" /inheritance:r /grant:r "{getpass.getuser()}:F"'

else:

    def others_at(place: Path | int) -> Others:
        """Say what others have of an open file, or of a path: a link, and what it leads to.

        `may_read` also stands for all that a group may do. Raises OSError.
        """
        found = os.stat(place)
        owners = {found.st_uid} | (set() if isinstance(place, int) else {os.lstat(place).st_uid})
        return Others(
            own_it=bool(owners - {os.getuid(), 0}),
            may_read=bool(found.st_mode & 0o077),
            may_write=bool(found.st_mode & stat.S_IWOTH),
        )

    def make_private_folder(path: Path) -> None:
        """Create a folder for this user alone (mode 700). Raises OSError, also if it is there."""
        os.mkdir(path, 0o700)

    def make_private_file(path: Path) -> int:
        """Create a file for this user alone (600); return its descriptor. Raises as above."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(path, flags, 0o600)

    def privacy_command(path: Path) -> str:
        """Return the command that takes a file from all but this user."""
        return f"chmod 600 {path}"
