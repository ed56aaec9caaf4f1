"""The kernel text by this machine's C compiler, to test it: phases in any order of threads.

Slow by design: a group is one call. Must not know what is computed.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from shardnet.errors import ConfigurationError
from shardnet.model.drivers.driver import Argument, Array, Buffer, Driver, Kernel

_OPTIONS: Final = ("-O1", "-shared", "-fPIC", "-w", "-ffp-contract=off", "-fno-math-errno")


class HostDriver(Driver):
    """This machine's CPU by the kernel text. See Driver. `order` is an expression in `i`."""

    dialect = "host"
    name = "host"
    description = "host (the kernel text by the C compiler)"

    def __init__(self, order: str = "(i)", options: Sequence[str] = ()) -> None:
        compiler = shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            raise ConfigurationError("--device host: no C compiler is installed")
        self._command = (compiler, *_OPTIONS, *options, f"-DORDER(i)={order}")
        self._lock = threading.Lock()
        self.n_launches = self.n_waits = 0

    def compile(self, text: str, names: Sequence[str]) -> Mapping[str, Kernel]:
        """See Driver."""
        at = "uint32_t *where_group(int i) { return i ? &GROUP_Y : &GROUP_X; }\n"
        with tempfile.TemporaryDirectory() as folder:
            source, library = Path(folder, "text.c"), Path(folder, "text.so")
            source.write_text(f"{text}\n{at}", encoding="utf-8")
            found = subprocess.run(
                [*self._command, "-march=native", "-o", library, source, "-lm"],
                capture_output=True,
                text=True,
                check=False,
            )
            if found.returncode:
                raise ConfigurationError(
                    f"the C compiler refuses the kernel text: {found.stderr[:400]}"
                )
            loaded = ctypes.CDLL(str(library))
        loaded.where_group.restype = ctypes.POINTER(ctypes.c_uint32)
        where = loaded.where_group(0), loaded.where_group(1)
        return {name: (loaded[name], where) for name in names}

    def empty(self, n_bytes: int) -> Buffer:
        """See Driver."""
        return np.empty(n_bytes + 4, np.uint8)

    def upload(self, buffer: Buffer, array: Array, offset: int = 0) -> None:
        """See Driver."""
        buffer[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)

    def download(self, buffer: Buffer, array: Array, offset: int = 0) -> None:
        """See Driver."""
        self.n_waits += 1
        array.reshape(-1).view(np.uint8)[:] = buffer[offset : offset + array.nbytes]

    def copy(
        self, source: Buffer, target: Buffer, n_bytes: int, at: tuple[int, int] = (0, 0)
    ) -> None:
        """See Driver."""
        target[at[1] : at[1] + n_bytes] = source[at[0] : at[0] + n_bytes]

    def launch(
        self, kernel: Kernel, groups: tuple[int, int], arguments: Sequence[Argument]
    ) -> None:
        """See Driver."""
        function, where = kernel
        given = [_as_c(argument) for argument in arguments]
        with self._lock:  # what a group shares is static
            self.n_launches += 1
            for y in range(groups[1]):
                where[1][0] = y
                for x in range(groups[0]):
                    where[0][0] = x
                    function(*given)

    @property
    def free_bytes(self) -> int:
        """See Driver: what the system has is counted elsewhere."""
        return 1 << 40


def _as_c(argument: Argument) -> Any:
    if isinstance(argument, np.float32):
        return ctypes.c_float(float(argument))
    if isinstance(argument, np.uint32):
        return ctypes.c_uint32(int(argument))
    return ctypes.c_void_p(argument.ctypes.data)
