"""A stage whose shards follow the first one as threads: all but how they start is real."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from support.rings.stage_chain import CPU, ROOM_BLOCKS, probed
from support.rings.stage_forms import form_of

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.runtime.shards import load_shard
from shardnet.runtime.shards.shard_process import read_job, serve
from shardnet.runtime.stage.stage_order import StageDevice, StageOrder
from shardnet.stage.stage_model import StageModel
from shardnet.types import DType, KvDType, LayerRange


class ShardThread:
    """Stands for a process: a thread that serves until its socket closes."""

    def __init__(self, theirs: socket.socket, descriptors: Sequence[int]) -> None:
        self._socket = socket.socket(fileno=os.dup(theirs.fileno()))
        self._thread = threading.Thread(target=self._run, name="shard", daemon=True)
        self._thread.start()

    def kill(self) -> None:
        """Close its socket."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def wait(self) -> int:
        """Wait for its end."""
        self._thread.join()
        return 0

    def _run(self) -> None:
        with self._socket:
            job = read_job(self._socket)
            serve(job, self._socket)


def load_sharded(
    folder: Path,
    layers: LayerRange,
    n_shards: int,
    *,
    context: int | None = None,
    kv_dtype: KvDType = KvDType.AUTO,
) -> StageModel:
    """Load a stage in float32 whose other shards are threads."""
    checkpoint = Checkpoint.open(folder)
    config = checkpoint.config
    order = StageOrder(
        form=form_of(folder, context=context or config.default_context, kv_dtype=kv_dtype.value),
        folder=folder,
        layers=layers,
        is_tail=layers.end == config.n_layers,
        devices=tuple(StageDevice(place=n, name=f"cpu:{n}") for n in range(n_shards)),
    )
    return load_shard.load_leading(
        order,
        checkpoint,
        replace(probed(CPU, DType.FLOAT32, None), kv_form=kv_dtype),
        ROOM_BLOCKS,
        packs=None,
        files=(),
        progress=lambda done, total: None,
        launch=ShardThread,
    )
