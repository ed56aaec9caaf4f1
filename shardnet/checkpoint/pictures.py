"""The part of a checkpoint that takes pictures: its tower, projector and processor.

Knows where they are: among the tensors of a multimodal checkpoint, or in a GGUF of their own beside
that of the language model. Reads headers only, and imports no torch. Must not know towers.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardnet.checkpoint.checkpoint import Checkpoint, gguf_file
from shardnet.checkpoint.formats.gguf import read_tensor_file
from shardnet.checkpoint.formats.gguf_header import (
    GgufHeader,
    MetadataValue,
    is_projector_name,
    read_gguf_header,
)
from shardnet.checkpoint.formats.gguf_ollama import HALVES, projector_of
from shardnet.checkpoint.formats.gguf_types import PLAIN, packing_of, unpack
from shardnet.checkpoint.formats.huggingface import converted_tensors
from shardnet.checkpoint.program_stores import projectors_of
from shardnet.checkpoint.tensors.checkpoint_files import folder_entries, has_file
from shardnet.checkpoint.tensors.json_files import read_json
from shardnet.checkpoint.tensors.manifest import is_blob
from shardnet.checkpoint.tensors.model_tensor import ModelTensor, rotary_halves, unchanged
from shardnet.checkpoint.tensors.stored_tensor import StoredTensor, damaged
from shardnet.errors import CheckpointError, UnsupportedModelError
from shardnet.model.config.fields import Fields
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families.transformers_modules import INSTALL
from shardnet.model.families.wrappers import VISIONS, WRAPPERS
from shardnet.model.vision.picture import PictureProcessor
from shardnet.model.vision.vision_family import (
    GGUF_KEYS,
    Table,
    TokenId,
    VisionConfig,
    VisionFamily,
)
from shardnet.types import DType

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from shardnet.model.layers.weight_source import WeightSource
    from shardnet.model.vision.tower import Tower

PROCESSOR_FILES: Final = ("preprocessor_config.json", "processor_config.json")
_HARMLESS: Final = (
    *("auto_map", "backend", "crop_size", "data_format", "default_to_square", "device", "do_pad"),
    *("disable_grouping", "feature_extractor_type", "image_processor_type", "image_seq_length"),
    *("image_token", "input_data_format", "num_additional_image_tokens", "pad_size"),
    *("processor_class", "return_tensors", "video_processor_type", "max_pixels", "min_pixels"),
    *("pan_and_scan_max_num_crops", "pan_and_scan_min_crop_size"),
    *("pan_and_scan_min_ratio_to_activate", "size_divisor", "_valid_processor_keys"),
)
"""Keys of processors' configs that change no picture."""
_LIMITS: Final = ("min_pixels", "max_pixels")
_OTHER: Final = "use the projector of this very model"
_SWAPPED: Final = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
_RUNNING: Final = (
    *("attention_dropout", "dtype", "head_dim", "initializer_range", "model_type", "torch_dtype"),
    *("architectures", "initializer_factor", "vocab_size"),
)
"""Keys of towers' configs that say nothing of what they compute, or what the others say too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures:
    """What a checkpoint has for pictures.

    `checkpoint` has the parameters of the tower by the names of the `table`, which `load` takes.
    Without `cuts` its processor does not say how many patches the tower is to compute.
    """

    table: Table
    load: Callable[[WeightSource, torch.dtype, torch.device], Tower]
    processor: PictureProcessor
    checkpoint: Checkpoint
    cuts: bool = True

    def weights_visited(self, side: int) -> int:
        """Return how many products with a weight a picture of `side` pixels takes, 0 if unknown."""
        import numpy as np

        if not self.cuts:
            return 0
        n_patches = len(self.processor.prepare(np.zeros((side, side, 3), np.uint8)).pixels)
        return n_patches * sum(map(math.prod, self.table.values()))

    def weight_bytes(self, dtype: DType) -> int:
        """Return the bytes of the tower's weights where it computes in `dtype`."""
        total = 0
        for name, shape in self.table.items():
            tensor = self.checkpoint.tensors.get(name)
            if tensor is not None and tensor.packed is not None:
                total += tensor.size_bytes
            else:
                total += math.prod(shape) * dtype.size_bytes
        return total


def open_pictures(
    checkpoint: Checkpoint, token_id: TokenId, mmproj: Path | None = None
) -> Pictures:
    """Find what takes pictures. `mmproj` is a GGUF of it, None for one beside the model's.

    Raises UnsupportedModelError, which says what is missing, for a model that takes none,
    CheckpointError for files that are damaged.
    """
    path = checkpoint.path
    header = None
    if mmproj is None and (model := gguf_file(path)) is not None:
        header = projector_of(model)
        mmproj = _find_projector(path) if header is None else model
    if mmproj is not None:
        return _open_gguf(checkpoint, token_id, mmproj, header or read_gguf_header(mmproj))
    wrapper = WRAPPERS.get(checkpoint.config.wrapper)
    kind = checkpoint.config.family
    if wrapper is None or kind not in wrapper.families:
        why = "it has no vision tower"
        if checkpoint.config.wrapper:
            why = f"the tower of {checkpoint.config.wrapper} with it is not implemented"
        raise UnsupportedModelError(
            f"this {kind} model takes no pictures: {why}",
            remedy="use a model that does, or leave the pictures out",
        )
    if wrapper.vision is None:
        return _open_modules(checkpoint)
    raw = json.loads(checkpoint.config_text)
    where = str(checkpoint.folder / "config.json")
    config = read_tower(wrapper.vision, raw, where, checkpoint.config)
    own = _read_processor(checkpoint.folder)
    spell = wrapper.vision.spell
    stored = {spell(name.removeprefix("model.")): info for name, info in checkpoint.stored.items()}
    table = wrapper.vision.tensors(config)
    made = {
        name: unchanged(name, _as_matrix(stored[name], shape))
        for name, shape in table.items()
        if name in stored
    }
    return Pictures(
        table=table,
        load=partial(wrapper.vision.load, config),
        processor=_processor(wrapper.vision, config, own, token_id),
        checkpoint=checkpoint.with_tensors(made),
    )


def _open_modules(checkpoint: Checkpoint) -> Pictures:
    """Open a tower that transformers' own modules compute."""
    try:
        from shardnet.model.modules.module_tower import ModuleProcessor, build_tower, row_token
    except ImportError as error:
        raise UnsupportedModelError(
            f"{checkpoint.path}: its tower has no implementation here, and transformers (5.24 or "
            "newer), which may have one, is not installed",
            remedy=f"{INSTALL}, or leave the pictures out",
        ) from error
    tower = build_tower(checkpoint.config_text, str(checkpoint.folder / "config.json"))
    stored = {name: unchanged(name, info) for name, info in checkpoint.stored.items()}
    made = converted_tensors(tower.rules, stored)
    table = tower.shapes
    return Pictures(
        table=table,
        load=tower.load,
        processor=ModuleProcessor(
            checkpoint.folder, row_token(checkpoint.config_text), tower.takes
        ),
        checkpoint=checkpoint.with_tensors({name: made[name] for name in made if name in table}),
        cuts=False,
    )


def read_tower(
    family: VisionFamily, raw: Mapping[str, Any], where: str, text: ModelConfig
) -> VisionConfig:
    """Read the config of a tower out of a config.json, which errors call `where`.

    Raises UnsupportedModelError for what is not implemented, CheckpointError for damage.
    """
    outer = Fields(raw, where)
    own = outer.inner("vision_config", outer.take("vision_config", dict))
    own.ignore(*_RUNNING)
    for key in ("num_channels", "in_channels"):
        own.require(key, 3)
    config = family.read_config(outer, own, text)
    own.note_the_rest()
    outer.refuse_unknown()
    return config


def _read_processor(folder: Path) -> Fields:
    """Read the config of the makers' processor: what it says of pictures."""
    for name in PROCESSOR_FILES:
        path = folder / name
        if has_file(path):
            raw = read_json(path)
            if name == PROCESSOR_FILES[0] or "image_processor" in raw:
                return Fields(raw.get("image_processor", raw), str(path))
    raise damaged(
        f"{folder}: neither {PROCESSOR_FILES[0]} nor {PROCESSOR_FILES[1]} is here, which say how "
        "pictures are prepared"
    )


def _processor(
    family: VisionFamily, config: VisionConfig, own: Fields, token_id: TokenId
) -> PictureProcessor:
    processor = family.make_processor(config, own, token_id)
    own.ignore(*_HARMLESS)
    own.note_the_rest()
    own.refuse_unknown()
    return processor


def _as_matrix(info: StoredTensor, shape: tuple[int, ...]) -> StoredTensor:
    """Describe the kernel of a convolution as a matrix, and a single number as one."""
    is_other = (len(info.shape) > 2 or not shape) and info.strides is None
    if is_other and math.prod(info.shape) == math.prod(shape):
        return replace(info, shape=shape)
    return info


def _find_projector(path: Path) -> Path:
    """Find the GGUF of a projector beside the model's: in its folder, or in Ollama's manifest."""
    folder = path if path.is_dir() else path.parent
    try:
        if is_blob(path.name):
            found = projectors_of(path)
        else:
            found = [folder / name for name in folder_entries(folder) if is_projector_name(name)]
    except OSError as error:
        raise CheckpointError(f"{folder}: {error.strerror}", remedy="check the path") from error
    if len(found) == 1:
        return found[0]
    if found:
        listed = ", ".join(sorted(file.name for file in found))
        raise UnsupportedModelError(
            f"{folder} has {len(found)} projectors: {listed}",
            remedy="name one of them with --mmproj",
        )
    raise UnsupportedModelError(
        f"{path}: no projector (mmproj) for pictures is beside this GGUF",
        remedy="fetch the mmproj file of the same repository into the folder, or name one with "
        "--mmproj",
    )


def _open_gguf(
    checkpoint: Checkpoint, token_id: TokenId, path: Path, header: GgufHeader
) -> Pictures:
    """Open the GGUF of a projector at `path`, or the part of one that `header` tells of."""
    family = _family_of(header.metadata, str(path))
    gguf = family.gguf
    assert gguf is not None, "it was found by its name there"
    header = _with_right_names(header)
    file = read_tensor_file(path, header)
    raw = _config_of_metadata(header.metadata, family, file.tensors, str(path))
    ids = (token_id(token) for token in (gguf.row_token, gguf.stand_in) if token)
    known = (each for each in ids if each is not None and each < checkpoint.config.vocab_size)
    if (row_id := next(known, None)) is None:
        raise UnsupportedModelError(
            f"{checkpoint.path}: its tokenizer has no {gguf.row_token}, which stands for pictures",
            remedy=_OTHER,
        )
    raw |= {"image_token_id": row_id}
    config = read_tower(family, raw, f"{path}, as config.json", checkpoint.config)
    own = Fields(_processor_of_metadata(header.metadata, family, raw), f"{path}, as JSON")
    has_pairs = gguf.has_rotary_pairs and HALVES not in header.metadata
    made = _gguf_tensors(family, config, file.tensors, str(path), has_pairs=has_pairs)
    return Pictures(
        table=family.tensors(config),
        load=partial(family.load, config),
        processor=_processor(family, config, own, token_id),
        checkpoint=checkpoint.beside(path.parent, {file.name: file}, made),
    )


def _with_right_names(header: GgufHeader) -> GgufHeader:
    """Swap `ffn_up` and `ffn_down` where the first converters did, which llama.cpp does too."""
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    up = shapes.get("v.blk.0.ffn_up.weight", ())
    if len(up) != 2 or up[0] >= up[1] or "v.blk.0.ffn_gate.weight" in shapes:
        return header

    def right(name: str) -> str:
        return re.sub(r"(?<=\.)ffn_(up|down)(?=\.)", lambda found: _SWAPPED[found[0]], name)

    tensors = tuple(replace(tensor, name=right(tensor.name)) for tensor in header.tensors)
    return replace(header, tensors=tensors)


def _family_of(metadata: Mapping[str, MetadataValue], where: str) -> VisionFamily:
    own = Fields(metadata, where)
    own.one_of("general.architecture", ("clip",))
    key = "clip.projector_type"
    if own.missing(key):
        key = "clip.vision.projector_type"
    known = {name: vision for vision in VISIONS if vision.gguf for name in vision.gguf.projectors}
    return known[own.one_of(key, sorted(known))]


def _vision_keys(metadata: Mapping[str, MetadataValue]) -> dict[str, MetadataValue]:
    prefix = "clip.vision."
    return {key.removeprefix(prefix): metadata[key] for key in metadata if key.startswith(prefix)}


def _config_of_metadata(
    metadata: Mapping[str, MetadataValue],
    family: VisionFamily,
    stored: Mapping[str, StoredTensor],
    where: str,
) -> dict[str, Any]:
    """Convert the metadata of a projector to the keys and values of config.json."""
    assert family.gguf is not None
    keys = _vision_keys(metadata)
    vision: dict[str, Any] = {GGUF_KEYS[key]: keys[key] for key in GGUF_KEYS if key in keys}
    is_silu = metadata.get("clip.use_silu") is True
    is_erf = metadata.get("clip.use_gelu") is True
    vision["hidden_act"] = "silu" if is_silu else "gelu" if is_erf else "quick_gelu"
    read = family.gguf.read(Fields(keys, where, "clip.vision."), stored)
    vision |= read.pop("vision_config", {})
    return {"vision_config": vision} | read


def _processor_of_metadata(
    metadata: Mapping[str, MetadataValue], family: VisionFamily, raw: Mapping[str, Any]
) -> dict[str, Any]:
    """Convert the metadata of a projector to the keys and values of a processor's config."""
    assert family.gguf is not None
    keys = _vision_keys(metadata)
    levels = {key: list(keys[key]) for key in ("image_mean", "image_std") if key in keys}  # type: ignore[arg-type]
    limits = {key: keys[f"image_{key}"] for key in _LIMITS if f"image_{key}" in keys}
    size = family.gguf.size(raw["vision_config"])
    return levels | limits | ({"size": size} if size else {})


def _gguf_tensors(
    family: VisionFamily,
    config: VisionConfig,
    stored: Mapping[str, StoredTensor],
    where: str,
    *,
    has_pairs: bool,
) -> dict[str, ModelTensor]:
    """Find all parameters. Raises CheckpointError for one that is missing or has another shape."""
    from gguf.constants import MODEL_ARCH
    from gguf.tensor_mapping import get_tensor_name_map

    gguf = family.gguf
    assert gguf is not None
    names = get_tensor_name_map(MODEL_ARCH.MMPROJ, max(config.n_layers, 3))
    own_names = gguf.names(config)
    made = {}
    for name, shape in family.tensors(config).items():
        stem, dot, suffix = name.rpartition(".")
        found = own_names.get(stem) or names.get_name(stem) or names.get_name(f"model.{stem}")
        parts = _stored_parts(own_names.get(name) or f"{found}{dot}{suffix}", stored, shape)
        if not parts:
            raise CheckpointError(f"{where} lacks {name}", remedy=_OTHER)
        is_turned = has_pairs and stem.endswith(("q_proj", "k_proj"))
        made[name] = _gguf_tensor(
            name,
            shape,
            parts,
            n_heads=config.n_heads if is_turned else None,
            added=gguf.added.get(name, 0.0),
        )
        is_one = len(parts) == 2 or all(part.shape[1:] == shape[1:] for part in parts)  # or frames
        if not is_one or sum(math.prod(part.shape) for part in parts) != math.prod(shape):
            raise CheckpointError(
                f"{where}: {parts[0].name} has shape {list(parts[0].shape)}, and {name} has "
                f"{list(shape)}",
                remedy=_OTHER,
            )
    return made


def _stored_parts(
    name: str, stored: Mapping[str, StoredTensor], shape: tuple[int, ...]
) -> list[StoredTensor]:
    """Find a parameter: whole, as one kernel for each of two frames, or cut to q, k and v."""
    if name in stored and f"{name}.1" not in stored:
        return [_as_matrix(stored[name], shape)]
    apart = [name.replace("attn_qkv", f"attn_{part}") for part in "qkv"]
    for names in ([name, f"{name}.1"], apart):
        if all(part in stored for part in names):
            return [stored[part] for part in names]
    return []


def _gguf_tensor(
    name: str,
    shape: tuple[int, ...],
    parts: Sequence[StoredTensor],
    *,
    n_heads: int | None,
    added: float,
) -> ModelTensor:
    """Make a parameter of what is stored, and undo what the converter has changed."""
    is_plain = all(part.dtype in PLAIN for part in parts)

    def make(stored: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        import torch

        made = []
        for rows, part in zip(stored, parts, strict=True):
            own = rows if n_heads is None else rotary_halves(rows, n_heads)
            if not is_plain:  # Ollama's may have values in other types than queries and keys
                is_packed = part.dtype not in PLAIN
                own = unpack(own, part.dtype, part.shape, dtype) if is_packed else own.to(dtype)
            made.append(own)
        if len(made) == 2:  # frames
            return torch.stack(made, 2).view(shape)
        return torch.cat(made).float() - added if added else torch.cat(made)

    if is_plain and len(parts) == 1 and n_heads is None and not added:
        return unchanged(name, parts[0])
    return ModelTensor(
        name=name,
        shape=shape,
        dtype=parts[0].dtype if is_plain and not added else None,
        sources=tuple(parts),
        make=make,
        packed=packing_of(parts, n_heads),
    )
