"""The forms of packed linear weights: codes, scales, layout, and sizes in bytes.

Knows sizes and numbers. Must not know torch or files: the planner uses it. kernels/panels.py packs
and unpacks, csrc/ multiplies.

A weight is `scale * code + minimum`, where the code is an integer of a few bits (minus `offset`, or
looked up in `book`) or a narrow float. Scales and minimums belong to a group of consecutive inputs
of one output. Where they are integers, they are multiplied by two float16 of the block they are in:
`scale = d * s`, `minimum = -m * dmin`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from shardnet.errors import UsageError

PANEL: Final = 16
"""Outputs whose weights are interleaved in one panel."""
UNIT: Final = 32
"""Inputs whose codes are packed together."""
_LEVELS_GROUP: Final = 128
"""Inputs that share a token's int8 scale, in forms whose scales are integers."""


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
        """Bits of one weight; scales are not counted."""
        return self.form.bits

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.form.group

    @property
    def of_head(self) -> Quantization:
        """The LM head's type: always int8, since its errors go straight into the logits."""
        return Quantization.INT8


class Code(enum.IntEnum):
    """What the bits of a weight mean."""

    LINEAR = 0
    """An unsigned integer, minus the form's offset."""
    BOOK = 1
    """An index into the form's book of 16 int8."""
    E4M3 = 2
    """An 8-bit float with 4 bits of exponent, no infinities (OCP FP8)."""
    E5M2 = 3
    """An 8-bit float with 5 bits of exponent: the upper half of a float16."""
    FLOAT_BOOK = 4
    """An index into the form's book of 16 float32."""
    BFLOAT16 = 5
    FLOAT16 = 6
    FLOAT32 = 7


class Scale(enum.IntEnum):
    """How a group's scale is stored."""

    FLOAT16 = 0
    BFLOAT16 = 1
    FLOAT32 = 2
    EXPONENT = 3
    """uint8: the power of two 2 ** (e - 127) (OCP Microscaling E8M0)."""
    FLOAT8 = 4
    """uint8: E4M3."""
    UINT8 = 5
    """uint8, times the block's float16."""
    INT8 = 6
    """int8, times the block's float16."""
    NIBBLES = 7
    """uint8: scale in the low half, minimum in the high half, each times the block's float16."""

    @property
    def bytes(self) -> int:
        """Bytes of one scale."""
        return {Scale.FLOAT16: 2, Scale.BFLOAT16: 2, Scale.FLOAT32: 4}.get(self, 1)


class Minimum(enum.IntEnum):
    """How a group's minimum is stored."""

    NONE = 0
    STORED = 1
    """Like the scale: added as it is, or subtracted where it is an integer times a float16."""
    ZERO_POINT = 2
    """uint8: the integer that stands for zero, so that the minimum is -zero * scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelForm:
    """One form of packed weights.

    `bits` of a code: 2, 3, 4, 5, 6 or 8; of floats 4, 8, 16 or 32. `group` inputs share a scale: 16
    or a multiple of 32. `block` inputs share the float16 that integer scales are multiplied by: a
    multiple of 32, 0 where scales are floats. All scales are multiplied by `factor`, a power of 2.

    Packed weights are uint8 [panels, blocks, bytes of a block]. A panel is 16 outputs. A block is
    `block` inputs, else a group, else 32 inputs (two groups of 16); of a block first 16 float16 d
    (and 16 float16 dmin) if it has them, then by group 16 scales, then by group 16 minimums, then
    the codes in units of 32 inputs, 64 bytes for each bit. Units hold *lines* of 64 bytes: [16
    outputs][4 inputs]. The byte of a line holds one code of 8 bits; or two codes of 4 bits, that of
    the next four inputs in the high half; or four of 2 bits; or eight of 1 bit. Codes of 6 bits are
    lines of the low 4, then lines of the high 2; of 5 bits, 4 and 1; of 3 bits, 2 and 1. Floats are
    not interleaved by four: a unit is [32 inputs][16 outputs], or with 4 bits [16 pairs of
    inputs][16 outputs]. The last panel and the last block are padded with zeros.

    Floats of 16 bits have neither groups nor blocks: a panel is [pairs of inputs][16 outputs][2].
    Nor have those of 32 bits: a panel is [inputs][16 outputs].
    """

    name: str
    bits: int
    group: int
    scale: Scale = Scale.FLOAT16
    minimum: Minimum = Minimum.NONE
    offset: int = 0
    book: tuple[float, ...] = ()
    block: int = 0
    factor: float = 1.0
    code: Code = Code.LINEAR

    @property
    def block_inputs(self) -> int:
        """Inputs of a block."""
        return 32 // self.bits if self.is_plain else self.block or max(self.group, UNIT)

    @property
    def block_groups(self) -> int:
        """Groups of a block."""
        return self.block_inputs // self.group

    @property
    def has_minimum(self) -> bool:
        """Whether a minimum is added to weights."""
        return self.minimum is not Minimum.NONE or self.scale is Scale.NIBBLES

    @property
    def is_float(self) -> bool:
        """Whether codes are floats; tokens are then not quantised to int8."""
        return self.code not in (Code.LINEAR, Code.BOOK)

    @property
    def is_plain(self) -> bool:
        """Whether weights are floats without groups or scales."""
        return self.bits >= 16

    @property
    def minimum_bytes(self) -> int:
        """Bytes of one stored minimum."""
        if self.minimum is Minimum.NONE:
            return 0
        return 1 if self.minimum is Minimum.ZERO_POINT else self.scale.bytes

    @property
    def block_scales(self) -> int:
        """Number of float16 scales of each output in a block: d, and dmin if it has minimums."""
        return 0 if not self.block else 2 if self.has_minimum else 1

    @property
    def header_bytes(self) -> int:
        """Bytes of a block before its codes."""
        if self.is_plain:
            return 0
        entry = self.scale.bytes + self.minimum_bytes
        return PANEL * (2 * self.block_scales + self.block_groups * entry)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.header_bytes + self.block_inputs * PANEL * self.bits // 8

    @property
    def has_levels(self) -> bool:
        """Whether the sums of a block's groups are scaled as integers, before they become floats.

        Impossible with both minimums and an offset or a book: kernels keep one sum of inputs, which
        corrects for either.
        """
        is_biased = self.offset != 0 or self.code is Code.BOOK
        return (
            self.block > 0
            and self.block % _LEVELS_GROUP == 0
            and self.bits < 8
            and not self.is_float
            and self.minimum is not Minimum.ZERO_POINT
            and self.scale in (Scale.UINT8, Scale.INT8, Scale.NIBBLES)
            and self.group <= UNIT
            and not (is_biased and self.has_minimum)
        )

    @property
    def has_kernel(self) -> bool:
        """Whether kernels support this group size: multiples of a unit, or half of one for some
        codes.
        """
        if self.group % UNIT == 0:
            return True
        takes_halves = self.code is Code.BOOK or (
            self.code is Code.LINEAR and self.bits in (2, 3, 6)
        )
        return takes_halves and self.group == UNIT // 2

    @property
    def token_group(self) -> int:
        """Inputs of a token that share a scale when tokens are quantised to int8."""
        if self.has_levels:
            return _LEVELS_GROUP
        return 64 if self.group % 64 == 0 else min(self.group, UNIT)

    def packed_shape(self, n_out: int, n_in: int) -> tuple[int, int, int]:
        """Return (panels, blocks, bytes of a block) of [n_out, n_in] weights."""
        return -(-n_out // PANEL), -(-n_in // self.block_inputs), self.block_bytes

    def packed_bytes(self, n_out: int, n_in: int) -> int:
        """Return the bytes that [n_out, n_in] weights take."""
        panels, blocks, block_bytes = self.packed_shape(n_out, n_in)
        return panels * blocks * block_bytes


_IQ4: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4: Final = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)

BFLOAT16: Final = PanelForm(name="BF16", bits=16, group=2, code=Code.BFLOAT16)
FLOAT16: Final = PanelForm(name="F16", bits=16, group=2, code=Code.FLOAT16)
FLOAT32: Final = PanelForm(name="F32", bits=32, group=1, code=Code.FLOAT32)

GGUF_FORMS: Final = {
    form.name: form
    for form in (
        PanelForm(name="Q4_0", bits=4, group=32, offset=8),
        PanelForm(name="Q4_1", bits=4, group=32, minimum=Minimum.STORED),
        PanelForm(name="Q5_0", bits=5, group=32, offset=16),
        PanelForm(name="Q5_1", bits=5, group=32, minimum=Minimum.STORED),
        PanelForm(name="Q8_0", bits=8, group=32, offset=128),
        PanelForm(name="Q2_K", bits=2, group=16, scale=Scale.NIBBLES, block=256),
        PanelForm(name="Q3_K", bits=3, group=16, scale=Scale.INT8, block=256, offset=4),
        PanelForm(
            name="Q4_K", bits=4, group=32, scale=Scale.UINT8, minimum=Minimum.STORED, block=256
        ),
        PanelForm(
            name="Q5_K", bits=5, group=32, scale=Scale.UINT8, minimum=Minimum.STORED, block=256
        ),
        PanelForm(name="Q6_K", bits=6, group=16, scale=Scale.INT8, block=256, offset=32),
        PanelForm(name="IQ4_NL", bits=4, group=32, book=_IQ4, code=Code.BOOK),
        PanelForm(
            name="IQ4_XS", bits=4, group=32, scale=Scale.INT8, block=256, book=_IQ4, code=Code.BOOK
        ),
        PanelForm(
            name="MXFP4",
            bits=4,
            group=32,
            scale=Scale.EXPONENT,
            factor=0.5,
            book=_FP4,
            code=Code.BOOK,
        ),
    )
}
"""By GGUF type: the form that its blocks are repacked to, without loss."""

NVFP4: Final = PanelForm(
    name="NVFP4",
    bits=4,
    group=16,
    scale=Scale.FLOAT8,
    factor=0.5,
    book=_FP4,
    code=Code.BOOK,
)

GGUF_BLOCK_BYTES: Final = {
    "Q4_0": 18,
    "Q4_1": 20,
    "Q5_0": 22,
    "Q5_1": 24,
    "Q8_0": 34,
    "Q2_K": 84,
    "Q3_K": 110,
    "Q4_K": 144,
    "Q5_K": 176,
    "Q6_K": 210,
    "IQ4_NL": 18,
    "IQ4_XS": 136,
    "MXFP4": 17,
}
"""By GGUF type: the bytes of a stored block."""


_FORMS: Final = {
    Quantization.INT8: PanelForm(name="int8", bits=8, group=64, offset=128),
    Quantization.INT4: PanelForm(name="int4", bits=4, group=32, offset=8),
}
