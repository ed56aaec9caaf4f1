"""Files with holes: what was never written takes no room on the disk, on Windows too.

A replica has the size of the whole model from the start, and often a part of its bytes.
"""

from __future__ import annotations

import os
import sys
from io import FileIO
from pathlib import Path

if sys.platform == "win32":
    import ctypes
    import msvcrt
    from ctypes import wintypes

    from shardnet.windows import Handle, checked, library

    _SET_SPARSE, _NO_SIZE = 0x900C4, 0xFFFFFFFF
    _kernel32 = library("kernel32")
    _kernel32.GetCompressedFileSizeW.restype = wintypes.DWORD

    def let_holes(file: FileIO) -> None:
        """Have what is not written of an open file take no room.

        Without it NTFS keeps room for all, and writes zeros up to wherever is written first. Disks
        that have no such files, as those with exFAT, are left as they are.
        """
        handle = Handle(msvcrt.get_osfhandle(file.fileno()))
        came = ctypes.byref(wintypes.DWORD())
        _kernel32.DeviceIoControl(handle, _SET_SPARSE, None, 0, None, 0, came, None)

    def disk_bytes(path: Path) -> int:
        """Return what a file takes of its disk. Raises OSError."""
        high = wintypes.DWORD()
        ctypes.set_last_error(0)
        low = _kernel32.GetCompressedFileSizeW(str(path), ctypes.byref(high))
        if low == _NO_SIZE and ctypes.get_last_error():
            checked(0, str(path))
        return int(high.value << 32 | low)

else:

    def let_holes(file: FileIO) -> None:
        """Have what is not written of an open file take no room: it is so on this system."""

    def disk_bytes(path: Path) -> int:
        """Return what a file, or a link, takes of its disk. Raises OSError."""
        return os.lstat(path).st_blocks * 512
