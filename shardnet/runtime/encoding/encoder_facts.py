"""What the files of an encoder say of it: its kind, pooling, longest input, memory.

Reads headers only; no torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from shardnet.checkpoint.checkpoint import gguf_file
from shardnet.checkpoint.formats.gguf import ONLY_ANSWERS, read_gguf_files
from shardnet.checkpoint.formats.gguf_header import first_values, gguf_files
from shardnet.checkpoint.formats.gguf_ollama import is_gemma_embedding
from shardnet.checkpoint.formats.gguf_types import form_name
from shardnet.checkpoint.formats.huggingface import open_huggingface
from shardnet.checkpoint.tensors.checkpoint_files import has_file
from shardnet.checkpoint.tensors.json_files import read_json
from shardnet.checkpoint.tensors.model_tensor import ModelTensor, unchanged
from shardnet.checkpoint.tensors.stored_tensor import FileState, TensorFile
from shardnet.errors import UnsupportedModelError
from shardnet.model.families.encoders import (
    GGUF_TYPES,
    EncoderConfig,
    Kind,
    is_encoder,
    read_encoder_config,
)
from shardnet.model.families.stage_tensors import count_parameters
from shardnet.runtime.encoding.gguf_encoder import POOLINGS, RANK, gguf_encoder
from shardnet.runtime.encoding.sentence_modules import (
    DenseLayer,
    SentenceModules,
    check_widths,
    read_decoder_modules,
    read_modules,
)
from shardnet.runtime.loading.model_facts import ModelFacts, Stamp, identify, stamp
from shardnet.stage.estimate.memory_estimate import (
    WeightForm,
    activation_peak_bytes,
    kv_block_bytes,
    stage_weight_bytes,
)
from shardnet.types import PREFILL_CHUNK_ROWS, DType, LayerRange, blocks_for

MAX_TOGETHER: Final = 8
"""Short inputs of a decoder that are computed at once."""
BATCH_POSITIONS: Final = 4096
"""Positions, padding included, that are computed at once, unless one input alone has more."""
_PREFIXES: Final = ("bert.", "distilbert.", "roberta.", "mpnet.", "nomic_bert.", "model.")
"""What classes with a head put before the names of the others' tensors."""
_HEADS: Final = ("cls.", "lm_head.", "classifier.", "head.", "decoder.", "vocab_")
"""What the names of tensors of heads begin with that vectors do not need."""

_ARCHITECTURE: Final = "general.architecture"


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderFacts:
    """An encoder on this machine.

    `modules` are what is done around it. `context` is the most tokens of one input, special ones
    included. `tensors` are its parameters, `opened` their files, by name in `folder`. `model_id` is
    SHA-256 in hex over config and headers. `model` is a decoder, computed by layers of our own as a
    ring would; None for what transformers' classes compute.
    """

    path: Path
    stamp: Stamp
    config: EncoderConfig
    modules: SentenceModules
    context: int
    folder: Path
    tensors: tuple[ModelTensor, ...]
    opened: dict[str, FileState]
    form: str
    size_bytes: int
    model_id: str
    model: ModelFacts | None = None
    unpacks: bool = False
    """Whether the device that computes it has a decoder's weights unpacked, as GPUs by torch."""

    @property
    def is_for_rings_too(self) -> bool:
        """Whether it is a decoder of which a ring makes the same, by what no file has to say."""
        said = self.modules
        if self.model is None or ONLY_ANSWERS in self.model.unknown_keys:
            return False
        if self.config.kind == "reranker":
            return said.answers is None
        of_last = replace(said, pooling="last", dense=(), prompt="", lowers=False)
        return said == of_last and said.normalized is not False

    @property
    def width(self) -> int:
        """How many numbers a vector has, or a score."""
        if self.config.kind == "reranker":
            return 1
        dense = self.modules.dense
        return dense[-1].tensors[0].shape[0] if dense else self.config.hidden_size

    @property
    def n_parameters(self) -> int:
        """How many weights it has."""
        if self.model is not None:
            return count_parameters(self.model.config)
        return sum(math.prod(tensor.shape) for tensor in self.tensors)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in memory: in float32, a decoder's linears as they are stored."""
        if self.model is not None:
            layers = LayerRange(0, self.config.n_layers)
            return stage_weight_bytes(self.model.config, layers, self._form)
        return 4 * self.n_parameters

    @property
    def activation_bytes(self) -> int:
        """Bytes that computing the largest batch takes, about: rows of one layer, and its maps.

        A decoder's keys and values are among them.
        """
        if self.model is not None:
            config, layers = self.model.config, LayerRange(0, self.config.n_layers)
            rows, dtype = PREFILL_CHUNK_ROWS, DType.FLOAT32
            kv_bytes = self.room_blocks * kv_block_bytes(config, layers, dtype)
            return kv_bytes + activation_peak_bytes(config, layers, rows, dtype, self.context)
        rows = max(BATCH_POSITIONS, self.context)
        return 4 * rows * (16 * self.config.hidden_size + self.config.n_maps * self.context)

    @property
    def batch_positions(self) -> int:
        """Positions that are computed in one go. A decoder, which may be large, gains by no more
        than a chunk of them, and the next request waits for it."""
        return BATCH_POSITIONS if self.model is None else 2 * PREFILL_CHUNK_ROWS

    @property
    def room_blocks(self) -> int:
        """The capacity of a decoder's KV cache: one input of any length, or several short ones."""
        return max(blocks_for(self.context), MAX_TOGETHER)

    @property
    def _form(self) -> WeightForm:
        assert self.model is not None
        found = self.model
        if self.unpacks:
            return WeightForm(dtype=found.config.checkpoint_dtype or DType.FLOAT32)
        dtype = DType.FLOAT32  # what computes it may be narrower
        return WeightForm(dtype=dtype, linear_dtype=found.linear_dtype, packed=found.packed)

    @property
    def needed_bytes(self) -> int:
        """Bytes of memory that it takes."""
        return self.weight_bytes + self.activation_bytes


def bare_name(name: str) -> str:
    """Return the name of a tensor as a class without a head has it."""
    return name.partition(".")[2] if name.startswith(_PREFIXES) else name


def is_of_head(name: str) -> bool:
    """Say whether a tensor is of a head that vectors do not need."""
    return bare_name(name).startswith(_HEADS)


def find_encoder(path: Path) -> EncoderFacts | None:
    """Read the headers of the encoder in a folder or a GGUF; None if something else is there.

    Raises CheckpointError if a file is damaged, UnsupportedModelError for what is not implemented.
    """
    file = gguf_file(path)
    if file is not None:
        said = first_values(file)
        arch = str(said.get(_ARCHITECTURE))
        if arch in GGUF_TYPES or is_gemma_embedding(said):
            return _in_gguf(path)
        number = said.get(f"{arch}.pooling_type")
        if number == RANK:
            return _decoder(path, "reranker", SentenceModules(pooling="last"))
        pooling = POOLINGS.get(number)
        if pooling is None:
            return None
        return _decoder(path, "embedding", SentenceModules(pooling=pooling))
    if not os.path.isdir(path) or not has_file(path / "config.json"):
        return None
    if is_encoder(read_json(path / "config.json")):
        return _in_folder(path)
    found = read_decoder_modules(path)
    return None if found is None else _decoder(path, *found)


def _decoder(path: Path, kind: Kind, modules: SentenceModules) -> EncoderFacts | None:
    """Describe a decoder that is an encoder; None for one that only a ring computes.

    Raises UnsupportedModelError where no ring would make the same of that.
    """
    model = identify(path)
    if model.unknown_keys != (ONLY_ANSWERS,):
        model.check_known()
    own = model.config
    if own.wrapper:
        raise UnsupportedModelError(f"{path}: {kind} models that see are not implemented")
    check_widths(modules.dense, own.hidden_size, str(path))
    context = min(own.default_context, modules.most_tokens or own.default_context)
    facts = EncoderFacts(
        path=path,
        stamp=model.stamp,
        config=EncoderConfig(
            model_type=own.family,
            kind=kind,
            class_name="",
            keys={},
            context=context,
            hidden_size=own.hidden_size,
            n_layers=own.n_layers,
            n_maps=0,
            has_types=False,
        ),
        modules=modules,
        context=context,
        folder=path,
        tensors=(),
        opened={},
        form=model.form,
        size_bytes=model.size_bytes,
        model_id=model.model_id,
        model=model,
    )
    if own.outline is None and not own.has_state:
        return facts
    if facts.is_for_rings_too:
        return None
    raise UnsupportedModelError(
        f"{path}: {own.family} is computed by rings alone, which do not do what is to be done "
        "around it",
        remedy="use another model (docs/models.md)",
    )


def _in_gguf(path: Path) -> EncoderFacts:
    stamped, paths = stamp(path), gguf_files(path)
    headers, files = read_gguf_files(paths)
    stored = {name: one for file in files.values() for name, one in file.tensors.items()}
    found = gguf_encoder(headers[0], stored, str(paths[0]))
    config = read_encoder_config(found.config, str(paths[0]))
    opened = {name: FileState.of(paths[0].with_name(name)) for name in files}
    dense = tuple(
        DenseLayer(
            activation="Identity",
            tensors=(tensor,),
            folder=paths[0].parent,
            opened=opened,
        )
        for tensor in found.dense
    )
    check_widths(dense, config.hidden_size, str(paths[0]))
    return EncoderFacts(
        path=path,
        stamp=stamped,
        config=config,
        modules=SentenceModules(pooling=found.pooling, dense=dense),
        context=config.context,
        folder=paths[0].parent,
        tensors=found.parameters,
        opened=opened,
        form=form_name(headers[0].metadata.get("general.file_type")),
        size_bytes=sum(file.size_bytes for file in files.values()),
        model_id=_model_id(files.values(), config),
    )


def _in_folder(path: Path) -> EncoderFacts:
    stamped = stamp(path)
    contents = open_huggingface(path)
    if contents.form:
        raise UnsupportedModelError(f"{path}: an encoder with {contents.form} weights is not read")
    config = read_encoder_config(contents.config, contents.where)
    modules = read_modules(path)
    check_widths(modules.dense, config.hidden_size, str(path))
    keeps_head = config.kind == "reranker"
    stored = [
        tensor
        for file in contents.files.values()
        for tensor in file.tensors.values()
        if keeps_head or not is_of_head(tensor.name)
    ]
    return EncoderFacts(
        path=path,
        stamp=stamped,
        config=config,
        modules=modules,
        context=min(config.context, modules.most_tokens or config.context),
        folder=path,
        tensors=tuple(unchanged(tensor.name, tensor) for tensor in stored),
        opened={name: FileState.of(contents.folder / name) for name in contents.files},
        form=max(stored, key=lambda tensor: tensor.size_bytes).dtype if stored else "",
        size_bytes=sum(file.size_bytes for file in contents.files.values()),
        model_id=_model_id(contents.files.values(), config),
    )


def _model_id(files: Iterable[TensorFile], config: EncoderConfig) -> str:
    headers = [f"{file.name} {file.size_bytes} {file.sha256}" for file in files]
    headers.append(json.dumps(config.keys, sort_keys=True))
    return hashlib.sha256("\n".join(headers).encode()).hexdigest()
