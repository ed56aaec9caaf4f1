"""Rows of weights as formats store them, on their way into panels (kernels/panels.py).

Must not know files, nor which format stores what. Imports no torch: opening a checkpoint says how
its weights are packed, without reading any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardnet.model.config.panel_form import PanelForm
from shardnet.model.kernels.codes import Codes

if TYPE_CHECKING:
    from torch import Tensor


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
