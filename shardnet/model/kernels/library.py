"""Finds the compiled library of csrc/, and runs its linear layers.

Knows the library's functions, which memory they accept and how they share torch's threads. Must not
know how weights are packed. Where the library was not built or does not fit this machine,
kernels/quantized_linear.py falls back to torch.
"""

from __future__ import annotations

import ctypes
import enum
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from shardnet.model.config.quantization import PANEL, Quantization

ISA_VARIABLE: Final = "SHARDNET_ISA"
"""Restricts the instruction set, for tests and comparisons: portable, avx2; off for torch alone."""

_LIBRARY: Final = "_quantized.so"
_VERSION: Final = 9
"""Counts up when the library's functions or structs change."""
_KEPT_BYTES: Final = 1 << 22
"""Scratch memory that each thread keeps: enough for a decode step."""
_OPENMP: Final = ("libgomp*", "libomp.*", "libiomp5.*")


class Isa(enum.IntEnum):
    """Instruction sets that the library is written for."""

    PORTABLE = 0
    AVX2 = 1
    AVX512 = 2
    NEON = 3


class Team(ctypes.Structure):
    """`struct team` of csrc/linear.h: the threads of a call, and their instruction set."""

    _fields_ = (
        ("parallel", ctypes.c_void_p),
        ("n_threads", ctypes.c_int32),
        ("isa", ctypes.c_int32),
    )


class _LinearStruct(ctypes.Structure):
    """`struct linear` of csrc/linear.h."""

    _fields_ = (
        ("weights", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("quantized", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("team", Team),
        ("n_rows", ctypes.c_int64),
        ("n_in", ctypes.c_int64),
        ("n_out", ctypes.c_int64),
        ("n_groups", ctypes.c_int64),
        ("group", ctypes.c_int32),
        ("bits", ctypes.c_int32),
        ("is_bf16", ctypes.c_int32),
        ("has_pairs", ctypes.c_int32),
        ("pairs", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeKernels:
    """The compiled library, and the instruction set it uses here.

    `has_pairs`: the machine multiplies pairs of bfloat16. `has_tiles`: it multiplies whole tiles
    (AMX), which oneDNN uses and the library does not.
    """

    isa: Isa
    has_pairs: bool
    has_tiles: bool
    _library: ctypes.CDLL
    _parallel: int

    @property
    def team(self) -> Team:
        """The threads of a call; their number is set with each call."""
        return Team(parallel=self._parallel, isa=self.isa)

    def function(self, name: str, *types: type[ctypes._CDataType]) -> ctypes._NamedFuncPointer:
        """Return a function of the library with arguments of `types` and no result."""
        found = self._library[name]  # an object of its own at each call, unlike an attribute
        found.argtypes = types
        found.restype = None
        return found

    def matmul(
        self,
        weights: Tensor,
        bias: Tensor | None,
        shape: tuple[int, int],
        bits: int,
        group: int = 0,
    ) -> NativeMatmul:
        """Make the matmul with packed `weights` of `shape` (N, K), all on the CPU.

        `bits` is 8 or 4, with weights quantised in groups of `group` inputs, or 16 for bfloat16.
        `bias` is float32 [N]. Raises ValueError for memory of another size, device or dtype.
        """
        return NativeMatmul(self, weights, bias, shape, bits, group)


class NativeMatmul:
    """A matmul with packed weights. Not thread-safe: it holds the arguments of its calls."""

    def __init__(
        self,
        kernels: NativeKernels,
        weights: Tensor,
        bias: Tensor | None,
        shape: tuple[int, int],
        bits: int,
        group: int,
    ) -> None:
        n_out, n_in = shape
        n_groups = -(-n_in // group) if group else 0
        check_memory("packed weights", weights, packed_bytes(shape, bits))
        if bias is not None:
            check_memory("a bias", bias, 4 * n_out, torch.float32)
        self.shape = shape
        self.row_bytes = n_groups * (group + 8) if group else 4 * (n_in + n_in % 2)
        """Scratch memory that each row needs during a call."""
        self._kept = (weights, bias)
        self._call = kernels.function("shardnet_linear", ctypes.POINTER(_LinearStruct))
        self._arguments = _LinearStruct(
            weights=weights.data_ptr(),
            bias=bias.data_ptr() if bias is not None else None,
            team=kernels.team,
            n_in=n_in,
            n_out=n_out,
            n_groups=n_groups,
            group=group,
            bits=bits,
            has_pairs=kernels.has_pairs,
        )
        self.address = ctypes.addressof(self._arguments)
        """Address of its `struct linear`, valid as long as this object lives."""

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply rows [T, K], bfloat16 or float32 on the CPU: [T, N] in their dtype.

        Raises ValueError for rows of another shape, dtype or device.
        """
        rows = rows.contiguous()
        arguments = self._arguments
        n_rows = check_rows(rows, self.shape[1])
        out = rows.new_empty(n_rows, self.shape[0])
        arguments.rows = rows.data_ptr()
        arguments.out = out.data_ptr()
        arguments.quantized = SCRATCH.at_least(n_rows * self.row_bytes).data_ptr()
        arguments.n_rows = n_rows
        arguments.is_bf16 = is_bf16(rows)
        arguments.team.n_threads = torch.get_num_threads()
        self._call(arguments)
        return out


def packed_bytes(shape: tuple[int, int], bits: int) -> int:
    """Return the bytes of packed weights of `shape` (N, K) with 8, 4 or 16 `bits` each."""
    n_out, n_in = shape
    if bits == 16:
        return -(-n_out // PANEL) * -(-n_in // 2) * PANEL * 4
    kind = Quantization.INT8 if bits == 8 else Quantization.INT4
    return kind.packed_bytes(n_out, n_in)


def check_memory(
    what: str, tensor: Tensor, n_bytes: int, dtype: torch.dtype | None = None
) -> Tensor:
    """Return `tensor` if it is `n_bytes` of contiguous CPU memory (and of `dtype`, if given).

    The library trusts the addresses it gets: a wrong one would end the process. Raises ValueError
    otherwise, naming `what`.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.nbytes != n_bytes:
        raise ValueError(
            f"{what}: the compiled library needs {n_bytes} contiguous bytes of CPU memory, "
            f"not {tensor.nbytes} on {tensor.device}, strides {tensor.stride()}"
        )
    if dtype is not None and tensor.dtype is not dtype:
        raise ValueError(f"{what}: the compiled library needs {dtype}, not {tensor.dtype}")
    return tensor


def check_rows(rows: Tensor, width: int) -> int:
    """Return T of rows [T, `width`] on the CPU. Raises ValueError for any other shape or device."""
    if rows.ndim != 2 or rows.shape[1] != width or rows.device.type != "cpu":
        raise ValueError(
            f"rows {list(rows.shape)} on {rows.device}: the compiled library needs {width} columns "
            "in CPU memory"
        )
    return rows.shape[0]


def is_bf16(tensor: Tensor) -> bool:
    """Tell bfloat16 from float32. Raises ValueError for a dtype the library does not compute."""
    if tensor.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"the compiled library does not compute {tensor.dtype}")
    return tensor.dtype is torch.bfloat16


class Scratch(threading.local):
    """Scratch memory for one call, kept for the thread's next call unless it is large."""

    def __init__(self) -> None:
        self._kept = torch.empty(0, dtype=torch.uint8)

    def at_least(self, n_bytes: int) -> Tensor:
        """Return at least `n_bytes` of uninitialised CPU memory, uint8."""
        if self._kept.numel() < n_bytes or self._kept.numel() > _KEPT_BYTES >= n_bytes:
            self._kept = torch.empty(n_bytes, dtype=torch.uint8)
        return self._kept


SCRATCH: Final = Scratch()


@cache
def native_kernels() -> NativeKernels | None:
    """Return the compiled library, or None if this machine has none."""
    return find_kernels(os.environ)


def find_kernels(environment: Mapping[str, str]) -> NativeKernels | None:
    """Load the library beside this file; None if there is none. `environment`: see ISA_VARIABLE."""
    wanted = environment.get(ISA_VARIABLE, "").lower()
    library = _open() if wanted != "off" else None
    if library is None:
        return None
    if not hasattr(library, f"shardnet_version_{_VERSION}"):
        return None  # built from another version of the source
    isa = Isa(library.shardnet_isa())
    if wanted == "portable" or (wanted == "avx2" and isa is Isa.AVX512):
        isa = Isa[wanted.upper()]
    return NativeKernels(
        isa=isa,
        has_pairs=isa is Isa.AVX512 and bool(library.shardnet_has_bf16_pairs()),
        has_tiles=bool(library.shardnet_has_bf16_tiles()),
        _library=library,
        _parallel=_parallel_function(),
    )


def _open() -> ctypes.CDLL | None:
    path = Path(__file__).with_name(_LIBRARY)
    if not path.is_file():
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        return None


def _parallel_function() -> int:
    """Return the address of GOMP_parallel in the OpenMP library that torch has loaded, 0 for none.

    The library's threads then are torch's: a second pool would wait for the same cores.
    """
    package = Path(torch.__file__).parent
    for folder in (package / "lib", package.parent / "torch.libs"):
        for path in sorted(path for name in _OPENMP for path in folder.glob(name)):
            try:
                function = ctypes.CDLL(str(path)).GOMP_parallel
            except (OSError, AttributeError):
                continue
            return ctypes.cast(function, ctypes.c_void_p).value or 0
    return 0
