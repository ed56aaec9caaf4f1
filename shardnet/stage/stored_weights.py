"""Makes linears of stored weights: plain floats, quantised while loading, or packed as they are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardnet.checkpoint.tensors.model_tensor import ModelTensor
from shardnet.errors import CapacityError, CheckpointError
from shardnet.model.config.panel_form import PANEL, PanelForm, Quantization
from shardnet.model.kernels.codec import torch_dtype
from shardnet.model.kernels.codes import PackedWeight
from shardnet.model.kernels.library import native_kernels
from shardnet.model.kernels.linear import KernelChoice, Linear, join_biases, linear_of_panels
from shardnet.model.kernels.panel_linear import PanelLinear, PanelPacking, fills_panels
from shardnet.model.kernels.panels import Panels, pack_into
from shardnet.model.kernels.quantized_linear import pack_all
from shardnet.stage.estimate.stored_dtype import STORED_FLOATS
from shardnet.stage.packs.pack_cache import PackCache
from shardnet.stage.packs.pack_writer import PackWriter
from shardnet.stage.streaming.buffers import FilePart
from shardnet.stage.streaming.streamed_linear import Place, StreamedLinear
from shardnet.stage.tensor_reader import TensorReader


class PlainWeights:
    """The weights that `reader` reads."""

    def __init__(self, reader: TensorReader) -> None:
        self._reader = reader

    def packed_while_read(
        self, weights: Sequence[str], form: PanelForm | None, *, transposed: bool
    ) -> Tensor | None:
        """Read plain weights and pack or quantise them to a form; None where that takes two steps.

        It does without the compiled library, and if they are not stored as rows of floats that
        begin with a panel each.
        """
        native = native_kernels()
        if form is None or native is None or transposed or any(map(self.is_packed, weights)):
            return None
        n_outs = [self._reader.shape(name)[0] for name in weights]
        if not fills_panels(n_outs) or not all(map(self._reader.is_read_by_rows, weights)):
            return None
        shape = self.shape(weights)
        packed = self._reader.panel_memory.take(form.packed_shape(*shape))
        packings = [
            PanelPacking(native=native, n_in=shape[1], dtype=self.stored_type(name), form=form)
            for name in weights
        ]
        self._reader.pack_while_reading(list(zip(weights, packings, strict=True)), packed)
        return packed

    def stored_type(self, name: str) -> torch.dtype:
        """Return the type that a parameter is stored in; uint8 for one that has to be computed."""
        stored = STORED_FLOATS.get(self._reader.tensor(name).dtype)
        return torch_dtype(stored) if stored is not None else torch.uint8

    def shape(self, weights: Sequence[str]) -> tuple[int, int]:
        """Return the shape of joined weights."""
        shapes = [self._reader.shape(name) for name in weights]
        return sum(shape[0] for shape in shapes), shapes[0][1]

    def is_packed(self, weight: str) -> bool:
        """Whether a weight is computed with in the packed form in which it is stored."""
        return self._reader.packed(weight) is not None

    def read(self, names: Sequence[str], *, transposed: bool) -> list[Tensor]:
        """Read parameters whole: [N, K] each, with `transposed` where they are stored as [K, N]."""
        weights = [self._reader.read(name) for name in names]
        self._reader.read_ahead()
        return [weight.T for weight in weights] if transposed else weights


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


def make_panels(reader: TensorReader, names: Sequence[str], device: torch.device) -> list[Panels]:
    """Pack parameters [N_i, K], all of which are stored packed: in order, as few as possible.

    Those of one form share panels, if no panel has outputs of two of them.
    """
    made = []
    for run in runs_of(reader, names):
        shapes = [reader.shape(name) for name in run]
        shape = (sum(shape[0] for shape in shapes), shapes[0][1])
        weight = reader.packed(run[0])
        assert weight is not None
        packed = reader.panel_memory.take(weight.form.packed_shape(*shape))
        order, end = None, 0
        if native_kernels() is not None and all(map(reader.is_read_by_rows, run)):
            reader.pack_while_reading(
                [(name, RowPacking.of(reader.tensor(name))) for name in run], packed
            )
        else:
            for name, (n_out, _) in zip(run, shapes, strict=True):
                begin, end = end, end + -(-n_out // PANEL)
                order = reader.pack(name, packed[begin:end])
                reader.read_ahead()
        panels = Panels(packed=packed, form=weight.form, shape=shape, input_order=order)
        made.append(panels.to(device))
    return made


def runs_of(reader: TensorReader, names: Sequence[str]) -> Iterator[list[str]]:
    """Split `names` of packed parameters into those that can share panels."""
    run: list[str] = []
    for name in names:
        last, weight = reader.packed(run[-1]) if run else None, reader.packed(name)
        assert weight is not None
        shares = (
            last is not None
            and last.form == weight.form
            and last.input_order is weight.input_order is None
            and reader.shape(run[-1])[0] % PANEL == 0
        )
        if run and not shares:
            yield run
            run = []
        run.append(name)
    yield run


def stream_panels(
    reader: TensorReader,
    names: Sequence[str],
    bias: Tensor | None,
    place: Place,
    device: torch.device,
) -> StreamedLinear:
    """Make a linear of packed parameters [N_i, K] that are read at their `place` for every pass.

    They are packed while they are read.
    """
    forms, shapes, begins = [], [], []
    end = 0
    for run in runs_of(reader, names):
        weights = [reader.tensor(name) for name in run]
        forms.append(RowPacking.of(weights[0]).form)
        shapes.append((sum(w.shape[0] for w in weights), weights[0].shape[1]))
        parts = [(part, RowPacking.of(w)) for w in weights for part in reader.parts(w.name)]
        begins.append(place.stream.reserve_each(place.layer, parts))
        end = begins[-1] + forms[-1].packed_bytes(*shapes[-1])

    def make(read: Tensor) -> PanelLinear:
        panels = []
        for form, shape, begin in zip(forms, shapes, begins, strict=True):
            own = read[begin - begins[0] :][: form.packed_bytes(*shape)]
            own = own.view(form.packed_shape(*shape))
            panels.append(Panels(packed=own, form=form, shape=shape))
        return PanelLinear(panels, bias)

    return StreamedLinear(
        place,
        begins[0],
        end - begins[0],
        (sum(n_out for n_out, _ in shapes), shapes[0][1]),
        make,
        is_ready=True,
        is_native=device.type == "cpu" and native_kernels() is not None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPacking:
    """Packs stored rows of a parameter, as bytes, on the calling thread.

    It implements `Packing` of streaming/buffers.py. A parameter whose rows have another order
    is packed as a whole.
    """

    weight: PackedWeight
    n_in: int
    row_bytes: int
    unit_bytes: int

    @classmethod
    def of(cls, tensor: ModelTensor) -> RowPacking:
        """Describe the packing of a parameter, each of whose stored tensors has rows of blocks."""
        assert tensor.packed is not None
        n_out, n_in = tensor.shape
        row_bytes = tensor.size_bytes // n_out
        unit_bytes = PANEL * row_bytes if tensor.packed.in_order else tensor.size_bytes
        return cls(weight=tensor.packed, n_in=n_in, row_bytes=row_bytes, unit_bytes=unit_bytes)

    @property
    def form(self) -> PanelForm:
        """The form that rows are packed to."""
        return self.weight.form

    def packed_bytes(self, size_bytes: int) -> int:
        """Return the packed size of `size_bytes` of rows."""
        return self.form.packed_bytes(size_bytes // self.row_bytes, self.n_in)

    @torch.inference_mode()  # as for the buffers' allocation
    def __call__(self, stored: Tensor, packed: Tensor) -> None:
        """Pack the rows in `stored`, uint8, into `packed`, uint8."""
        rows = stored.view(-1, self.row_bytes)
        n_rows = rows.shape[0]
        panels = packed.view(self.form.packed_shape(n_rows, self.n_in))
        pack_into(panels, self.weight.rows([rows], 0, n_rows), self.form, n_threads=1)


class JoinedLinear:
    """Linear layers with the same inputs, their outputs one behind the other."""

    is_native = False

    def __init__(self, parts: Sequence[Linear]) -> None:
        self._parts = tuple(parts)
        self.shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
        self.weights_stay = all(part.weights_stay for part in parts)

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """Those of all parts."""
        return tuple(weight for part in self._parts for weight in part.weights)

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply every row."""
        return torch.cat([part(rows) for part in self._parts], dim=-1)
