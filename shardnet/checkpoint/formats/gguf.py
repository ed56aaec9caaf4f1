"""GGUF checkpoints: one file, or several parts, with config, tokenizer and tensors in it.

An unknown key is noted by name.
"""

from __future__ import annotations

import struct
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from shardnet.checkpoint.formats.gguf_header import (
    GgufHeader,
    GgufTensor,
    MetadataValue,
    ahead_name,
    gguf_files,
    read_gguf_header,
)
from shardnet.checkpoint.formats.gguf_ollama import language_of
from shardnet.checkpoint.formats.gguf_parameters import BLOCK, arrange
from shardnet.checkpoint.formats.gguf_types import PACKED, PLAIN, form_name, packed_bytes, type_name
from shardnet.checkpoint.tensors.checkpoint_files import open_file
from shardnet.checkpoint.tensors.manifest import Contents
from shardnet.checkpoint.tensors.stored_tensor import (
    FileTotals,
    StoredTensor,
    TensorFile,
    check_name,
    damaged,
    end_of,
    hash_ranges,
)
from shardnet.errors import CheckpointError, UnsupportedModelError, shown
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import FACTOR_TENSORS, Factors, GgufFields
from shardnet.model.families.encoders import GGUF_TYPES, writes_nothing
from shardnet.model.families.registry import gguf_families

ANSWERS: Final = ["yes", "no"]
"""What a reranker answers; others' rows of the LM head are no use to it."""
ANSWERS_HEAD: Final = "cls.output.weight"
"""Those rows [2, E], which may be all that there is of a head: of one that is the embedding too."""
ONLY_ANSWERS: Final = f"an LM head of {' and '.join(ANSWERS)} alone ({ANSWERS_HEAD})"
"""What is noted of a file without another head: a ring would write text by a head of its own."""
_ARCHITECTURE: Final = "general.architecture"
_FIRST_MXFP4: Final = 4
"""The type of MXFP4 by Ollama's first converter of gpt-oss, which no other file has."""
_NUMBERS: Final = ".ffn_gate_tid2eid.weight"
"""Ends the names of tables of experts, which are whole numbers."""
_POOLINGS: Final = range(5)
"""None, those of vectors, a reranker's: runtime/encoding has to know, text is the same."""


def config_of_metadata(
    metadata: Mapping[str, MetadataValue],
    tensors: Container[str],
    vocab_size: int,
    factors: Factors,
    dtype: str,
    where: str,
    unknown: list[str],
) -> dict[str, Any]:
    """Convert the metadata of the file `where` to the keys and values of config.json.

    `tensors` are the names in the file, `factors` what divides rotary frequencies, `dtype` what
    most of the file is stored in. Unknown keys are added to the list `unknown`. Raises
    UnsupportedModelError for an architecture or a value that is not implemented, CheckpointError
    for one that is malformed.
    """
    general = Fields(metadata, where)
    arch = general.take("general.architecture", str)
    families = gguf_families()
    if arch == "clip":
        raise UnsupportedModelError(
            f"{where}: general.architecture = 'clip': this reads pictures for a language model, "
            "and writes nothing",
            remedy="name the language model's file with --model, and this one with --mmproj",
        )
    if arch in GGUF_TYPES:
        raise writes_nothing(where)
    if "bert" in arch:
        raise UnsupportedModelError(
            f"{where}: general.architecture = {shown(arch)}: of encoders these are read from GGUF: "
            f"{', '.join(GGUF_TYPES)}",
            remedy="use an encoder of one of these kinds, as GGUF or safetensors (docs/models.md)",
        )
    own = {
        key.removeprefix(f"{arch}."): value
        for key, value in metadata.items()
        if key.startswith(f"{arch}.")
    }
    fields = GgufFields(own, where, f"{arch}.", unknown, tensors=tensors, factors=factors)
    n_ahead = _n_layers_ahead(fields)
    if n_ahead:
        n_blocks = fields.positive("block_count")
        for key, value in own.items():
            if isinstance(value, list) and len(value) == n_blocks:
                own[key] = value[:-n_ahead]
        own["block_count"] = n_blocks - n_ahead
    config = None
    for family in families.get(arch, ()):
        if config is None and family.gguf is not None and family.gguf.claims(fields):
            config = {"model_type": family.model_type} | family.gguf.read(fields)
            if arch in family.gguf.multimodal:
                fields.ignore("n_deepstack_layers")
            if arch.startswith(("qwen", "glm4")):
                takes_turns = arch != "qwen2vl" and arch.startswith("qwen")
                config |= _read_axes(fields, config, takes_turns=takes_turns)
    if config is None:
        raise general.unsupported("general.architecture", arch, ", ".join(sorted(families)))
    fields.ignore("vocab_size", "tensor_data_layout", "rope.scaling.finetuned")
    if own.get("pooling_type") in _POOLINGS:
        fields.ignore("pooling_type")
    labels = fields.take("classifier.output_labels", list, ANSWERS)
    if labels != ANSWERS:
        raise fields.unsupported("classifier.output_labels", labels, str(ANSWERS))
    fields.require("attention.causal", True)
    fields.note_the_rest()
    ends = ("eos", "eot", "eom")
    eos = [general.take(f"tokenizer.ggml.{end}_token_id", int, None) for end in ends]
    eos += general.take("tokenizer.ggml.eos_token_ids", list, [])  # Ollama's
    return config | {
        "vocab_size": vocab_size,
        "tie_word_embeddings": "output.weight" not in tensors,
        "torch_dtype": dtype,
        "bos_token_id": general.take("tokenizer.ggml.bos_token_id", int, None),
        "eos_token_id": list(dict.fromkeys(token for token in eos if token is not None)),
    }


def _read_axes(fields: Fields, config: Mapping[str, Any], *, takes_turns: bool) -> dict[str, Any]:
    """Read of how many rotary columns turn by time, height and width, as config.json would say."""
    sections = fields.take("rope.dimension_sections", list, None)
    if sections is None:
        return {}
    rope = {"rope_type": "default"} | (config["rope_scaling"] or {})
    return {
        "rope_scaling": rope | {"mrope_section": sections[:3], "mrope_interleaved": takes_turns}
    }


def _n_layers_ahead(fields: Fields) -> int:
    """Return how many of the last layers predict tokens further ahead, by an architecture's keys.

    They count among its blocks, and are left out.
    """
    key = "nextn_predict_layers"
    return fields.positive(key) if fields.take(key, int, 0) else 0


MAX_FACTORS: Final = 1 << 16
"""Cap on the factors of rotary frequencies, which are read at opening."""

_DTYPES: Final = {"F32": "float32", "F16": "float16"}


def open_gguf(path: Path) -> Contents:
    """Read the headers of the GGUF at `path`, a file or a folder; see `gguf_files`.

    Raises CheckpointError, which names the file and the tensor, for what is damaged,
    UnsupportedModelError for an architecture or a type that is not implemented.
    """
    paths = gguf_files(path)
    headers, files = read_gguf_files(paths)
    stored = {name: info for file in files.values() for name, info in file.tensors.items()}
    factors = {
        info.name: _read_factors(part, info)
        for part, header in zip(paths, headers, strict=True)
        for info in header.tensors
        if info.name in FACTOR_TENSORS
    }
    embedding = stored.get("token_embd.weight")
    if embedding is None:
        raise damaged(f"{paths[0]}: tensor token_embd.weight is missing")
    metadata = headers[0].metadata
    unknown: list[str] = []
    config = config_of_metadata(
        metadata,
        stored,
        vocab_size=embedding.shape[0],
        factors=factors,
        dtype=_main_dtype(stored),
        where=str(paths[0]),
        unknown=unknown,
    )
    arch = str(metadata["general.architecture"])
    n_blocks = max(_number(header, f"{arch}.block_count") for header in headers)
    if f"{arch}.classifier.output_labels" in metadata:
        answers_head = stored.pop(ANSWERS_HEAD, None)  # runtime/encoding/decoder.py reads it
        if answers_head is not None and "output.weight" not in stored:
            unknown.append(ONLY_ANSWERS)
    return Contents(
        folder=paths[0].parent,
        config=config,
        where=f"{paths[0]}, as config.json",
        files=files,
        whole=(),
        arrange=lambda config: arrange(config, arch, stored, n_blocks),
        form=form_name(metadata.get("general.file_type")),
        unknown_keys=tuple(unknown),
    )


def read_gguf_files(paths: Sequence[Path]) -> tuple[list[GgufHeader], dict[str, TensorFile]]:
    """Read the headers of the parts of a checkpoint; see `open_gguf`."""
    headers: list[GgufHeader] = []
    files: dict[str, TensorFile] = {}
    totals = FileTotals(paths[0])
    for part in paths:
        header = language_of(read_gguf_header(part), str(part))
        if headers and part.name == ahead_name(paths[0].name):
            header = _layers_ahead(headers[0], header, part)
        headers.append(header)
        files[part.name] = totals.add(read_tensor_file(part, headers[-1]))
    return headers, files


def _layers_ahead(model: GgufHeader, own: GgufHeader, path: Path) -> GgufHeader:
    """Take of a file beside a model's the layers that predict further tokens, and nothing else.

    Raises CheckpointError for that of another model: one number or word of its sizes differs.
    """
    arch = f"{model.metadata.get(_ARCHITECTURE)}."
    blocks, ahead = f"{arch}block_count", f"{arch}nextn_predict_layers"

    def told(header: GgufHeader) -> dict[str, MetadataValue]:
        said = {key: one for key, one in header.metadata.items() if not isinstance(one, list)}
        said[blocks] = _number(header, blocks) - _number(header, ahead)
        return {key: said[key] for key in said if key.startswith((_ARCHITECTURE, arch))}

    of_model = told(model) | {ahead: _number(own, ahead)}
    for key, value in told(own).items():
        if of_model.get(key, value) != value:
            raise CheckpointError(
                f"{path}: {key} is {shown(value)}, and {shown(of_model[key])} in the model beside "
                "it: these layers were made for another model",
                remedy="remove or rename it, or fetch the one of this very model",
            )
    behind = _number(model, blocks)
    found = ((tensor, BLOCK.match(tensor.name)) for tensor in own.tensors)
    return replace(
        own, tensors=tuple(tensor for tensor, at in found if at and int(at[1]) >= behind)
    )


def _number(header: GgufHeader, key: str) -> int:
    value = header.metadata.get(key)
    return value if isinstance(value, int) else 0


def read_tensor_file(path: Path, header: GgufHeader) -> TensorFile:
    """Check that all tensors are within the file. Rotary factors count as part of its head.

    Raises CheckpointError, which names the tensor, and UnsupportedModelError for a type.
    """
    infos = [_stored(path, tensor) for tensor in header.tensors]
    end = end_of(path, infos, header.head_bytes)
    if end > header.size_bytes:
        last = max(infos, key=lambda info: info.offset + info.size_bytes)
        raise damaged(
            f"{path}: truncated: {header.size_bytes} bytes, tensor {last.name} ends at {end}"
        )
    factors = [info for info in infos if info.name in FACTOR_TENSORS]
    heads = [(0, header.head_bytes), *((info.offset, info.size_bytes) for info in factors)]
    heads.sort()
    try:
        sha256 = hash_ranges(path, heads)
    except OSError as error:
        raise damaged(f"{path}: {error.strerror}") from error
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
    is_table = kind == "I32" and tensor.name.endswith(_NUMBERS)
    if kind not in PLAIN + PACKED and not is_table:
        remedy = "use a file in one of these"
        if tensor.type_number == _FIRST_MXFP4:
            remedy = "`ollama pull` it again, or use a GGUF that llama.cpp's converter has made"
        raise UnsupportedModelError(
            f"{where} is stored as {kind}; supported: {', '.join((*PLAIN, *PACKED))}",
            remedy=remedy,
        )
    size_bytes = packed_bytes(kind, tensor.shape)
    if size_bytes is None or (kind in PACKED and len(tensor.shape) == 1):
        raise damaged(f"{where} of shape {list(tensor.shape)} cannot be {kind}")
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
        raise damaged(f"{path}: tensor {tensor.name} is not a list of F32 factors")
    try:
        with open_file(path) as file:
            file.seek(tensor.offset)
            return struct.unpack(f"<{n}f", file.read(4 * n))
    except (OSError, struct.error) as error:
        raise damaged(f"{path}: tensor {tensor.name}: {error}") from error


def _main_dtype(stored: Mapping[str, StoredTensor]) -> str:
    """Return the dtype of most stored bytes; bfloat16 for packed types."""
    sizes: dict[str, int] = {}
    for info in stored.values():
        sizes[info.dtype] = sizes.get(info.dtype, 0) + info.size_bytes
    return _DTYPES.get(max(sizes, key=lambda kind: sizes[kind]), "bfloat16")
