"""Identify checkpoints whose headers are large in a process of their own.

Reading a hundred thousand headers takes seconds of Python, for which the streams of this process
would stand still again and again. Knows which headers are large. Blocks: for threads that may wait.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any, Final

from shardnet.checkpoint.formats.gguf_header import gguf_files
from shardnet.checkpoint.replica import StoredLayers
from shardnet.checkpoint.tensors.checkpoint_files import find_file, folder_entries, open_file
from shardnet.checkpoint.tensors.manifest import is_blob
from shardnet.checkpoint.tensors.stored_tensor import AGAIN
from shardnet.errors import CheckpointError
from shardnet.guard.helper_process import HelperProcess, JobFailedError, JobLimits
from shardnet.model.families.registry import parse_config
from shardnet.runtime.loading.model_facts import ModelFacts, identify
from shardnet.stage.estimate.packed_sizes import PackedCount, PackedSizes
from shardnet.threads import DaemonThreads
from shardnet.types import DType, LayerRange

LARGE_BYTES: Final = 1 << 20
"""Headers of more bytes than this are read in another process."""
LIMITS: Final = JobLimits(cpu_s=60, wall_s=300.0, memory_bytes=2 << 30, reply_bytes=64 << 20)

_MODULE = "shardnet.cluster.store.identify_program"
_POLL_S = 0.5
"""A thread that wakes up so often is not taken for one that hangs on a disk (disk_jobs.py)."""


def identify_guarded(path: Path) -> ModelFacts:
    """Identify a checkpoint here, or in another process where its headers are large.

    Raises what `identify` raises, CheckpointError too for headers that take too long or too much
    memory.
    """
    return identify(path) if header_bytes(path) <= LARGE_BYTES else identify_apart(path)


def identify_apart(path: Path) -> ModelFacts:
    """Identify a checkpoint in another process; raises as `identify_guarded`."""
    process, threads = HelperProcess(_MODULE), DaemonThreads(1, "shardnet-identify")
    try:
        asked = threads.submit(process.call, "identify", {"path": str(path)}, LIMITS)
        while not asked.done():
            with contextlib.suppress(TimeoutError):
                asked.exception(_POLL_S)
        value, _ = asked.result()
    except JobFailedError as error:
        raise CheckpointError(
            f"{path}: reading its headers failed: {error}", remedy=AGAIN
        ) from error
    finally:
        process.close()
        threads.close()
    return _facts(path, value)


def header_bytes(path: Path) -> int:
    """Return how many bytes of headers a checkpoint has at most, as far as its files tell."""
    try:
        if not path.is_dir():
            return sum(_size_bytes(file) for file in gguf_files(path))
        return sum(_header_bytes(path / name) for name in folder_entries(path))
    except (OSError, CheckpointError):
        return 0  # opening it says what is wrong


def _header_bytes(file: Path) -> int:
    if file.name.endswith((".gguf", ".bin", ".pth", ".index.json")) or is_blob(file.name):
        return _size_bytes(file)
    if file.name.endswith(".safetensors"):
        with open_file(file) as opened:
            return int.from_bytes(opened.read(8), "little")
    return 0


def _size_bytes(file: Path) -> int:
    status = find_file(file)
    return status.st_size if status is not None else 0


def _facts(path: Path, value: dict[str, Any]) -> ModelFacts:
    stored, linear = value["stored_dtype"], value["linear_dtype"]
    return ModelFacts(
        model_id=value["model_id"],
        path=path,
        config=parse_config(json.loads(value["config_text"]), str(path), []),
        config_text=value["config_text"],
        stamp=tuple((name, size, time_ns) for name, size, time_ns in value["stamp"]),
        is_complete=value["is_complete"],
        stored_dtype=DType(stored) if stored else None,
        linear_dtype=DType(linear) if linear else None,
        packed=_packed(value["packed"]) if value["packed"] else None,
        form=value["form"],
        size_bytes=value["size_bytes"],
        unknown_keys=tuple(value["unknown_keys"]),
        recommended=value["recommended"],
        layers=StoredLayers(
            size_bytes=tuple(value["layers"]["size_bytes"]),
            held=tuple(LayerRange(**held) for held in value["layers"]["held"]),
        ),
        has_mtp=value["has_mtp"],
        tower_bytes={DType(name): n_bytes for name, n_bytes in value["tower_bytes"].items()},
        picture_layers=value["picture_layers"],
    )


def _packed(value: dict[str, Any]) -> PackedSizes:
    return PackedSizes(
        layers=tuple(PackedCount(**count) for count in value["layers"]),
        experts=tuple(PackedCount(**count) for count in value["experts"]),
        embedding=PackedCount(**value["embedding"]),
        head=PackedCount(**value["head"]),
        is_tied=value["is_tied"],
        can_stream=value["can_stream"],
        is_all=value["is_all"],
    )
