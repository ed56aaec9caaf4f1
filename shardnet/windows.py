"""Windows' own libraries, for what Python does not ask of them.

Knows how they are loaded and how their calls fail. Must not know what is asked of them.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, Final, TypeVar

T = TypeVar("T")


class Handle(ctypes.c_void_p):
    """What Windows names a thing by. Given to a call as a number it would lose half its bits."""


_GIVE_HANDLES: Final = (
    *("CreateFileW", "CreateJobObjectW", "GetCurrentProcess", "GetStdHandle", "OpenProcess"),
)
"""Those of kernel32 that are called."""


@cache
def library(name: str) -> Any:
    """Load a library of Windows. Raises AttributeError on other systems."""
    system: Any = ctypes  # of which other systems' Pythons lack a part
    loaded = system.WinDLL(name, use_last_error=True)
    for function in _GIVE_HANDLES if name == "kernel32" else ():
        getattr(loaded, function).restype = Handle
    return loaded


def checked(result: T, path: str | None = None) -> T:
    """Return what a call of such a library gave. Raises the OSError of the call if it is false."""
    if not result:
        system: Any = ctypes
        code = system.get_last_error()
        error: Any = OSError  # takes Windows' code there
        raise error(0, system.FormatError(code).strip(), path, code)
    return result
