"""Makes linears and tables of weights that stay in the form they are stored in.

Knows which weights share panels, and how packed and plain ones are joined. Must not know forward
passes, nor how tensors are found and counted (tensor_reader.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shardnet.model.config.panel_form import PANEL
from shardnet.model.kernels.linear import Linear
from shardnet.model.kernels.panels import Panels
from shardnet.stage.tensor_reader import TensorReader


def make_panels(reader: TensorReader, names: Sequence[str], device: torch.device) -> list[Panels]:
    """Pack parameters [N_i, K], all of which are stored packed: in order, as few as possible.

    Those of one form share panels, if no panel has outputs of two of them.
    """
    made = []
    for run in _runs(reader, names):
        shapes = [reader.shape(name) for name in run]
        shape = (sum(shape[0] for shape in shapes), shapes[0][1])
        weight = reader.packed(run[0])
        assert weight is not None
        packed = torch.empty(weight.form.packed_shape(*shape), dtype=torch.uint8)
        order, end = None, 0
        for name, (n_out, _) in zip(run, shapes, strict=True):
            begin, end = end, end + -(-n_out // PANEL)
            order = reader.pack(name, packed[begin:end])
            reader.read_ahead()
        panels = Panels(packed=packed, form=weight.form, shape=shape, input_order=order)
        made.append(panels.to(device))
    return made


def _runs(reader: TensorReader, names: Sequence[str]) -> Iterator[list[str]]:
    """Split `names` into those that can share panels."""
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


class JoinedLinear:
    """Linear layers with the same inputs, their outputs one behind the other."""

    weights_stay = True
    is_native = False

    def __init__(self, parts: Sequence[Linear]) -> None:
        self._parts = tuple(parts)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return sum(part.shape[0] for part in self._parts), self._parts[0].shape[1]

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply every row."""
        return torch.cat([part(rows) for part in self._parts], dim=-1)
