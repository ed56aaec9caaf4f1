"""Reading a stage's weights: names resolved, shapes and dtypes checked, bytes counted.

Knows the checkpoint and the tensor table. Must not know forward passes: a family asks for its
parameters by name and gets ready-made products, norms and tables, which share no memory with the
file.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Final, Protocol

import torch
from torch import Tensor

from shardnet.errors import CapacityError, CheckpointError
from shardnet.model.buffers import find_buffers
from shardnet.model.checkpoint import Checkpoint
from shardnet.model.codec import torch_dtype
from shardnet.model.kernels import (
    Kernel,
    KernelChoice,
    Linear,
    PlainLinear,
    make_linear,
    make_quantized,
    probe,
    rows_are_exact,
)
from shardnet.model.layers import Norm
from shardnet.model.layout import StageTensors, left_over
from shardnet.model.making import ModelTensor
from shardnet.model.native import NativeProduct, NativeSource, native_kernels
from shardnet.model.native_linear import NativeLinear, PanelPacking, fills_panels
from shardnet.model.pack_cache import PackCache
from shardnet.model.pack_writer import PackWriter
from shardnet.model.quantization import Quantization
from shardnet.model.quantized import QuantizedLinear, pack_all
from shardnet.model.streaming import FilePart, LayerStream
from shardnet.types import DType

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all); what it raises ends the loading."""

_FLOATS = frozenset({"F32", "F16", "BF16"})
_READ_AHEAD_BYTES: Final = 1 << 26
"""What the disk reads at most while tensors are made ready."""


class WeightSource(Protocol):
    """Where a family's file gets its parameters: a checkpoint, or noise (sample_model.py)."""

    def linear(
        self, *names: str, transposed: bool = False, precise: bool = False, wide: bool = False
    ) -> Linear:
        """Join the parameters `NAME.weight` (and `NAME.bias`, where the model has it).

        `precise` keeps them as they are where products are rounded, `wide` is also in float32
        whatever else is computed in.
        """

    def norm(self, name: str, eps: float, offset: float = 0.0) -> Norm:
        """Make a norm of `NAME.weight` and, where the model has it, `NAME.bias`.

        An `offset` is added to the weight, in float32, where the norm stays.
        """

    def table(self, name: str) -> Tensor:
        """Give `NAME.weight` as it is: [rows, E] in the compute dtype."""

    def parameter(self, name: str) -> Tensor:
        """Give the parameter of this whole name as it is, in float32."""


class StageWeights:
    """The tensors of one stage, handed out once each as what a layer needs."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        tensors: StageTensors,
        choice: KernelChoice,
        device: torch.device,
        progress: Progress,
        packs: PackCache | None = None,
        streamed: Sequence[int] = (),
    ) -> None:
        """Check every tensor of the stage by its header, before any is read.

        Products of the `streamed` layers, absolute numbers, stay on disk: `stream` reads them.

        Raises CheckpointError for one that is missing or has the wrong shape or dtype, and for one
        in the checkpoint that the model has no place for.
        """
        self._checkpoint = checkpoint
        self._choice = choice
        self._device = device
        self._progress = progress
        self._packs = packs
        self.writer = PackWriter(packs)
        """What is packed goes to the cache on its thread."""
        self._shapes = tensors.all
        self._head = tensors.head.keys()
        self._shared = tensors.embedding.keys() & tensors.head.keys()
        self._kept: dict[str, Tensor] = {}
        self.stream = LayerStream(find_buffers(device) if streamed else None)
        first = min(tensors.layers, default=0)
        self._streamed = {n: layer - first for layer in streamed for n in tensors.layers[layer]}
        config = checkpoint.config
        for name in self._shapes:
            self._check(name)
        unknown = left_over(config, checkpoint.tensors)
        if unknown:
            raise CheckpointError(
                f"{self._where(checkpoint.tensors[unknown[0]])} ({len(unknown)} such) has no "
                f"place in a {config.family} model; use a checkpoint of the plain architecture"
            )
        self.exact_rows = choice.exact_rows
        """As probed, or 1 if a product of this stage turned out not to keep its rows' bits."""
        self._tested: set[tuple[int, int, DType, type[Linear]]] = set()
        self._coming = {name: False for name in self._shapes if name not in self._streamed}
        """What is to be read, about in this order, and whether the disk has been asked for it."""
        self._done_bytes = 0
        self._total_bytes = sum(checkpoint.tensors[name].size_bytes for name in self._shapes)

    def linear(
        self, *names: str, transposed: bool = False, precise: bool = False, wide: bool = False
    ) -> Linear:
        """Join the parameters `NAME.weight` (and `NAME.bias`, where the model has it).

        `transposed` is for weights stored with the inputs first (GPT-2's Conv1D). `precise` keeps
        them as they are where products are rounded, `wide` is also in float32 whatever else is
        computed in.
        """
        is_head = f"{names[0]}.weight" in self._head
        kind = None if precise or wide else self._choice.rounding(is_head=is_head)
        biases = [self._read(f"{name}.bias") for name in names if f"{name}.bias" in self._shapes]
        choice = self._wide if wide else self._choice
        layer = self._streamed.get(f"{names[0]}.weight")
        if layer is not None and not (precise or wide):
            return self._on_disk(layer, names, biases, kind, transposed=transposed)
        if kind is not None:
            packed, shape = self._packed(names, kind, transposed=transposed)
            linear = make_quantized(packed, shape, biases, self._device, kind)
        else:
            weights = self._weights(names, transposed=transposed)
            linear = make_linear(choice, weights, biases, self._device)
            del weights
        del biases
        self._finish()
        self._test(names[0], linear, choice)
        return linear

    @cached_property
    def _wide(self) -> KernelChoice:
        """How float32 is computed here."""
        return probe(self._device, DType.FLOAT32, None)

    def _on_disk(
        self,
        layer: int,
        names: Sequence[str],
        biases: Sequence[Tensor],
        kind: Quantization | None,
        *,
        transposed: bool,
    ) -> Linear:
        """Make a product whose weights are read when its layer is at work.

        What the library multiplies is packed as it is read, where panels do not go over from one
        weight to the next; what oneDNN does, and what is turned, when its layer is at work.
        """
        if kind is not None:
            packed, shape = self._packed(names, kind, transposed=transposed)
            return self._packed_on_disk(layer, names, packed, shape, biases, kind)
        stored = [self._checkpoint.tensors[f"{name}.weight"] for name in names]
        shape = (sum(tensor.shape[0] for tensor in stored), stored[0].shape[1])
        assert not transposed or len(names) == 1
        native = native_kernels() if self._choice.kernel is Kernel.NATIVE else None
        packing = None
        if native is not None and not transposed and fills_panels([t.shape[0] for t in stored]):
            packing = PanelPacking(native=native, n_in=shape[1])
        parts = [self._part(tensor) for tensor in stored]
        begin = self.stream.reserve(layer, parts, packing)
        n_bytes = sum(part.size_bytes for part in parts)
        for name in names:
            self._skip(f"{name}.weight")
        is_plain = self._choice.kernel is Kernel.PLAIN and not transposed
        make = self._maker(shape, biases, packing, transposed=transposed)
        linear = StreamedLinear(
            self.stream,
            layer,
            begin,
            n_bytes if packing is None else packing.packed_bytes(n_bytes),
            shape[::-1] if transposed else shape,
            make,
            is_ready=is_plain or packing is not None,
            is_native=native is not None,
        )
        self._test_on_disk(names[0], linear, stored, make)
        self._finish()
        return linear

    def _maker(
        self,
        shape: tuple[int, int],
        biases: Sequence[Tensor],
        packing: PanelPacking | None,
        *,
        transposed: bool,
    ) -> Callable[[Tensor], Linear]:
        """Return what makes a product of the bytes that were read, packed if there is `packing`."""
        choice, device = self._choice, self._device
        own = [bias.clone() for bias in biases]
        bias = torch.cat(own).to(device, torch_dtype(choice.dtype)) if own else None

        def make(raw: Tensor) -> Linear:
            if packing is not None:
                return NativeLinear(raw, shape, bias, packing.native)
            weight = raw.view(torch_dtype(choice.stored_dtype)).view(shape)
            if choice.kernel is Kernel.PLAIN and not transposed:
                return PlainLinear(weight, bias, choice.min_rows)
            return make_linear(choice, [weight.T if transposed else weight], own, device)

        return make

    def _test_on_disk(
        self,
        name: str,
        linear: StreamedLinear,
        stored: Sequence[ModelTensor],
        make: Callable[[Tensor], Linear],
    ) -> None:
        """Try once whether products of this shape keep their rows' bits; the library's all do.

        Only for that is anything read now.
        """
        key = (*linear.shape, self._choice.dtype, StreamedLinear)
        if linear.is_native or self.exact_rows <= 1 or key in self._tested:
            return
        self._tested.add(key)
        whole = torch.cat([self._checkpoint.read(tensor.name) for tensor in stored])
        raw = whole.view(-1).view(torch.uint8).to(self._device)
        self._test(name, make(raw), self._choice)

    def _packed_on_disk(
        self,
        layer: int,
        names: Sequence[str],
        packed: Tensor,
        shape: tuple[int, int],
        biases: Sequence[Tensor],
        kind: Quantization,
    ) -> Linear:
        """Make a product of packed weights that the cache keeps. Raises CapacityError unless so."""
        assert self._packs is not None
        path, offset = self._packs.place(names, kind)
        try:
            part = FilePart.of(path, offset, packed.nbytes)
        except CheckpointError as error:
            raise CapacityError(
                f"{path}: rounded weights of layers to be streamed could not be kept there; make "
                "room on that disk (`shardnet cache rm`)"
            ) from error
        begin, packed_shape = self.stream.reserve(layer, [part]), packed.shape
        device = self._device
        bias = torch.cat(list(biases)).to(device, torch.float32, copy=True) if biases else None

        def make(raw: Tensor) -> QuantizedLinear:
            return QuantizedLinear(raw.view(packed_shape), shape, kind, bias)

        made = make(packed.to(device))
        self._test(names[0], made, self._choice)
        self._finish()
        return StreamedLinear(
            self.stream,
            layer,
            begin,
            packed.nbytes,
            shape,
            make,
            is_ready=True,
            is_native=made.is_native,
        )

    def _part(self, tensor: ModelTensor) -> FilePart:
        source = tensor.sources[0]
        path = self._checkpoint.folder / source.file
        return FilePart.of(path, source.offset, source.size_bytes)

    def _test(self, name: str, linear: Linear, choice: KernelChoice) -> None:
        """Find out, once for each shape, whether the product keeps its rows' bits."""
        key = (*linear.shape, choice.dtype, type(linear))
        if self.exact_rows > 1 and key not in self._tested:
            self._tested.add(key)
            if not rows_are_exact(linear, choice, self._device):
                log.warning("%s: rows of a product are not exact in company", name)
                self.exact_rows = 1

    def _weights(self, names: Sequence[str], *, transposed: bool) -> list[Tensor]:
        weights = [self._read(f"{name}.weight") for name in names]
        self._read_ahead()
        return [weight.T for weight in weights] if transposed else weights

    def _packed(
        self, names: Sequence[str], kind: Quantization, *, transposed: bool
    ) -> tuple[Tensor, tuple[int, int]]:
        """Return packed weights and their [N, K], from the cache or packed now and kept there."""
        shapes = [self._shapes[f"{name}.weight"] for name in names]
        n_outs, n_in = [s[0] for s in shapes], shapes[0][1]
        if transposed:
            n_outs, n_in = [s[1] for s in shapes], shapes[0][0]
        shape = (sum(n_outs), n_in)
        packed = self._kept_pack(names, kind, kind.packed_shape(*shape))
        if packed is None:
            packed = pack_all(self._weights(names, transposed=transposed), kind, self._finish)
            self.writer.put(names, kind, packed)
            if self._device.type != "cpu" or f"{names[0]}.weight" in self._streamed:
                self.writer.finish(self._finish)  # or it would stay in memory only to be written
        return packed, shape

    def _kept_pack(
        self, names: Sequence[str], kind: Quantization, shape: tuple[int, int, int]
    ) -> Tensor | None:
        """Return packed weights from the cache, which then need not be read."""
        if self._packs is None:
            return None
        uncounted = [f"{name}.weight" for name in names if f"{name}.weight" not in self._kept]
        stored_bytes = sum(self._checkpoint.tensors[name].size_bytes for name in uncounted)
        packed_bytes, done = math.prod(shape), 0

        def came(n_bytes: int) -> None:
            nonlocal done
            done += n_bytes
            done_bytes = self._done_bytes + stored_bytes * done // packed_bytes
            self._progress(done_bytes, self._total_bytes)

        packed = self._packs.get(names, kind, shape, came)
        if packed is not None:
            for name in names:
                self._skip(f"{name}.weight")
        return packed

    def norm(self, name: str, eps: float, offset: float = 0.0) -> Norm:
        """Make a norm of `NAME.weight` and, where the model has it, `NAME.bias`.

        An `offset` is added to the weight, in float32, where the norm stays.
        """
        with_bias = f"{name}.bias" in self._shapes
        if offset:
            weight = self._read(f"{name}.weight").to(self._device, torch.float32) + offset
        else:
            weight = self._own(f"{name}.weight")
        norm = Norm(
            weight=weight,
            bias=self._own(f"{name}.bias") if with_bias else None,
            eps=eps,
        )
        self._finish()
        return norm

    def table(self, name: str) -> Tensor:
        """Copy `NAME.weight` as it is: [rows, E] in the compute dtype."""
        table = self._own(f"{name}.weight")
        self._finish()
        return table

    def parameter(self, name: str) -> Tensor:
        """Copy the parameter of this whole name, in float32."""
        value = self._read(name).to(self._device, torch.float32, copy=True)
        self._finish()
        return value

    def _own(self, name: str) -> Tensor:
        is_stored = self._checkpoint.tensors[name].dtype is not None
        dtype = torch_dtype(self._choice.dtype)
        return self._read(name).to(self._device, dtype, copy=is_stored)

    def _read(self, name: str) -> Tensor:
        """Make a tensor. A tied table that the stage needs twice is read and counted once."""
        if name in self._kept:
            return self._kept.pop(name)
        self._coming.pop(name, None)
        tensor = self._checkpoint.read(name, torch_dtype(self._choice.dtype), self._came)
        if name in self._shared:
            self._kept[name] = tensor
        return tensor

    def _read_ahead(self) -> None:
        """Have the disk read what comes next, while we pack what is here."""
        room = _READ_AHEAD_BYTES
        for name, is_asked_for in self._coming.items():
            if not is_asked_for:
                self._coming[name] = True
                self._checkpoint.announce(name, room)
            room -= self._checkpoint.tensors[name].size_bytes
            if room <= 0:
                break

    def _came(self, n_bytes: int) -> None:
        """Count bytes that have been read."""
        self._done_bytes += n_bytes
        self._finish()

    def _skip(self, name: str) -> None:
        """Count a tensor that need not be read."""
        self._coming.pop(name, None)
        if self._kept.pop(name, None) is None:
            self._done_bytes += self._checkpoint.tensors[name].size_bytes

    def _finish(self) -> None:
        """Say how far we are."""
        self._progress(self._done_bytes, self._total_bytes)

    def _check(self, name: str) -> None:
        """Hold the header of the tensor `name` against the model's config."""
        tensor = self._checkpoint.tensors.get(name)
        if tensor is None:
            raise CheckpointError(
                f"{self._checkpoint.path}: tensor {name} is missing; fetch the checkpoint again"
            )
        where, expected = self._where(tensor), self._shapes[name]
        if tensor.shape != expected:
            raise CheckpointError(
                f"{where} has shape {list(tensor.shape)}, the config asks for {list(expected)}; "
                "config and tensors are of different models: fetch the checkpoint again"
            )
        if tensor.dtype is not None and tensor.dtype not in _FLOATS:
            raise CheckpointError(
                f"{where} is stored as {tensor.dtype}; supported: {', '.join(sorted(_FLOATS))}; "
                "use a checkpoint that is not quantized, or one whose config says how it is"
            )

    def _where(self, tensor: ModelTensor) -> str:
        source = tensor.sources[0]
        return f"{self._checkpoint.folder / source.file}: tensor {source.name}"


class StreamedLinear:
    """A product whose weights are in one of the buffers of `stream` while its layer computes."""

    def __init__(
        self,
        stream: LayerStream,
        layer: int,
        begin: int,
        size_bytes: int,
        shape: tuple[int, int],
        make: Callable[[Tensor], Linear],
        *,
        is_ready: bool,
        is_native: bool,
    ) -> None:
        """Take where the weights begin in a buffer, and what makes a product of these bytes.

        With `is_ready` it multiplies with these very bytes; else it packs them, whenever they have
        been read, and the product goes with its layer.
        """
        self._stream = stream
        self._layer = layer
        self._begin = begin
        self._size_bytes = size_bytes
        self._shape = shape
        self._make = make
        self._is_ready = is_ready
        self._is_native = is_native
        self._by_buffer: dict[int, Linear] = {}

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self._shape

    @property
    def is_native(self) -> bool:
        """Whether the compiled library multiplies."""
        return self._is_native

    def native_product(self) -> NativeProduct:
        """Return what multiplies with the weights that are there now."""
        product = self._at_hand()
        assert isinstance(product, NativeSource), "is_native says so"
        return product.native_product()

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply every row."""
        return self._at_hand()(rows)

    def _at_hand(self) -> Linear:
        """Return the product of the weights that have been read for the layer at work."""
        buffer = self._stream.buffer_of(self._layer)
        made, key = self._stream.made, self._begin
        if self._is_ready:
            made, key = self._by_buffer, buffer
        if key not in made:
            made[key] = self._make(self._stream.weights(self._begin, self._size_bytes, buffer))
        return made[key]
