"""Packs stored weights into panels, and unpacks them, with torch and with the compiled library.

Knows the layout (config/panel_form.py). Must not know files, models, nor who stores what:
checkpoint/formats gives rows as `Codes` or as the blocks of a GGUF type.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardnet.model.config.panel_form import PanelForm
from shardnet.model.kernels.stored_rows import StoredRows


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
