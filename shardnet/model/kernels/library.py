"""Finds the compiled library of csrc/, and calls its products.

Knows the library's functions, what memory they may be given and how they get torch's threads. Must
not know how weights are packed.
Where the library was not built, or does not fit this machine, there is none:
kernels/quantized_linear.py has torch do the work.
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
from typing import Final, Protocol, runtime_checkable

import torch
from torch import Tensor

from shardnet.model.config.quantization import PANEL, Quantization

ISA_VARIABLE: Final = "SHARDNET_ISA"
"""Has a machine use less than it can, for tests and comparisons: portable, avx2; off for torch."""

_LIBRARY: Final = "_quantized.so"
_VERSION: Final = 7
"""Counts up with what the library and this module tell each other."""
_KEPT_BYTES: Final = 1 << 22
"""Room that each thread keeps: enough for a decode step."""
_OPENMP: Final = ("libgomp*", "libomp.*", "libiomp5.*")


class Isa(enum.IntEnum):
    """Instruction sets that the library is written for."""

    PORTABLE = 0
    AVX2 = 1
    AVX512 = 2
    NEON = 3


class Team(ctypes.Structure):
    """`struct team` of csrc/products.h: the threads of a call, and what they compute with."""

    _fields_ = (
        ("parallel", ctypes.c_void_p),
        ("n_threads", ctypes.c_int32),
        ("isa", ctypes.c_int32),
    )


class _Product(ctypes.Structure):
    """`struct product` of csrc/products.h."""

    _fields_ = (
        ("weights", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("rounded", ctypes.c_void_p),
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
    """The library, and the instruction set it uses here.

    `has_pairs`: it has instructions that multiply pairs of bfloat16, `has_tiles` others that
    multiply whole tiles, which the library does not use and oneDNN does. `can_fold`: it has those
    that kernels/checksum.py needs.
    """

    isa: Isa
    has_pairs: bool
    has_tiles: bool
    can_fold: bool
    _library: ctypes.CDLL
    _parallel: int

    @property
    def team(self) -> Team:
        """The threads that calls of the library get, without their number."""
        return Team(parallel=self._parallel, isa=self.isa)

    def function(self, name: str, *types: type[ctypes._CDataType]) -> ctypes._NamedFuncPointer:
        """Return a function of the library that takes these and returns nothing."""
        found = self._library[name]  # an object of its own at each call, unlike an attribute
        found.argtypes = types
        found.restype = None
        return found

    def product(
        self,
        weights: Tensor,
        bias: Tensor | None,
        shape: tuple[int, int],
        bits: int,
        group: int = 0,
    ) -> NativeProduct:
        """Make the product with packed `weights` of `shape` (N, K), all of it on the CPU.

        `bits` are 8 or 4, with weights in groups of `group` inputs, or 16 for bfloat16 weights.
        `bias` is float32 [N].
        """
        return NativeProduct(self, weights, bias, shape, bits, group)


class NativeProduct:
    """A product with packed weights. Not thread-safe: it keeps its call's arguments."""

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
        """Room that each row needs while it is multiplied."""
        self._kept = (weights, bias)
        self._call = kernels.function("shardnet_multiply", ctypes.POINTER(_Product))
        self._arguments = _Product(
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
        """Where `struct product` is, as long as this object lives."""

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply [T, K] rows, bfloat16 or float32; returns [T, N] in their dtype.

        Raises ValueError for rows that the library cannot read.
        """
        rows = rows.contiguous()
        arguments = self._arguments
        n_rows = check_rows(rows, self.shape[1])
        out = rows.new_empty(n_rows, self.shape[0])
        arguments.rows = rows.data_ptr()
        arguments.out = out.data_ptr()
        arguments.rounded = ROOM.of(n_rows * self.row_bytes).data_ptr()
        arguments.n_rows = n_rows
        arguments.is_bf16 = is_bf16(rows)
        arguments.team.n_threads = torch.get_num_threads()
        self._call(arguments)
        return out


def packed_bytes(shape: tuple[int, int], bits: int) -> int:
    """Return what the library writes and reads of packed [N, K] weights of 8, 4 or 16 bits."""
    n_out, n_in = shape
    if bits == 16:
        return -(-n_out // PANEL) * -(-n_in // 2) * PANEL * 4
    kind = Quantization.INT8 if bits == 8 else Quantization.INT4
    return kind.packed_bytes(n_out, n_in)


def check_memory(
    what: str, tensor: Tensor, n_bytes: int, dtype: torch.dtype | None = None
) -> Tensor:
    """Return a tensor whose memory the library may use as n_bytes in one piece.

    The library trusts the addresses it gets: a wrong one would end the process. Raises ValueError.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.nbytes != n_bytes:
        raise ValueError(
            f"{what}: the compiled library wants {n_bytes} bytes in one piece of the CPU's memory, "
            f"not {tensor.nbytes} on {tensor.device}, strides {tensor.stride()}"
        )
    if dtype is not None and tensor.dtype is not dtype:
        raise ValueError(f"{what}: the compiled library wants {dtype}, not {tensor.dtype}")
    return tensor


def check_rows(rows: Tensor, width: int) -> int:
    """Return how many rows [T, width] there are, in one piece. Raises ValueError."""
    if rows.ndim != 2 or rows.shape[1] != width or rows.device.type != "cpu":
        raise ValueError(
            f"rows {list(rows.shape)} on {rows.device}: the compiled library wants {width} columns "
            "in the CPU's memory"
        )
    return rows.shape[0]


def is_bf16(tensor: Tensor) -> bool:
    """Say which of the two dtypes that the library computes with this is. Raises ValueError."""
    if tensor.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"the compiled library computes no {tensor.dtype}")
    return tensor.dtype is torch.bfloat16


@runtime_checkable
class NativeSource(Protocol):
    """A linear product that may have one of the library's behind it."""

    @property
    def is_native(self) -> bool:
        """Whether it has."""

    def native_product(self) -> NativeProduct:
        """Return what multiplies now, if it has."""


class Room(threading.local):
    """Memory for one call, kept for the thread's next one unless it is much."""

    def __init__(self) -> None:
        self._kept = torch.empty(0, dtype=torch.uint8)

    def of(self, n_bytes: int) -> Tensor:
        """Return at least so many bytes, of any contents."""
        if self._kept.numel() < n_bytes or self._kept.numel() > _KEPT_BYTES >= n_bytes:
            self._kept = torch.empty(n_bytes, dtype=torch.uint8)
        return self._kept


ROOM: Final = Room()


@cache
def native_kernels() -> NativeKernels | None:
    """Return the compiled products, None where there are none on this machine."""
    return find_kernels(os.environ)


def find_kernels(environment: Mapping[str, str]) -> NativeKernels | None:
    """Look for the library beside this file; see ISA_VARIABLE."""
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
        can_fold=bool(library.shardnet_can_fold()),
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
