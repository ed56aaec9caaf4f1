"""Devices by OpenCL: GPUs of Intel, AMD and NVIDIA without a build of torch for them, and CPUs.

pyopencl is an extra. Must not know what is computed.
"""

from __future__ import annotations

import os
import re
import threading
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from shardnet.errors import ConfigurationError
from shardnet.model.drivers.driver import (
    THREADS,
    Argument,
    Array,
    Buffer,
    Driver,
    Kernel,
    no_memory,
)

_OPTIONS: Final = ["-cl-std=CL1.2", "-cl-fp32-correctly-rounded-divide-sqrt", "-w"]
"""Without the second a division may be three units in the last place off; -w: a CPU's compiler
warns of each loop that it does not unroll."""
_OF_POCL: Final = "-cl-opt-disable"
"""PoCL 3.0's optimiser leaves out a bound of the attention's last loop: it writes past a buffer."""


def opencl_devices() -> list[Any]:
    """List the devices of all OpenCL platforms. Raises ConfigurationError without pyopencl."""
    os.environ.setdefault("PYOPENCL_NO_CACHE", "1")  # drivers cache what they compile themselves
    try:
        import pyopencl as cl
    except ImportError as error:
        raise ConfigurationError(
            "--device opencl: the package pyopencl is not installed",
            remedy="pip install 'shardnet[opencl]', and the OpenCL driver of the card",
        ) from error
    try:
        return [device for platform in cl.get_platforms() for device in platform.get_devices()]
    except cl.LogicError:  # no platform at all
        return []


class OpenClDriver(Driver):
    """One device by OpenCL. See Driver."""

    dialect = "opencl"

    def __init__(self, index: int) -> None:
        """Take device `index` of all that OpenCL finds. Raises ConfigurationError without it."""
        found = opencl_devices()
        if index >= len(found):
            few = f"{len(found)}, numbered from opencl:0," if found else "no device"
            raise ConfigurationError(
                f"--device opencl:{index}: OpenCL finds {few} here",
                remedy="install the OpenCL driver of the card, or use --device cpu",
            )
        import pyopencl as cl

        self._cl, self._device = cl, found[index]
        self.name = f"opencl:{index}"
        self.description = f"{self.name} ({self._device.name.strip()})"
        if self._device.max_work_group_size < THREADS:
            raise ConfigurationError(
                f"--device {self.name}: {self.description} has no groups of {THREADS} threads",
                remedy="use --device cpu",
            )
        self._memory: Any = type("Memory", (cl.Buffer,), {})  # a class that has weak references
        self._context = cl.Context([self._device])
        self._queue = cl.CommandQueue(self._context)
        is_pocl = "pocl" in self._device.platform.version.lower()
        self._options = [*_OPTIONS, *([_OF_POCL] if is_pocl else [])]
        self._lock = threading.Lock()
        self.n_launches = self.n_waits = self._taken_bytes = 0

    def compile(self, text: str, names: Sequence[str]) -> Mapping[str, Kernel]:
        """See Driver."""
        try:
            with warnings.catch_warnings(category=self._cl.CompilerWarning, action="ignore"):
                program = self._cl.Program(self._context, text).build(options=self._options)
            return {name: self._cl.Kernel(program, name) for name in names}
        except self._cl.Error as error:
            why = re.sub(r"\s+", " ", str(error))[:400]
            raise ConfigurationError(f"{self.description} compiles no kernel: {why}") from error

    def empty(self, n_bytes: int) -> Buffer:
        """See Driver."""
        size, most = max(4, n_bytes), self._device.max_mem_alloc_size
        try:
            buffer = self._memory(self._context, self._cl.mem_flags.READ_WRITE, size)
            # Many drivers take memory only where it is used, in the middle of a step.
            self._cl.enqueue_fill_buffer(self._queue, buffer, np.uint8(0), 0, size)
            self._queue.finish()
        except self._cl.Error as error:
            at_once = f", at most {most} at once (CL_DEVICE_MAX_MEM_ALLOC_SIZE)"
            why = at_once if size > most else ""
            raise no_memory(self.description, n_bytes, why) from error
        self._taken_bytes += size
        weakref.finalize(buffer, self._give_back, size).atexit = False
        return buffer

    def _give_back(self, n_bytes: int) -> None:
        self._taken_bytes -= n_bytes

    def view(self, buffer: Buffer, begin: int, n_bytes: int) -> Buffer:
        """See Driver."""
        return buffer.get_sub_region(begin, n_bytes)

    def upload(self, buffer: Buffer, array: Array, offset: int = 0) -> None:
        """See Driver."""
        self._cl.enqueue_copy(self._queue, buffer, array, dst_offset=offset, is_blocking=True)

    def download(self, buffer: Buffer, array: Array, offset: int = 0) -> None:
        """See Driver."""
        self.n_waits += 1
        self._cl.enqueue_copy(self._queue, array, buffer, src_offset=offset, is_blocking=True)

    def copy(
        self, source: Buffer, target: Buffer, n_bytes: int, at: tuple[int, int] = (0, 0)
    ) -> None:
        """See Driver."""
        places = {"src_offset": at[0], "dst_offset": at[1]}
        self._cl.enqueue_copy(self._queue, target, source, byte_count=n_bytes, **places)

    def launch(
        self, kernel: Kernel, groups: tuple[int, int], arguments: Sequence[Argument]
    ) -> None:
        """See Driver."""
        with self._lock:  # a kernel's arguments are its own
            self.n_launches += 1
            for place, argument in enumerate(arguments):
                kernel.set_arg(place, argument)
            self._cl.enqueue_nd_range_kernel(
                self._queue, kernel, (groups[0] * THREADS, groups[1]), (THREADS, 1)
            )

    @property
    def free_bytes(self) -> int:
        """See Driver: OpenCL tells only how much there is, of which what was taken here is not."""
        return max(0, int(self._device.global_mem_size) - self._taken_bytes)
