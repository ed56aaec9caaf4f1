"""Rows of weights as codes, scales and minimums: what every stored form can be read as.

Must not know who stores weights so, nor how they are packed. Imports no torch (stored_rows.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
