"""The types that weights can be quantised to, and how many bytes they take then.

Knows sizes. Must not know torch: the planner asks here. kernels/quantized_linear.py quantises.
"""

from __future__ import annotations

import enum
from typing import Final

from shardnet.errors import UsageError
from shardnet.model.config.panel_form import PanelForm

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
    def form(self) -> PanelForm:
        """The form of the quantised weights."""
        return _FORMS[self]

    @property
    def bits(self) -> int:
        """Bits of one weight, without its part of the scale."""
        return self.form.bits

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.form.group

    @property
    def of_head(self) -> Quantization:
        """The LM head's type: its errors go straight into the logits."""
        return Quantization.INT8


_FORMS: Final = {
    Quantization.INT8: PanelForm(name="int8", bits=8, group=64, offset=128),
    Quantization.INT4: PanelForm(name="int4", bits=4, group=32, offset=8),
}
