"""What the library compressed-tensors writes (llm-compressor, vLLM): integers and narrow floats.

Knows the keys of its config and the names of its tensors. Must not know files. Activations are not
quantised here, whatever the config says of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from shardnet.checkpoint.quantization.fp8 import ScaleLayout, fp8_tensor, read_scales
from shardnet.checkpoint.quantization.gptq import order_of_groups
from shardnet.checkpoint.quantization.mxfp4 import nvfp4_tensor, two_in_a_byte
from shardnet.checkpoint.quantization.weight_parts import (
    FLOAT_SCALES,
    WeightFormat,
    WeightParts,
    coded_tensor,
    group_of,
)
from shardnet.checkpoint.tensors.model_tensor import ModelTensor
from shardnet.errors import shown
from shardnet.model.config.fields import MAX_SIZE, Fields
from shardnet.model.config.panel_form import Minimum, PanelForm
from shardnet.model.kernels.codes import Codes

if TYPE_CHECKING:
    from torch import Tensor

_IGNORED: Final = (
    "ignore kv_cache_scheme global_compression_ratio provider quantization_status version "
    "run_compressed dequantize use_optimized_inference"
)
_SKIPPED: Final = tuple(
    f".{prefix}_{suffix}"
    for prefix in ("input", "output", "q", "k", "v")
    for suffix in ("scale", "zero_point", "global_scale")
)
_MIXED: Final = "mixed-precision"
"""The format of a checkpoint whose groups have formats of their own."""
_PACKED: Final = ".weight_packed"
_SHARED: Final = (".weight", _PACKED, ".weight_scale", ".weight_shape")
"""Suffixes in all formats; the shape repeats what the config says of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightScheme:
    """How the linears' weights are quantised: the keys of `weights`.

    `group_size` inputs share a scale, or with 0 a row, or with `block` (rows, columns) a block.
    """

    bits: int
    kind: str
    symmetric: bool
    group_size: int
    block: tuple[int, int]


def read_compressed_tensors(fields: Fields) -> WeightFormat:
    """Read `quantization_config`. Raises UnsupportedModelError for what is not implemented."""
    fields.ignore(*_IGNORED.split())
    sparsity = fields.inner("sparsity_config", fields.take("sparsity_config", dict, {}))
    sparsity.ignore("global_sparsity", "sparsity_structure", "registry_requires_subclass")
    sparsity.ignore("targets", "ignore")
    sparsity.require("format", "dense")
    sparsity.note_the_rest()
    name = fields.take("format", str)
    groups = fields.take("config_groups", dict)
    if not groups:
        raise fields.damaged("quantization_config.config_groups is empty")
    schemes = {_read_group(fields, str(key), group, name) for key, group in groups.items()}
    combines = {known.marker: partial(known.combine, scheme=own) for known, own in schemes}
    if len(combines) < len(schemes):  # their tensors do not say which is which
        raise fields.unsupported(
            "config_groups", f"{len(groups)} groups", "groups with the same weights"
        )

    def combine(parts: WeightParts) -> ModelTensor:
        marker = _PACKED if _PACKED in parts.parts else ".weight_scale"
        return combines[marker if marker in combines else next(iter(combines))](parts)

    return WeightFormat(
        markers=tuple(combines),
        suffixes=(*_SHARED, *{suffix for known, _ in schemes for suffix in known.suffixes}),
        combine=combine,
        skipped=_SKIPPED,
    )


def _format_of(fields: Fields, name: str, scheme: WeightScheme) -> _Format:
    """Return the format `name`, which must be one that weights of the `scheme` may have."""
    known = _FORMATS.get(f"{scheme.kind}-quantized" if name == "naive-quantized" else name)
    if known is None:
        raise fields.unsupported("format", name, ", ".join(_FORMATS))
    if scheme.kind != known.kind or scheme.bits not in known.bits:
        raise fields.unsupported(
            "config_groups",
            f"{scheme.kind} of {scheme.bits} bits",
            f"{known.kind} of {' or '.join(map(str, known.bits))} bits in the format {name}",
        )
    return known


def _read_group(fields: Fields, key: str, raw: Any, name: str) -> tuple[_Format, WeightScheme]:
    """Read how one group of linears is quantised; which they are, the tensors' names say."""
    if not isinstance(raw, dict) or not isinstance(raw.get("weights"), dict):
        raise fields.damaged(
            f"quantization_config.config_groups.{key} is {shown(raw)}, expected weights in it"
        )
    group = fields.inner(f"config_groups.{key}", raw)
    group.ignore("targets", "input_activations", "output_activations", "weights")
    own = group.take("format", str, name)
    if own != name and name != _MIXED:
        raise group.unsupported("format", own, name)
    group.note_the_rest()
    weights = group.inner("weights", raw["weights"])
    weights.ignore("observer", "observer_kwargs", "scale_dtype", "zp_dtype", "actorder")
    weights.require("dynamic", False)
    size = weights.take("group_size", int, -1)
    strategy = weights.take("strategy", str, "channel" if size == -1 else "group")
    if strategy not in ("tensor", "channel", "group", "block", "tensor_group"):
        raise weights.unsupported("strategy", strategy, "tensor, channel, group, block")
    is_grouped = strategy in ("group", "tensor_group")
    if (size != -1 and not 1 <= size <= MAX_SIZE) or (is_grouped and size == -1):
        raise weights.damaged(f"group_size of {key} is {size}, expected 1 on")
    scheme = WeightScheme(
        bits=weights.positive("num_bits", 8, at_most=32),
        kind=weights.take("type", str, "int").lower(),
        symmetric=weights.take("symmetric", bool, True),
        group_size=size if is_grouped else 0,
        block=_read_block(weights) if strategy == "block" else (1, 1),
    )
    weights.ignore("block_structure")
    weights.note_the_rest()
    return _format_of(fields, own, scheme), scheme


def _read_block(weights: Fields) -> tuple[int, int]:
    """Read the rows and columns of a block: [128, 128] or "128x128"."""
    given = weights.take("block_structure", (list, str))
    sizes = given.split("x") if isinstance(given, str) else given
    if len(sizes) == 2 and all(str(n).isascii() and str(n).isdigit() for n in sizes):
        rows, columns = (int(str(n)[:12]) for n in sizes)
        if 0 < rows <= MAX_SIZE and 0 < columns <= MAX_SIZE:
            return rows, columns
    raise weights.damaged(f"block_structure is {shown(given)}, expected [n, n]")


def _combine_integers(parts: WeightParts, *, scheme: WeightScheme) -> ModelTensor:
    """Combine integers, packed [N, K x bits / 32] or int8 [N, K], with scales and zero points.

    Packed ones are stored with half of their range added. Symmetric ones may have zero points too,
    of zero.
    """
    n_out, n_in = parts.shape
    bits, each = scheme.bits, 32 // scheme.bits
    is_packed = _PACKED in parts.parts
    scales, layout = read_scales(parts, ".weight_scale", (1, scheme.group_size or n_in))
    if is_packed:
        weight = parts.part(".weight_packed", ("I32",), (n_out, -(-n_in // each)))
    else:
        weight = parts.part(".weight", ("I8",), parts.shape)
    sources = {"weight": weight, "scales": scales}
    if not scheme.symmetric and is_packed:
        n_groups = -(-n_in // (scheme.group_size or n_in))
        shape = (-(-n_out // each), n_groups)
        sources["zeros"] = parts.part(".weight_zero_point", ("I32",), shape)
    elif not scheme.symmetric or ".weight_zero_point" in parts.parts:
        sources["zeros"] = parts.part(".weight_zero_point", ("I8",), scales.shape)
    if ".weight_g_idx" in parts.parts:
        sources["groups"] = parts.part(".weight_g_idx", ("I32", "I64"), (n_in,))
    stored = _StoredIntegers(parts, scheme, layout, [*sources], is_packed=is_packed)
    form = PanelForm(
        name=f"INT{bits}",
        bits=bits,
        group=group_of(layout.columns, n_in),
        scale=FLOAT_SCALES[scales.dtype],
        minimum=Minimum.NONE if scheme.symmetric else Minimum.ZERO_POINT,
        offset=1 << bits - 1 if scheme.symmetric else 0,
    )
    return coded_tensor(
        parts.name,
        parts.shape,
        list(sources.values()),
        form=form,
        rows=stored.rows,
        input_order=stored.input_order if "groups" in sources else None,
    )


@dataclass(frozen=True, slots=True)
class _StoredIntegers:
    """Reads rows of integers from the tensors of one weight, which come in the order of `names`."""

    parts: WeightParts
    scheme: WeightScheme
    layout: ScaleLayout
    names: Sequence[str]
    _: KW_ONLY
    is_packed: bool

    def input_order(self, stored: Sequence[Tensor]) -> Tensor | None:
        """Return the inputs in the order of their groups, None if they are (InputOrder)."""
        groups = stored[self.names.index("groups")]
        if bool((groups == -1).all()):  # the library's value for groups in order
            return None
        size = self.scheme.group_size or self.parts.shape[1]
        return order_of_groups(groups, size, self.parts, ".weight_g_idx")

    def rows(self, stored: Sequence[Tensor], begin: int, end: int) -> Codes:
        """Return the codes of rows [begin, end) (ReadRows)."""
        from shardnet.checkpoint.quantization.packed_codes import biased, split_bits

        taken, n_in = stored[0][begin:end], self.parts.shape[1]
        codes = split_bits(taken, self.scheme.bits)[:, :n_in] if self.is_packed else biased(taken)
        order = self.input_order(stored) if "groups" in self.names else None
        return Codes(
            codes=codes if order is None else codes[:, order],
            scales=self.layout.of_rows(stored[1], begin, end),
            minimums=self._zero_points(stored, begin, end),
        )

    def _zero_points(self, stored: Sequence[Tensor], begin: int, end: int) -> Tensor | None:
        from shardnet.checkpoint.quantization.packed_codes import biased, split_bits

        if "zeros" not in self.names:
            return None
        zeros = stored[self.names.index("zeros")]
        if self.scheme.symmetric:
            if zeros.any():
                what = "is not all zeros, as symmetric ones are"
                raise self.parts.damaged(".weight_zero_point", what)
            return None
        if not self.is_packed:
            return self.layout.of_rows(biased(zeros), begin, end)
        each = 32 // self.scheme.bits
        packed = zeros[begin // each : -(-end // each)]
        return split_bits(packed.T, self.scheme.bits)[:, : end - begin].T.contiguous()


def _combine_fp8(parts: WeightParts, *, scheme: WeightScheme) -> ModelTensor:
    """Combine E4M3 floats [N, K] with scales per tensor, row, group or block."""
    block = (1, scheme.group_size) if scheme.group_size else scheme.block
    scales, layout = read_scales(parts, ".weight_scale", block)
    weight = parts.part(".weight", ("F8_E4M3",), parts.shape)
    return fp8_tensor(parts.name, weight, scales, layout)


def _combine_nvfp4(parts: WeightParts, *, scheme: WeightScheme) -> ModelTensor:
    """Combine 4-bit floats, two in each byte, with E4M3 scales, divided by one for all of them."""
    size = scheme.group_size or 16
    return nvfp4_tensor(parts, ".weight_packed", ".weight_global_scale", size=size, divides=True)


def _combine_mxfp4(parts: WeightParts, *, scheme: WeightScheme) -> ModelTensor:
    """Combine 4-bit floats, two in each byte, with exponents for every 32 inputs."""
    size = scheme.group_size or 32
    return two_in_a_byte(parts, ".weight_packed", "U8", ".weight_scale", ("U8",), size)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Format:
    """One format: what it stores, the part that marks a quantised weight, and its own parts."""

    kind: str
    bits: tuple[int, ...]
    marker: str
    combine: Callable[..., ModelTensor]
    suffixes: tuple[str, ...] = ()


_INTEGER_PARTS: Final = (".weight_zero_point", ".weight_g_idx")
_FORMATS: Final = {
    "pack-quantized": _Format(
        kind="int",
        bits=(2, 4, 8),
        marker=_PACKED,
        combine=_combine_integers,
        suffixes=_INTEGER_PARTS,
    ),
    "int-quantized": _Format(
        kind="int",
        bits=(8,),
        marker=".weight_scale",
        combine=_combine_integers,
        suffixes=_INTEGER_PARTS,
    ),
    "float-quantized": _Format(
        kind="float", bits=(8,), marker=".weight_scale", combine=_combine_fp8
    ),
    "nvfp4-pack-quantized": _Format(
        kind="float",
        bits=(4,),
        marker=_PACKED,
        combine=_combine_nvfp4,
        suffixes=(".weight_global_scale",),
    ),
    "mxfp4-pack-quantized": _Format(
        kind="float", bits=(4,), marker=_PACKED, combine=_combine_mxfp4
    ),
}
