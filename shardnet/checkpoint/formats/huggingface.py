"""Checkpoints as transformers writes them: config.json beside tensors under the model's own names.

Knows which files there are: safetensors or torch's, one or several named by an index. Must not know
how their headers are laid out, nor families.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shardnet.checkpoint.formats.indexed_files import ReadFile, read_indexed_files
from shardnet.checkpoint.formats.safetensors_files import read_safetensors_file
from shardnet.checkpoint.formats.stacked_experts import split_experts
from shardnet.checkpoint.formats.torch_files import read_torch_file
from shardnet.checkpoint.quantization.registry import model_tensors, take_format
from shardnet.checkpoint.tensors.checkpoint_files import has_file
from shardnet.checkpoint.tensors.json_files import read_json
from shardnet.checkpoint.tensors.manifest import ID_FILES, INDEX_FILES, Contents
from shardnet.checkpoint.tensors.model_tensor import ModelTensor
from shardnet.checkpoint.tensors.stored_tensor import TensorFile
from shardnet.errors import CheckpointError
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families.wrappers import WRAPPERS, language_name

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from shardnet.model.modules.conversions import Conversions, ConvertedTensor


def converted_tensors(
    rules: Conversions, tensors: Mapping[str, ModelTensor]
) -> dict[str, ModelTensor]:
    """Convert `tensors`, which have the names that are stored, to those of the model.

    What the model has no place for keeps its name: the loader refuses it. Raises CheckpointError
    for tensors that do not make the parameter that their names say.
    """
    made = rules.convert({name: tensor.shape for name, tensor in tensors.items()})
    return {one.name: _model_tensor(one, tensors) for one in made}


def _model_tensor(one: ConvertedTensor, tensors: Mapping[str, ModelTensor]) -> ModelTensor:
    parts, make_one = [tensors[name] for name in one.sources], one.make
    if make_one is None:
        return replace(parts[0], name=one.name, packed=None)

    def make(stored: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        left, values = iter(stored), []
        for part in parts:
            values.append(part.make([next(left) for _ in part.sources], dtype))
        return make_one(values)

    return ModelTensor(
        name=one.name,
        shape=one.shape,
        dtype=None,
        sources=tuple(source for part in parts for source in part.sources),
        make=make,
    )


SINGLE_FILES: Final = ("model.safetensors", "pytorch_model.bin")
"""Safetensors go first."""
HF_INDEX_FILES: Final = INDEX_FILES[:2]
"""In the order of SINGLE_FILES."""
_READERS: Final[tuple[ReadFile, ...]] = (read_safetensors_file, read_torch_file)
HF_WHOLE: Final = tuple(name for name in ID_FILES if name != "params.json")
"""Files that belong to such a checkpoint besides its tensors."""


def has_huggingface_tensors(folder: Path) -> bool:
    """Return whether there are tensor files with the names used by transformers."""
    return any(has_file(folder / name) for name in (*SINGLE_FILES, *HF_INDEX_FILES))


def open_huggingface(folder: Path) -> Contents:
    """Read config.json and the headers of the tensor files.

    Raises CheckpointError, which names the file, when one is missing, truncated or damaged.
    """
    where = folder / "config.json"
    config = read_json(where)
    unknown: list[str] = []
    weight_format = take_format(config, str(where), unknown)
    index, files = _tensor_files(folder)
    stored = {name: info for file in files.values() for name, info in file.tensors.items()}
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in WRAPPERS:
        # Two configs may say this, or leave it to their class. The file has a head or has none.
        names = (language_name(name) or "" for name in stored)
        config["tie_word_embeddings"] = not any(name.startswith("lm_head.") for name in names)

    def arrange(config: ModelConfig) -> Mapping[str, ModelTensor]:
        tensors = model_tensors(config, stored, weight_format, str(folder))
        if config.outline is not None:
            from shardnet.model.modules.conversions import conversions_of

            return converted_tensors(conversions_of(config.outline.config_text), tensors)
        return split_experts(config, tensors)

    return Contents(
        folder=folder,
        config=config,
        where=str(where),
        files=files,
        whole=(*HF_WHOLE, *index),
        arrange=arrange,
        form=weight_format.title if weight_format is not None else "",
        unknown_keys=tuple(unknown),
    )


def _tensor_files(folder: Path) -> tuple[list[str], dict[str, TensorFile]]:
    """Read the headers of all tensor files; return them and the name of the index, if any."""
    for single, index, read in zip(SINGLE_FILES, HF_INDEX_FILES, _READERS, strict=True):
        if has_file(folder / single):
            return [], {single: read(folder / single)}
        if has_file(folder / index):
            return [index], read_indexed_files(folder / index, read)
    names = ", ".join((*SINGLE_FILES, *HF_INDEX_FILES))
    raise CheckpointError(
        f"{folder}: no tensors are here: neither {names}, nor consolidated files beside "
        "params.json, nor a GGUF",
        remedy="fetch the checkpoint again",
    )
