"""Meta's and Mistral's own layout: params.json, and tensors in `consolidated` files.

Knows their names of tensors, that queries and keys are in interleaved rotary order, and how the
parts of Meta's model parallel training are joined: every part has the same tensors, each cut along
one axis or, as norms are, not at all. Of params.json a family reads its own keys. Must not know
kernels.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardnet.checkpoint.formats.safetensors_files import (
    read_indexed_files,
    read_safetensors_file,
    refuse_absent,
)
from shardnet.checkpoint.formats.torch_files import read_torch_file
from shardnet.checkpoint.quantization.fp8 import ScaleLayout, fp8_tensor
from shardnet.checkpoint.tensors.checkpoint_files import folder_entries, has_file
from shardnet.checkpoint.tensors.json_files import read_json
from shardnet.checkpoint.tensors.manifest import ID_FILES, Contents
from shardnet.checkpoint.tensors.model_tensor import (
    Make,
    ModelTensor,
    as_stored,
    rotary_halves,
    unchanged,
)
from shardnet.checkpoint.tensors.stored_tensor import FileTotals, StoredTensor, TensorFile, damaged
from shardnet.model.config.decoder_config import read_params_decoder
from shardnet.model.config.fields import Fields
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families.registry import FAMILIES, family_of
from shardnet.model.families.stage_tensors import lacking, stage_tensors
from shardnet.model.families.tensor_shapes import Shape
from shardnet.types import LayerRange

if TYPE_CHECKING:
    import torch
    from torch import Tensor


Parts = Mapping[str, Sequence[StoredTensor]]
"""The parts of each tensor, by its name in the files, in order."""

PARAMS_FILE: Final = "params.json"
SINGLE_FILE: Final = "consolidated.safetensors"
INDEX_FILE: Final = "consolidated.safetensors.index.json"
_PART = re.compile(r"consolidated\.(\d\d)\.(pth|safetensors)")
_SCALE = ".qscale_weight"
_SKIPPED = re.compile(r"rope\.freqs|.*\.qscale_act")
"""Scales of activations among them, which are not quantised here."""
OWN_WHOLE: Final = tuple(name for name in ID_FILES if name != "config.json")
"""Files that belong to such a checkpoint besides its tensors."""
_DTYPES: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

_OUTER: Final = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
}
_IN_LAYER: Final = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


def has_consolidated_files(folder: Path) -> bool:
    """Return whether `folder` has a checkpoint of this layout."""
    files = (SINGLE_FILE, INDEX_FILE, "consolidated.00.pth", "consolidated.00.safetensors")
    return has_file(folder / PARAMS_FILE) and any(has_file(folder / name) for name in files)


def open_consolidated(folder: Path) -> Contents:
    """Read params.json and the headers of the tensor files.

    Raises CheckpointError, which names the file, when one is missing, truncated or damaged.
    """
    where = folder / PARAMS_FILE
    params = read_json(where)
    index, files = _tensor_files(folder)
    parts: dict[str, list[StoredTensor]] = {}
    for file in files.values():
        for name, info in file.tensors.items():
            parts.setdefault(name.rpartition("/")[2], []).append(info)
    required = ("tok_embeddings.weight", "norm.weight")
    head = () if params.get("tied_embeddings") else ("output.weight",)
    refuse_absent(files.values(), folder, lambda: {*required, *head} - parts.keys(), str)
    for name in required:
        if name not in parts:
            raise damaged(f"{folder}: tensor {name} is missing")
    is_tied = "output.weight" not in parts
    rows = parts["tok_embeddings.weight" if is_tied else "output.weight"]
    kind = parts["norm.weight"][0].dtype
    unknown: list[str] = []
    config = config_of_params(
        params,
        vocab_size=sum(info.shape[0] for info in rows if info.shape),
        is_tied=is_tied,
        dtype=_DTYPES.get(kind, "bfloat16"),
        where=str(where),
        unknown=unknown,
    )

    def arrange(config: ModelConfig) -> dict[str, ModelTensor]:
        made = _arrange(parts, config)

        def needed() -> set[str]:
            weights = {_own_name(config, name) for name in lacking(config, made)}
            scales = {name.replace(".weight", _SCALE) for name in parts}
            return weights.union(*(scales.intersection(file.absent) for file in files.values()))

        refuse_absent(files.values(), folder, needed, str)
        return made

    return Contents(
        folder=folder,
        config=config,
        where=f"{where}, as config.json",
        files=files,
        whole=(*OWN_WHOLE, *index),
        arrange=arrange,
        unknown_keys=tuple(unknown),
    )


def _tensor_files(folder: Path) -> tuple[list[str], dict[str, TensorFile]]:
    """Read the headers of all tensor files; return them and the name of the index, if any."""
    if has_file(folder / SINGLE_FILE):
        return [], {SINGLE_FILE: read_safetensors_file(folder / SINGLE_FILE)}
    if has_file(folder / INDEX_FILE):
        return [INDEX_FILE], read_indexed_files(folder / INDEX_FILE, read_safetensors_file)
    try:
        paths = [folder / name for name in part_files(folder_entries(folder))]
    except OSError as error:
        raise damaged(f"{folder}: {error.strerror}") from error
    for number, path in enumerate(paths):
        expected = f"consolidated.{number:02}{paths[0].suffix}"
        if path.name != expected:
            raise damaged(f"{folder / expected}: this part is missing")
    totals = FileTotals(folder)
    return [], {path.name: totals.add(_read_part(path, len(paths))) for path in paths}


def part_files(names: Iterable[str]) -> list[str]:
    """Filter `names` for the parts of a checkpoint, sorted: safetensors, or else torch's."""
    parts = sorted(name for name in names if _PART.fullmatch(name))
    return [name for name in parts if name.endswith(".safetensors")] or parts


def _read_part(path: Path, n_parts: int) -> TensorFile:
    """Read one part's header. Of several parts, tensor names are prefixed with the part's."""
    is_torch = path.suffix == ".pth"
    file = read_torch_file(path) if is_torch else read_safetensors_file(path)
    if n_parts == 1:
        return file
    renamed = (replace(info, name=f"{path.stem}/{name}") for name, info in file.tensors.items())
    return replace(file, tensors={info.name: info for info in renamed})


def _arrange(parts: Parts, config: ModelConfig) -> dict[str, ModelTensor]:
    """Map the parts of every tensor to its parameter; an unknown tensor has its own name."""
    left = {name: infos for name, infos in parts.items() if not _SKIPPED.fullmatch(name)}
    made: dict[str, ModelTensor] = {}
    shapes = stage_tensors(config, LayerRange(0, config.n_layers)).all
    for name, shape in shapes.items():
        own_name = _own_name(config, name)
        infos = left.pop(own_name, None)
        if infos is not None:
            scales = left.pop(own_name.replace(".weight", _SCALE), None)
            made[name] = _parameter(config, name, shape, infos)
            if scales is not None:
                made[name] = _scaled(config, made[name], infos, scales)
    return made | {name: unchanged(name, infos[0]) for name, infos in left.items()}


def _own_name(config: ModelConfig, name: str) -> str:
    """Convert `model.layers.3.mlp.up_proj.weight` to `layers.3.feed_forward.w3.weight`."""
    stem, _, kind = name.rpartition(".")
    if stem in _OUTER:
        return f"{_OUTER[stem]}.{kind}"
    _, _, layer, inner = stem.split(".", 3)
    experts = family_of(config).experts
    if experts is not None:
        inner = inner.replace(f"{experts.block}.", "feed_forward.")
    return f"layers.{layer}.{_IN_LAYER.get(inner, inner)}.{kind}"


def _parameter(
    config: ModelConfig, name: str, shape: Shape, infos: Sequence[StoredTensor]
) -> ModelTensor:
    n_heads = _rotated_heads(config, name)
    first = infos[0].shape
    if len({(info.shape, info.dtype) for info in infos}) > 1:
        return unchanged(name, infos[0])  # parts unlike each other: refused by its shape
    axis = _cut_axis(first, shape, len(infos))
    if axis is None:
        infos, made = infos[:1], first
    else:
        made = tuple(n * len(infos) if at == axis else n for at, n in enumerate(first))
    return ModelTensor(
        name=name,
        shape=made,
        dtype=infos[0].dtype,
        sources=tuple(infos),
        make=_joined(axis, n_heads if made == shape else None),
    )


def _rotated_heads(config: ModelConfig, name: str) -> int | None:
    """Return the heads of queries or keys, whose rows rotate in pairs; None for others."""
    if ".q_proj." in name:
        return config.n_heads
    return config.n_kv_heads if ".k_proj." in name else None


def _scaled(
    config: ModelConfig,
    tensor: ModelTensor,
    infos: Sequence[StoredTensor],
    scales: Sequence[StoredTensor],
) -> ModelTensor:
    """Combine an FP8 weight with its one scale; return any other `tensor` unchanged."""
    is_fp8 = infos[0].dtype == "F8_E4M3" and len(infos[0].shape) == 2
    if len(infos) > 1 or not is_fp8 or scales[0].shape not in ((), (1,)):
        return tensor
    n_rows, n_heads = infos[0].shape[0], _rotated_heads(config, tensor.name)

    def order(begin: int, end: int) -> Tensor:
        import torch

        stored = torch.arange(n_rows)
        return (stored if n_heads is None else rotary_halves(stored, n_heads))[begin:end]

    layout = ScaleLayout(rows=n_rows, columns=0)
    has_order = n_heads is not None
    return fp8_tensor(tensor.name, infos[0], scales[0], layout, order if has_order else None)


def _cut_axis(part: Shape, whole: Shape, n_parts: int) -> int | None:
    """Return the axis along which a tensor is split, None if every part has all of it."""
    for axis in range(len(part)):
        grown = tuple(n * n_parts if at == axis else n for at, n in enumerate(part))
        if n_parts > 1 and grown == whole:
            return axis
    return None


def _joined(axis: int | None, n_heads: int | None) -> Make:
    def make(stored: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        import torch

        values = as_stored(stored, dtype) if axis is None else torch.cat(list(stored), axis)
        return values if n_heads is None else rotary_halves(values, n_heads)

    return make


def config_of_params(
    params: Mapping[str, Any],
    vocab_size: int,
    is_tied: bool,
    dtype: str,
    where: str,
    unknown: list[str] | None = None,
) -> dict[str, Any]:
    """Convert the params.json at `where` to the keys and values of config.json.

    `vocab_size` and `is_tied` follow from the tensors, and `dtype`, which they are stored in.
    Unknown keys are added to the list `unknown`; without it they are refused. Raises
    UnsupportedModelError for a value that is not implemented, CheckpointError for one that is
    malformed.
    """
    fields = Fields(params, where, unknown=unknown)
    fields.ignore("vocab_size", "tied_embeddings", "max_batch_size", "model_parallel_size")
    config = read_params_decoder(fields) | _read_family(fields)
    fields.note_the_rest()
    fields.refuse_unknown()
    return config | {
        "vocab_size": vocab_size,
        "tie_word_embeddings": is_tied,
        "torch_dtype": dtype,
    }


def _read_family(fields: Fields) -> dict[str, Any]:
    for family in FAMILIES.values():
        consolidated = family.consolidated
        if consolidated is not None and consolidated.claims(fields):
            return {"model_type": family.model_type} | consolidated.read(fields)
    raise fields.damaged("its keys are of no model that is known")
