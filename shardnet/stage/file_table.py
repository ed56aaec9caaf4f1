"""Tables whose rows stay in files, here or at other nodes: read as soon as tokens are known.

Knows how rows are stored. Must not know which rows a token needs, nor who looks up or is asked.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Final

import numpy as np
import torch
from torch import Tensor

from shardnet.checkpoint.tensors.model_tensor import ModelTensor
from shardnet.checkpoint.tensors.stored_tensor import AskRows, StoredRow, damaged, file_changed
from shardnet.errors import CheckpointError, ShardnetError
from shardnet.model.kernels.codec import torch_dtype
from shardnet.model.kernels.panels import Panels, unpack_whole
from shardnet.model.layers.weight_source import RowsOf, Text
from shardnet.stage.estimate.memory_estimate import KEPT_ROWS_BYTES
from shardnet.stage.estimate.stored_dtype import STORED_FLOATS
from shardnet.stage.stored_weights import RowPacking
from shardnet.stage.streaming.buffers import FileChanged, FilePart, fill
from shardnet.stage.tensor_reader import TensorReader
from shardnet.threads import DaemonThreads
from shardnet.types import PREFILL_CHUNK_ROWS, MicroBatch, RowGroup, SequenceId, SlotId

_BESIDE_BYTES: Final = 256
"""What a row takes there beside its own bytes."""
_FLOATS: Final = {name: torch_dtype(dtype) for name, dtype in STORED_FLOATS.items()}
_SCALES: Final = _FLOATS | dict.fromkeys(("F8_E8M0", "U8"), torch.float8_e8m0fnu)
_STORED: Final = _SCALES | {"F8_E4M3": torch.float8_e4m3fn}
"""By safetensors' names."""


class RowCache:
    """Rows that other nodes have sent of the `tables` of a stage: those that were needed last.

    `ask` brings others. One thread at a time: who needs what another has asked for finds it.
    """

    def __init__(self, model_id: str, most_bytes: int = KEPT_ROWS_BYTES) -> None:
        self.model_id = model_id
        self.most_bytes = most_bytes
        self.tables: list[FileTable] = []
        self.ask: AskRows | None = None
        self.latest: tuple[list[tuple[list[int], int]], list[list[Tensor]]] = [], []
        """The texts of the step that came last, and the rows of each table that they need."""
        self._kept: OrderedDict[StoredRow, bytes] = OrderedDict()
        self._kept_bytes = 0
        self._turn = threading.Lock()

    def bring(self, texts: Sequence[Text]) -> list[list[Tensor]]:
        """Have the rows come that texts need; return them for each table. Raises LostShardError."""
        kinds = dict.fromkeys(table.rows_of for table in self.tables)  # scales have those of codes
        found = {of: [of(*text) for text in texts] for of in kinds}
        needed = [found[table.rows_of] for table in self.tables]
        self.rows(
            [
                row
                for table, own in zip(self.tables, needed, strict=True)
                for ids in own
                for row in table._stored(torch.unique(ids))
            ]
        )
        return needed

    def rows(self, wanted: Sequence[StoredRow]) -> bytearray:
        """Return rows, one behind the other. Raises LostShardError."""
        with self._turn:
            lacking = [row for row in dict.fromkeys(wanted) if row not in self._kept]
            assert self.ask is not None, "who loads the stage says whom to ask"
            came, end = self.ask(self.model_id, lacking) if lacking else bytearray(), 0
            for row in lacking:
                begin, end = end, end + row.n_bytes
                self._kept[row] = bytes(came[begin:end])
                self._kept_bytes += row.n_bytes + _BESIDE_BYTES
            for row in wanted:
                self._kept.move_to_end(row)
            found = bytearray().join(self._kept[row] for row in wanted)
            while self._kept_bytes > self.most_bytes:
                row, _ = self._kept.popitem(last=False)
                self._kept_bytes -= row.n_bytes + _BESIDE_BYTES
            return found


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTable:
    """A table whose rows [N, E] stay in files: those that are looked up are read each time.

    The system keeps in memory what it has room for. Where other nodes have the files a `cache` has
    rows of the stored tensors `names`, one for each of the `parts`. `ends` are the rows behind each
    of these, `stored` their type, or how rows of blocks are packed; codes of FP8 (E4M3) are
    multiplied by `scale`, or in equal parts by what their row of the table `scales` has, None for
    others. `rows_of` says which rows token ids need, and a thread asks for these before they are
    read.
    """

    parts: Sequence[FilePart]
    names: Sequence[str]
    cache: RowCache | None
    ends: Tensor  # [parts], int64
    stored: torch.dtype | RowPacking
    scale: float | None
    scales: FileTable | None
    width: int
    row_bytes: int
    dtype: torch.dtype
    device: torch.device
    rows_of: RowsOf

    @classmethod
    def of(
        cls,
        reader: TensorReader,
        weights: Sequence[str],
        dtype: torch.dtype,
        device: torch.device,
        rows_of: RowsOf,
        cache: RowCache,
    ) -> FileTable:
        """Find parameters in their files; rows of those at other nodes go through `cache`.

        Raises CheckpointError unless all are rows of floats, of FP8 with one scale or with some for
        each row, or of a GGUF's blocks.
        """
        tensors = [reader.tensor(name) for name in weights]
        first = tensors[0]
        stored, *scales = first.sources
        is_fp8 = stored.dtype == "F8_E4M3" and len(scales) == 1
        is_fp8 = is_fp8 and scales[0].dtype in _SCALES and math.prod(scales[0].shape) == 1
        has_scales = not is_fp8 and _has_scales(first)
        for tensor in tensors:
            as_rows = tensor.is_stored_matrix or tensor.is_stored_blocks
            as_rows = tensor.sources[1:] == tuple(scales) if is_fp8 else as_rows
            as_rows = _has_scales(tensor) if has_scales else as_rows
            kinds = [source.dtype for source in tensor.sources]
            if not as_rows or kinds != [source.dtype for source in first.sources]:
                name = tensor.name
                raise CheckpointError(f"{name} is not stored as rows, which are looked up there")
        scale, n_kinds = None, 2 if has_scales else 1
        if is_fp8:
            read = torch.empty(1, 1, dtype=_SCALES[scales[0].dtype])
            _fill_rows(reader.parts(weights[0])[1], [0], read.view(torch.uint8), [0])
            scale = float(read)
        table = None
        for kind, source in reversed([*enumerate(first.sources[:n_kinds])]):
            is_blocks = first.is_stored_blocks
            table = cls(
                parts=[reader.parts(name)[kind] for name in weights],
                names=[tensor.sources[kind].name for tensor in tensors],
                cache=cache if reader.lacks(weights) else None,
                ends=torch.tensor([reader.shape(name)[0] for name in weights]).cumsum(0),
                stored=RowPacking.of(first) if is_blocks else _STORED[source.dtype],
                scale=scale,
                scales=table,
                width=math.prod(source.shape[1:]),
                row_bytes=source.size_bytes // source.shape[0],
                dtype=dtype,
                device=device,
                rows_of=rows_of,
            )
        assert table is not None
        if table.cache is not None:
            cache.tables += table.both
        return table

    @property
    def both(self) -> list[FileTable]:
        """It, and that of its scales, if it has one."""
        return [self] if self.scales is None else [self, self.scales]

    @property
    def kept_bytes(self) -> int:
        """What rows of all tables of the stage may take of its device's memory."""
        return 0 if self.cache is None or self.device.type == "cuda" else self.cache.most_bytes

    def rows(self, ids: Tensor) -> Tensor:
        """Read the rows `ids` [T]: a new tensor [T, E]. Raises CheckpointError, LostShardError."""
        wanted, places = map(torch.from_numpy, np.unique(ids.cpu().numpy(), return_inverse=True))
        return self._values(wanted)[places].to(self.device, self.dtype)

    def bring(self, texts: Sequence[Text]) -> list[Tensor]:
        """Ask other nodes for the rows of all tables of the stage at once; see StoredTable."""
        if self.cache is None:
            return [self.rows_of(*text) for text in texts]
        key = [(ids.tolist(), n_before) for ids, n_before in texts]
        known, needed = self.cache.latest
        if known != key:
            needed = self.cache.bring(texts)
            self.cache.latest = key, needed
        return next(
            own for table, own in zip(self.cache.tables, needed, strict=True) if table is self
        )

    def _stored(self, wanted: Tensor) -> list[StoredRow]:
        """Name the rows `wanted`, in their order, which is ascending."""
        return [
            StoredRow(self.names[number], row, self.row_bytes)
            for number, rows, _ in self._by_part(wanted)
            for row in rows
        ]

    def _values(self, wanted: Tensor) -> Tensor:
        """Return what the rows `wanted`, which ascend, hold: [n, E]."""
        if self.cache is not None:
            came = self.cache.rows(self._stored(wanted))
            found = torch.frombuffer(came, dtype=torch.uint8).view(len(wanted), self.row_bytes)
        else:
            found = torch.empty(len(wanted), self.row_bytes, dtype=torch.uint8)
            for number, rows, own in self._by_part(wanted):
                _fill_rows(self.parts[number], rows, found, own)
        if isinstance(self.stored, torch.dtype):
            values = found.view(self.stored)
            if self.scales is None:
                return values if self.scale is None else values.float() * self.scale
            scales = self.scales._values(wanted).float()
            return values.float() * scales.repeat_interleave(self.width // scales.shape[1], 1)
        form, shape = self.stored.form, (len(found), self.width)
        packed = torch.empty(form.packed_shape(*shape), dtype=torch.uint8)
        self.stored(found, packed)
        return unpack_whole([Panels(packed=packed, form=form, shape=shape)], torch.float32)

    def read_ahead(self, texts: Sequence[tuple[Sequence[int], int]]) -> None:
        """Have the rows of tokens read into the page cache, on a thread; waits for nothing.

        Of each text not those of so many of its first tokens.
        """
        DaemonThreads(1, "shardnet-ahead").post(partial(self._ask_for, texts))  # ends behind it

    def _ask_for(self, texts: Sequence[tuple[Sequence[int], int]]) -> None:
        if self.cache is not None:
            with contextlib.suppress(ShardnetError):  # as looking up will say
                if self.cache.tables[0] is self:
                    self.cache.bring([(torch.tensor(ids), n_before) for ids, n_before in texts])
            return
        for token_ids, n_before in texts:
            for _ in self.asking(token_ids, n_before=n_before):
                pass

    def asking(
        self, token_ids: Sequence[int], most_bytes: int = sys.maxsize, n_before: int = 0
    ) -> Iterator[None]:
        """Have the rows of tokens read into the page cache, each once, a chunk at each turn.

        Not those for which it would take more than `most_bytes`: a page beside each row's own. Of
        rows that other nodes have not more than the cache of the stage keeps.
        """
        beside = mmap.PAGESIZE
        if self.cache is not None:
            most_bytes = min(most_bytes, self.cache.most_bytes // len(self.cache.tables))
            beside = _BESIDE_BYTES
        with contextlib.suppress(FileChanged, OSError, ShardnetError):  # as reading will say
            ids = torch.tensor(token_ids, dtype=torch.int64)
            needed = self.rows_of(ids, n_before).numpy()
            wanted, first = np.unique(needed, return_index=True)
            n_left = most_bytes // (beside + self.row_bytes)
            step = PREFILL_CHUNK_ROWS * needed.shape[1]
            for begin in range(0, needed.size, step):
                own = wanted[(begin <= first) & (first < begin + step)][:n_left]
                n_left -= len(own)
                if self.cache is not None:
                    self.cache.rows(self._stored(torch.from_numpy(own)))
                else:
                    for number, rows, _ in self._by_part(torch.from_numpy(own)):
                        _ask_for_rows(self.parts[number], rows, self.row_bytes)
                yield

    def _by_part(self, wanted: Tensor) -> Iterator[tuple[int, list[int], list[int]]]:
        """List the parts with the rows `wanted`, which rows of each these are, and their places."""
        numbers = torch.bucketize(wanted, self.ends, right=True)
        for number in sorted(set(numbers.tolist())):
            begin = int(self.ends[number - 1]) if number else 0
            own = (numbers == number).nonzero()[:, 0]
            yield number, (wanted[own] - begin).tolist(), own.tolist()


def _has_scales(tensor: ModelTensor) -> bool:
    """Say whether it is FP8 of which each row has a scale, or one for each of its equal parts."""
    if [len(tensor.sources), len(tensor.row_sources)] != [2, 2]:
        return False
    codes, scales = tensor.sources
    n_parts = math.prod(scales.shape[1:])
    size = tensor.packed.form.group if n_parts > 1 and tensor.packed is not None else codes.shape[1]
    is_fp8 = codes.dtype == "F8_E4M3" and scales.dtype in _SCALES
    return is_fp8 and n_parts * size == codes.shape[1]


def _ask_for_rows(part: FilePart, rows: Sequence[int], row_bytes: int) -> None:
    """Have rows of a file read into the page cache: by the system, else here."""
    with part.opened() as file:
        for row in rows:
            begin = part.offset + row * row_bytes
            if sys.platform == "linux":
                os.posix_fadvise(file.fileno(), begin, row_bytes, os.POSIX_FADV_WILLNEED)
            else:
                file.seek(begin)
                file.read(row_bytes)


def _fill_rows(part: FilePart, rows: Sequence[int], raw: Tensor, places: Sequence[int]) -> None:
    """Read rows of a file to `places` of the rows `raw`, uint8. Raises CheckpointError."""
    try:
        with part.opened() as file:
            for row, place in zip(rows, places, strict=True):
                file.seek(part.offset + row * raw.shape[1])
                fill(file, raw[place])
    except FileChanged:
        raise file_changed(part.path) from None
    except OSError as error:
        raise damaged(f"{part.path} cannot be read ({error.strerror})") from error


_REWOUND: Final = 64
"""So many tokens may a step go back, behind drafts that were rejected."""


class RecentTokens:
    """Tokens of steps in the order in which they arrive. `n_before` each decide what it looks up.

    Of a slot those of one sequence are known, and from its first position on that arrived.
    """

    def __init__(self, n_before: int) -> None:
        self._n_before = n_before
        self._known: dict[SlotId, tuple[SequenceId, int, Sequence[int]]] = {}

    def texts(self, batch: MicroBatch) -> Iterator[tuple[Sequence[int], int]]:
        """Give of each group token ids, and how many of the first ones are there for the others.

        Those are the ones before the group, or where these are not known its own first ones.
        """
        ends = accumulate(group.n_rows for group in batch.groups)
        for group, end in zip(batch.groups, ends, strict=True):
            ids = batch.token_ids[end - group.n_rows : end]
            begin, before = self._before(group)
            text = [*before, *ids]
            at = max(0, len(text) - self._n_before - _REWOUND)
            self._known[group.slot] = (group.sequence_id, begin + at, text[at:])
            n_first = min(len(before), self._n_before) if begin == 0 else self._n_before
            text = text[max(0, len(before) - n_first) :]
            if len(text) > n_first:
                yield text, n_first

    def _before(self, group: RowGroup) -> tuple[int, Sequence[int]]:
        """Return the known tokens right before a group, and the position of the first of them."""
        owner, begin, ids = self._known.get(group.slot, (group.sequence_id, 0, ()))
        n = group.position - begin
        if owner == group.sequence_id and 0 <= n <= len(ids):
            return begin, ids[:n]
        return group.position, ()
