"""Identify a checkpoint on this machine: its folder, its model, its vision tower."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shardnet.assets import DEFAULT_MODEL_NAME, DEFAULT_MODEL_PATH
from shardnet.checkpoint.adapters.layer_files import AdapterFacts, with_adapters
from shardnet.checkpoint.checkpoint import Checkpoint, names_checkpoint, no_mtp
from shardnet.checkpoint.formats.gguf_header import gguf_files
from shardnet.checkpoint.hub_cache import HubName, pulled_folder
from shardnet.checkpoint.model_names import LM_STUDIO
from shardnet.checkpoint.pictures import Pictures, open_pictures
from shardnet.checkpoint.program_stores import OllamaName, find_in_lm_studio, find_ollama
from shardnet.checkpoint.recommended_sampling import read_recommended
from shardnet.checkpoint.replica import NO_LAYERS, StoredLayers, stored_layers
from shardnet.checkpoint.replica_journal import Journal
from shardnet.checkpoint.tensors.checkpoint_files import folder_entries
from shardnet.errors import CheckpointError, UnsupportedModelError
from shardnet.model.config.fields import unknown_keys_error
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.vision.picture import PictureProcessor
from shardnet.model.vision.vision_family import TokenId
from shardnet.stage.estimate.memory_estimate import WeightForm, layer_read_bytes
from shardnet.stage.estimate.packed_sizes import PackedSizes, packed_sizes
from shardnet.stage.estimate.stored_dtype import linear_dtype, stored_dtype
from shardnet.types import PREFILL_CHUNK_ROWS, DType


def processor_at(path: Path, mmproj: Path | None, token_id: TokenId) -> PictureProcessor:
    """Return the picture processor of the checkpoint at `path`; for `mmproj` see open_pictures.

    Raises UnsupportedModelError, which says what is missing, for a model that takes none, and
    CheckpointError for damaged files.
    """
    return open_pictures(Checkpoint.open(path), token_id, mmproj).processor


def tower_of(checkpoint: Checkpoint, mmproj: Path | None = None) -> Pictures | None:
    """Return the vision tower that a first stage loads, None if it is incomplete or unsupported.

    The reason is raised when a request has a picture. Of a GGUF that was named, `mmproj`, it is
    raised at once, as `open_pictures` does.
    """
    try:
        found = open_pictures(checkpoint, lambda text: 0, mmproj)
    except (UnsupportedModelError, CheckpointError):
        if mmproj is not None:
            raise
        return None
    stored = found.checkpoint.tensors
    here = {name: stored[name].shape for name in found.table if name in stored}
    return found if here == found.table else None


PICTURE_SIDE = 512
"""Side, in pixels, of the picture for which a plan predicts the time."""
MAX_CONFIG_TEXT = 1 << 20
"""Most characters of a config.json that one node sends another."""


Stamp = tuple[tuple[str, int, int], ...]
"""Name, size and time of change (ns) of every file of a checkpoint folder; see `stamp`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What is known of a checkpoint from its headers.

    `path` is its folder, or its file. `config_text` is its config as the text of a config.json.
    `stamp` changes when a file of it does. `is_complete`: it holds every tensor, and is not a
    replica. `packed` has the sizes of the weights that stay as they are stored. `stored_dtype` is
    the dtype of all other linear weights of layers in the files, None if they have to be converted;
    `linear_dtype` the same with the LM head. `form` names how they are stored, for people, and
    `size_bytes` is the size of the tensor files. `unknown_keys` of its config may change what is
    computed: rings refuse it unless they are to be ignored. `recommended` is the sampling that its
    makers recommend, by the names of SamplingParams. `layers` are the stored sizes of layers, and
    which of them are here.
    """

    model_id: str
    path: Path
    config: ModelConfig
    config_text: str
    stamp: Stamp
    is_complete: bool
    stored_dtype: DType | None = None
    linear_dtype: DType | None = None
    packed: PackedSizes | None = None
    form: str = ""
    size_bytes: int = 0
    unknown_keys: tuple[str, ...] = ()
    layers: StoredLayers = NO_LAYERS
    recommended: Mapping[str, float] = field(default_factory=dict)
    has_mtp: bool = False
    """Whether it has a layer for multi-token prediction."""
    adapters: tuple[AdapterFacts, ...] = ()
    """The adapters that a ring with this model loads."""
    tower_bytes: Mapping[DType, int] = field(default_factory=dict)
    """Bytes of its vision tower, by the dtype that computes; {} without one."""
    picture_layers: float = 0.0
    """The tower's time for a picture of 512 x 512, in layers' times for 256 rows; 0 if unknown."""

    def with_adapters(self, adapters: Sequence[AdapterFacts]) -> ModelFacts:
        """Return the facts with the weights of these adapters in the model's layers."""
        config = with_adapters(self.config, adapters)
        return replace(self, config=config, adapters=tuple(adapters))

    def with_mtp(self) -> ModelFacts:
        """Return the facts with the layer for multi-token prediction in the model. Raises
        UsageError where there is none.
        """
        if not self.has_mtp:
            raise no_mtp()
        return replace(self, config=replace(self.config, has_mtp=True))

    def with_tower(self, mmproj: Path) -> ModelFacts:
        """Return the facts with the tower of the GGUF `mmproj` in place of its own. Blocks; raises
        as tower_of.
        """
        checkpoint = Checkpoint.open(self.path, ignore_unknown_config=True)
        return replace(self, **_tower_sizes(checkpoint, mmproj))

    def check_known(self) -> None:
        """Raise UnsupportedModelError, which names all unknown keys of the config, if any."""
        if self.unknown_keys:
            raise unknown_keys_error(str(self.path), self.unknown_keys)


def find_folder(model: str) -> Path | None:
    """Return the folder, or the GGUF file, that `model` names on this machine: the bundled model,
    an absolute path, a model of the Hub that was pulled, of Ollama's or LM Studio's store.

    None when there is none here.
    """
    if model == DEFAULT_MODEL_NAME or os.path.isabs(model):
        path = DEFAULT_MODEL_PATH if model == DEFAULT_MODEL_NAME else Path(model)
        return path if names_checkpoint(path) else None
    if model.startswith(LM_STUDIO):
        return find_in_lm_studio(model)
    if ollama := OllamaName.parse(model):
        return find_ollama(ollama)
    name = HubName.parse(model)
    return pulled_folder(name) if name is not None else None


def identify(path: Path) -> ModelFacts:
    """Read the headers of a checkpoint and identify its model. Reads no tensor.

    Unknown keys of its config are not refused: see `ModelFacts.check_known`.
    """
    stamped = stamp(path)
    checkpoint = Checkpoint.open(path, ignore_unknown_config=True)
    return ModelFacts(
        model_id=checkpoint.model_id,
        path=path,
        config=checkpoint.config,
        config_text=checkpoint.config_text,
        stamp=stamped,
        is_complete=checkpoint.journal is None,
        stored_dtype=stored_dtype(checkpoint),
        linear_dtype=linear_dtype(checkpoint),
        packed=packed_sizes(checkpoint),
        form=checkpoint.form,
        size_bytes=checkpoint.size_bytes,
        unknown_keys=checkpoint.unknown_keys,
        recommended=read_recommended(path),
        layers=stored_layers(checkpoint),
        has_mtp=checkpoint.has_mtp,
        **_tower_sizes(checkpoint),
    )


def _tower_sizes(checkpoint: Checkpoint, mmproj: Path | None = None) -> dict[str, Any]:
    """Return the fields of ModelFacts about the vision tower."""
    tower = tower_of(checkpoint, mmproj)
    if tower is None:
        return {"tower_bytes": {}, "picture_layers": 0.0}
    form = WeightForm(dtype=DType.FLOAT32)
    of_row = layer_read_bytes(checkpoint.config, form) // DType.FLOAT32.size_bytes
    return {
        "tower_bytes": {dtype: tower.weight_bytes(dtype) for dtype in DType},
        "picture_layers": tower.weights_visited(PICTURE_SIDE) / (PREFILL_CHUNK_ROWS * of_row),
    }


def identify_at(model: str, *, ignore_unknown_config: bool = False) -> ModelFacts:
    """Identify the checkpoint that `model` names on this machine.

    Raises CheckpointError if there is none, or it is damaged, UnsupportedModelError if its config
    has unknown keys, unless `ignore_unknown_config`.
    """
    folder = find_folder(model)
    if folder is None:
        raise CheckpointError(f"there is no checkpoint folder at {model}")
    facts = identify(folder)
    if not ignore_unknown_config:
        facts.check_known()
    return facts


def check_model_id(path: Path, found: str, planned: str) -> None:
    """Raise CheckpointError if the model `found` at `path` is not the `planned` one."""
    if found != planned:
        raise CheckpointError(
            f"{path} holds model {found[:12]}, but the plan was made for {planned[:12]}: it has "
            "changed since, or differs between nodes"
        )


def config_text(facts: ModelFacts) -> str:
    """Return the text of a checkpoint's config, for a node that has no checkpoint.

    Raises CheckpointError when it is larger than 1 MiB.
    """
    text = facts.config_text
    if len(text) > MAX_CONFIG_TEXT:
        raise CheckpointError(
            f"{facts.path}: its config has {len(text)} characters, at most 1 MiB can be sent"
        )
    return text


def stamp(path: Path) -> Stamp:
    """Return name, size and modification time (ns) of every file of a checkpoint.

    The stamp of a replica changes only when tensors that it held are replaced: added tensors change
    nothing that was loaded before. Raises CheckpointError if the folder cannot be read.
    """
    journal = Journal.find(path) if path.is_dir() else None
    if journal is not None:
        return (("replica", journal.n_dropped, 0),)
    try:
        files = gguf_files(path) if path.is_file() else [path / n for n in folder_entries(path)]
        files = sorted(file for file in files if file.is_file())
        return tuple((f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files)
    except OSError as error:
        raise CheckpointError(
            f"{path}: {error.strerror}", remedy="check the path of --model"
        ) from error
