"""Rows of weights as codes, scales and minimums: what every stored form can be read as.

Must not know files, who stores weights so, nor how they are packed. Imports no torch: opening a
checkpoint says how its weights are packed, without reading any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardnet.model.config.panel_form import PanelForm

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Codes:
    """Rows of weights as codes, scales and minimums.

    `codes` are uint8 [N, K], `scales` [N, groups] in the form's type (torch.uint8 where torch has
    none), `minimums` likewise or None, `block_scales` float16 [N, blocks, 1 or 2], or None.
    """

    codes: Tensor
    scales: Tensor
    minimums: Tensor | None = None
    block_scales: Tensor | None = None

    @classmethod
    def join(cls, parts: Sequence[Codes]) -> Codes:
        """Join rows that have minimums and block scales alike."""
        import torch

        def joined(name: str) -> Tensor | None:
            each = [getattr(part, name) for part in parts]
            return None if each[0] is None else torch.cat(each)

        codes, scales = joined("codes"), joined("scales")
        assert codes is not None
        assert scales is not None
        return cls(
            codes=codes,
            scales=scales,
            minimums=joined("minimums"),
            block_scales=joined("block_scales"),
        )

    def contiguous(self) -> Codes:
        """Return the same rows in memory without gaps."""
        minimums, outer = self.minimums, self.block_scales
        return Codes(
            codes=self.codes.contiguous(),
            scales=self.scales.contiguous(),
            minimums=None if minimums is None else minimums.contiguous(),
            block_scales=None if outer is None else outer.contiguous(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufRows:
    """Rows of weights in the blocks of a GGUF type: uint8 [N, bytes of a row]."""

    type: str
    rows: Tensor


StoredRows = Codes | GgufRows
"""Rows of weights as some format stores them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """How the stored tensors of a parameter [N, K] become panels of a form.

    `rows(stored, begin, end)` gives the rows [begin, end) of stored tensors, which it must not
    change. `input_order(stored)`, where groups are not of consecutive inputs, is the order in which
    the form has the inputs, int32 [K], None after all if they are in order: column i of the panels
    is of input order[i]. With `in_order` its rows are those of its stored tensors, one behind the
    other, and any of them can be packed while they are read. With
    `is_cut` they are some rows of what its stored tensors have.
    """

    form: PanelForm
    rows: Callable[[Sequence[Tensor], int, int], StoredRows]
    input_order: Callable[[Sequence[Tensor]], Tensor | None] | None = None
    in_order: bool = False
    is_cut: bool = False
