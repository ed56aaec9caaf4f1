"""The types that weights can be quantised to, and how many bytes they take then.

Knows sizes. Must not know torch: the planner asks here. kernels/quantized_linear.py quantises.
"""

from __future__ import annotations

import enum
from typing import Final

from shardnet.errors import UsageError

PANEL: Final = 16
"""Outputs whose weights are interleaved; see kernels/quantized_linear.py."""
SCALE_BYTES: Final = 2 * PANEL
"""A group's float16 scales, one for each output of a panel."""
UNPACKED_PANELS: Final = 64
"""Panels that torch unpacks at a time where there is no compiled matmul."""


class Quantization(enum.Enum):
    """The integers that weights are quantised to, in groups that share a scale."""

    INT8 = "int8"
    INT4 = "int4"

    @classmethod
    def named(cls, name: str) -> Quantization | None:
        """Return the type called `name`, None for "" and "none". Raises UsageError for others."""
        if name in ("", "none"):
            return None
        try:
            return cls(name)
        except ValueError:
            raise UsageError(f"--quant {name}: choose none, int8 or int4") from None

    @property
    def bits(self) -> int:
        """Bits of one weight, without its part of the scale."""
        return 8 if self is Quantization.INT8 else 4

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return 64 if self is Quantization.INT8 else 32

    @property
    def of_head(self) -> Quantization:
        """The LM head's type: its errors go straight into the logits."""
        return Quantization.INT8

    def packed_shape(self, n_out: int, n_in: int) -> tuple[int, int, int]:
        """Return (panels, groups, bytes of a group of a panel) of [n_out, n_in] weights."""
        group_bytes = SCALE_BYTES + PANEL * self.group * self.bits // 8
        return -(-n_out // PANEL), -(-n_in // self.group), group_bytes

    def packed_bytes(self, n_out: int, n_in: int) -> int:
        """Return the bytes that [n_out, n_in] weights take."""
        panels, groups, group_bytes = self.packed_shape(n_out, n_in)
        return panels * groups * group_bytes
