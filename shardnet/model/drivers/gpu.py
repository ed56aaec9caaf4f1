"""NVIDIA's and AMD's GPUs: the driver and the runtime compiler of each, by ctypes.

Both makers' functions are alike but for their names: `--device nvidia:0` and `amd:0`. libcuda comes
with NVIDIA's driver, NVRTC with torch's CUDA build or by itself (`pip install 'shardnet[nvidia]'`);
libamdhip64 and HIPRTC come with ROCm, on Windows with the driver or the HIP SDK. NVIDIA's was run
on an H100 under Linux; AMD's never, since none was at hand: its texts were compiled. Must not know
what is computed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
import torch

from shardnet.errors import ConfigurationError
from shardnet.model.drivers.driver import THREADS, Argument, Array, Buffer, Kernel, no_memory

_OUT_OF_MEMORY: Final = 2
"""The code of it, of either maker."""
_RELAXED: Final = 2
"""How launches are recorded, of either maker: other threads may allocate meanwhile."""
_OVERLAPS: Final = 6
"""The attribute of a launch that may begin before the one before has ended."""
_OVERLAPS_FROM: Final = 90
"""Compute capability, ten times, from which the text waits for the launch before (cuda.h)."""
_DESKTOP_BYTES: Final = 512 << 20
"""What is left to Windows' desktop and its programs, which draw with the same card: it does not say
when memory is full, but moves what is used least over to the system's, many times as slow."""
_PIECE_BYTES: Final = 64 << 20
"""What is uploaded at a time: then another thread may launch."""


Keep = Callable[[str, Callable[[], bytes]], bytes]
"""Returns what was made for a key before, else makes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Maker:
    """How one maker's functions are called, and where their libraries are."""

    kind: str
    dialect: str
    driver: tuple[str, ...]
    driver_remedy: str
    compiler: tuple[str, ...]
    compiler_prefix: str
    compiler_remedy: str
    options: tuple[str, ...]
    names: Mapping[str, str]


_FUNCTIONS: Final = {
    "init": ("cuInit", "hipInit"),
    "count": ("cuDeviceGetCount", "hipGetDeviceCount"),
    "name": ("cuDeviceGetName", "hipDeviceGetName"),
    "free": ("cuMemGetInfo_v2", "hipMemGetInfo"),
    "alloc": ("cuMemAlloc_v2", "hipMalloc"),
    "release": ("cuMemFree_v2", "hipFree"),
    "up": ("cuMemcpyHtoDAsync_v2", "hipMemcpyHtoDAsync"),
    "down": ("cuMemcpyDtoH_v2", "hipMemcpyDtoH"),
    "across": ("cuMemcpyDtoDAsync_v2", "hipMemcpyDtoDAsync"),
    "load": ("cuModuleLoadData", "hipModuleLoadData"),
    "function": ("cuModuleGetFunction", "hipModuleGetFunction"),
    "launch": ("cuLaunchKernel", "hipModuleLaunchKernel"),
    "stream": ("cuStreamCreate", "hipStreamCreateWithFlags"),
    "begin": ("cuStreamBeginCapture_v2", "hipStreamBeginCapture"),
    "end": ("cuStreamEndCapture", "hipStreamEndCapture"),
    "make": ("cuGraphInstantiateWithFlags", "hipGraphInstantiateWithFlags"),
    "again": ("cuGraphLaunch", "hipGraphLaunch"),
    "forget": ("cuGraphDestroy", "hipGraphDestroy"),
    "free_graph": ("cuGraphExecDestroy", "hipGraphExecDestroy"),
}
"""What the functions are called: NVIDIA's name, and AMD's."""
CUDA: Final = Maker(
    kind="nvidia",
    dialect="cuda",
    driver=("libcuda.so.1", "nvcuda.dll"),
    driver_remedy="install NVIDIA's driver for the card, or use --device cpu",
    compiler=(
        *("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2"),
        *("nvrtc64_130_0.dll", "nvrtc64_120_0.dll", "nvrtc64_112_0.dll"),
    ),
    compiler_prefix="nvrtc",
    compiler_remedy="pip install 'shardnet[nvidia]', or torch's build for the card",
    options=("--std=c++17", "--fmad=false"),
    names={what: both[0] for what, both in _FUNCTIONS.items()},
)
HIP: Final = Maker(
    kind="amd",
    dialect="hip",
    driver=(
        *("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6"),
        *("amdhip64_7.dll", "amdhip64_6.dll", "amdhip64.dll"),
    ),
    driver_remedy="install ROCm (on Windows AMD's driver) for the card, or use --device cpu",
    compiler=(
        *("libhiprtc.so", "libhiprtc.so.7", "libhiprtc.so.6"),
        *("hiprtc07??.dll", "hiprtc06??.dll", "hiprtc05??.dll"),
    ),
    compiler_prefix="hiprtc",
    compiler_remedy="install ROCm (on Windows AMD's HIP SDK)",
    options=("-O3", "-ffp-contract=off"),
    names={what: both[1] for what, both in _FUNCTIONS.items()},
)


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("kind", ctypes.c_uint64), ("value", ctypes.c_uint64 * 8))


class _Launch(ctypes.Structure):
    """CUlaunchConfig: groups and threads by three axes, bytes that a group shares."""

    _fields_ = (
        ("groups", ctypes.c_uint * 3),
        ("threads", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("n_attributes", ctypes.c_uint),
    )


_OVERLAPPING: Final = (_Attribute * 1)(_Attribute(_OVERLAPS, (1,)))


@cache
def _library(names: tuple[str, ...]) -> ctypes.CDLL | None:
    """Load the first of these libraries that is here: in the system, or in a package of pip's.

    On Windows also in a maker's kit; a name may be a pattern there.
    """
    folders = _folders(Path(torch.__file__).parents[1])
    for name in _own(names):
        inside = [str(path) for each in folders for path in sorted(each.glob(f"{name}*"))]
        for place in (name, *inside):
            try:
                return _opened(place)
            except OSError:
                continue
    return None


def _folders(packages: Path) -> list[Path]:
    """List the folders that may have such a library beside those that the system searches."""
    if sys.platform != "win32":
        return [path for path in packages.glob("nvidia/*/lib") if path.is_dir()]
    kits = [Path(os.environ[name]) for name in ("CUDA_PATH", "HIP_PATH") if os.environ.get(name)]
    system = Path(os.environ.get("SYSTEMROOT", r"C:\Windows"), "System32")
    pip = [
        path for pattern in ("bin", "bin/x86_64") for path in packages.glob(f"nvidia/*/{pattern}")
    ]
    kit = [each / inside for each in kits for inside in ("bin", "bin/x64")]
    return [path for path in (*pip, packages / "torch" / "lib", *kit, system) if path.is_dir()]


def _opened(place: str) -> ctypes.CDLL:
    """Load a library, on Windows with what it loads by name when it is used. Raises OSError.

    Windows does not look for that beside it, but takes what is there already.
    """
    path = Path(place)
    if sys.platform == "win32" and path.is_absolute():
        os.add_dll_directory(str(path.parent))
        kind = path.name.partition("rtc")[0] + "rtc"
        for beside in path.parent.glob(f"{kind}-builtins*.dll"):
            with contextlib.suppress(OSError):
                ctypes.CDLL(str(beside))
    return ctypes.CDLL(place)


def _own(libraries: Sequence[str]) -> list[str]:
    """Return those of some libraries that are this system's."""
    return [name for name in libraries if name.endswith(".dll") == (sys.platform == "win32")]


def _named(libraries: Sequence[str]) -> str:
    return _own(libraries)[0].replace("?", "x")


def compiled(
    maker: Maker, text: str, architecture: str, more: Sequence[str] = ()
) -> tuple[bytes, str]:
    """Compile a whole text for an architecture (sm_86), by the maker's runtime compiler.

    Returns the code, and what the compiler says; `more` are further options.

    Raises ConfigurationError for what it does not compile, and where it is not installed.
    """
    library, prefix = _library(maker.compiler), maker.compiler_prefix
    if library is None:
        raise ConfigurationError(
            f"--device {maker.kind}: {_named(maker.compiler)}, which compiles kernels, is not "
            "installed",
            remedy=maker.compiler_remedy,
        )
    program = ctypes.c_void_p()
    options = [*maker.options, *more]
    if architecture:
        flag = "--gpu-architecture=" if maker is CUDA else "--offload-arch="
        options.append(f"{flag}{architecture}")
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    library[f"{prefix}CreateProgram"](
        ctypes.byref(program), text.encode(), b"shardnet.cu", 0, None, None
    )
    failed = library[f"{prefix}CompileProgram"](program, len(options), given)

    def got(what: str) -> bytes:
        size = ctypes.c_size_t()
        library[f"{prefix}Get{what}Size"](program, ctypes.byref(size))
        found = ctypes.create_string_buffer(size.value)
        library[f"{prefix}Get{what}"](program, found)
        return found.raw

    log = got("ProgramLog").rstrip(b"\0").decode(errors="replace")
    code = b"" if failed else got("CUBIN" if maker is CUDA else "Code")
    library[f"{prefix}DestroyProgram"](ctypes.byref(program))
    if failed:
        why = " ".join(log.split())[:400]
        raise ConfigurationError(f"{architecture or maker.kind} compiles no kernel: {why}")
    return code, log


def compiler_version(maker: Maker) -> tuple[int, int]:
    """Return the version of a maker's runtime compiler; (0, 0) where it is not installed."""
    library, numbers = _library(maker.compiler), (ctypes.c_int(), ctypes.c_int())
    if library is not None:
        library[f"{maker.compiler_prefix}Version"](*map(ctypes.byref, numbers))
    return numbers[0].value, numbers[1].value


def count_gpus(maker: Maker) -> int:
    """Count the GPUs that a maker's driver finds here; 0 where it is not installed."""
    library, count = _library(maker.driver), ctypes.c_int(0)
    if library is None or getattr(library, maker.names["init"])(0):
        return 0
    getattr(library, maker.names["count"])(ctypes.byref(count))
    return count.value


def nvidia_uuid(index: int) -> str:
    """Return the UUID of a GPU as NVIDIA's tools write it. Raises RuntimeError without it."""
    library, found = _library(CUDA.driver), (ctypes.c_ubyte * 16)()
    if library is None or index >= count_gpus(CUDA) or library["cuDeviceGetUuid"](found, index):
        raise RuntimeError("NVIDIA's driver knows no such device")
    return f"GPU-{uuid.UUID(bytes=bytes(found))}"


class GpuDriver:
    """A GPU of a maker by its own driver. See Driver. Kernels run in a stream of their own."""

    def __init__(self, maker: Maker, index: int, keep: Keep | None = None) -> None:
        """Take GPU `index`; `keep` has what was compiled before. Raises ConfigurationError if it
        is not here.
        """
        self._maker, self.dialect, self.name = maker, maker.dialect, f"{maker.kind}:{index}"
        self._keep = keep
        library, n_gpus = _library(maker.driver), count_gpus(maker)
        if library is None or index >= n_gpus:
            few = f"{n_gpus} GPUs, numbered from 0," if n_gpus else "no GPU"
            raise ConfigurationError(
                f"--device {self.name}: {_named(maker.driver)} finds {few} here",
                remedy=maker.driver_remedy,
            )
        self._library = library
        self._context = ctypes.c_void_p()
        self._index = index
        device = ctypes.c_int(index)
        if maker is CUDA:
            library["cuDeviceGet"](ctypes.byref(device), index)
            self._must(library["cuDevicePrimaryCtxRetain"](ctypes.byref(self._context), device))
        self._enter()
        name = ctypes.create_string_buffer(256)
        self._call("name", name, 256, device)
        self.description = f"{self.name} ({name.value.decode(errors='replace')})"
        capability = self._find_capability(device)
        self._architecture = f"sm_{capability}" if capability else ""
        self._overlaps = capability >= _OVERLAPS_FROM and hasattr(library, "cuLaunchKernelEx")
        self._lock = threading.RLock()
        """Whoever launches or copies holds it: while one thread records, no other one may."""
        self._stream = ctypes.c_void_p()
        """In which kernels run, and all copies but those to the host, which wait for it. What is
        uploaded may change at once: memory that is not pinned is copied first."""
        self._call("stream", ctypes.byref(self._stream), 0)
        self.n_launches = self.n_waits = 0

    def _find_capability(self, device: ctypes.c_int) -> int:
        """Return NVIDIA's compute capability, ten times; 0 for AMD's, whose compiler knows it."""
        if self._maker is not CUDA:
            return 0
        major, minor = ctypes.c_int(), ctypes.c_int()
        for number, value in ((75, major), (76, minor)):
            self._library["cuDeviceGetAttribute"](ctypes.byref(value), number, device)
        return 10 * major.value + minor.value

    def _enter(self) -> None:
        """Have the calling thread use this GPU."""
        if self._maker is CUDA:
            self._must(self._library.cuCtxSetCurrent(self._context))
        else:
            self._must(self._library.hipSetDevice(self._index))

    def _must(self, code: int, what: str = "") -> None:
        if code:
            raise ConfigurationError(
                f"{self.name}: {what or 'a function of the driver'} failed ({code})"
            )

    def _call(self, what: str, *arguments: object) -> None:
        self._must(getattr(self._library, self._maker.names[what])(*arguments), what)

    def compile(self, text: str, names: Sequence[str]) -> Mapping[str, Kernel]:
        """See Driver."""
        self._enter()
        module = ctypes.c_void_p()
        code = self._code_of(text)
        with self._lock:
            self._call("load", ctypes.byref(module), code)
        found: dict[str, Kernel] = {}
        for name in names:
            found[name] = ctypes.c_void_p()
            self._call("function", ctypes.byref(found[name]), module, name.encode())
        return found

    def _code_of(self, text: str) -> bytes:
        """Return what a text is compiled to, for this card and by this compiler."""
        maker = self._maker

        def make() -> bytes:
            return compiled(maker, text, self._architecture)[0]

        if self._keep is None:
            return make()
        by = maker.options, compiler_version(maker), self.description, text
        return self._keep(repr(by), make)

    def empty(self, n_bytes: int) -> Buffer:
        """See Driver."""
        self._enter()
        address = ctypes.c_void_p()
        function = self._library[self._maker.names["alloc"]]
        code = function(ctypes.byref(address), ctypes.c_size_t(max(4, n_bytes)))
        if code == _OUT_OF_MEMORY:
            raise no_memory(self.description, n_bytes)
        self._must(code, "alloc")
        return _Memory(self, address)

    def view(self, buffer: Buffer, begin: int, n_bytes: int) -> Buffer:
        """See Driver."""
        return _View(buffer, buffer.at(begin))

    def release(self, address: ctypes.c_void_p) -> None:
        """Give memory back."""
        self._enter()
        self._library[self._maker.names["release"]](address)

    def upload(self, buffer: Buffer, array: Array, offset: int = 0) -> None:
        """See Driver."""
        self._enter()
        for at in range(0, array.nbytes, _PIECE_BYTES):
            n_bytes = ctypes.c_size_t(min(_PIECE_BYTES, array.nbytes - at))
            with self._lock:
                source = ctypes.c_void_p(array.ctypes.data + at)
                self._call("up", buffer.at(offset + at), source, n_bytes, self._stream)

    def download(self, buffer: Buffer, array: Array, offset: int = 0) -> None:
        """See Driver."""
        self._enter()
        target, n_bytes = ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes)
        with self._lock:
            self.n_waits += 1
            self._call("down", target, buffer.at(offset), n_bytes)

    def copy(
        self, source: Buffer, target: Buffer, n_bytes: int, at: tuple[int, int] = (0, 0)
    ) -> None:
        """See Driver."""
        self._enter()
        with self._lock:
            size = ctypes.c_size_t(n_bytes)
            self._call("across", target.at(at[1]), source.at(at[0]), size, self._stream)

    def launch(
        self, kernel: Kernel, groups: tuple[int, int], arguments: Sequence[Argument]
    ) -> None:
        """See Driver."""
        values = (ctypes.c_uint64 * len(arguments))(*map(_bits_of, arguments))
        first = ctypes.addressof(values)
        given = (ctypes.c_void_p * len(arguments))(*range(first, first + 8 * len(arguments), 8))
        with self._lock:
            self._enter()
            self.n_launches += 1
            if self._overlaps:
                made = _Launch((*groups, 1), (THREADS, 1, 1), 0, self._stream, _OVERLAPPING, 1)
                code = self._library["cuLaunchKernelEx"](ctypes.byref(made), kernel, given, None)
                self._must(code, "launch")
                return
            self._call("launch", kernel, *groups, 1, THREADS, 1, 1, 0, self._stream, given, None)

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """See Driver: as a graph. Raises what `run` raises."""
        self._enter()
        made = ctypes.c_void_p()
        with self._lock:
            before = self.n_launches
            try:
                graph = self._captured(run)
            finally:
                n_launches, self.n_launches = self.n_launches - before, before
        try:
            self._call("make", ctypes.byref(made), graph, ctypes.c_ulonglong(0))
        finally:
            self._library[self._maker.names["forget"]](graph)
        return _Graph(self, made, n_launches)

    def _captured(self, run: Callable[[], None]) -> ctypes.c_void_p:
        """Return what `run` launches as a graph, which is not launched. The caller has the lock."""
        graph = ctypes.c_void_p()
        self._call("begin", self._stream, _RELAXED)
        try:
            run()
        except BaseException:  # the stream must not go on recording
            self._library[self._maker.names["end"]](self._stream, ctypes.byref(graph))
            self._library[self._maker.names["forget"]](graph)
            raise
        self._call("end", self._stream, ctypes.byref(graph))
        return graph

    def launch_graph(self, graph: ctypes.c_void_p, n_launches: int) -> None:
        """Launch what was recorded."""
        self._enter()
        with self._lock:
            self.n_launches += n_launches
            self._call("again", graph, self._stream)

    def free_graph(self, graph: ctypes.c_void_p) -> None:
        """Forget what was recorded."""
        self._enter()
        self._library[self._maker.names["free_graph"]](graph)

    @property
    def free_bytes(self) -> int:
        """See Driver."""
        self._enter()
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("free", ctypes.byref(free), ctypes.byref(total))
        return max(0, free.value - _DESKTOP_BYTES) if sys.platform == "win32" else free.value


class _Memory:
    """Memory of a GPU, given back when nobody has it any more."""

    def __init__(self, driver: GpuDriver, address: ctypes.c_void_p) -> None:
        self._driver, self.address = driver, address

    def at(self, offset: int) -> ctypes.c_void_p:
        """Return an address in it."""
        return ctypes.c_void_p((self.address.value or 0) + offset)

    def __del__(self) -> None:
        self._driver.release(self.address)


@dataclass(frozen=True, slots=True)
class _View:
    """A part of memory, which it keeps."""

    memory: _Memory
    address: ctypes.c_void_p


class _Graph:
    """Recorded launches."""

    def __init__(self, driver: GpuDriver, graph: ctypes.c_void_p, n_launches: int) -> None:
        self._driver, self._graph, self._n_launches = driver, graph, n_launches

    def __call__(self) -> None:
        self._driver.launch_graph(self._graph, self._n_launches)

    def __del__(self) -> None:
        self._driver.free_graph(self._graph)


def _bits_of(argument: Argument) -> int:
    """Return what a kernel reads of an argument: the lowest bytes of a word."""
    if isinstance(argument, np.float32):
        return int(argument.view(np.uint32))
    return int(argument) if isinstance(argument, np.uint32) else argument.address.value
