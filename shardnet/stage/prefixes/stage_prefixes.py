"""The prefixes of one stage: from a slot to files, and from files to a slot.

Knows blocks of a KV cache and which of them a prefix needs. Must not know the sequences' tokens:
the head names a block by a key that stands for all tokens up to its end. Nothing is restored but
blocks whose files are all there and undamaged.

A finished slot is written from its own tensors, block by block, on a thread of its own: no copy of
it is made. Rows that are written meanwhile end what may still be copied, before they are written.
Layers with a sliding window hold the end of a slot only, so each window has a file of its own. So
have the states after a block of layers that keep one: they are written where they were kept.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from shardnet.errors import CapacityError, UsageError
from shardnet.model.cache.kv_cache import KvCache
from shardnet.model.cache.slot_blocks import SlotContents, SlotState, first_block
from shardnet.stage.prefixes.prefix_store import StageFolder
from shardnet.threads import DaemonThreads
from shardnet.types import BLOCK_POSITIONS, SequenceId, SlotId, StateId

_log = logging.getLogger(__name__)

MAX_WAITING_BYTES: Final = 1 << 30
"""Slots that wait to be written hold at most this much, unless it is only one."""
MAX_RESTORED: Final = 2
"""Prefixes that were read and whose sequence has not begun; more are computed instead."""
_NICENESS: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """The layers of a stage with one window, None for those without: a file for each block.

    Or those that keep a state: a file for the states after a block.
    """

    window: int | None
    layers: tuple[int, ...]
    size_bytes: int
    is_states: bool = False

    @property
    def name(self) -> str:
        if self.is_states:
            return "s"
        return "kv" if self.window is None else f"w{self.window}"

    def first_held(self, saving: _Saving) -> int:
        """Return the first block that a slot holds whole in all of these layers."""
        return max(saving.contents.first(layer) for layer in self.layers) // BLOCK_POSITIONS

    def is_held(self, saving: _Saving, block: int) -> bool:
        """Say whether a slot has what is to be written of a block."""
        return block + 1 in saving.states if self.is_states else block >= self.first_held(saving)

    def first_needed(self, n_blocks: int) -> int:
        """Return the first of so many blocks without which they cannot be restored."""
        return n_blocks - 1 if self.is_states else first_block(n_blocks, self.window)

    def read(self, contents: SlotContents, block: int, target: Tensor) -> None:
        """Copy a block to `target`, uint8 [size_bytes]."""
        if not self.is_states:
            contents.read_block(self.layers, block, target)
        for state, part in self._states(contents, target):
            state.read(part)

    def write(self, contents: SlotContents, block: int, source: Tensor) -> None:
        """Set a block to what `read` has copied; states are those after it."""
        if not self.is_states:
            contents.write_block(self.layers, block, source)
        for state, part in self._states(contents, source):
            state.write(part)
            state.end = (block + 1) * BLOCK_POSITIONS

    def _states(self, contents: SlotContents, flat: Tensor) -> Iterator[tuple[SlotState, Tensor]]:
        begin = 0
        for layer in self.layers if self.is_states else ():
            state = contents.states[layer]
            yield state, flat[begin : begin + state.n_bytes]
            begin += state.n_bytes


@dataclass(slots=True, kw_only=True, eq=False)
class _Saving:
    """A slot on its way to the disk: the positions before `end` are as they were.

    `states` have those that were kept after so many blocks.
    """

    contents: SlotContents
    states: Mapping[int, SlotContents]
    keys: Sequence[bytes]
    end: int
    n_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Restored:
    contents: SlotContents
    n_blocks: int
    token_ids: Sequence[int]


@dataclass(slots=True, kw_only=True)
class PrefixFigures:
    """What became of prefixes on a stage, in positions."""

    saved: int = 0
    restored: int = 0


class StagePrefixes:
    """Writes prefixes of the slots of `kv` to `files`, and reads them back."""

    def __init__(self, kv: KvCache, files: StageFolder) -> None:
        self._kv = kv
        self.files = files
        """Where the blocks are."""
        self._parts = [*_parts(kv)]
        self.block_bytes = sum(part.size_bytes for part in self._parts if not part.is_states)
        """Bytes of one block in all layers."""
        self.figures = PrefixFigures()
        self._thread = DaemonThreads(1, "shardnet-prefixes", niceness=_NICENESS)
        self._saving: list[_Saving] = []
        self._writing: list[Future[None]] = []
        self._restored: dict[SequenceId, _Restored] = {}
        self._wanted: dict[SequenceId, object] = {}
        """The latest call of `restore` for each sequence: an older one may come late."""
        self._is_closed = False
        kv.before_write = self._before_write

    # --- on the compute thread

    def save(
        self, slot: SlotId, keys: Sequence[bytes], states: Mapping[int, StateId] | None = None
    ) -> None:
        """Begin to write the first blocks of `slot`, named by `keys`, that are not on disk yet.

        So are the `states` that were kept after so many blocks. Nothing is written where too much
        waits already.
        """
        if self._is_closed or not keys:
            return
        contents = self._kv.contents(slot)
        wanted = (states or {}).items()
        kept = {n_blocks: self._kv.kept_contents(state) for n_blocks, state in wanted}
        n_bytes = len(keys) * self.block_bytes + len(kept) * self._kv.state_bytes
        waiting = [*self._saving]
        if waiting and sum(each.n_bytes for each in waiting) + n_bytes > MAX_WAITING_BYTES:
            return
        if self._kv.device.type != "cpu" or self._kv.is_cut:
            begin = self._first_missing(keys) * BLOCK_POSITIONS
            # Other threads must keep off the device, whose graphs are captured, and other shards.
            contents = _copied(contents, begin, len(keys) * BLOCK_POSITIONS)
        saving = _Saving(
            contents=contents,
            states={n_blocks: states for n_blocks, states in kept.items() if states is not None},
            keys=keys,
            end=len(keys) * BLOCK_POSITIONS,
            n_bytes=n_bytes,
        )
        self._saving.append(saving)
        self._writing = [each for each in self._writing if not each.done()]
        self._writing.append(self._thread.submit(self._write, saving))

    def adopt(self, sequence_id: SequenceId, slot: SlotId, n_positions: int) -> Sequence[int]:
        """Let `slot` hold what was read for a sequence; return the tokens of its positions.

        Raises UsageError if that is not what is here, CapacityError as KvCache.adopt.
        """
        restored = self._restored.pop(sequence_id, None)
        self._wanted.pop(sequence_id, None)
        if restored is None or restored.n_blocks * BLOCK_POSITIONS != n_positions:
            raise UsageError(f"{n_positions} positions were not read for sequence {sequence_id}")
        self._kv.adopt(slot, restored.contents, restored.n_blocks)
        self.figures.restored += n_positions
        return restored.token_ids

    def clear(self) -> None:
        """Forget what was read or is being read. What is written is written to its end."""
        self._wanted.clear()
        self._restored.clear()

    def _first_missing(self, keys: Sequence[bytes]) -> int:
        """Return the first block that is not on disk whole, of layers without a window if any."""
        names = self.files.names()
        part = self._parts[0]
        are_here = (self.files.path(key, part.name).name in names for key in keys)
        return next((block for block, is_here in enumerate(are_here) if not is_here), len(keys))

    def _before_write(self, slot: SlotId, begin: int, keys: Sequence[Tensor]) -> None:
        for saving in [*self._saving] if self._saving else ():
            if begin < saving.end and saving.contents.keys[0] is keys[0]:
                saving.end = begin

    # --- on any other thread

    def restorable(self, keys: Sequence[bytes]) -> bytes:
        """Return of which of the first blocks all files are here: bit `n - 1` for `n` blocks."""
        names = self.files.names()
        found = bytearray(-(-len(keys) // 8))
        runs = dict.fromkeys((part.name for part in self._parts), 0)
        for n_blocks, key in enumerate(keys, start=1):
            is_whole = True
            for part in self._parts:
                is_here = self.files.path(key, part.name).name in names
                runs[part.name] = runs[part.name] + 1 if is_here else 0
                needed = n_blocks - part.first_needed(n_blocks)
                is_whole = is_whole and runs[part.name] >= needed
            if is_whole:
                found[(n_blocks - 1) // 8] |= 1 << (n_blocks - 1) % 8
        return bytes(found)

    def restore(
        self, sequence_id: SequenceId, keys: Sequence[bytes], token_ids: Sequence[int]
    ) -> bool:
        """Read the blocks `keys` for a sequence that will begin with `token_ids`.

        Returns whether all of them came. None are read while MAX_RESTORED others wait. Without any
        keys what was read before is forgotten.
        """
        self._restored.pop(sequence_id, None)
        self._wanted.pop(sequence_id, None)
        if not keys:
            return True
        if len(self._restored) >= MAX_RESTORED:
            return False
        this = self._wanted[sequence_id] = object()
        contents = self._read(keys, token_ids)
        if contents is None or self._wanted.get(sequence_id) is not this:
            return False
        self._restored[sequence_id] = _Restored(
            contents=contents, n_blocks=len(keys), token_ids=token_ids
        )
        return True

    def _read(self, keys: Sequence[bytes], token_ids: Sequence[int]) -> SlotContents | None:
        """Read blocks to memory; None if one is missing, or there is no room."""
        n_blocks = len(keys)
        if n_blocks > self._kv.room_blocks or len(token_ids) != n_blocks * BLOCK_POSITIONS:
            return None
        began = time.perf_counter()
        try:
            contents = self._kv.new_contents(n_blocks)
        except CapacityError:
            return None
        n_bytes = 0
        paths = []
        for part in self._parts:
            buffer = torch.empty(part.size_bytes, dtype=torch.uint8)
            for block in range(part.first_needed(n_blocks), n_blocks):
                path = self.files.path(keys[block], part.name)
                if not self.files.read(path, keys[block], _bytes_of(buffer)):
                    return None
                part.write(contents, block, buffer)
                n_bytes += buffer.numel()
                paths.append((block, path))
        self.files.store.measured(n_bytes, time.perf_counter() - began)
        self.files.touch([path for _, path in sorted(paths)])
        return contents

    def stop_writing(self) -> None:
        """Write no more of the slots that wait to be written: their memory is wanted."""
        for saving in [*self._saving]:
            saving.end = 0

    def settle(self, timeout_s: float) -> None:
        """Wait until everything is written, at most `timeout_s`."""
        wait_for([*self._writing], timeout_s)

    def close(self) -> None:
        """End the thread after the block that it writes."""
        self._is_closed = True
        self._kv.before_write = None
        self._thread.close()

    # --- on the thread that writes

    def _write(self, saving: _Saving) -> None:
        try:
            self.files.begin()
            self._write_blocks(saving)
        except OSError as error:
            _log.warning("a prefix cannot be kept on disk: %s", error)
        finally:
            self._saving.remove(saving)

    def _write_blocks(self, saving: _Saving) -> None:
        names = self.files.names()
        files = [*self._files_of(saving)]
        missing = [
            (block, part, path)
            for block, part, path in files
            if path.name not in names and part.is_held(saving, block)
        ]
        wanted = sum(part.size_bytes for _, part, _ in missing)
        keep = {path for _, _, path in files}
        # With these the end is what counts.
        whole = any(part.window is not None or part.is_states for part in self._parts)
        room = self.files.store.make_room(wanted, keep, all_or_none=whole) if wanted else 0
        if whole and wanted > room:
            return
        for block, part, path in missing:
            room -= part.size_bytes
            if room < 0 or self._is_closed:
                break
            buffer = torch.empty(part.size_bytes, dtype=torch.uint8)
            part.read(
                saving.states[block + 1] if part.is_states else saving.contents, block, buffer
            )
            if saving.end < (block + 1) * BLOCK_POSITIONS:  # rows have been written meanwhile
                break
            self.files.write(path, saving.keys[block], _bytes_of(buffer))
            if part is self._parts[0]:
                self.figures.saved += BLOCK_POSITIONS
        self.files.touch([path for _, _, path in files])

    def _files_of(self, saving: _Saving) -> Iterator[tuple[int, _Part, Path]]:
        """List the files of a slot, block by block."""
        for block, key in enumerate(saving.keys):
            for part in self._parts:
                yield block, part, self.files.path(key, part.name)


def _parts(kv: KvCache) -> Iterator[_Part]:
    contents = kv.new_contents(1)
    with_rows = [n for n in range(len(contents.keys)) if kv.has_rows(n)]
    for window in sorted({kv.windows[n] for n in with_rows}, key=lambda window: window or 0):
        layers = tuple(n for n in with_rows if kv.windows[n] == window)
        yield _Part(window=window, layers=layers, size_bytes=contents.block_bytes(layers))
    if kv.has_states:
        layers = tuple(contents.states)
        yield _Part(window=None, layers=layers, size_bytes=kv.state_bytes, is_states=True)


def _copied(contents: SlotContents, begin: int, end: int) -> SlotContents:
    """Copy positions `[begin, end)` to the CPU, of each layer those that it holds."""
    firsts = [max(first, begin) for first in contents.firsts]

    def copied(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [
            tensor[:, first - held : max(first, end) - held].cpu()
            for tensor, first, held in zip(tensors, firsts, contents.firsts, strict=True)
        ]

    return SlotContents(keys=copied(contents.keys), values=copied(contents.values), firsts=firsts)


def _bytes_of(tensor: Tensor) -> memoryview:
    array: Any = tensor.numpy()  # numpy's arrays are buffers, which its types do not say
    return memoryview(array).cast("B")
