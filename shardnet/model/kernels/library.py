"""Finds the compiled library of csrc/, and runs its linear layers.

Knows the library's functions, which memory they accept and how they share torch's threads. Must not
know how weights are packed. Where the library was not built or does not fit this machine,
kernels/quantized_linear.py falls back to torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from shardnet.errors import ConfigurationError
from shardnet.model.config.panel_form import PanelForm
from shardnet.model.kernels import LIBRARY
from shardnet.threads import at_thread_end

ISA_VARIABLE: Final = "SHARDNET_ISA"
"""Restricts the instruction set, for tests and comparisons: to one of _LESS, or to portable; off
for torch alone. What the CPU does not have is not taken from it.
"""

KERNELS_VERSION: Final = 28
"""Counts up when the library's functions or structs change."""
_KEPT_BYTES: Final = 1 << 22
"""Scratch memory that each thread keeps: enough for a decode step."""
_LINE_BYTES: Final = 64
"""Of a row of bfloat16 as tiles of AMX read it: at least one line."""
_OPENMP: Final = ("libgomp*", "libomp.*", "libiomp5.*", "libiomp5md.dll")
_KMPC: Final = ("__kmpc_fork_call", "__kmpc_push_num_threads", "__kmpc_global_thread_num")
"""What Intel's OpenMP library has in place of GOMP_parallel where it is for Windows."""


class Isa(enum.IntEnum):
    """Instruction sets that the library is written for."""

    PORTABLE = 0
    AVX2 = 1
    AVX512 = 2
    NEON = 3
    NEON_PLAIN = 4
    """Without dot products of bytes, as on a Raspberry Pi 4."""


_LESS: Final = {
    "avx512_bf16": Isa.AVX512,
    "avx512": Isa.AVX512,  # without pairs of bfloat16
    "avx2": Isa.AVX512,
    "neon_plain": Isa.NEON,
}
"""What SHARDNET_ISA may restrict to, and the instruction set it takes something from."""
_CHOICES: Final = ("", "off", "portable", "neon", *_LESS)


def fields(kind: Any, *names: str) -> list[tuple[str, Any]]:
    """Name fields of a struct that are of one kind, as C declares them in a line."""
    return [(name, kind) for name in names]


class Team(ctypes.Structure):
    """`struct team` of csrc/linear.h: the threads of a call, and their instruction set."""

    _fields_ = (
        ("parallel", ctypes.c_void_p),
        *fields(ctypes.c_int32, "n_threads", "isa"),
    )


class FormStruct(ctypes.Structure):
    """`struct form` of csrc/linear.h."""

    _fields_ = (
        *fields(ctypes.c_int32, "bits", "code", "scale", "minimum", "offset", "group", "block"),
        *fields(ctypes.c_int32, "block_scales", "header_bytes", "block_bytes", "token_group"),
        ("factor", ctypes.c_float),
        ("book", ctypes.c_float * 16),
    )

    @staticmethod
    @cache
    def of(form: PanelForm) -> FormStruct:
        """Mirror a form; not to be changed."""
        same = [name for name, *_ in FormStruct._fields_ if name not in ("block", "book")]
        return FormStruct(
            block=form.block_inputs,
            book=(ctypes.c_float * 16)(*form.book),
            **{name: getattr(form, name) for name in same},
        )


class _LinearStruct(ctypes.Structure):
    """`struct linear` of csrc/linear.h."""

    _fields_ = (
        *fields(ctypes.c_void_p, "weights", "rows", "out", "bias", "order", "next", "quantized"),
        *fields(ctypes.c_void_p, "scales", "offsets", "sums", "group_sums"),
        ("team", Team),
        *fields(ctypes.c_int64, "n_rows", "n_in", "n_out", "width", "n_groups"),
        ("form", FormStruct),
        *fields(ctypes.c_int32, "is_bf16", "has_pairs", "pairs", "has_tiles"),
    )


class PackedPart(Protocol):
    """Packed weights: some of the outputs of a matmul."""

    @property
    def packed(self) -> Tensor:
        """The weights in memory."""

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""

    @property
    def form(self) -> PanelForm:
        """What the memory means."""

    @property
    def input_order(self) -> Tensor | None:
        """The input of each column, int32 [K]; None where they are in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeKernels:
    """The compiled library, and the instruction set it uses here.

    `has_pairs`: it multiplies pairs of bfloat16. `has_tiles`: it multiplies tiles (AMX), of bytes
    where rows are many, and of pairs of bfloat16.
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

    def matmul(self, parts: Sequence[PackedPart], bias: Tensor | None) -> NativeMatmul:
        """Make the matmul with packed weights, all on the CPU: outputs of `parts` in order.

        `bias` is float32 [N]. Raises ValueError for memory of another size, device or dtype.
        """
        return NativeMatmul(self, parts, bias)


class NativeMatmul:
    """A matmul with packed weights. Not thread-safe: it holds the arguments of its calls."""

    def __init__(
        self, kernels: NativeKernels, parts: Sequence[PackedPart], bias: Tensor | None
    ) -> None:
        n_out, n_in = sum(part.shape[0] for part in parts), parts[0].shape[1]
        if bias is not None:
            check_memory("a bias", bias, 4 * n_out, torch.float32)
        self.shape = (n_out, n_in)
        self.row_bytes = sum(_row_bytes(part.form, n_in) for part in parts)
        """Scratch memory that each row needs during a call."""
        self._kept = (*parts, bias)
        self._call = kernels.function("shardnet_linear", ctypes.POINTER(_LinearStruct))
        self._structs = (_LinearStruct * len(parts))()
        begin = 0
        for place, part in enumerate(parts):
            own_bias = bias[begin : begin + part.shape[0]] if bias is not None else None
            self._structs[place] = _struct_of(kernels, part, own_bias, n_out, n_in)
            begin += part.shape[0]
        self.address = ctypes.addressof(self._structs)
        """Address of its first `struct linear`, valid as long as this object lives."""
        for place in range(1, len(parts)):
            following = self.address + place * ctypes.sizeof(_LinearStruct)
            self._structs[place - 1].next = following

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply rows [T, K], bfloat16 or float32 on the CPU: [T, N] in their dtype.

        Raises ValueError for rows of another shape, dtype or device.
        """
        rows = rows.contiguous()
        arguments = self._structs[0]
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


def _struct_of(
    kernels: NativeKernels, part: PackedPart, bias: Tensor | None, width: int, n_in: int
) -> _LinearStruct:
    """Describe one part. Raises ValueError for memory of another size or device."""
    form, shape, order = part.form, part.shape, part.input_order
    if shape[1] != n_in:
        raise ValueError(f"parts of {n_in} and {shape[1]} inputs do not make one matmul")
    check_memory("packed weights", part.packed, form.packed_bytes(*shape))
    if order is not None:
        check_memory("an order of inputs", order, 4 * n_in, torch.int32)
        if n_in and not 0 <= int(order.min()) <= int(order.max()) < n_in:
            raise ValueError(f"an order of inputs names one beyond {n_in}")
    return _LinearStruct(
        weights=part.packed.data_ptr(),
        bias=bias.data_ptr() if bias is not None else None,
        order=order.data_ptr() if order is not None else None,
        team=kernels.team,
        n_in=n_in,
        n_out=shape[0],
        width=width,
        n_groups=-(-n_in // form.block_inputs) * form.block_inputs // form.token_group,
        form=FormStruct.of(form),
        has_pairs=kernels.has_pairs,
        has_tiles=kernels.has_tiles,
    )


def _row_bytes(form: PanelForm, n_in: int) -> int:
    """Return the scratch memory that a row needs for one part."""
    inputs = -(-n_in // form.block_inputs) * form.block_inputs
    if form.is_float:
        return max(4 * inputs, _LINE_BYTES)
    sums = 2 * inputs // form.group if form.has_levels else 0
    return inputs + 12 * inputs // form.token_group + sums


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
        self._kept: Tensor | None = None

    def at_least(self, n_bytes: int) -> Tensor:
        """Return at least `n_bytes` of uninitialised CPU memory, uint8."""
        kept = self._kept
        if kept is None or kept.numel() < n_bytes or kept.numel() > _KEPT_BYTES >= n_bytes:
            kept = self._kept = torch.empty(n_bytes, dtype=torch.uint8)
        return kept

    def clear(self) -> None:
        """Let go of what the calling thread keeps."""
        self._kept = None


SCRATCH: Final = Scratch()
at_thread_end(SCRATCH.clear)


@cache
def native_kernels() -> NativeKernels | None:
    """Return the compiled library, or None if this machine has none."""
    return find_kernels(os.environ)


def find_kernels(environment: Mapping[str, str]) -> NativeKernels | None:
    """Load the library beside this file; None if there is none. `environment`: see ISA_VARIABLE."""
    wanted = environment.get(ISA_VARIABLE, "").lower()
    if wanted not in _CHOICES:
        raise ConfigurationError(
            f"{ISA_VARIABLE}={wanted}: there is no such instruction set",
            remedy=f"choose one of {', '.join(_CHOICES[1:])}",
        )
    library = _open() if wanted != "off" else None
    if library is None:
        return None
    if not hasattr(library, f"shardnet_version_{KERNELS_VERSION}"):
        return None  # built from another version of the source
    isa = Isa(library.shardnet_isa())
    if wanted == "portable" or _LESS.get(wanted) is isa:
        isa = Isa[wanted.removesuffix("_bf16").upper()]
    has_pairs = isa is Isa.AVX512 and bool(library.shardnet_has_bf16_pairs())
    return NativeKernels(
        isa=isa,
        has_pairs=has_pairs and wanted != "avx512",
        has_tiles=isa is Isa.AVX512 and not wanted and bool(library.shardnet_has_tiles()),
        _library=library,
        _parallel=_parallel_function(library),
    )


def _open() -> ctypes.CDLL | None:
    path = Path(__file__).with_name(LIBRARY)
    if not path.is_file():
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        return None


def _parallel_function(library: ctypes.CDLL) -> int:
    """Return the address of a function that does what GOMP_parallel does, 0 for none.

    It is of the OpenMP library that torch has loaded: a second pool of threads would wait for the
    same cores.
    """
    package = Path(torch.__file__).parent
    for folder in (package / "lib", package.parent / "torch.libs"):
        for path in sorted(path for name in _OPENMP for path in folder.glob(name)):
            with contextlib.suppress(OSError):
                if address := parallel_by(ctypes.CDLL(str(path)), library):
                    return address
    return 0


def parallel_by(openmp: ctypes.CDLL, library: ctypes.CDLL) -> int:
    """Return the address of GOMP_parallel in `openmp`, or of what `library` makes of its parts.

    0 if it has neither.
    """
    if found := _address(openmp, "GOMP_parallel"):
        return found
    parts = [_address(openmp, name) for name in _KMPC]
    if not all(parts):
        return 0
    make = library["shardnet_parallel_by_kmpc"]
    make.argtypes, make.restype = (ctypes.c_void_p,) * len(parts), ctypes.c_void_p
    return make(*parts) or 0


def _address(library: ctypes.CDLL, name: str) -> int:
    """Return the address of a function, 0 if `library` has none of that name."""
    function = getattr(library, name, None)
    return (ctypes.cast(function, ctypes.c_void_p).value or 0) if function is not None else 0
