"""Linear products: which kernel and dtype a device computes in, and the product itself.

Knows torch's kernels and how to tell what they can do. Must not know models. The choice rests on
feature tests, never on timing, so that all nodes of one kind choose the same.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from shardnet.model.config.quantization import Quantization
from shardnet.model.kernels.bf16_linear import NativeLinear
from shardnet.model.kernels.codec import torch_dtype
from shardnet.model.kernels.library import Isa, NativeSource, native_kernels
from shardnet.model.kernels.quantized_linear import QuantizedLinear, pack_all
from shardnet.types import DType

MAX_EXACT_ROWS = 32
"""Rows up to which the probe looks for equal bits."""

_MIN_ROWS_CANDIDATES = (1, 4)
_PROBED_ROWS = (2, 3, 4, 5, 6, 7, 8, 12, 15, 16, 17, 24, 31)
_PROBE_SHAPES = ((512, 2048), (640, 768))
"""Output and input sizes of the probe's products. Loading tests the model's own as well."""


class Kernel(enum.Enum):
    """How linear products are computed."""

    PACKED = "packed"
    """oneDNN, weights reordered once at load for this CPU."""
    PLAIN = "plain"
    """torch.nn.functional.linear."""
    NATIVE = "native"
    """The compiled library, for weights of bfloat16; where they are not, as PLAIN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelChoice:
    """What a device computes in.

    A row's bits do not depend on the rows beside it in products of at most `exact_rows` rows.
    Products of fewer than `min_rows` rows are padded up to it: some CPUs compute a single row in
    another order than several (and, measured on AVX-512 without AMX, slower than four).
    """

    dtype: DType
    kernel: Kernel
    exact_rows: int
    min_rows: int
    quantization: Quantization | None = None
    """What the weights of products are rounded to."""
    device: str = "cpu"
    """Type of the device: the compiled library is the CPU's."""

    @property
    def stored_dtype(self) -> DType:
        """What weights are stored in that can be made ready without being converted."""
        return DType.BFLOAT16 if self.kernel is Kernel.NATIVE else self.dtype

    def rounding(self, *, is_head: bool) -> Quantization | None:
        """What the weights of a layer's product, or of the LM head, are rounded to."""
        if self.quantization is None or not is_head:
            return self.quantization
        return self.quantization.of_head

    @property
    def name(self) -> str:
        """For people: `packed bfloat16`, or `bfloat16 with int4 weights, avx512`."""
        if self.quantization is None:
            return f"{self.kernel.value} {self.dtype.value}"
        native = native_kernels() if self.device == "cpu" else None
        path = native.isa.name.lower() if native is not None else "torch"
        return f"{self.dtype.value} with {self.quantization.value} weights, {path}"


class Linear(Protocol):
    """A linear product: [T, K] rows in, [T, N] rows out, in the kernel's dtype."""

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply every row."""

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""

    @property
    def weights_stay(self) -> bool:
        """Whether the weights stay at one address for as long as the linear is used."""


class PlainLinear:
    """A product by torch.nn.functional.linear."""

    weights_stay = True

    def __init__(self, weight: Tensor, bias: Tensor | None, min_rows: int = 1) -> None:
        self._weight = weight  # [N, K]
        self._bias = bias  # [N]
        self._padding = _Padding.like(weight, min_rows)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        n_out, n_in = self._weight.shape
        return n_out, n_in

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply every row."""
        product = F.linear(self._padding.fill(rows), self._weight, self._bias)
        return product[: rows.shape[0]]


class PackedLinear:
    """A product by oneDNN with weights packed once for this CPU.

    The operators are private to torch: `probe` tests them before anything relies on them.
    """

    weights_stay = True

    def __init__(self, weight: Tensor, bias: Tensor | None, min_rows: int = 1) -> None:
        self._shape = (weight.shape[0], weight.shape[1])
        self._weight = torch.ops.mkldnn._reorder_linear_weight.default(weight)  # [N, K], opaque
        self._bias = bias  # [N]
        self._padding = _Padding.like(weight, min_rows)
        self._product = torch.ops.mkldnn._linear_pointwise.default

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self._shape

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply every row."""
        padded = self._padding.fill(rows)
        product: Tensor = self._product(padded, self._weight, self._bias, "none", [], "")
        return product[: rows.shape[0]]


@dataclass(frozen=True, slots=True)
class _Padding:
    """Rows of zeros for products of too few rows."""

    zeros: Tensor  # [min_rows, K]

    @classmethod
    def like(cls, weight: Tensor, min_rows: int) -> _Padding:
        return cls(weight.new_zeros(min_rows, weight.shape[1]))

    def fill(self, rows: Tensor) -> Tensor:
        """Bring [T, K] up to [min_rows, K]; longer ones stay as they are."""
        missing = self.zeros.shape[0] - rows.shape[0]
        return torch.cat((rows, self.zeros[:missing])) if missing > 0 else rows


def make_linear(
    choice: KernelChoice,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    device: torch.device,
    quantization: Quantization | None = None,
) -> Linear:
    """Join [N_i, K] weights (and [N_i] biases, or none) into one product on `device`.

    `quantization` is what these weights are rounded to. Takes views of a mapped file and keeps none
    of them.
    """
    dtype = torch_dtype(choice.dtype)
    if quantization is not None:
        n_out = sum(weight.shape[0] for weight in weights)
        shape = (n_out, weights[0].shape[1])
        return make_quantized(pack_all(weights, quantization), shape, biases, device, quantization)
    bias = join_biases(biases, device, dtype)
    native = native_kernels() if choice.kernel is Kernel.NATIVE else None
    if native is not None and all(weight.dtype is torch.bfloat16 for weight in weights):
        return NativeLinear.pack(weights, bias, native)
    whole = torch.cat(list(weights)) if len(weights) > 1 else weights[0]
    if choice.kernel is Kernel.PACKED:
        return PackedLinear(whole.to(dtype).contiguous(), bias, choice.min_rows)
    owned = whole.to(device, dtype, copy=len(weights) == 1).contiguous()
    return PlainLinear(owned, bias, choice.min_rows)


def join_biases(
    biases: Sequence[Tensor], device: torch.device, dtype: torch.dtype
) -> Tensor | None:
    """Join [N_i] biases into one on `device`, which shares no memory with them; None of none."""
    return torch.cat(list(biases)).to(device, dtype, copy=True) if biases else None


def make_quantized(
    packed: Tensor,
    shape: tuple[int, int],
    biases: Sequence[Tensor],
    device: torch.device,
    quantization: Quantization,
) -> Linear:
    """Make a product of packed [N, K] weights on `device`."""
    bias = join_biases(biases, device, torch.float32)
    return QuantizedLinear(packed.to(device), shape, quantization, bias)


def probe(
    device: torch.device,
    requested: DType | Literal["auto"],
    checkpoint_dtype: DType | None,
    quantization: Quantization | None = None,
) -> KernelChoice:
    """Choose dtype and kernel for a device, and find out how many rows it computes exactly.

    `auto` follows the checkpoint. A CPU never computes in float16 (slower than either neighbour):
    an automatic choice takes bfloat16 instead, a requested float16 is computed in float32 and
    rounded at the stage's border. bfloat16 without oneDNN's packed kernel is many times slower than
    float32 at several rows, so it is computed in float32 too. `quantization` is taken as it is:
    rounded weights compute on every device.
    """
    choice = _probe_dtype(device, requested, checkpoint_dtype)
    return choice if quantization is None else replace(choice, quantization=quantization)


def _probe_dtype(
    device: torch.device, requested: DType | Literal["auto"], checkpoint_dtype: DType | None
) -> KernelChoice:
    _use_huge_pages()
    wanted = (checkpoint_dtype or DType.FLOAT32) if requested == "auto" else requested
    if device.type != "cpu":
        _attend_without_plans()
        return _measure(device, wanted, Kernel.PLAIN)
    if requested == "auto" and wanted is DType.FLOAT16:
        wanted = DType.BFLOAT16
    native = native_kernels()
    if wanted is DType.BFLOAT16 and _packs(DType.BFLOAT16):
        has_best = native is not None and native.has_pairs and not native.has_tiles
        if has_best:
            return _native(DType.BFLOAT16)
        return _measure(device, DType.BFLOAT16, Kernel.PACKED)
    if checkpoint_dtype is DType.BFLOAT16 and native is not None and native.isa is not Isa.PORTABLE:
        return _native(DType.FLOAT32)
    kernel = Kernel.PACKED if _packs(DType.FLOAT32) else Kernel.PLAIN
    return _measure(device, DType.FLOAT32, kernel)


def _native(dtype: DType) -> KernelChoice:
    """Choose the compiled library: by how it computes, rows keep their bits in any company."""
    return KernelChoice(dtype=dtype, kernel=Kernel.NATIVE, exact_rows=MAX_EXACT_ROWS, min_rows=1)


def _use_huge_pages() -> None:
    """Let torch ask the kernel for huge pages: decoding reads all weights, 7 to 15 % faster so.

    It looks at this variable once, when it first allocates. Without effect afterwards.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def _attend_without_plans() -> None:
    """Have torch attend by other kernels than cuDNN's, which it prefers on Hopper.

    cuDNN makes a plan for every number of keys, which takes longer than a decode step, and every
    decode step has another one.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def _packs(dtype: DType) -> bool:
    """Whether torch's packed product exists here, takes this dtype and gives the right numbers."""
    operators = ("_reorder_linear_weight", "_linear_pointwise")
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if not all(hasattr(torch.ops.mkldnn, name) for name in operators):
        return False
    weight, rows = _numbers(96, 64, dtype), _numbers(5, 64, dtype)
    try:
        product = PackedLinear(weight, None)(rows)
    except (RuntimeError, NotImplementedError):  # this CPU, or this torch, does not take it
        return False
    expected = rows.double() @ weight.double().T
    return bool(torch.allclose(product.double(), expected, rtol=2e-2, atol=2e-2))


def _measure(device: torch.device, dtype: DType, kernel: Kernel) -> KernelChoice:
    """Find the smallest padding with which rows keep their bits in company."""
    choice = KernelChoice(dtype=dtype, kernel=kernel, exact_rows=1, min_rows=1, device=device.type)
    for min_rows in _MIN_ROWS_CANDIDATES:
        exact = replace(choice, exact_rows=MAX_EXACT_ROWS, min_rows=min_rows)
        if all(_is_exact(exact, device, *shape) for shape in _PROBE_SHAPES):
            return exact
    return choice


def _is_exact(choice: KernelChoice, device: torch.device, n_out: int, n_in: int) -> bool:
    weight = _numbers(n_out, n_in, choice.dtype).to(device)
    return rows_are_exact(make_linear(choice, [weight], [], device), choice, device)


@torch.inference_mode()
def rows_are_exact(linear: Linear, choice: KernelChoice, device: torch.device) -> bool:
    """Whether rows have the same bits alone and in company, up to 32 rows.

    The compiled library's do by how it computes; other products are tried.
    """
    if isinstance(linear, NativeSource) and linear.is_native:
        return True
    rows = _numbers(MAX_EXACT_ROWS, linear.shape[1], choice.dtype).to(device)
    whole = linear(rows)  # [32, N]
    alone = torch.cat([linear(row[None]) for row in rows])
    return torch.equal(alone, whole) and all(
        torch.equal(linear(rows[:n]), whole[:n]) for n in _PROBED_ROWS
    )


def _numbers(rows: int, width: int, dtype: DType) -> Tensor:
    """Make a [rows, width] CPU tensor of repeatable values of order 1."""
    generator = torch.Generator().manual_seed(rows * 100_003 + width)
    return torch.randn(rows, width, generator=generator).to(torch_dtype(dtype))
