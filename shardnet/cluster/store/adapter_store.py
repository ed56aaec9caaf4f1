"""LoRA adapters on this disk: one file for each layer, as nodes send them to each other.

Knows where the files are, which are whole, and which go first. Blocks on the disk. Must not know
links, nor what a model's linears are.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Final

from shardnet.checkpoint.adapters.layer_files import (
    MAX_LAYER_BYTES,
    AdapterFacts,
    LayerPart,
    adapter_id,
    layer_file,
    open_adapter,
)
from shardnet.checkpoint.adapters.stored_adapter import StoredAdapter
from shardnet.checkpoint.replica import disk_error
from shardnet.errors import CapacityError, CheckpointError, UnsupportedModelError, telling_shortages
from shardnet.files import DiskShare, make_own_folder, read_own, write_whole
from shardnet.runtime.loading.model_facts import ModelFacts, Stamp, stamp
from shardnet.slot_operations import MAX_ADAPTERS

SHARE_OF_DISK: Final = 0.1
"""Adapters take at most this share of the disk's free space and their own."""
N_KEPT: Final = 2 * MAX_ADAPTERS
"""The adapters that were used last stay: those of a ring, and of one that is built."""


class AdapterStore:
    """The adapters below `folder`, those not used for longest deleted first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[tuple[str, str], AdapterFacts] = {}
        """What was found, by path and by the id of the model that it was read for."""
        self._whole: set[tuple[str, int]] = set()
        """Adapters and layers whose files were held against their digests."""
        self._used: dict[str, None] = {}
        """Ids of adapters that this process has used, the last one last."""

    def take(self, name: str, path: str, facts: ModelFacts) -> AdapterFacts:
        """Read the adapter at a path for the model of `facts`, and keep the files of its layers.

        What was read before is not read again until a file changes. Raises CheckpointError if
        there is none, or it is damaged or for another model, UnsupportedModelError for what is not
        implemented, CapacityError if the disk is full.
        """
        stamped = self.stamp(path)
        known = self._known.get((path, facts.model_id))
        if (
            known is not None
            and known.stamp == stamped
            and all(self.has(known.adapter_id, part) for part in known.parts)
        ):
            return AdapterFacts(
                name=name, adapter_id=known.adapter_id, parts=known.parts, path=path, stamp=stamped
            )
        adapter = open_adapter(Path(path), facts.config)
        parts = [_part_of(path, adapter, layer)[0] for layer in sorted(adapter.pairs)]
        found = AdapterFacts(
            name=name, adapter_id=adapter_id(parts), parts=tuple(parts), path=path, stamp=stamped
        )
        for part in parts:  # read once more: all layers at once may be more than memory holds
            if not self.has(found.adapter_id, part):
                self.keep(found.adapter_id, part, _part_of(path, adapter, part.layer)[1])
        self._known[path, facts.model_id] = found
        return found

    def stamp(self, path: str) -> Stamp:
        """Return what changes when a file of the adapter at `path` does; () if there is none."""
        found = Path(path)
        if os.path.isfile(found):  # unlike Path's, it raises nothing
            status = found.stat()
            return ((found.name, status.st_size, status.st_mtime_ns),)
        return stamp(found) if os.path.isdir(found) else ()

    def file(self, adapter: str, layer: int) -> Path:
        """Return where the file of a layer lies, or would."""
        return self.folder / adapter / f"{layer}.safetensors"

    def has(self, adapter: str, part: LayerPart) -> bool:
        """Say whether the file of a layer is here and whole; a damaged one is deleted."""
        self._use(adapter)
        path, key = self.file(adapter, part.layer), (adapter, part.layer)
        try:
            if path.stat().st_size == part.size_bytes and key in self._whole:
                return True
            content = read_own(path, MAX_LAYER_BYTES)
        except OSError:
            return False
        if hashlib.sha256(content).hexdigest() != part.sha256:
            path.unlink(missing_ok=True)
            return False
        self._whole.add(key)
        return True

    def keep(self, adapter: str, part: LayerPart, content: bytes) -> None:
        """Write the file of a layer. Raises CheckpointError if it is not the one of `part`,
        CapacityError if the disk is full.
        """
        if hashlib.sha256(content).hexdigest() != part.sha256:
            raise CheckpointError(
                f"layer {part.layer} of adapter {adapter[:12]} came with other bytes than it has"
            )
        path = self.file(adapter, part.layer)
        try:
            self._use(adapter)
            self._make_room(len(content))
            write_whole(path, content)
        except OSError as error:
            raise disk_error(error, path) from error
        self._whole.add((adapter, part.layer))

    def read(self, adapter: str, layer: int) -> bytes:
        """Return the file of a layer. Raises CheckpointError if it is not here."""
        try:
            with telling_shortages(f"layer {layer} of adapter {adapter[:12]}"):
                return read_own(self.file(adapter, layer), MAX_LAYER_BYTES)
        except OSError as error:
            raise CheckpointError(
                f"layer {layer} of adapter {adapter[:12]} is not here", remedy="ask another node"
            ) from error

    def _use(self, adapter: str) -> None:
        self._used.pop(adapter, None)
        self._used[adapter] = None

    def _make_room(self, n_bytes: int) -> None:
        """Delete what was used longest ago until `n_bytes` more fit. Raises OSError."""
        make_own_folder(self.folder)
        entries = [entry for entry in self.folder.iterdir() if entry.is_dir()]
        sizes = {entry: _size(entry) for entry in entries}
        share = DiskShare.of(
            SHARE_OF_DISK,
            used_bytes=sum(sizes.values()),
            free_bytes=shutil.disk_usage(self.folder).free,
        )
        numbers = {adapter: number for number, adapter in enumerate(self._used)}
        kept = {*[*self._used][-N_KEPT:]}
        idle = [entry for entry in entries if entry.name not in kept]
        idle.sort(key=lambda entry: (numbers.get(entry.name, -1), os.path.getmtime(entry)))

        def delete(entry: Path) -> int:
            shutil.rmtree(entry, ignore_errors=True)
            return sizes[entry]

        share.evict(n_bytes, idle, delete)
        if n_bytes > share.free_bytes:
            raise CapacityError(
                f"{self.folder} has no room for {n_bytes} bytes of an adapter",
                remedy="free some of that disk",
            )


def _part_of(path: str, adapter: StoredAdapter, layer: int) -> tuple[LayerPart, bytes]:
    """Read what an adapter has for a layer: what is said of its file, and the file.

    Raises UnsupportedModelError for one that is too large.
    """
    content, n_weights = layer_file(adapter.read(layer))
    if len(content) > MAX_LAYER_BYTES:
        raise UnsupportedModelError(
            f"{path}: layer {layer} has {len(content)} bytes, at most {MAX_LAYER_BYTES} are loaded",
            remedy="use an adapter of a lower rank",
        )
    digest = hashlib.sha256(content).hexdigest()
    part = LayerPart(layer=layer, size_bytes=len(content), n_weights=n_weights, sha256=digest)
    return part, content


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
