"""What a stage's layers are made of: products, norms and tables of a checkpoint's tensors.

Knows which parameters become which kind of product, and where packed ones are kept. Must not know
forward passes, nor how tensors are found and counted (tensor_reader.py): a family asks for its
parameters by name and gets what shares no memory with the file.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.errors import CapacityError, CheckpointError
from shardnet.model.config.quantization import Quantization
from shardnet.model.families.stage_tensors import StageTensors
from shardnet.model.kernels.codec import torch_dtype
from shardnet.model.kernels.linear import (
    KernelChoice,
    Linear,
    join_biases,
    make_linear,
    probe,
    rows_are_exact,
)
from shardnet.model.kernels.quantized_linear import QuantizedLinear, pack_all
from shardnet.model.layers.norms import Norm
from shardnet.stage.pack_cache import PackCache
from shardnet.stage.pack_writer import PackWriter
from shardnet.stage.streaming.buffers import find_buffers
from shardnet.stage.streaming.layer_stream import FilePart, LayerStream
from shardnet.stage.streaming.streamed_linear import StoredProduct, StreamedLinear
from shardnet.stage.tensor_reader import Progress, TensorReader
from shardnet.types import DType

log = logging.getLogger(__name__)


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
        Raises what a TensorReader raises.
        """
        self._choice = choice
        self._device = device
        self._packs = packs
        self.writer = PackWriter(packs)
        """What is packed goes to the cache on its thread."""
        self._head = tensors.head.keys()
        self.stream = LayerStream(find_buffers(device) if streamed else None)
        first = min(tensors.layers, default=0)
        self._streamed = {n: layer - first for layer in streamed for n in tensors.layers[layer]}
        dtype = torch_dtype(choice.dtype)
        self._reader = TensorReader(checkpoint, tensors, dtype, progress, self._streamed)
        self._company = _CompanyTests(choice.exact_rows, device)

    @property
    def exact_rows(self) -> int:
        """As probed, or 1 if a product of this stage turned out not to keep its rows' bits."""
        return self._company.exact_rows

    def linear(
        self, *names: str, transposed: bool = False, precise: bool = False, wide: bool = False
    ) -> Linear:
        """Join the parameters `NAME.weight` (and `NAME.bias`, where the model has it).

        `transposed` is for weights stored with the inputs first (GPT-2's Conv1D). `precise` keeps
        them as they are where products are rounded, `wide` is also in float32 whatever else is
        computed in.
        """
        weights = [f"{name}.weight" for name in names]
        biases = [f"{name}.bias" for name in names if self._reader.has(f"{name}.bias")]
        choice, kind, layer = self._choice, None, None
        if wide:
            choice = self._wide
        elif not precise:
            kind = choice.rounding(is_head=weights[0] in self._head)
            layer = self._streamed.get(weights[0])
        bias = [self._reader.read(name) for name in biases]
        if kind is not None:
            linear = self._rounded(names, bias, kind, layer, transposed=transposed)
        elif layer is not None:
            linear = self._on_disk(weights, bias, layer, transposed=transposed)
        else:
            whole = self._weights(weights, transposed=transposed)
            linear = make_linear(choice, whole, bias, self._device)
            del whole
            self._company.test(names[0], linear, choice)
        del bias
        self._reader.report()
        return linear

    @cached_property
    def _wide(self) -> KernelChoice:
        """How float32 is computed here."""
        return probe(self._device, DType.FLOAT32, None)

    def _on_disk(
        self, names: Sequence[str], biases: Sequence[Tensor], layer: int, *, transposed: bool
    ) -> Linear:
        """Make a product whose weights are read when its layer is at work."""
        shapes = [self._reader.shape(name) for name in names]
        product = StoredProduct.of(
            self._choice, self._device, shapes, biases, transposed=transposed
        )
        parts = [self._reader.part(name) for name in names]
        linear = StreamedLinear(
            self.stream,
            layer,
            self.stream.reserve(layer, parts, product.packing),
            product.read_bytes(sum(part.size_bytes for part in parts)),
            product.shape,
            product.make,
            is_ready=product.is_ready,
            is_native=product.is_native,
        )
        self._reader.skip(names)
        if not product.is_native and self._company.is_new(linear, self._choice):
            # Only then is anything read now: the library's products need not be tried.
            stored = torch.cat([self._reader.again(name) for name in names])
            made = product.make(stored.view(-1).view(torch.uint8).to(self._device))
            self._company.test(names[0], made, self._choice)
        return linear

    def _rounded(
        self,
        names: Sequence[str],
        biases: Sequence[Tensor],
        kind: Quantization,
        layer: int | None,
        *,
        transposed: bool,
    ) -> Linear:
        """Make a product of packed weights; those of a streamed `layer` stay in the cache."""
        shapes = [self._reader.shape(f"{name}.weight") for name in names]
        if transposed:
            shapes = [shape[::-1] for shape in shapes]
        shape = (sum(shape[0] for shape in shapes), shapes[0][1])
        packed = self._packed(
            names, kind, shape, transposed=transposed, is_streamed=layer is not None
        )
        bias = join_biases(biases, self._device, torch.float32)
        made = QuantizedLinear(packed.to(self._device), shape, kind, bias)
        self._company.test(names[0], made, self._choice)
        if layer is None:
            return made
        part, packed_shape = self._kept_part(names, kind, packed), packed.shape

        def make(read: Tensor) -> QuantizedLinear:
            return QuantizedLinear(read.view(packed_shape), shape, kind, bias)

        return StreamedLinear(
            self.stream,
            layer,
            self.stream.reserve(layer, [part]),
            packed.nbytes,
            shape,
            make,
            is_ready=True,
            is_native=made.is_native,
        )

    def _kept_part(self, names: Sequence[str], kind: Quantization, packed: Tensor) -> FilePart:
        """Name packed weights in the cache. Raises CapacityError where it could not keep them."""
        assert self._packs is not None
        path, offset = self._packs.place(names, kind)
        try:
            return FilePart.of(path, offset, packed.nbytes)
        except CheckpointError as error:
            raise CapacityError(
                f"{path}: rounded weights of layers to be streamed could not be kept there; make "
                "room on that disk (`shardnet cache rm`)"
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
        """Return packed weights of `shape` (N, K), from the cache or packed now and kept there."""
        weights = [f"{name}.weight" for name in names]
        packed_shape = kind.packed_shape(*shape)
        if self._packs is not None:
            came = self._reader.instead_of(weights, math.prod(packed_shape))
            kept = self._packs.get(names, kind, packed_shape, came)
            if kept is not None:
                self._reader.skip(weights)
                return kept
        packed = pack_all(self._weights(weights, transposed=transposed), kind, self._reader.report)
        self.writer.put(names, kind, packed)
        if is_streamed or self._device.type != "cpu":
            self.writer.finish(self._reader.report)  # else it would stay in memory to be written
        return packed

    def _weights(self, names: Sequence[str], *, transposed: bool) -> list[Tensor]:
        weights = [self._reader.read(name) for name in names]
        self._reader.read_ahead()
        return [weight.T for weight in weights] if transposed else weights

    def norm(self, name: str, eps: float, offset: float = 0.0) -> Norm:
        """Make a norm of `NAME.weight` and, where the model has it, `NAME.bias`.

        An `offset` is added to the weight, in float32, where the norm stays.
        """
        with_bias = self._reader.has(f"{name}.bias")
        if offset:
            weight = self._reader.read(f"{name}.weight").to(self._device, torch.float32) + offset
        else:
            weight = self._own(f"{name}.weight")
        norm = Norm(
            weight=weight,
            bias=self._own(f"{name}.bias") if with_bias else None,
            eps=eps,
        )
        self._reader.report()
        return norm

    def table(self, name: str) -> Tensor:
        """Copy `NAME.weight` as it is: [rows, E] in the compute dtype."""
        table = self._own(f"{name}.weight")
        self._reader.report()
        return table

    def parameter(self, name: str) -> Tensor:
        """Copy the parameter of this whole name, in float32."""
        value = self._reader.read(name).to(self._device, torch.float32, copy=True)
        self._reader.report()
        return value

    def _own(self, name: str) -> Tensor:
        return self._reader.own(name, self._device, torch_dtype(self._choice.dtype))


class _CompanyTests:
    """Finds out, once for each kind of product, whether it keeps its rows' bits in company."""

    def __init__(self, exact_rows: int, device: torch.device) -> None:
        """Begin with the rows that were probed."""
        self.exact_rows = exact_rows
        self._device = device
        self._seen: set[tuple[int, int, DType, type[Linear]]] = set()

    def is_new(self, linear: Linear, choice: KernelChoice) -> bool:
        """Say, once, that a product of its kind has still to be tested."""
        key = (*linear.shape, choice.dtype, type(linear))
        if self.exact_rows == 1 or key in self._seen:
            return False
        self._seen.add(key)
        return True

    def test(self, name: str, linear: Linear, choice: KernelChoice) -> None:
        """Test a product unless one of its kind has been."""
        if self.is_new(linear, choice) and not rows_are_exact(linear, choice, self._device):
            log.warning("%s: rows of a product are not exact in company", name)
            self.exact_rows = 1
