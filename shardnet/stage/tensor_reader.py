"""A stage's tensors, checked by their headers, each read once, and how far the reading is.

Knows the checkpoint and the tensor table. Must not know what tensors are made into.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final

import torch
from torch import Tensor

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.tensors.model_tensor import ModelTensor
from shardnet.errors import CheckpointError
from shardnet.model.families.stage_tensors import Shape, StageTensors, left_over
from shardnet.stage.streaming.layer_stream import FilePart

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all); what it raises ends the loading."""

_FLOATS = frozenset({"F32", "F16", "BF16"})
_READ_AHEAD_BYTES: Final = 1 << 26
"""What the disk reads at most while tensors are made ready."""


class TensorReader:
    """Makes tensors of a stage, and says how many of its bytes have been read."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        tensors: StageTensors,
        dtype: torch.dtype,
        progress: Progress,
        on_disk: Collection[str] = (),
    ) -> None:
        """Check every tensor of the stage by its header, before any is read.

        `dtype` is what tensors are made in where the file has them quantized; those `on_disk` may
        never be asked for. Raises CheckpointError for a tensor that is missing or has the wrong
        shape or dtype, and for one in the checkpoint that the model has no place for.
        """
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._progress = progress
        self._shapes = tensors.all
        for name, shape in self._shapes.items():
            _check(checkpoint, name, shape)
        _refuse_unknown(checkpoint)
        self._shared = tensors.embedding.keys() & tensors.head.keys()
        self._kept: dict[str, Tensor] = {}
        self._coming = {name: False for name in self._shapes if name not in on_disk}
        """What is to be read, about in this order, and whether the disk has been asked for it."""
        self._done_bytes = 0
        self._total_bytes = sum(checkpoint.tensors[name].size_bytes for name in self._shapes)

    def has(self, name: str) -> bool:
        """Say whether the stage has a tensor of this name."""
        return name in self._shapes

    def shape(self, name: str) -> Shape:
        """Return the shape of a tensor."""
        return self._shapes[name]

    def read(self, name: str) -> Tensor:
        """Make a tensor. A tied table that the stage needs twice is read and counted once."""
        if name in self._kept:
            return self._kept.pop(name)
        self._coming.pop(name, None)
        tensor = self._checkpoint.read(name, self._dtype, self._came)
        if name in self._shared:
            self._kept[name] = tensor
        return tensor

    def own(self, name: str, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Make a tensor on `device` that shares no memory with the file."""
        is_stored = self._checkpoint.tensors[name].dtype is not None
        return self.read(name).to(device, dtype, copy=is_stored)

    def again(self, name: str) -> Tensor:
        """Make a tensor that is not counted, as it is stored."""
        return self._checkpoint.read(name)

    def part(self, name: str) -> FilePart:
        """Name the bytes of a tensor that is stored as it is."""
        source = self._checkpoint.tensors[name].sources[0]
        path = self._checkpoint.folder / source.file
        return FilePart.of(path, source.offset, source.size_bytes)

    def read_ahead(self) -> None:
        """Have the disk read what comes next, while somebody packs what is here."""
        room = _READ_AHEAD_BYTES
        for name, is_asked_for in self._coming.items():
            if not is_asked_for:
                self._coming[name] = True
                self._checkpoint.announce(name, room)
            room -= self._checkpoint.tensors[name].size_bytes
            if room <= 0:
                break

    def skip(self, names: Sequence[str]) -> None:
        """Count tensors that need not be read."""
        for name in names:
            self._coming.pop(name, None)
            if self._kept.pop(name, None) is None:
                self._done_bytes += self._checkpoint.tensors[name].size_bytes

    def instead_of(self, names: Sequence[str], n_bytes: int) -> Callable[[int], None]:
        """Return what takes note of bytes that come in place of tensors, `n_bytes` in all.

        They are shown, not counted: who has them all skips the tensors.
        """
        uncounted = [name for name in names if name not in self._kept]
        stored_bytes = sum(self._checkpoint.tensors[name].size_bytes for name in uncounted)
        come_bytes = 0

        def came(more_bytes: int) -> None:
            nonlocal come_bytes
            come_bytes += more_bytes
            shown_bytes = self._done_bytes + stored_bytes * come_bytes // n_bytes
            self._progress(shown_bytes, self._total_bytes)

        return came

    def report(self) -> None:
        """Say how far we are."""
        self._progress(self._done_bytes, self._total_bytes)

    def _came(self, n_bytes: int) -> None:
        self._done_bytes += n_bytes
        self.report()


def _check(checkpoint: Checkpoint, name: str, expected: Shape) -> None:
    """Hold the header of a tensor against the shape that the config asks for."""
    tensor = checkpoint.tensors.get(name)
    if tensor is None:
        raise CheckpointError(
            f"{checkpoint.path}: tensor {name} is missing; fetch the checkpoint again"
        )
    where = _where(checkpoint, tensor)
    if tensor.shape != expected:
        raise CheckpointError(
            f"{where} has shape {list(tensor.shape)}, the config asks for {list(expected)}; "
            "config and tensors are of different models: fetch the checkpoint again"
        )
    if tensor.dtype is not None and tensor.dtype not in _FLOATS:
        raise CheckpointError(
            f"{where} is stored as {tensor.dtype}; supported: {', '.join(sorted(_FLOATS))}; "
            "use a checkpoint that is not quantized, or one whose config says how it is"
        )


def _refuse_unknown(checkpoint: Checkpoint) -> None:
    unknown = left_over(checkpoint.config, checkpoint.tensors)
    if unknown:
        raise CheckpointError(
            f"{_where(checkpoint, checkpoint.tensors[unknown[0]])} ({len(unknown)} such) has no "
            f"place in a {checkpoint.config.family} model; use a checkpoint of the plain "
            "architecture"
        )


def _where(checkpoint: Checkpoint, tensor: ModelTensor) -> str:
    source = tensor.sources[0]
    return f"{checkpoint.folder / source.file}: tensor {source.name}"
