"""AWQ's 4-bit integers, as AutoAWQ stores them for its kernels `gemm` and `gemv`.

Knows the keys of its config and the names of its tensors. Must not know files.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from shardnet.checkpoint.quantization.gptq import read_group_size, take_shared
from shardnet.checkpoint.quantization.weight_parts import (
    FLOAT_SCALES,
    FLOATS,
    WeightFormat,
    WeightParts,
    coded_tensor,
    group_of,
)
from shardnet.checkpoint.tensors.model_tensor import ModelTensor
from shardnet.model.config.fields import Fields
from shardnet.model.config.panel_form import Minimum, PanelForm
from shardnet.model.kernels.codes import Codes

if TYPE_CHECKING:
    from torch import Tensor

ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in an integer the 4 bits of each of 8 outputs stand, with `gemm`."""
_INTEGERS: Final = ("I32",)
_IGNORED: Final = (
    *("checkpoint_format", "do_fuse", "fuse_max_seq_len", "modules_to_fuse"),
    "zero_point",  # the tensors have zeros in any case
)


def read_awq(fields: Fields) -> WeightFormat:
    """Read `quantization_config`. Raises UnsupportedModelError for what is not implemented."""
    take_shared(fields)
    fields.ignore(*_IGNORED)
    fields.require("bits", 4)
    version = fields.take("version", str, fields.take("format", str, "gemm")).lower()
    combine = {"gemm": _combine_gemm, "gemv": _combine_gemv}.get(version)
    if combine is None:
        raise fields.unsupported("version", version, "gemm, gemv")
    return WeightFormat(
        markers=(".qweight",),
        suffixes=(".qweight", ".qzeros", ".scales"),
        combine=partial(combine, group_size=read_group_size(fields)),
    )


def _form(group_size: int, n_in: int, dtype: str) -> PanelForm:
    return PanelForm(
        name="AWQ 4",
        bits=4,
        group=group_of(group_size, n_in),
        scale=FLOAT_SCALES[dtype],
        minimum=Minimum.ZERO_POINT,
    )


def _combine_gemm(parts: WeightParts, *, group_size: int) -> ModelTensor:
    """Combine qweight [K, N / 8], 8 outputs in each integer, qzeros [G, N / 8], scales [G, N]."""
    n_out, n_in = parts.shape
    n_groups = -(-n_in // (group_size or n_in))
    sources = (
        parts.part(".qweight", _INTEGERS, (n_in, n_out // 8)),
        parts.part(".qzeros", _INTEGERS, (n_groups, n_out // 8)),
        parts.part(".scales", FLOATS, (n_groups, n_out)),
    )

    def rows(stored: Sequence[Tensor], begin: int, end: int) -> Codes:
        qweight, qzeros, scales = stored
        eights = slice(begin // 8, end // 8)
        return Codes(
            codes=_outputs(qweight[:, eights]),
            scales=scales[:, begin:end].T,
            minimums=_outputs(qzeros[:, eights]),
        )

    form = _form(group_size, n_in, sources[2].dtype)
    return coded_tensor(parts.name, parts.shape, sources, form=form, rows=rows)


def _outputs(packed: Tensor) -> Tensor:
    """Split integers [R, n / 8] into the codes of outputs in order: uint8 [n, R]."""
    import torch

    by_output = packed.T.contiguous()
    made = torch.empty(by_output.shape[0], 8, by_output.shape[1], dtype=torch.uint8)
    for low in range(0, 8, 2):  # two codes of each byte
        byte = (by_output >> 4 * low).to(torch.uint8)
        torch.bitwise_and(byte, 15, out=made[:, ORDER.index(low)])
        torch.bitwise_right_shift(byte, 4, out=made[:, ORDER.index(low + 1)])
    return made.flatten(0, 1)


def _combine_gemv(parts: WeightParts, *, group_size: int) -> ModelTensor:
    """Combine qweight [N, K / 8], 8 inputs in each integer, qzeros [N, W], scales [N, 8 W].

    W has room for the groups, and more for small ones.
    """
    n_out, n_in = parts.shape
    n_groups = -(-n_in // (group_size or n_in))
    multiple = {64: 2, 32: 4}.get(group_size, 1)
    width = -(-n_groups // (8 * multiple)) * multiple
    sources = (
        parts.part(".qweight", _INTEGERS, (n_out, n_in // 8)),
        parts.part(".qzeros", _INTEGERS, (n_out, width)),
        parts.part(".scales", FLOATS, (n_out, 8 * width)),
    )

    def rows(stored: Sequence[Tensor], begin: int, end: int) -> Codes:
        from shardnet.checkpoint.quantization.packed_codes import split_bits

        qweight, qzeros, scales = (values[begin:end] for values in stored)
        return Codes(
            codes=split_bits(qweight, 4),
            scales=scales[:, :n_groups],
            minimums=split_bits(qzeros, 4)[:, :n_groups],
        )

    form = _form(group_size, n_in, sources[2].dtype)
    return coded_tensor(parts.name, parts.shape, sources, form=form, rows=rows)
