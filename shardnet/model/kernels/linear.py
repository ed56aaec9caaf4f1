"""Linear layers: which kernel and dtype a device computes in, and the layer itself.

Knows torch's kernels and how to test what they support. Must not know models. The choice rests on
feature tests, never on timing, so that all nodes of one kind choose the same.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from shardnet.model.config.panel_form import Quantization
from shardnet.model.kernels.codec import torch_dtype
from shardnet.model.kernels.devices import computes, multiplies_packed
from shardnet.model.kernels.library import Isa, NativeMatmul, native_kernels
from shardnet.model.kernels.packing import FLOAT_FORMS
from shardnet.model.kernels.panel_linear import PanelLinear, float_linear
from shardnet.model.kernels.panels import Panels, unpack_whole
from shardnet.model.kernels.quantized_linear import pack_all
from shardnet.types import (
    PAIRS_ARITHMETIC,
    PORTABLE_ARITHMETIC,
    TILES_ARITHMETIC,
    Arith,
    DType,
    KvDType,
)

MAX_EXACT_ROWS = 32
"""Largest batch for which the probe tests batch invariance."""

_MIN_ROWS_CANDIDATES = (1, 4)
_MIN_ROWS_OF_HALVES = (4,)
"""By oneDNN: where 64 does not divide the inputs it adds a single row up in another order than
several, which shows after rounding in one result of 50,000, too seldom for the probe."""
_PROBED_ROWS = (2, 3, 4, 5, 6, 7, 8, 12, 15, 16, 17, 24, 31)
_HALVES = (DType.BFLOAT16, DType.FLOAT16)
_PROBE_SHAPES = ((512, 2048), (640, 768))
"""Output and input sizes of the probe's matmuls. Loading tests the model's own as well."""


class Kernel(enum.Enum):
    """How linear layers are computed."""

    PACKED = "packed"
    """oneDNN, with weights reordered once at load for this CPU."""
    PLAIN = "plain"
    """torch.nn.functional.linear."""
    NATIVE = "native"
    """The compiled library, for weights in their stored dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelChoice:
    """The dtype and kernel that a device computes with.

    Matmuls of at most `exact_rows` rows are batch-invariant: a row's bits do not depend on the rest
    of the batch. Matmuls of fewer than `min_rows` rows are padded up to it: some CPUs compute a
    single row in another order than several (and, measured on AVX-512 without AMX, slower than
    four).
    """

    dtype: DType
    kernel: Kernel
    exact_rows: int
    min_rows: int
    quant: Quantization | None = None
    """What the weights of linear layers are quantised to."""
    device: str = "cpu"
    """Type of the device: the compiled library runs on CPUs only."""
    stored_forms: tuple[str, ...] = ()
    """Names of the forms of weights that stay packed as they are stored."""
    native_dtype: DType = DType.BFLOAT16
    """With the compiled library, the dtype of the checkpoint's weights: it is kept in memory."""

    by_text: str = ""
    """The device on which the kernel text computes the layers, "" for none."""
    hidden_dtype: DType | None = None
    """What hidden states are rounded to after each layer, if that is not `dtype`: the dtype of the
    ring, where this device computes in a wider one."""
    held_dtype: DType | None = None
    """What keys and values are rounded to, if that is not `dtype`."""
    kv_form: KvDType = KvDType.AUTO
    """How the KV cache holds keys and values."""

    @property
    def unpacks(self) -> bool:
        """Whether weights that are packed are unpacked to `dtype` when they are loaded."""
        return not multiplies_packed(torch.device(self.device))

    @property
    def kv_dtype(self) -> DType:
        """The dtype of keys and values that are not quantised."""
        return self.held_dtype or self.dtype

    @property
    def stored_dtype(self) -> DType:
        """The dtype that stored weights need in order to be used without conversion."""
        return self.native_dtype if self.kernel is Kernel.NATIVE else self.dtype

    def weight_quantization(self, *, is_head: bool) -> Quantization | None:
        """Return what the weights of a layer's linear, or of the LM head, are quantised to."""
        if self.quant is None or not is_head:
            return self.quant
        return self.quant.of_head

    @property
    def name(self) -> str:
        """Display name: `packed bfloat16`, or `bfloat16 with int4 weights, avx512`."""
        weights = " and ".join(self.stored_forms)
        if self.quant is not None:
            weights = self.quant.value
        if not weights:
            return f"{self.by_text or self.kernel.value} {self.dtype.value}"
        native = None if self.unpacks else native_kernels()
        path = "unpacked" if self.unpacks else "torch"
        if native is not None:
            path = self.by_text or native.isa.name.lower()
        return f"{self.dtype.value} with {weights} weights, {path}"


class Linear(Protocol):
    """A linear layer: rows [T, K] to [T, N], in the kernel's dtype and on its device."""

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply every row."""

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""

    @property
    def weights_stay(self) -> bool:
        """Whether the weights stay at one address for as long as the linear is used."""

    @property
    def is_native(self) -> bool:
        """Whether the compiled library computes it; it is a NativeLinear then."""

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """The tensors that hold weights and bias and never change; none of what is not so held."""


class NativeLinear(Linear, Protocol):
    """A linear layer that the compiled library computes."""

    def native_matmul(self) -> NativeMatmul:
        """Return the library's matmul with the current weights."""


def is_native(linear: Linear) -> TypeGuard[NativeLinear]:
    """Say whether the compiled library computes `linear`."""
    return linear.is_native


class PlainLinear:
    """A linear layer by torch.nn.functional.linear."""

    weights_stay = True
    is_native = False

    def __init__(self, weight: Tensor, bias: Tensor | None, min_rows: int = 1) -> None:
        self._weight = weight  # [N, K]
        self._bias = bias  # [N]
        self._padding = _Padding.like(weight, min_rows)
        n_out, n_in = weight.shape
        self.shape = (n_out, n_in)
        self.weights = (weight,) if bias is None else (weight, bias)

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply every row."""
        result = F.linear(self._padding.fill(rows), self._weight, self._bias)
        return result[: rows.shape[0]]


class ScaledLinear:
    """A linear layer whose outputs are multiplied, each by a factor of its own."""

    is_native = False

    def __init__(self, linear: Linear, factors: Tensor) -> None:
        self.plain = linear
        """The linear without factors."""
        self.factors = factors  # [N], float32
        """Those of the outputs: [N], float32."""
        self.shape, self.weights_stay = linear.shape, linear.weights_stay

    @classmethod
    def of(cls, linear: Linear, *parts: tuple[int, float]) -> Linear:
        """Multiply so many outputs in turn by a number each; `linear` itself if all are 1."""
        if all(factor == 1 for _, factor in parts):
            return linear
        factors = torch.cat([torch.full((n,), factor) for n, factor in parts])
        assert len(factors) == linear.shape[0]
        device = linear.weights[0].device if linear.weights else None
        return cls(linear, factors.to(device))

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """Those of the linear, and the factors."""
        return (*self.plain.weights, self.factors)

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply every row."""
        outputs = self.plain(rows)
        return (outputs * self.factors.to(outputs.device)).to(outputs.dtype)


class PackedLinear:
    """A linear layer by oneDNN, with weights packed once for this CPU.

    The operators are private to torch: `probe` tests them before anything relies on them.
    """

    weights_stay = True
    is_native = False

    def __init__(self, weight: Tensor, bias: Tensor | None, min_rows: int = 1) -> None:
        self.shape = (weight.shape[0], weight.shape[1])
        """(N, K)."""
        self._weight = torch.ops.mkldnn._reorder_linear_weight.default(weight)  # [N, K], opaque
        self._bias = bias  # [N]
        self._padding = _Padding.like(weight, min_rows)
        self._linear = torch.ops.mkldnn._linear_pointwise.default
        self.weights = () if bias is None else (bias,)
        """The bias: what oneDNN has packed is opaque."""

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply every row."""
        padded = self._padding.fill(rows)
        result: Tensor = self._linear(padded, self._weight, self._bias, "none", [], "")
        return result[: rows.shape[0]]


@dataclass(frozen=True, slots=True)
class _Padding:
    """Zero rows that pad a batch up to `min_rows`."""

    zeros: Tensor  # [min_rows, K]

    @classmethod
    def like(cls, weight: Tensor, min_rows: int) -> _Padding:
        return cls(weight.new_zeros(min_rows, weight.shape[1]))

    def fill(self, rows: Tensor) -> Tensor:
        """Pad rows [T, K] to [min_rows, K]; longer batches are returned unchanged."""
        missing = self.zeros.shape[0] - rows.shape[0]
        return torch.cat((rows, self.zeros[:missing])) if missing > 0 else rows


def make_linear(
    choice: KernelChoice,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    device: torch.device,
    quant: Quantization | None = None,
) -> Linear:
    """Join weights [N_i, K] (and biases [N_i], or none) into one linear layer on `device`.

    `weights` are of any float dtype and may be views of a mapped file: the layer shares no memory
    with them. `quant` is what they are quantised to.
    """
    dtype = torch_dtype(choice.dtype)
    if quant is not None:
        n_out = sum(weight.shape[0] for weight in weights)
        shape = (n_out, weights[0].shape[1])
        packed = pack_all(weights, quant).to(device)
        panels = Panels(packed=packed, form=quant.form, shape=shape)
        return linear_of_panels(choice, [panels], join_biases(biases, device, torch.float32))
    bias = join_biases(biases, device, dtype)
    native = native_kernels() if choice.kernel is Kernel.NATIVE else None
    if native is not None:
        dtypes = {weight.dtype for weight in weights}
        if len(dtypes) > 1 or not dtypes <= FLOAT_FORMS.keys():
            weights = [weight.float() for weight in weights]
        return float_linear(weights, bias, native)
    whole = torch.cat(list(weights)) if len(weights) > 1 else weights[0]
    if choice.kernel is Kernel.PACKED:
        return PackedLinear(whole.to(dtype).contiguous(), bias, choice.min_rows)
    owned = whole.to(device, dtype, copy=len(weights) == 1).contiguous()
    return PlainLinear(owned, bias, choice.min_rows)


def join_biases(
    biases: Sequence[Tensor], device: torch.device, dtype: torch.dtype
) -> Tensor | None:
    """Join biases [N_i] into a new tensor on `device`; None if there are none."""
    return torch.cat(list(biases)).to(device, dtype, copy=True) if biases else None


def linear_of_panels(choice: KernelChoice, panels: Sequence[Panels], bias: Tensor | None) -> Linear:
    """Make a linear layer of packed weights, unpacked now where nothing of ours multiplies them.

    torch would else unpack them for every step, which moves ten times their bytes.
    """
    if not choice.unpacks:
        return PanelLinear(panels, bias)
    dtype = torch_dtype(choice.dtype)
    whole = unpack_whole(panels, dtype)
    return PlainLinear(whole, None if bias is None else bias.to(dtype), choice.min_rows)


def probe(
    device: torch.device,
    requested: DType | Literal["auto"],
    checkpoint_dtype: DType | None,
    quant: Quantization | None = None,
    arith: Arith = Arith.FAST,
    *,
    is_packed: bool = False,
) -> KernelChoice:
    """Choose dtype and kernel for a device, and test up to how many rows it is batch-invariant.

    `auto` follows the checkpoint. A CPU never computes in float16 (slower than bfloat16 and
    float32): an automatic choice takes bfloat16 instead, a requested float16 is computed in float32
    and rounded after each layer. bfloat16 without instructions for it is many times slower than
    float32 at several rows, so it is computed in float32 too. With portable arithmetic a CPU
    computes in float32 by the compiled library, even in plain C. A GPU that does not compute the
    dtype correctly computes in float32, and rounds. `quant` is taken as given:
    every device computes with quantised weights. The library computes with weights of float16 in
    float32: bfloat16 would take 3 bits from them. If `is_packed`, all linear weights are quantised
    in the file: then it computes in float32 too, where bfloat16 would only add an error, and holds
    keys and values in bfloat16. oneDNN, whose bits depend on the batch, computes only where the
    library was not built or has no vector instructions.
    """
    choice = _probe_dtype(device, requested, checkpoint_dtype, arith)
    if is_packed and choice.kernel is Kernel.NATIVE and choice.dtype is DType.BFLOAT16:
        choice = replace(choice, dtype=DType.FLOAT32, held_dtype=DType.BFLOAT16)
    if requested != "auto" and requested is not choice.dtype:
        choice = replace(choice, hidden_dtype=requested)
    return choice if quant is None else replace(choice, quant=quant)


def _probe_dtype(
    device: torch.device,
    requested: DType | Literal["auto"],
    checkpoint_dtype: DType | None,
    arith: Arith,
) -> KernelChoice:
    _use_huge_pages()
    wanted = (checkpoint_dtype or DType.FLOAT32) if requested == "auto" else requested
    if device.type != "cpu":
        _disable_cudnn_attention()
        if not computes(device, torch_dtype(wanted)):
            wanted = DType.FLOAT32
        return _measure(device, wanted, Kernel.PLAIN)
    if requested == "auto" and wanted is DType.FLOAT16:
        wanted = DType.BFLOAT16
    is_portable, native = arith is Arith.PORTABLE, native_kernels()
    has_vectors = native is not None and native.isa is not Isa.PORTABLE
    if native is not None and (is_portable or has_vectors):
        is_half = wanted is DType.BFLOAT16 and checkpoint_dtype is not DType.FLOAT16
        if is_half and native.has_pairs and not is_portable:
            return _native(DType.BFLOAT16)
        stored = checkpoint_dtype if checkpoint_dtype in _HALVES else DType.FLOAT32
        return _native(DType.FLOAT32, stored)
    if wanted is DType.BFLOAT16 and not is_portable and _packs(wanted):
        return _measure(device, wanted, Kernel.PACKED)
    kernel = Kernel.PACKED if _packs(DType.FLOAT32) else Kernel.PLAIN
    return _measure(device, DType.FLOAT32, kernel)


def cpu_arithmetic() -> str:
    """Name how this CPU computes in a ring of 16 bits; CPUs of equal names give equal bits."""
    native = native_kernels()
    if native is not None and native.isa is not Isa.PORTABLE:
        by_pairs = TILES_ARITHMETIC if native.has_tiles else PAIRS_ARITHMETIC
        return by_pairs if native.has_pairs else PORTABLE_ARITHMETIC
    by = "oneDNN of torch" if _packs(DType.BFLOAT16) else "torch"
    return f"{by} {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"


def _native(dtype: DType, stored: DType = DType.BFLOAT16) -> KernelChoice:
    """Choose the compiled library, which is batch-invariant by construction."""
    return KernelChoice(
        dtype=dtype,
        kernel=Kernel.NATIVE,
        exact_rows=MAX_EXACT_ROWS,
        min_rows=1,
        native_dtype=stored,
    )


def _use_huge_pages() -> None:
    """Have torch request huge pages: decoding reads all weights, which is 7 to 15 % faster so.

    torch reads this variable once, at its first allocation; later calls have no effect.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def _disable_cudnn_attention() -> None:
    """Disable cuDNN's attention kernels, which torch prefers on Hopper.

    cuDNN plans anew for every number of keys, and each decode step has another number: planning
    takes longer than the step.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def _packs(dtype: DType) -> bool:
    """Whether torch's packed linear exists here, accepts `dtype` and computes correctly."""
    operators = ("_reorder_linear_weight", "_linear_pointwise")
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if not all(hasattr(torch.ops.mkldnn, name) for name in operators):
        return False
    weight, rows = _numbers(96, 64, dtype), _numbers(5, 64, dtype)
    try:
        result = PackedLinear(weight, None)(rows)
    except (RuntimeError, NotImplementedError):  # this CPU, or this torch, does not take it
        return False
    expected = rows.double() @ weight.double().T
    return bool(torch.allclose(result.double(), expected, rtol=2e-2, atol=2e-2))


def _measure(device: torch.device, dtype: DType, kernel: Kernel) -> KernelChoice:
    """Find the smallest padding that makes matmuls batch-invariant."""
    choice = KernelChoice(dtype=dtype, kernel=kernel, exact_rows=1, min_rows=1, device=device.type)
    is_of_halves = device.type == "cpu" and dtype in _HALVES
    for min_rows in _MIN_ROWS_OF_HALVES if is_of_halves else _MIN_ROWS_CANDIDATES:
        exact = replace(choice, exact_rows=MAX_EXACT_ROWS, min_rows=min_rows)
        if all(_is_exact(exact, device, *shape) for shape in _PROBE_SHAPES):
            return exact
    return choice


def _is_exact(choice: KernelChoice, device: torch.device, n_out: int, n_in: int) -> bool:
    weight = _numbers(n_out, n_in, choice.dtype).to(device)
    return is_batch_invariant(make_linear(choice, [weight], [], device), choice, device)


@torch.inference_mode()
def is_batch_invariant(linear: Linear, choice: KernelChoice, device: torch.device) -> bool:
    """Test whether rows have the same bits alone and in any batch of up to 32 rows.

    The compiled library is batch-invariant by construction; other kernels are tried.
    """
    if linear.is_native:
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
