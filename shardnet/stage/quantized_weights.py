"""Makes linears of weights that are quantised while a stage loads, and caches them packed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardnet.errors import CapacityError, CheckpointError
from shardnet.model.config.panel_form import Quantization
from shardnet.model.kernels.linear import KernelChoice, Linear, join_biases, linear_of_panels
from shardnet.model.kernels.panel_linear import PanelLinear
from shardnet.model.kernels.panels import Panels
from shardnet.model.kernels.quantized_linear import pack_all
from shardnet.stage.packs.pack_cache import PackCache
from shardnet.stage.packs.pack_writer import PackWriter
from shardnet.stage.plain_weights import PlainWeights
from shardnet.stage.streaming.file_parts import FilePart
from shardnet.stage.streaming.streamed_linear import Place, StreamedLinear
from shardnet.stage.tensor_reader import TensorReader


@dataclass(eq=False, kw_only=True)
class QuantizedWeights:
    """Quantises the weights of one stage."""

    choice: KernelChoice
    reader: TensorReader
    plain: PlainWeights
    packs: PackCache | None
    writer: PackWriter
    device: torch.device

    def linear(
        self,
        names: Sequence[str],
        biases: Sequence[Tensor],
        kind: Quantization,
        place: Place | None,
        *,
        transposed: bool,
    ) -> tuple[Linear, Linear]:
        """Make a quantised linear; with a `place` to be streamed its weights stay in the cache.

        Returns one with weights in memory, of which batch invariance can be tested, and the one to
        compute with.
        """
        shapes = [self.reader.shape(f"{name}.weight") for name in names]
        if transposed:
            shapes = [shape[::-1] for shape in shapes]
        shape = (sum(shape[0] for shape in shapes), shapes[0][1])
        packed = self._packed(
            names, kind, shape, transposed=transposed, is_streamed=place is not None
        )
        bias = join_biases(biases, self.device, torch.float32)
        own = Panels(packed=packed.to(self.device), form=kind.form, shape=shape)
        if place is None:
            whole = linear_of_panels(self.choice, [own], bias)
            return whole, whole
        made = PanelLinear([own], bias)
        part, packed_shape = self._cached_part(names, kind, packed), packed.shape

        def make(read: Tensor) -> PanelLinear:
            return PanelLinear(
                [Panels(packed=read.view(packed_shape), form=kind.form, shape=shape)], bias
            )

        streamed = StreamedLinear(
            place,
            place.stream.reserve(place.layer, [part]),
            packed.nbytes,
            shape,
            make,
            is_ready=True,
            is_native=made.is_native,
        )
        return made, streamed

    def _cached_part(self, names: Sequence[str], kind: Quantization, packed: Tensor) -> FilePart:
        """Locate packed weights in the cache. Raises CapacityError if they could not be stored."""
        assert self.packs is not None
        path, offset = self.packs.place(names, kind)
        try:
            return FilePart.of(path, offset, packed.nbytes)
        except CheckpointError as error:
            raise CapacityError(
                f"{path}: quantised weights of layers to be streamed could not be stored there",
                remedy="make room on that disk (`shardnet cache rm`)",
            ) from error

    def _packed(
        self,
        names: Sequence[str],
        kind: Quantization,
        shape: tuple[int, int],
        *,
        transposed: bool,
        is_streamed: bool,
    ) -> Tensor:
        """Return packed weights of `shape` (N, K), from the cache, or packed now and cached."""
        weights = [f"{name}.weight" for name in names]
        packed_shape = kind.form.packed_shape(*shape)
        if self.packs is not None:
            came = self.reader.instead_of(weights, math.prod(packed_shape))
            cached = self.packs.get(names, kind, packed_shape, came)
            if cached is not None:
                self.reader.skip(weights)
                return cached
        packed = self.plain.packed_while_read(weights, kind.form, transposed=transposed)
        if packed is None:
            whole = self.plain.read(weights, transposed=transposed)
            packed = pack_all(whole, kind, self.reader.report)
            del whole
        self.writer.put(names, kind, packed)
        if is_streamed or self.device.type != "cpu":
            self.writer.finish(self.reader.report)  # else it would stay in memory until written
        return packed
