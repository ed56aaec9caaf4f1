"""MLX's integers with a scale and a bias for each group, and its 4- and 8-bit floats.

Knows the object `quantization` that mlx-lm writes to config.json, and the names of its tensors.
Must not know files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from shardnet.checkpoint.quantization.mxfp4 import MXFP4_FORM
from shardnet.checkpoint.quantization.weight_parts import (
    FLOAT_SCALES,
    FLOATS,
    WeightFormat,
    WeightParts,
    coded_tensor,
)
from shardnet.checkpoint.tensors.model_tensor import ModelTensor
from shardnet.model.config.fields import Fields
from shardnet.model.config.panel_form import NVFP4, Code, Minimum, PanelForm, Scale
from shardnet.model.kernels.codes import Codes

if TYPE_CHECKING:
    from torch import Tensor

_BITS: Final = (2, 3, 4, 5, 6, 8)
_FLOAT_FORMS: Final[Mapping[str, PanelForm]] = {
    "mxfp4": MXFP4_FORM,
    "mxfp8": PanelForm(name="MXFP8", bits=8, group=32, scale=Scale.EXPONENT, code=Code.E4M3),
    "nvfp4": NVFP4,
}
"""By mode. Their scales are bytes, and nothing is added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scheme:
    """How one weight is quantised."""

    mode: str
    bits: int
    group_size: int


def read_mlx(fields: Fields) -> WeightFormat:
    """Read `quantization`: a scheme for all weights, and by module those of other ones.

    Raises UnsupportedModelError for what is not implemented.
    """
    usual = _read_scheme(fields, "affine", {"bits": 4, "group_size": 64})
    exceptions: dict[str, _Scheme] = {}
    for path, said in fields.take_the_rest().items():
        if isinstance(said, dict):
            inner = fields.inner(path, said)
            defaults = {"bits": usual.bits, "group_size": usual.group_size}
            exceptions[path] = _read_scheme(inner, usual.mode, defaults)
            inner.note_the_rest()
        elif not isinstance(said, bool):
            raise fields.unsupported(path, said, "bits, group_size, mode and names of modules")
    return WeightFormat(
        markers=(".scales",),
        suffixes=(".weight", ".scales", ".biases"),
        combine=partial(_combine, usual=usual, exceptions=exceptions),
    )


def _read_scheme(fields: Fields, mode: str, defaults: Mapping[str, int]) -> _Scheme:
    mode = fields.take("mode", str, mode)
    if mode != "affine" and mode not in _FLOAT_FORMS:
        raise fields.unsupported("mode", mode, ", ".join(("affine", *_FLOAT_FORMS)))
    bits = fields.take("bits", int, defaults["bits"])
    size = fields.positive("group_size", defaults["group_size"])
    form = _FLOAT_FORMS.get(mode)
    if form is None and bits not in _BITS:
        raise fields.unsupported("bits", bits, ", ".join(map(str, _BITS)))
    if form is not None and (bits, size) != (form.bits, form.group):
        raise fields.unsupported(
            "mode", f"{mode} with {bits} bits in groups of {size}", f"{form.bits} in {form.group}"
        )
    return _Scheme(mode=mode, bits=bits, group_size=size)


def _combine(
    parts: WeightParts, *, usual: _Scheme, exceptions: Mapping[str, _Scheme]
) -> ModelTensor:
    """Combine integers [N, K x bits / 32], scales [N, G], and biases [N, G] that are added."""
    n_out, n_in = parts.shape
    module = parts.parts[".scales"].name.removesuffix(".scales")
    scheme = exceptions.get(module, usual)
    bits, size = scheme.bits, scheme.group_size
    sources = [parts.part(".weight", ("U32",), (n_out, n_in * bits // 32))]
    float_form = _FLOAT_FORMS.get(scheme.mode)
    n_groups = -(-n_in // size)
    if float_form is None:
        sources.append(parts.part(".scales", FLOATS, (n_out, n_groups)))
        sources.append(parts.part(".biases", (sources[1].dtype,), (n_out, n_groups)))
        form = PanelForm(
            name=f"MLX {bits}",
            bits=bits,
            group=size,
            scale=FLOAT_SCALES[sources[1].dtype],
            minimum=Minimum.STORED,
        )
    else:
        sources.append(parts.part(".scales", ("U8",), (n_out, n_groups)))
        form = float_form

    def rows(stored: Sequence[Tensor], begin: int, end: int) -> Codes:
        from shardnet.checkpoint.quantization.packed_codes import split_bits

        some = [values[begin:end].contiguous() for values in stored]
        return Codes(
            codes=split_bits(some[0], bits),
            scales=some[1],
            minimums=some[2] if len(some) > 2 else None,
        )

    return coded_tensor(parts.name, parts.shape, sources, form=form, rows=rows)
