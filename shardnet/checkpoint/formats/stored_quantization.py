"""Read `quantization_config` of config.json, and combine the stored tensors of each weight.

Knows the names and shapes of FP8, GPTQ, AWQ and MXFP4 tensors. Must not know the arithmetic
(dequantize.py), nor families. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from shardnet.checkpoint.tensors.model_tensor import Make, ModelTensor
from shardnet.checkpoint.tensors.stored_tensor import AGAIN, StoredTensor
from shardnet.errors import CheckpointError, shown
from shardnet.model.config.fields import MAX_SIZE, Fields

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_FLOATS: Final = ("F32", "F16", "BF16")
_INTEGERS: Final = ("I32",)
_BYTES: Final = ("U8",)
_NARROW: Final = ("F8_E4M3", "F8_E5M2")

_IGNORED: Final = {
    "fp8": "activation_scheme fmt modules_to_not_convert ignored_layers kv_cache_scheme",
    "gptq": (
        "sym desc_act damp_percent damp_auto_increment lm_head model_name_or_path "
        "model_file_base_name true_sequential static_groups meta dataset tokenizer batch_size "
        "block_name_to_quantize cache_block_outputs exllama_config max_input_length model_seqlen "
        "module_name_preceding_first_block modules_in_block_to_quantize pad_token_id use_cuda_fp16 "
        "use_exllama disable_exllama backend is_marlin_format pack_dtype mse quantizer"
    ),
    "awq": "modules_to_not_convert do_fuse fuse_max_seq_len modules_to_fuse exllama_config backend",
    "mxfp4": "modules_to_not_convert dequantize",
}
"""Keys about the making of a checkpoint, or for other programs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredQuantization:
    """The form in which weights are stored.

    `group_size` inputs share a scale, all where it is 0. `zero_offset` is added to GPTQ's zeros.
    `block` are the rows and columns that share a scale of FP8.
    """

    method: str
    group_size: int = 0
    zero_offset: int = 0
    block: tuple[int, int] = (1, 1)


def read_quantization(raw: Mapping[str, Any], where: str) -> StoredQuantization:
    """Read the object `quantization_config` of the config.json at `where`.

    Raises UnsupportedModelError for a method, or a variant of one, that is not implemented.
    """
    fields = Fields(raw, where, prefix="quantization_config.")
    method = fields.take("quant_method", str)
    if method not in _IGNORED:
        raise fields.unsupported("quant_method", method, ", ".join(sorted(_IGNORED)))
    fields.ignore(*_IGNORED[method].split())
    match method:
        case "fp8":
            made = StoredQuantization(method=method, block=_block_size(fields))
        case "gptq":
            made = _gptq(fields)
        case "awq":
            made = _awq(fields)
        case _:
            made = StoredQuantization(method=method)
    fields.refuse_the_rest()
    return made


def _block_size(fields: Fields) -> tuple[int, int]:
    sizes = fields.take("weight_block_size", list, [1, 1])
    if len(sizes) != 2 or not all(isinstance(n, int) and 0 < n <= MAX_SIZE for n in sizes):
        raise fields.damaged(
            f"quantization_config.weight_block_size is {shown(sizes)}, expected [n, n]"
        )
    return sizes[0], sizes[1]


def _gptq(fields: Fields) -> StoredQuantization:
    fields.require("bits", 4)
    form = fields.take("checkpoint_format", str, "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise fields.unsupported("checkpoint_format", form, "gptq, gptq_v2")
    offset = 1 if form == "gptq" else 0
    return StoredQuantization(method="gptq", group_size=_group_size(fields), zero_offset=offset)


def _awq(fields: Fields) -> StoredQuantization:
    fields.require("bits", 4)
    fields.require("zero_point", True)
    version = fields.take("version", str, "gemm")
    if version.lower() != "gemm":
        raise fields.unsupported("version", version, "gemm")
    return StoredQuantization(method="awq", group_size=_group_size(fields))


def _group_size(fields: Fields) -> int:
    """Read the number of inputs that share a scale; 0 for all of them."""
    size = fields.take("group_size", int, 128)
    if size != -1 and not 1 <= size <= MAX_SIZE:
        raise fields.damaged(f"quantization_config.group_size is {size}, expected -1 or 1 on")
    return 0 if size == -1 else int(size)


Stored = Mapping[str, StoredTensor]
Combine = Callable[["_Weight", StoredQuantization], ModelTensor]


def combine(how: StoredQuantization, stored: Stored, where: str) -> dict[str, ModelTensor]:
    """Combine the parts of each quantised weight among the tensors of the folder `where`.

    Returns them by parameter name, as the checkpoint spells it; `plain` lists the other tensors.
    Raises CheckpointError for parts that do not fit each other.
    """
    suffixes, make = _METHODS[how.method]
    made: dict[str, ModelTensor] = {}
    for stem in _stems(stored, suffixes[0]):
        parts = {suffix: stored[stem + suffix] for suffix in suffixes if stem + suffix in stored}
        weight = _Weight(stem=stem, parts=parts, where=where)
        if how.method == "fp8" and len(parts) == 1:
            continue  # not quantized
        tensor = make(weight, how)
        made[tensor.name] = tensor
    return made


def plain(
    how: StoredQuantization, stored: Stored, made: Mapping[str, ModelTensor]
) -> list[StoredTensor]:
    """List the stored tensors outside quantised weights, without scales of activations.

    Activations are not quantised here.
    """
    used = {source.name for tensor in made.values() for source in tensor.sources}
    skipped = (".input_scale", ".activation_scale") if how.method == "fp8" else ()
    return [
        info for name, info in stored.items() if name not in used and not name.endswith(skipped)
    ]


def _stems(stored: Stored, suffix: str) -> Iterator[str]:
    return (name.removesuffix(suffix) for name in stored if name.endswith(suffix))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weight:
    """The parts of one weight, by suffix."""

    stem: str
    parts: Stored
    where: str

    def part(self, suffix: str, dtypes: Sequence[str], shape: tuple[int, ...]) -> StoredTensor:
        """Return a part; raise CheckpointError unless it has one of these dtypes and this shape."""
        info = self.parts.get(suffix)
        if info is None:
            raise CheckpointError(
                f"{self.where}: tensor {self.stem}{suffix} is missing", remedy=AGAIN
            )
        if info.dtype not in dtypes or info.shape != shape:
            raise CheckpointError(
                f"{self.where}/{info.file}: tensor {info.name} is {info.dtype} {list(info.shape)}, "
                f"expected {' or '.join(dtypes)} {list(shape)}",
                remedy=AGAIN,
            )
        return info

    def first(self, suffix: str, n_axes: int) -> StoredTensor:
        """Return the part that determines the shapes of the others."""
        info = self.parts[suffix]
        if len(info.shape) != n_axes or 0 in info.shape:
            raise CheckpointError(
                f"{self.where}/{info.file}: tensor {info.name} has shape {list(info.shape)}, "
                f"expected {n_axes} axes",
                remedy=AGAIN,
            )
        return info


def _fp8_weight(weight: _Weight, how: StoredQuantization) -> ModelTensor:
    info = weight.first(".weight", 2)
    suffix = next(suffix for suffix in weight.parts if suffix != ".weight")
    scale = weight.parts[suffix]
    n_rows, n_columns = info.shape
    blocks = tuple(-(-n // size) for n, size in zip(info.shape, how.block, strict=True))
    shape = scale.shape
    if shape not in ((), (1,), (n_rows,), (n_rows, 1)):
        shape = blocks
    weight.part(suffix, _FLOATS, shape)
    weight.part(".weight", _NARROW, (n_rows, n_columns))

    def make(stored: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        from shardnet.checkpoint.formats.dequantize import from_fp8

        return from_fp8(stored, how.block, dtype)

    return _combined(f"{weight.stem}.weight", info.shape, (info, scale), make)


def _gptq_weight(weight: _Weight, how: StoredQuantization) -> ModelTensor:
    packed = weight.first(".qweight", 2)
    n_inputs, n_outputs = packed.shape[0] * 8, packed.shape[1]
    group_size = how.group_size or n_inputs
    n_groups = -(-n_inputs // group_size)
    sources = [
        weight.part(".qweight", _INTEGERS, packed.shape),
        weight.part(".qzeros", _INTEGERS, (n_groups, n_outputs // 8)),
        weight.part(".scales", _FLOATS, (n_groups, n_outputs)),
    ]
    if ".g_idx" in weight.parts:
        sources.append(weight.part(".g_idx", _INTEGERS, (n_inputs,)))

    def make(stored: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        from shardnet.checkpoint.formats.dequantize import from_gptq

        order = stored[3:]
        if order and not 0 <= int(order[0].min()) <= int(order[0].max()) < n_groups:
            raise CheckpointError(
                f"{weight.where}: tensor {weight.stem}.g_idx names a group beyond {n_groups}",
                remedy=AGAIN,
            )
        return from_gptq(stored, group_size, how.zero_offset, dtype)

    return _combined(f"{weight.stem}.weight", (n_outputs, n_inputs), sources, make)


def _awq_weight(weight: _Weight, how: StoredQuantization) -> ModelTensor:
    packed = weight.first(".qweight", 2)
    n_inputs, n_outputs = packed.shape[0], packed.shape[1] * 8
    group_size = how.group_size or n_inputs
    n_groups = -(-n_inputs // group_size)
    sources = (
        weight.part(".qweight", _INTEGERS, packed.shape),
        weight.part(".qzeros", _INTEGERS, (n_groups, n_outputs // 8)),
        weight.part(".scales", _FLOATS, (n_groups, n_outputs)),
    )

    def make(stored: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        from shardnet.checkpoint.formats.dequantize import from_awq

        return from_awq(stored, group_size, dtype)

    return _combined(f"{weight.stem}.weight", (n_outputs, n_inputs), sources, make)


def _mxfp4_weight(weight: _Weight, how: StoredQuantization) -> ModelTensor:
    blocks = weight.first("_blocks", 4)
    n_experts, n_outputs, n_blocks, _ = blocks.shape
    sources = (
        weight.part("_blocks", _BYTES, (n_experts, n_outputs, n_blocks, 16)),
        weight.part("_scales", _BYTES, (n_experts, n_outputs, n_blocks)),
    )

    def make(stored: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        from shardnet.checkpoint.formats.dequantize import from_mxfp4

        return from_mxfp4(stored, dtype)

    return _combined(weight.stem, (n_experts, n_blocks * 32, n_outputs), sources, make)


def _combined(
    name: str, shape: tuple[int, ...], sources: Sequence[StoredTensor], make: Make
) -> ModelTensor:
    return ModelTensor(name=name, shape=shape, dtype=None, sources=tuple(sources), make=make)


_METHODS: Final[Mapping[str, tuple[tuple[str, ...], Combine]]] = {
    "fp8": ((".weight", ".weight_scale_inv", ".weight_scale"), _fp8_weight),
    "gptq": ((".qweight", ".qzeros", ".scales", ".g_idx"), _gptq_weight),
    "awq": ((".qweight", ".qzeros", ".scales"), _awq_weight),
    "mxfp4": (("_blocks", "_scales"), _mxfp4_weight),
}
"""By method: the suffixes of a weight's parts, the first of which every weight has, and what makes
one weight of them."""
