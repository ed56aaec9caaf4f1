"""What the files of an encoder say of it: its kind, pooling, longest input; a GGUF's parameters.

Reads headers only; no torch.

Reads headers only, and imports torch only to make a parameter.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardnet.checkpoint.checkpoint import gguf_file
from shardnet.checkpoint.formats.gguf import read_gguf_files
from shardnet.checkpoint.formats.gguf_header import GgufHeader, first_values, gguf_files
from shardnet.checkpoint.formats.gguf_types import PLAIN, form_name, unpack
from shardnet.checkpoint.formats.huggingface import open_huggingface
from shardnet.checkpoint.tensors.checkpoint_files import has_file
from shardnet.checkpoint.tensors.json_files import read_json
from shardnet.checkpoint.tensors.model_tensor import ModelTensor, unchanged
from shardnet.checkpoint.tensors.stored_tensor import FileState, StoredTensor, TensorFile
from shardnet.errors import UnsupportedModelError
from shardnet.model.config.fields import Fields
from shardnet.model.config.limits import NORM_EPS, THETAS
from shardnet.model.families.encoders import (
    CLASSES,
    GGUF_TYPES,
    EncoderConfig,
    is_encoder,
    read_encoder_config,
)
from shardnet.model.families.stage_tensors import count_parameters
from shardnet.runtime.encoding.sentence_modules import (
    Pooling,
    SentenceModules,
    makes_vectors,
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

if TYPE_CHECKING:
    import torch


_LAST: Final = 3
_POOLINGS: Final[Mapping[int, Pooling]] = {1: "mean", 2: "cls", _LAST: "last"}
_RANK: Final = 4
_TYPES: Final = "embeddings.token_type_embeddings.weight"
_BERT_LAYER: Final = "encoder.layer.{}."
_NAMES: Final[Mapping[str, Mapping[str, str]]] = {
    "bert": {
        "token_embd": "embeddings.word_embeddings",
        "token_types": "embeddings.token_type_embeddings",
        "position_embd": "embeddings.position_embeddings",
        "token_embd_norm": "embeddings.LayerNorm",
        "attn_q": f"{_BERT_LAYER}attention.self.query",
        "attn_k": f"{_BERT_LAYER}attention.self.key",
        "attn_v": f"{_BERT_LAYER}attention.self.value",
        "attn_output": f"{_BERT_LAYER}attention.output.dense",
        "attn_output_norm": f"{_BERT_LAYER}attention.output.LayerNorm",
        "ffn_up": f"{_BERT_LAYER}intermediate.dense",
        "ffn_down": f"{_BERT_LAYER}output.dense",
        "layer_output_norm": f"{_BERT_LAYER}output.LayerNorm",
        "cls": "pooler.dense",
        "cls.output": "classifier",
    },
    "nomic-bert": {
        "token_embd": "embeddings.word_embeddings",
        "token_types": "embeddings.token_type_embeddings",
        "token_embd_norm": "emb_ln",
        "attn_qkv": "encoder.layers.{}.attn.Wqkv",
        "attn_output": "encoder.layers.{}.attn.out_proj",
        "attn_output_norm": "encoder.layers.{}.norm1",
        "ffn_up": "encoder.layers.{}.mlp.fc11",
        "ffn_gate": "encoder.layers.{}.mlp.fc12",
        "ffn_down": "encoder.layers.{}.mlp.fc2",
        "layer_output_norm": "encoder.layers.{}.norm2",
    },
    "modern-bert": {
        "token_embd": "embeddings.tok_embeddings",
        "token_embd_norm": "embeddings.norm",
        "attn_norm": "layers.{}.attn_norm",
        "attn_qkv": "layers.{}.attn.Wqkv",
        "attn_output": "layers.{}.attn.Wo",
        "ffn_norm": "layers.{}.mlp_norm",
        "ffn_up": "layers.{}.mlp.Wi",
        "ffn_down": "layers.{}.mlp.Wo",
        "output_norm": "final_norm",
        "cls": "head.dense",
        "cls.norm": "head.norm",
        "cls.output": "classifier",
    },
}
"""What transformers, or a model's makers, call a tensor, by its name in GGUF."""
_TENSOR: Final = re.compile(r"(?:blk\.(\d+)\.)?(.+)\.(weight|bias)")


def gguf_encoder(
    header: GgufHeader, stored: Mapping[str, StoredTensor], where: str
) -> tuple[dict[str, Any], tuple[ModelTensor, ...], Pooling]:
    """Return an encoder's config, parameters and pooling, from the header of the file `where`.

    Raises CheckpointError for a missing or malformed key, UnsupportedModelError for a value that is
    not implemented.
    """
    arch = str(header.metadata["general.architecture"])
    own = {
        key.removeprefix(f"{arch}."): value
        for key, value in header.metadata.items()
        if key.startswith(f"{arch}.")
    }
    fields = Fields(own, where, f"{arch}.")
    pooling = fields.take("pooling_type", int, 0)
    if pooling not in (0, *_POOLINGS, _RANK):
        raise fields.unsupported("pooling_type", pooling, "mean 1, cls 2, last 3, rank 4")
    ranks = pooling == _RANK or "cls.output.weight" in stored
    tensors = [_parameter(arch, tensor) for tensor in stored.values()]
    config = _config(arch, fields, {tensor.name: tensor.shape for tensor in tensors})
    config["architectures"] = [
        CLASSES[GGUF_TYPES[arch]] + ("ForSequenceClassification" if ranks else "Model")
    ]
    pad = Fields(header.metadata, where).take("tokenizer.ggml.padding_token_id", int, 0)
    config["pad_token_id"] = pad if 0 <= pad < config["vocab_size"] else 0
    if arch == "bert" and "token_types.weight" not in stored:
        if ranks:  # their heads are told from BERT's by nothing
            raise UnsupportedModelError(
                f"{where}: rerankers of DistilBERT are not read from GGUF",
                remedy="take the model's own repository, with safetensors",
            )
        tensors.append(_no_types(config["hidden_size"]))
    return config, tuple(tensors), _POOLINGS.get(pooling, "mean")


def _config(arch: str, fields: Fields, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Read what transformers' class is made of."""
    names = _NAMES[arch]
    (vocab_size, *_) = shapes.get(f"{names['token_embd']}.weight", (0,))
    n_heads, width = fields.positive("attention.head_count"), fields.positive("embedding_length")
    fields.require("attention.causal", False)
    if fields.take("rope.scaling.type", str, "none") != "none":
        raise fields.unsupported("rope.scaling.type", "another one", "none")
    config = {
        "model_type": GGUF_TYPES[arch],
        "vocab_size": vocab_size,
        "hidden_size": width,
        "num_hidden_layers": fields.positive("block_count"),
        "num_attention_heads": n_heads,
        "intermediate_size": fields.positive("feed_forward_length"),
        "max_position_embeddings": fields.positive("context_length"),
        "num_labels": shapes.get("classifier.weight", (1,))[0],
    }
    eps_key = "attention.layer_norm_epsilon"
    if arch == "modern-bert":
        every = fields.take("attention.sliding_window_pattern", int, 3)
        if fields.missing(eps_key):
            eps_key = "attention.layer_norm_rms_epsilon"
        return config | {
            "norm_eps": fields.number(eps_key, within=NORM_EPS),
            "local_attention": fields.positive("attention.sliding_window"),
            "global_attn_every_n_layers": every,
            "global_rope_theta": fields.number("rope.freq_base", 160000.0, within=THETAS),
            "local_rope_theta": fields.number("rope.freq_base_swa", 10000.0, within=THETAS),
            "classifier_pooling": "mean",  # as llama.cpp has it: no key says
        }
    config["layer_norm_eps"] = fields.number(eps_key, within=NORM_EPS)
    config["type_vocab_size"] = shapes.get(_TYPES, (1,))[0]
    if arch == "nomic-bert":
        theta = fields.number("rope.freq_base", 1000.0, within=THETAS)
        return config | {"hidden_act": "silu", "rope_theta": theta}
    positions = shapes.get("embeddings.position_embeddings.weight", (0,))[0]
    return config | {"hidden_act": "gelu", "max_position_embeddings": positions}


def _parameter(arch: str, source: StoredTensor) -> ModelTensor:
    """Describe a parameter by transformers' name; one that nobody knows has its own."""
    name, shape = source.name, source.shape
    match = _TENSOR.fullmatch(source.name)
    if match and match[2] in _NAMES[arch]:
        name = f"{_NAMES[arch][match[2]].format(match[1])}.{match[3]}"
    if len(shape) == 1 and name in (_TYPES, "classifier.weight"):
        shape = (1, *shape)  # the converter leaves axes of one out

    def make(stored: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        if source.dtype in PLAIN:
            return stored[0].to(dtype).view(shape)
        return unpack(stored[0], source.dtype, shape, dtype)

    return ModelTensor(name=name, shape=shape, dtype=None, sources=(source,), make=make)


def _no_types(width: int) -> ModelTensor:
    """Make the types of tokens of a model that has none, as DistilBERT."""

    def make(stored: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        import torch

        return torch.zeros(1, width, dtype=dtype)

    return ModelTensor(name=_TYPES, shape=(1, width), dtype=None, sources=(), make=make)


MAX_TOGETHER: Final = 8
"""Short inputs of a decoder that are computed at once."""
BATCH_POSITIONS: Final = 4096
"""Positions, padding included, that are computed at once, unless one input alone has more."""
MAX_BATCH: Final = 64
"""Inputs that are computed at once."""

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

    @property
    def is_plain_decoder(self) -> bool:
        """Whether it is a decoder whose hidden state of the last token is the vector."""
        of_last = SentenceModules(pooling="last", most_tokens=self.modules.most_tokens)
        normalized = self.modules.normalized
        return (
            self.model is not None
            and normalized is not False
            and (replace(self.modules, normalized=None) == of_last)
        )

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
    def room_blocks(self) -> int:
        """The capacity of a decoder's KV cache: one input of any length, or several short ones."""
        return max(blocks_for(self.context), MAX_TOGETHER)

    @property
    def _form(self) -> WeightForm:
        assert self.model is not None
        found = self.model
        dtype = DType.FLOAT32  # what computes it may be narrower
        return WeightForm(dtype=dtype, linear_dtype=found.linear_dtype, packed=found.packed)

    @property
    def needed_bytes(self) -> int:
        """Bytes of memory that it takes."""
        return self.weight_bytes + self.activation_bytes


def find_encoder(path: Path) -> EncoderFacts | None:
    """Read the headers of the encoder in a folder or a GGUF; None if something else is there.

    Raises CheckpointError if a file is damaged, UnsupportedModelError for what is not implemented.
    """
    file = gguf_file(path)
    if file is not None:
        said = first_values(file)
        arch = str(said.get(_ARCHITECTURE))
        if arch in GGUF_TYPES:
            return _in_gguf(path)
        is_one = said.get(f"{arch}.pooling_type") == _LAST
        return _decoder(path, SentenceModules(pooling="last")) if is_one else None
    if not os.path.isdir(path) or not has_file(path / "config.json"):
        return None
    if is_encoder(read_json(path / "config.json")):
        return _in_folder(path)
    return _decoder(path, read_modules(path)) if makes_vectors(path) else None


def _decoder(path: Path, modules: SentenceModules) -> EncoderFacts | None:
    """Describe a decoder that makes vectors; None for one that only a ring computes."""
    model = identify(path)
    model.check_known()
    own = model.config
    if own.outline is not None or own.has_state:
        return None
    context = min(own.default_context, modules.most_tokens or own.default_context)
    return EncoderFacts(
        path=path,
        stamp=model.stamp,
        config=EncoderConfig(
            model_type=own.family,
            kind="embedding",
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


def _in_gguf(path: Path) -> EncoderFacts:
    stamped, paths = stamp(path), gguf_files(path)
    headers, files = read_gguf_files(paths)
    stored = {name: one for file in files.values() for name, one in file.tensors.items()}
    raw, tensors, pooling = gguf_encoder(headers[0], stored, str(paths[0]))
    config = read_encoder_config(raw, str(paths[0]))
    return EncoderFacts(
        path=path,
        stamp=stamped,
        config=config,
        modules=SentenceModules(pooling=pooling),
        context=config.context,
        folder=paths[0].parent,
        tensors=tensors,
        opened={name: FileState.of(paths[0].with_name(name)) for name in files},
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
    stored = [tensor for file in contents.files.values() for tensor in file.tensors.values()]
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
