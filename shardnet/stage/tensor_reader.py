"""Reads a stage's tensors, each once, after checking all headers, and reports progress.

Knows the checkpoint and the tensor table. Must not know what tensors are used for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.tensors.model_tensor import ModelTensor, cut_tensor
from shardnet.checkpoint.tensors.stored_tensor import damaged, file_changed
from shardnet.errors import CheckpointError
from shardnet.model.config.panel_form import PANEL
from shardnet.model.families.stage_tensors import Shape, StageTensors, left_over
from shardnet.model.kernels.codes import PackedWeight
from shardnet.model.kernels.panels import PanelMemory, pack_into
from shardnet.model.kernels.worker_pool import WorkerPool
from shardnet.stage.estimate.packed_sizes import packs_by_rows
from shardnet.stage.streaming.buffers import FileChanged, FilePart, Packing, Piece, bring, pieces_of

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in total); an exception it raises aborts the loading."""

_FLOATS = frozenset({"F32", "F16", "BF16"})
EXPERTS_OF_TOKENS: Final = ".tid2eid"
"""Ends the names of tables of experts, which are whole numbers."""
_READ_AHEAD_BYTES: Final = 1 << 26
"""Bytes that are read ahead at most while other tensors are packed."""
_PACKED_BYTES: Final = 1 << 22
"""Stored bytes that are packed into panels at a time."""
_PIECE_BYTES: Final = 1 << 21
"""Stored bytes that a thread reads and packs at a time: small enough to share out evenly."""


class TensorReader:
    """Reads the tensors of a stage, and counts their bytes."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        tensors: StageTensors,
        dtype: torch.dtype,
        progress: Progress,
        on_disk: Collection[str] = (),
    ) -> None:
        """Check every tensor of the stage by its header, before any is read.

        Tensors that the file stores quantised are dequantised to `dtype`; those in `on_disk` need
        not be read at all. Raises CheckpointError for a tensor that is missing or has the wrong
        shape or dtype, and for a tensor in the checkpoint that the model does not use.
        """
        self._cut: dict[str, ModelTensor] = {}
        self._checkpoint = checkpoint.with_tensors(self._cut)
        self._dtype = dtype
        self._progress = progress
        self._shapes = tensors.all
        for name, shape in self._shapes.items():
            _check(checkpoint, name, shape)
        if not checkpoint.is_part:
            _refuse_unknown(checkpoint)
        self._shared = tensors.embedding.keys() & tensors.head.keys()
        self._kept: dict[str, Tensor] = {}
        self._counted: set[str] = set()
        """Tensors whose bytes are done, or being done."""
        self._coming = {name: False for name in self._shapes if name not in on_disk}
        """Tensors still to be read, about in this order, and whether read-ahead has begun."""
        self._files: dict[str, FilePart] = {}
        self.panel_memory = PanelMemory()
        """Where weights of the stage are packed."""
        self._done_bytes = 0
        self._workers: WorkerPool | None = None
        self._total_bytes = sum(checkpoint.tensors[name].size_bytes for name in self._shapes)

    def keep(self, name: str, ranges: Sequence[tuple[int, int]], axis: int) -> None:
        """Read no more of a tensor than `ranges` of an axis, in the place of all of it."""
        whole = self._checkpoint.tensors[name]
        self._cut[name] = own = cut_tensor(whole, ranges, axis)
        self._shapes[name] = own.shape
        self._total_bytes += own.size_bytes - whole.size_bytes

    def has(self, name: str) -> bool:
        """Say whether the stage has a tensor with this name."""
        return name in self._shapes

    def shape(self, name: str) -> Shape:
        """Return the shape of a tensor."""
        return self._shapes[name]

    def read(self, name: str) -> Tensor:
        """Read a tensor, on the CPU. A tied table that is needed twice is read and counted once."""
        if name in self._kept:
            return self._kept.pop(name)
        is_first = name not in self._counted
        tensor = self._checkpoint.read(name, self._dtype, self._begin_counting(name))
        if name in self._shared and is_first:
            self._kept[name] = tensor
        return tensor

    def packed(self, name: str) -> PackedWeight | None:
        """Return how a tensor becomes panels, None if its values have to be plain."""
        return self._checkpoint.tensors[name].packed

    def pack(self, name: str, panels: Tensor) -> Tensor | None:
        """Pack a tensor into all of `panels`, uint8, and return its order of inputs, if it has one.

        Its stored bytes are in memory until it is packed. Raises as `Checkpoint.read`.
        """
        tensor, came = self._checkpoint.tensors[name], self._begin_counting(name)
        packed, n_rows = tensor.packed, tensor.shape[0]
        assert packed is not None
        stored = self._checkpoint.stored_of(name, came)
        self.read_ahead()
        order = packed.input_order(stored) if packed.input_order is not None else None
        step = PANEL * max(1, _PACKED_BYTES * n_rows // tensor.size_bytes // PANEL)
        for begin in range(0, n_rows, step):
            end = min(begin + step, n_rows)
            rows = packed.rows(stored, begin, end)
            pack_into(panels[begin // PANEL : -(-end // PANEL)], rows, packed.form)
            self.report()
        return order

    def pack_while_reading(self, weights: Sequence[tuple[str, Packing]], packed: Tensor) -> None:
        """Read tensors, packing each on the way, one behind the other into all of `packed`, uint8.

        As many threads as torch has read and pack pieces of their own. Raises CheckpointError as
        `Checkpoint.read`.
        """
        is_first = [self._begin(name) for name, _ in weights]
        self.read_ahead()
        parts = [(part, packing) for name, packing in weights for part in self._parts_read(name)]
        pieces, done = list(pieces_of(parts, 0, _PIECE_BYTES)), deque[int]()
        assert pieces[-1].end == packed.nbytes, "these tensors fill the panels"
        memory = packed.view(-1)

        def read(piece: Piece) -> None:
            try:
                bring(memory, piece)
            except FileChanged:
                raise file_changed(piece.part.path) from None
            except OSError as error:
                raise damaged(f"{piece.part.path} cannot be read ({error.strerror})") from error
            done.append(piece.part.size_bytes)

        def report() -> None:
            come_bytes = sum(done.popleft() for _ in range(len(done)))
            if all(is_first):
                self._came(come_bytes)

        if self._workers is None:
            self._workers = WorkerPool(torch.get_num_threads(), "shardnet-load")
        self._workers.run(read, pieces, report)
        report()

    def is_read_by_rows(self, name: str) -> bool:
        """Say whether rows of a tensor can be packed while they are read, a part of them at a time.

        A tied table that was read for its other use is not read again.
        """
        tensor = self._checkpoint.tensors[name]
        if name in self._kept or not tensor.size_bytes:
            return False
        return packs_by_rows(tensor) if tensor.packed is not None else tensor.is_stored_matrix

    def _parts_read(self, name: str) -> list[FilePart]:
        self._checkpoint.sources_of(name)
        return self.parts(name)

    def _begin(self, name: str) -> bool:
        """Say that a tensor is read now; return whether its bytes count."""
        self._coming.pop(name, None)
        is_first = name not in self._counted
        self._counted.add(name)
        return is_first

    def _begin_counting(self, name: str) -> Callable[[int], None]:
        """Say that a tensor is read now; return what to call with its bytes as they come."""
        return self._came if self._begin(name) else lambda n_bytes: None

    def own(self, name: str, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Read a tensor to `device` in `dtype`; it shares no memory with the file."""
        return self.read(name).to(device, dtype)

    def again(self, name: str) -> Tensor:
        """Read a tensor in its stored dtype, without counting it."""
        return self._checkpoint.read(name)

    def tensor(self, name: str) -> ModelTensor:
        """Return the description of a tensor."""
        return self._checkpoint.tensors[name]

    def lacks(self, names: Sequence[str]) -> bool:
        """Say whether stored rows of one of these are not here, but at other nodes."""
        sources = (source for name in names for source in self.tensor(name).row_sources)
        return bool(self._checkpoint.missing(source.name for source in sources))

    def parts(self, name: str) -> list[FilePart]:
        """Locate the bytes of the stored tensors that a tensor is made of."""
        return [
            replace(self._file(source.file), offset=source.offset, size_bytes=source.size_bytes)
            for source in self._checkpoint.tensors[name].sources
        ]

    def _file(self, name: str) -> FilePart:
        """Locate a file, as it was when it was needed first: what is read must stay as it is."""
        if name not in self._files:
            journal = self._checkpoint.journal
            n_dropped = journal.n_dropped if journal is not None else None
            path = self._checkpoint.folder / name
            self._files[name] = FilePart.of(path, 0, 0, n_dropped)
        return self._files[name]

    def read_ahead(self) -> None:
        """Start reading the next tensors into the page cache, while the caller packs."""
        room = _READ_AHEAD_BYTES
        for name, is_asked_for in self._coming.items():
            if not is_asked_for:
                self._coming[name] = True
                self._checkpoint.prefetch(name, room)
            room -= self._checkpoint.tensors[name].size_bytes
            if room <= 0:
                break

    def skip(self, names: Sequence[str]) -> None:
        """Count tensors as done without reading them."""
        for name in names:
            self._kept.pop(name, None)
            if self._begin(name):
                self._done_bytes += self._checkpoint.tensors[name].size_bytes

    def instead_of(self, names: Sequence[str], n_bytes: int) -> Callable[[int], None]:
        """Return a callback for bytes read in place of the tensors `names`, `n_bytes` in total.

        It reports them without counting them: after the last, call `skip`.
        """
        uncounted = [name for name in names if name not in self._counted]
        stored_bytes = sum(self._checkpoint.tensors[name].size_bytes for name in uncounted)
        come_bytes = 0

        def came(more_bytes: int) -> None:
            nonlocal come_bytes
            come_bytes += more_bytes
            shown_bytes = self._done_bytes + stored_bytes * come_bytes // n_bytes
            self._progress(shown_bytes, self._total_bytes)

        return came

    def report(self) -> None:
        """Report progress."""
        self._progress(self._done_bytes, self._total_bytes)

    def _came(self, n_bytes: int) -> None:
        self._done_bytes += n_bytes
        self.report()


def _check(checkpoint: Checkpoint, name: str, expected: Shape) -> None:
    """Check the header of a tensor against the shape that the config implies."""
    tensor = checkpoint.tensors.get(name)
    if tensor is None:
        raise damaged(f"{checkpoint.path}: tensor {name} is missing")
    where = _where(checkpoint, tensor)
    if tensor.shape != expected:
        raise CheckpointError(
            f"{where} has shape {list(tensor.shape)}, the config asks for {list(expected)}",
            remedy="config and tensors are of different models: fetch the checkpoint again",
        )
    is_whole = name.endswith(EXPERTS_OF_TOKENS) and tensor.dtype in ("I32", "I64")
    if tensor.dtype is not None and tensor.dtype not in _FLOATS and not is_whole:
        raise CheckpointError(
            f"{where} is stored as {tensor.dtype}; supported: {', '.join(sorted(_FLOATS))}",
            remedy="use a checkpoint that is not quantized, or one whose config says how it is",
        )


def _refuse_unknown(checkpoint: Checkpoint) -> None:
    unknown = left_over(checkpoint.config, checkpoint.tensors)
    if unknown:
        raise CheckpointError(
            f"{_where(checkpoint, checkpoint.tensors[unknown[0]])} ({len(unknown)} such) has no "
            f"place in a {checkpoint.config.family} model",
            remedy="use a checkpoint of the plain architecture",
        )


def _where(checkpoint: Checkpoint, tensor: ModelTensor) -> str:
    source = tensor.sources[0]
    return f"{checkpoint.folder / source.file}: tensor {source.name}"
