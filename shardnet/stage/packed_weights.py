"""Makes linears and tables of weights that stay in the form they are stored in.

Knows which weights share panels, and how packed and plain ones are joined. Must not know forward
passes, nor how tensors are found and counted (tensor_reader.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardnet.checkpoint.tensors.model_tensor import ModelTensor
from shardnet.model.config.panel_form import PANEL, PanelForm
from shardnet.model.kernels.codes import PackedWeight
from shardnet.model.kernels.library import native_kernels
from shardnet.model.kernels.linear import Linear
from shardnet.model.kernels.panel_linear import PanelLinear
from shardnet.model.kernels.panels import Panels, pack_into
from shardnet.stage.streaming.streamed_linear import Place, StreamedLinear
from shardnet.stage.tensor_reader import TensorReader


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

    It implements `Packing` of streaming/file_parts.py. A parameter whose rows have another order
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

    @property
    def weights_stay(self) -> bool:
        """Whether the weights stay at one address for as long as the linear is used."""
        return all(part.weights_stay for part in self._parts)

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """Those of all parts."""
        return tuple(weight for part in self._parts for weight in part.weights)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return sum(part.shape[0] for part in self._parts), self._parts[0].shape[1]

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply every row."""
        return torch.cat([part(rows) for part in self._parts], dim=-1)
