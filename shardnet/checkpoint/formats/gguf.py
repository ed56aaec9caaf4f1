"""GGUF checkpoints: one file, or several parts, with config, tokenizer and tensors in it.

Knows which stored tensor is which parameter, and how llama.cpp's converter has changed its values
(convert_hf_to_gguf.py in github.com/ggml-org/llama.cpp): rotary order, norms,
transposed matrices, all experts of a layer in one tensor. Which of these apply, the family says.
Names come from the `gguf` package. Must not know kernels.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shardnet.checkpoint.formats.gguf_header import (
    GgufHeader,
    GgufTensor,
    MetadataValue,
    gguf_files,
    read_gguf_header,
)
from shardnet.checkpoint.formats.gguf_metadata import config_of_metadata
from shardnet.checkpoint.formats.gguf_types import PACKED, PLAIN, packed_bytes, type_name, unpack
from shardnet.checkpoint.tensors.checkpoint_files import open_file
from shardnet.checkpoint.tensors.manifest import Contents
from shardnet.checkpoint.tensors.model_tensor import Make, ModelTensor, rotary_halves, unchanged
from shardnet.checkpoint.tensors.stored_tensor import (
    AGAIN,
    FileTotals,
    StoredTensor,
    TensorFile,
    check_name,
    end_of,
    hash_ranges,
)
from shardnet.errors import CheckpointError, UnsupportedModelError
from shardnet.model.config.gguf_keys import FACTOR_TENSORS
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families.family import Family
from shardnet.model.families.registry import family_of
from shardnet.model.families.stage_tensors import stage_tensors
from shardnet.types import LayerRange

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MAX_FACTORS: Final = 1 << 16
"""Cap on the factors of rotary frequencies, which are read at opening."""

_EXPERT = re.compile(r"model\.layers\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)\.(weight|bias)")
_ONE_EXPERT = re.compile(r"blk\.\d+\.ffn_(gate|up|down)\.\d+\.weight")
_DTYPES: Final = {"F32": "float32", "F16": "float16"}


def open_gguf(path: Path) -> Contents:
    """Read the headers of the GGUF at `path`, a file or a folder; see `gguf_files`.

    Raises CheckpointError, which names the file and the tensor, for what is damaged,
    UnsupportedModelError for an architecture or a type that is not implemented.
    """
    paths = gguf_files(path)
    headers: list[GgufHeader] = []
    files: dict[str, TensorFile] = {}
    totals = FileTotals(paths[0])
    for part in paths:
        headers.append(read_gguf_header(part))
        files[part.name] = totals.add(_tensor_file(part, headers[-1]))
    stored = {name: info for file in files.values() for name, info in file.tensors.items()}
    factors = {
        info.name: _read_factors(part, info)
        for part, header in zip(paths, headers, strict=True)
        for info in header.tensors
        if info.name in FACTOR_TENSORS
    }
    embedding = stored.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{paths[0]}: tensor token_embd.weight is missing", remedy=AGAIN)
    metadata = headers[0].metadata
    config = config_of_metadata(
        metadata,
        stored,
        vocab_size=embedding.shape[0],
        factors=factors,
        dtype=_main_dtype(stored),
        where=str(paths[0]),
    )
    arch = str(metadata["general.architecture"])
    return Contents(
        folder=paths[0].parent,
        config=config,
        where=f"{paths[0]}, as config.json",
        files=files,
        whole=(),
        arrange=lambda config: _arrange(config, arch, _without_ahead(stored, metadata, config)),
    )


def _tensor_file(path: Path, header: GgufHeader) -> TensorFile:
    """Check that all tensors are within the file. Rotary factors count as part of its head."""
    infos = [_stored(path, tensor) for tensor in header.tensors]
    end = end_of(path, infos, header.head_bytes)
    if end > header.size_bytes:
        last = max(infos, key=lambda info: info.offset + info.size_bytes)
        raise CheckpointError(
            f"{path}: truncated: {header.size_bytes} bytes, tensor {last.name} ends at {end}",
            remedy=AGAIN,
        )
    factors = [info for info in infos if info.name in FACTOR_TENSORS]
    heads = [(0, header.head_bytes), *((info.offset, info.size_bytes) for info in factors)]
    heads.sort()
    try:
        sha256 = hash_ranges(path, heads)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}", remedy=AGAIN) from error
    return TensorFile(
        name=path.name,
        size_bytes=header.size_bytes,
        heads=tuple(heads),
        sha256=sha256,
        tensors={info.name: info for info in infos if info not in factors},
    )


def _stored(path: Path, tensor: GgufTensor) -> StoredTensor:
    check_name(path, tensor.name)
    kind = type_name(tensor.type_number)
    where = f"{path}: tensor {tensor.name}"
    if _ONE_EXPERT.fullmatch(tensor.name):
        raise UnsupportedModelError(
            f"{where} is of one expert, as in files of 2023",
            remedy="use a newer file of the model",
        )
    if kind not in PLAIN + PACKED:
        raise UnsupportedModelError(
            f"{where} is stored as {kind}; supported: {', '.join((*PLAIN, *PACKED))}",
            remedy="use a file in one of these",
        )
    size_bytes = packed_bytes(kind, tensor.shape)
    if size_bytes is None or (kind in PACKED and len(tensor.shape) == 1):
        raise CheckpointError(
            f"{where} of shape {list(tensor.shape)} cannot be {kind}", remedy=AGAIN
        )
    return StoredTensor(
        name=tensor.name,
        dtype=kind,
        shape=tensor.shape,
        size_bytes=size_bytes,
        file=path.name,
        offset=tensor.offset,
    )


def _read_factors(path: Path, tensor: GgufTensor) -> tuple[float, ...]:
    """Read a small float32 tensor, whose bytes are known to lie within the file."""
    n = tensor.shape[-1]
    if type_name(tensor.type_number) != "F32" or len(tensor.shape) > 1 or n > MAX_FACTORS:
        raise CheckpointError(
            f"{path}: tensor {tensor.name} is not a list of F32 factors", remedy=AGAIN
        )
    try:
        with open_file(path) as file:
            file.seek(tensor.offset)
            return struct.unpack(f"<{n}f", file.read(4 * n))
    except (OSError, struct.error) as error:
        raise CheckpointError(f"{path}: tensor {tensor.name}: {error}", remedy=AGAIN) from error


def _main_dtype(stored: Mapping[str, StoredTensor]) -> str:
    """Return the dtype of most stored bytes; bfloat16 for packed types."""
    sizes: dict[str, int] = {}
    for info in stored.values():
        sizes[info.dtype] = sizes.get(info.dtype, 0) + info.size_bytes
    return _DTYPES.get(max(sizes, key=lambda kind: sizes[kind]), "bfloat16")


def _without_ahead(
    stored: Mapping[str, StoredTensor], metadata: Mapping[str, MetadataValue], config: ModelConfig
) -> dict[str, StoredTensor]:
    """Leave out the layers behind the last one that predict further tokens ahead."""
    n_ahead = metadata.get(f"{metadata['general.architecture']}.nextn_predict_layers", 0)
    ahead = range(config.n_layers, config.n_layers + (n_ahead if isinstance(n_ahead, int) else 0))
    layer = re.compile(r"blk\.(\d{1,9})\.")
    return {
        name: info
        for name, info in stored.items()
        if (found := layer.match(name)) is None or int(found[1]) not in ahead
    }


def _arrange(
    config: ModelConfig, arch: str, stored: Mapping[str, StoredTensor]
) -> dict[str, ModelTensor]:
    """Map every stored tensor to its parameter; an unknown one has its own name."""
    from gguf.constants import MODEL_ARCH, MODEL_ARCH_NAMES
    from gguf.tensor_mapping import get_tensor_name_map

    number = next(kind for kind in MODEL_ARCH if MODEL_ARCH_NAMES[kind] == arch)
    names = get_tensor_name_map(number, config.n_layers)
    family = family_of(config)
    left = dict(stored)
    made: dict[str, ModelTensor] = {}
    for name, shape in stage_tensors(config, LayerRange(0, config.n_layers)).all.items():
        expert = _find_expert(family, name)
        if expert is not None:
            found_expert = _expert_tensor(config, name, expert, stored)
            if found_expert is not None:
                made[name] = found_expert
                for stack in expert.stacks:
                    left.pop(stack, None)
            continue
        found = None
        known = _renamed(family, name)
        for spelled in (family.name_prefix + known, known):
            found = found or names.get_name(spelled, try_suffixes=(".weight", ".bias"))
        info = stored.get(found) or stored.get(f"{found}.weight") if found is not None else None
        if info is not None:
            left.pop(info.name, None)
            if [n for n in info.shape if n > 1] == [n for n in shape if n > 1]:
                info = replace(info, shape=shape)  # the converter leaves axes of one out
            made[name] = _parameter(name, info, _changes(config, name, info))
    return made | {name: unchanged(name, info) for name, info in left.items()}


def _renamed(family: Family, name: str) -> str:
    """Return the name that the converter looks up for a parameter."""
    for ending, other in family.gguf.renamed if family.gguf is not None else ():
        if name.endswith(ending):
            return name.removesuffix(ending) + other
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class _Expert:
    """An expert's parameter: its number, and the stacked tensors with its rows."""

    number: int
    stacks: tuple[str, ...]


def _find_expert(family: Family, name: str) -> _Expert | None:
    """Return which rows of which tensors make an expert's parameter, None for other parameters."""
    match, names = _EXPERT.fullmatch(name), family.experts
    if match is None or names is None:
        return None
    layer, number, linear, kind = match.groups()
    parts = {"gate": names.gate, "up": names.up, "down": names.down}
    stacks = [f"blk.{layer}.ffn_{part}_exps.{kind}" for part in parts if parts[part] == linear]
    return _Expert(number=int(number), stacks=tuple(stacks)) if stacks else None


def _expert_tensor(
    config: ModelConfig, name: str, expert: _Expert, stored: Mapping[str, StoredTensor]
) -> ModelTensor | None:
    """Make an expert's parameter from its rows of the stacks; None if one does not fit."""
    assert config.experts is not None
    sources = []
    for stack in expert.stacks:
        info = stored.get(stack)
        if info is None or len(info.shape) < 2 or info.shape[0] != config.experts.n_experts:
            return None
        one = info.rows(expert.number, expert.number + 1)
        sources.append(replace(one, shape=info.shape[1:]))
    n_rows = sum(source.shape[0] for source in sources)
    kinds = {source.dtype for source in sources}
    return ModelTensor(
        name=name,
        shape=(n_rows, *sources[0].shape[1:]),
        dtype=kinds.pop() if len(kinds) == 1 and kinds <= {*PLAIN} else None,
        sources=tuple(sources),
        make=_joiner(sources),
    )


def _joiner(sources: Sequence[StoredTensor]) -> Make:
    """Concatenate the rows of one or two tensors."""

    def make(stored: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        import torch

        made = [
            values if source.dtype in PLAIN else unpack(values, source.dtype, source.shape, dtype)
            for source, values in zip(sources, stored, strict=True)
        ]
        if len(made) == 1:
            return made[0]
        if len({values.dtype for values in made}) > 1:
            made = [values.to(dtype) for values in made]
        return torch.cat(made)

    return make


@dataclass(frozen=True, slots=True, kw_only=True)
class _Changes:
    """Changes of the converter to a parameter. `n_heads`: rows are in interleaved rotary order.

    `is_decay`: minus the exponential is stored.
    """

    n_heads: int | None = None
    added: float = 0.0
    transposed: bool = False
    is_decay: bool = False


def _changes(config: ModelConfig, name: str, info: StoredTensor) -> _Changes:
    gguf = family_of(config).gguf
    assert gguf is not None
    if gguf.interleaved_rotary and ".q_proj." in name:
        return _Changes(n_heads=config.n_heads)
    if gguf.interleaved_rotary and ".k_proj." in name:
        return _Changes(n_heads=config.n_kv_heads)
    if gguf.decay is not None and name.endswith(gguf.decay):
        return _Changes(is_decay=True)
    if gguf.plain_norm is not None and name.endswith(gguf.plain_norm):
        return _Changes()
    if config.norm_offset and name.endswith("norm.weight"):
        return _Changes(added=config.norm_offset)
    is_transposed = bool(gguf.transposed) and name.startswith(gguf.transposed)
    return _Changes(transposed=is_transposed and len(info.shape) == 2)


def _parameter(name: str, info: StoredTensor, changes: _Changes) -> ModelTensor:
    is_plain = info.dtype in PLAIN and not changes.added and not changes.is_decay
    return ModelTensor(
        name=name,
        shape=info.shape[::-1] if changes.transposed else info.shape,
        dtype=info.dtype if is_plain else None,
        sources=(info,),
        make=_maker(info, changes),
    )


def _maker(info: StoredTensor, changes: _Changes) -> Make:
    def make(stored: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        (rows,) = stored
        if changes.n_heads is not None:
            rows = rotary_halves(rows, changes.n_heads)  # rows are packed each for itself
        values = rows if info.dtype in PLAIN else unpack(rows, info.dtype, info.shape, dtype)
        if changes.added:
            values = values.float() - changes.added
        if changes.is_decay:
            values = values.float().neg().log()
        return values.T if changes.transposed else values

    return make
