"""Packs stored weights into panels, and unpacks them, with torch and with the compiled library.

Knows the layout (config/panel_form.py). Must not know files, models, nor who stores what:
checkpoint/formats gives rows as `Codes` or as the blocks of a GGUF type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardnet.model.config.panel_form import PanelForm


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
    change. `input_order(stored)`, where groups are not of consecutive inputs, is the order int64 [K]
    in which the form has the inputs: weight column i is of input order[i].
    """

    form: PanelForm
    rows: Callable[[Sequence[Tensor], int, int], StoredRows]
    input_order: Callable[[Sequence[Tensor]], Tensor] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Panels:
    """Packed weights of `shape` (N, K): uint8 [panels, blocks, bytes of a block]."""

    packed: Tensor
    form: PanelForm
    shape: tuple[int, int]
    input_order: Tensor | None = None


def pack_into(packed: Tensor, rows: StoredRows, form: PanelForm) -> None:
    """Pack rows into `packed`, uint8 [panels, blocks, bytes of a block], all of it.

    Raises ValueError for rows or memory of another size.
    """
    raise NotImplementedError


def unpack(panels: Panels, dtype: torch.dtype) -> Tensor:
    """Compute the weights [N, K] in `dtype`, columns in the form's order of inputs."""
    raise NotImplementedError


def look_up(panels: Panels, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute the rows `ids` [T] of the weights: [T, K] in `dtype`, for embeddings."""
    raise NotImplementedError
