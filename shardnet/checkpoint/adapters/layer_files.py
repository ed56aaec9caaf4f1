"""One layer of an adapter as a file of its own, in which nodes keep and send it.

Whatever format an adapter came in, the file of a layer has the same bytes on every node: its digest
names it. It is a safetensors file with `NAME.a`, `NAME.b` and `NAME.factor` of each linear. Must
not know where files lie, nor links.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from shardnet.checkpoint.adapters.adapter_files import CONFIG, open_gguf_adapter, open_peft
from shardnet.checkpoint.adapters.stored_adapter import LowRank, StoredAdapter
from shardnet.checkpoint.formats.gguf_header import is_gguf
from shardnet.checkpoint.formats.safetensors_files import read_safetensors_file
from shardnet.checkpoint.tensors.checkpoint_files import has_file
from shardnet.checkpoint.tensors.stored_tensor import FileState, read_stored
from shardnet.errors import CheckpointError
from shardnet.model.config.model_config import ModelConfig

if TYPE_CHECKING:
    import torch


MAX_LAYER_BYTES: Final = 1 << 28
"""Cap on the file of one layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPart:
    """What an adapter has for one absolute `layer`: its file, and the weights in it."""

    layer: int
    size_bytes: int
    n_weights: int
    sha256: str

    @property
    def memory_bytes(self) -> int:
        """Bytes that it takes in memory: float32."""
        return 4 * self.n_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFacts:
    """What is known of an adapter that a ring has, called `name` by requests.

    `parts` are those of all layers that it changes, by their numbers. Where it was read on this
    machine, `path` is where and `stamp` changes when a file of it does.
    """

    name: str
    adapter_id: str
    parts: tuple[LayerPart, ...]
    path: str = ""
    stamp: tuple[tuple[str, int, int], ...] = ()

    def bytes_of(self, layer: int) -> int:
        """Return the bytes that its part for a layer takes in memory."""
        return sum(part.memory_bytes for part in self.parts if part.layer == layer)


class Weighing(Protocol):
    """An adapter, or a part of one, that takes memory."""

    def bytes_of(self, layer: int) -> int:
        """Return the bytes that its part for a layer takes in memory."""


def with_adapters(config: ModelConfig, adapters: Sequence[Weighing]) -> ModelConfig:
    """Return the config of a model with adapters beside its weights."""
    layers = range(config.n_layers) if adapters else ()
    n_bytes = tuple(sum(each.bytes_of(layer) for each in adapters) for layer in layers)
    return replace(config, adapter_bytes=n_bytes)


def open_adapter(path: Path, config: ModelConfig) -> StoredAdapter:
    """Read the headers of the adapter at `path`: a PEFT folder, or a GGUF file.

    Raises CheckpointError if there is none, or it does not fit the model of `config`,
    UnsupportedModelError for what is not implemented.
    """
    if is_gguf(path):
        return open_gguf_adapter(path, config)
    if has_file(path / CONFIG):
        return open_peft(path, config)
    raise CheckpointError(
        f"there is no LoRA adapter at {path}",
        remedy=f"give a folder with {CONFIG}, or a GGUF file, on the ring's first node",
    )


def adapter_id(parts: Sequence[LayerPart]) -> str:
    """Return the id of an adapter: SHA-256, in hex, over the digests of its layers' files."""
    named = [[part.layer, part.sha256] for part in parts]
    return hashlib.sha256(json.dumps(["lora", 1, named]).encode()).hexdigest()


def layer_file(linears: Mapping[str, LowRank]) -> tuple[bytes, int]:
    """Return the file of one layer, and how many weights its matrices have."""
    import torch

    tensors: dict[str, torch.Tensor] = {}
    for name, low_rank in sorted(linears.items()):
        tensors |= {f"{name}.a": low_rank.a, f"{name}.b": low_rank.b}
        tensors[f"{name}.factor"] = torch.tensor([low_rank.factor], dtype=torch.float64)
    header, bodies, at = {}, [], 0
    for name, tensor in tensors.items():
        body = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        span = [at, at + len(body)]
        kind = _KINDS[str(tensor.dtype)]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": span}
        bodies.append(body)
        at += len(body)
    text = json.dumps(header, separators=(",", ":")).encode()
    n_weights = sum(one.a.numel() + one.b.numel() for one in linears.values())
    return b"".join((len(text).to_bytes(8, "little"), text, *bodies)), n_weights


_KINDS: Final = {
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.float64": "F64",
}


def read_layer_file(path: Path) -> dict[str, LowRank]:
    """Read what `layer_file` has made. Raises CheckpointError if it is damaged."""
    opened = FileState.of(path)
    stored = read_safetensors_file(path).tensors
    tensors = {name: read_stored(path.parent, info, opened) for name, info in stored.items()}
    names = [name.removesuffix(".factor") for name in tensors if name.endswith(".factor")]
    try:
        return {
            name: LowRank(
                a=tensors[f"{name}.a"],
                b=tensors[f"{name}.b"],
                factor=float(tensors[f"{name}.factor"].item()),
            )
            for name in names
        }
    except (KeyError, RuntimeError) as error:
        raise CheckpointError(f"{path} is damaged ({error})", remedy="delete it") from error
