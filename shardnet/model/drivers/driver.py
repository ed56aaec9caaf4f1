"""What a device is to those who compute on it: memory, compiled kernel texts and launches in order.

Knows how a text is put together: the words of a dialect, the macros of a kernel, the kernels. Must
not know models, nor what any kernel computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from shardnet.errors import CapacityError

THREADS: Final = 256
"""Threads of a group, in all kernels."""
ALIGNED: Final = 512
"""Where a view of memory may begin, for all makers' drivers: at a multiple of so many bytes."""
Array = npt.NDArray[Any]
Buffer = Any
"""Memory of a device, as its driver has it."""
Kernel = Any
Argument = Buffer | np.uint32 | np.float32


def no_memory(device: str, n_bytes: int, why: str = "") -> CapacityError:
    """Make the error of a device that has no memory for so many bytes."""
    remedy = "give the node fewer layers, or less --context"
    return CapacityError(f"{device} has no memory for {n_bytes} bytes{why}", remedy=remedy)


class Driver(Protocol):
    """A device. Not thread-safe: the compute thread owns it. Launches run in their order."""

    name: str
    """As `--device` has it: opencl:0."""
    description: str
    dialect: str
    """Whose words the text has: a file in text/."""
    n_launches: int
    n_waits: int
    """How often kernels were launched, and how often the device was waited for."""

    def compile(self, text: str, names: Sequence[str]) -> Mapping[str, Kernel]:
        """Compile a whole text; return its kernels by name. Raises ConfigurationError."""

    def empty(self, n_bytes: int) -> Buffer:
        """Allocate memory. Raises CapacityError."""

    def view(self, buffer: Buffer, begin: int, n_bytes: int) -> Buffer:
        """Return a part of a buffer, from a multiple of ALIGNED bytes on, which keeps all of it."""
        return buffer[begin : begin + n_bytes]

    def upload(self, buffer: Buffer, array: Array, offset: int = 0) -> None:
        """Copy contiguous `array` to `offset` bytes behind the beginning of a buffer."""

    def download(self, buffer: Buffer, array: Array, offset: int = 0) -> None:
        """Wait for all launches, and copy from a buffer into contiguous `array`."""

    def copy(
        self, source: Buffer, target: Buffer, n_bytes: int, at: tuple[int, int] = (0, 0)
    ) -> None:
        """Copy from one buffer to another, from and to so many bytes behind their beginnings."""

    def launch(
        self, kernel: Kernel, groups: tuple[int, int], arguments: Sequence[Argument]
    ) -> None:
        """Launch so many groups of THREADS threads."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Return what launches again, in one call where the driver can, all that `run` launches.

        Buffers and numbers stay those of now. `run` may not have run when this returns.
        """
        return run

    @property
    def free_bytes(self) -> int:
        """Memory that is free, by the driver's word."""


def launch(
    driver: Driver,
    kernel: Kernel,
    groups: tuple[int, int],
    buffers: Sequence[Buffer],
    *numbers: int | np.float32,
) -> None:
    """Launch a kernel of the text, which takes buffers and then numbers, whole ones as uint32."""
    given = [n if isinstance(n, np.float32) else np.uint32(n) for n in numbers]
    driver.launch(kernel, groups, [*buffers, *given])


@cache
def part_of_text(name: str) -> str:
    """Read one file of the text."""
    return (Path(__file__).parents[1] / "devices" / "text" / f"{name}.h").read_text(
        encoding="utf-8"
    )


def whole_text(dialect: str, macros: Mapping[str, object], *parts: str) -> str:
    """Put a text together; a macro is defined before the words of the dialect."""
    head = [f"#define {name} {value}" for name, value in {"THREADS": THREADS, **macros}.items()]
    return "\n".join([*head, part_of_text(dialect), *map(part_of_text, parts)])


class Kernels:
    """Compiled texts of one driver, each once."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._known: dict[str, Mapping[str, Kernel]] = {}

    def of(
        self, macros: Mapping[str, object], parts: Sequence[str], names: Sequence[str]
    ) -> Mapping[str, Kernel]:
        """Return kernels of a text."""
        text = whole_text(self._driver.dialect, macros, *parts)
        if text not in self._known:
            self._known[text] = self._driver.compile(text, names)
        return self._known[text]
