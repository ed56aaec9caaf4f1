"""Linear layers whose weights are read from disk for every pass.

Knows how a linear is made from the bytes that were read, and when. Must not know who reads them,
nor names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shardnet.model.families.stage_tensors import Shape
from shardnet.model.kernels.codec import torch_dtype
from shardnet.model.kernels.float_linear import PanelPacking, fills_panels
from shardnet.model.kernels.library import (
    NativeKernels,
    NativeMatmul,
    native_kernels,
)
from shardnet.model.kernels.linear import (
    Kernel,
    KernelChoice,
    Linear,
    PlainLinear,
    is_native,
    join_biases,
    make_linear,
)
from shardnet.model.kernels.packing import FLOAT_FORMS
from shardnet.model.kernels.panel_linear import PanelLinear
from shardnet.model.kernels.panels import Panels
from shardnet.stage.streaming.expert_pool import PooledExpert
from shardnet.stage.streaming.layer_stream import LayerStream


class Place(NamedTuple):
    """What streamed weights are read with: their layer, counted within the stage, or an expert."""

    stream: LayerStream | PooledExpert
    layer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLinear:
    """The recipe of a linear layer whose weights are read as a checkpoint stores them.

    `stored` is the shape of the concatenated weights: [N, K], or [K, N] if they are `transposed`.
    With the compiled library, weights are packed as they are read, unless a panel would cover two
    of them; for oneDNN, and if transposed, they are packed when their layer is computed.
    """

    choice: KernelChoice
    device: torch.device
    stored: tuple[int, int]
    transposed: bool
    biases: Sequence[Tensor]
    bias: Tensor | None
    native: NativeKernels | None
    packing: PanelPacking | None

    @classmethod
    def of(
        cls,
        choice: KernelChoice,
        device: torch.device,
        shapes: Sequence[Shape],
        biases: Sequence[Tensor],
        *,
        transposed: bool,
    ) -> StoredLinear:
        """Join weights that are stored in `shapes`; only a single weight may be transposed."""
        assert not transposed or len(shapes) == 1
        native = native_kernels() if choice.kernel is Kernel.NATIVE else None
        n_in, packing = shapes[0][1], None
        if native is not None and not transposed and fills_panels([shape[0] for shape in shapes]):
            dtype = torch_dtype(choice.stored_dtype)
            form = FLOAT_FORMS[dtype]
            packing = PanelPacking(native=native, n_in=n_in, dtype=dtype, form=form)
        own = [bias.clone() for bias in biases]
        return cls(
            choice=choice,
            device=device,
            stored=(sum(shape[0] for shape in shapes), n_in),
            transposed=transposed,
            biases=own,
            bias=join_biases(own, device, torch_dtype(choice.dtype)),
            native=native,
            packing=packing,
        )

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.stored[::-1] if self.transposed else self.stored

    @property
    def is_native(self) -> bool:
        """Whether the compiled library computes it."""
        return self.native is not None

    @property
    def is_ready(self) -> bool:
        """Whether the bytes in the buffer are the kernel's weights, without further packing."""
        return self.packing is not None or self._is_plain

    @property
    def _is_plain(self) -> bool:
        return self.choice.kernel is Kernel.PLAIN and not self.transposed

    def read_bytes(self, stored_bytes: int) -> int:
        """Return the bytes that `stored_bytes` take in a buffer."""
        return stored_bytes if self.packing is None else self.packing.packed_bytes(stored_bytes)

    def make(self, read: Tensor) -> Linear:
        """Make the linear from the bytes in a buffer, uint8 [read_bytes]."""
        if self.native is not None and self.packing is not None:
            panels = Panels(packed=read, form=self.packing.form, shape=self.stored)
            return PanelLinear([panels], self.bias, self.native)
        weight = read.view(torch_dtype(self.choice.stored_dtype)).view(self.stored)
        if self._is_plain:
            return PlainLinear(weight, self.bias, self.choice.min_rows)
        weight = weight.T if self.transposed else weight
        return make_linear(self.choice, [weight], self.biases, self.device)


@dataclass(eq=False, repr=False)
class StreamedLinear:
    """A linear layer whose weights are in a buffer of its `place` while its layer computes.

    They begin at the offset `begin` of the buffer; `make` makes the linear of them. With `is_ready`
    it uses the bytes in the buffer directly, and there is one for each buffer of a layer; else, and
    in experts, it is made anew after every read, and dropped with its layer or expert.
    """

    weights_stay = False

    place: Place
    begin: int
    size_bytes: int
    shape: tuple[int, int]
    """(N, K)."""
    make: Callable[[Tensor], Linear]
    _: KW_ONLY
    is_ready: bool
    is_native: bool
    """Whether the compiled library computes it."""

    def __post_init__(self) -> None:
        self._by_buffer: dict[int, Linear] = {}

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """None: they are read from disk for every pass."""
        return ()

    def fetch(self) -> None:
        """Begin to read them, if they are an expert's: its layer does not wait for those."""
        if isinstance(self.place.stream, PooledExpert):
            self.place.stream.fetch()

    def native_matmul(self) -> NativeMatmul:
        """Return the library's matmul with the weights in the current buffer."""
        linear = self._current()
        assert is_native(linear), "self.is_native says so"
        return linear.native_matmul()

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply every row: [T, K] to [T, N]."""
        return self._current()(rows)

    def _current(self) -> Linear:
        """Return the linear with the weights in the current buffer."""
        stream = self.place.stream
        buffer = stream.buffer_of(self.place.layer)
        made, key = stream.made, self.begin
        if self.is_ready and not isinstance(stream, PooledExpert):
            made, key = self._by_buffer, buffer
        if key not in made:
            made[key] = self.make(stream.weights(self.begin, self.size_bytes, buffer))
        return made[key]
