"""Reads weights that are stored as plain floats: whole, or packed while they are read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardnet.model.config.panel_form import PanelForm
from shardnet.model.kernels.codec import torch_dtype
from shardnet.model.kernels.float_linear import PanelPacking, fills_panels
from shardnet.model.kernels.library import native_kernels
from shardnet.stage.estimate.stored_dtype import STORED_FLOATS
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
        packed = torch.empty(form.packed_shape(*shape), dtype=torch.uint8)
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
