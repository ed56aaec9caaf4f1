"""Loads the first shard of a stage here, and has the others loaded beside.

Knows the order of work. Must not know how processes are started and told (processes.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.errors import ConfigurationError, UsageError
from shardnet.model.kernels.linear import KernelChoice
from shardnet.model.shards.cut import MAX_SHARDS
from shardnet.runtime.shards.calls import ShardJob
from shardnet.runtime.shards.load_shard import pack_cache
from shardnet.runtime.shards.processes import Launch, ShardProcesses, launch
from shardnet.runtime.stage.stage_order import StageDevice, StageOrder
from shardnet.stage.load import load_stage
from shardnet.stage.stage_model import StageModel
from shardnet.stage.tensor_reader import Progress

_MOST_ROWS: Final = 1024
"""Rows of the largest frame and more."""
_MESSAGE_BYTES: Final = 1 << 20
"""Of the token ids and masks of a call."""


def load_leading(
    order: StageOrder,
    checkpoint: Checkpoint,
    choice: KernelChoice,
    room_blocks: int,
    *,
    packs: Path | None,
    files: Sequence[object],
    progress: Progress,
    launch: Launch = launch,
) -> StageModel:
    """Load the first shard of a stage, while processes load the others that `order` names.

    `packs` is the folder of quantised weights, `files` what identifies the checkpoint's files
    there. `launch` starts a process. Raises what loading raises in any of them, ConfigurationError
    where a process cannot be given what it needs.
    """
    _check(order)
    n_shards, config = len(order.shards), checkpoint.config
    mailbox_bytes = _MESSAGE_BYTES + _MOST_ROWS * 4 * config.hidden_size
    processes = ShardProcesses(n_shards, mailbox_bytes, launch)

    def job(index: int, memory: int, mailbox: int, n_bytes: int) -> ShardJob:
        device = order.shards[index]
        return ShardJob(
            order=replace(order, device=device.torch, cores=device.cores, shards=()),
            index=index,
            size=n_shards,
            memory=memory,
            mailbox=mailbox,
            mailbox_bytes=n_bytes,
            n_threads=n_threads_of(device, n_shards),
            room_blocks=room_blocks,
            packs="" if packs is None else str(packs),
            pack_identity=json.dumps([*files, f"shard {index} of {n_shards}"]),
        )

    processes.start(job)
    own = job(0, -1, -1, 0)
    model = load_stage(
        checkpoint,
        order.layers,
        choice=choice,
        device=torch.device(order.shards[0].torch),
        room_blocks=room_blocks,
        context=order.context,
        progress=progress,
        packs=pack_cache(own),
        kv_dtype=order.kv_dtype,
        group=processes.group,
        followers=processes,
    )
    model.exact_rows = min(model.exact_rows, processes.await_ready(lambda: progress(1, 1)))
    return model


def n_threads_of(device: StageDevice, n_shards: int) -> int:
    """Return the threads of a shard: one for each of its cores."""
    return len(device.cores) or max(1, (os.cpu_count() or 1) // n_shards)


def _check(order: StageOrder) -> None:
    if os.name != "posix":
        raise ConfigurationError(
            "a stage is cut over processes on Linux and macOS only", remedy="name one device"
        )
    if order.n_streamed:
        raise UsageError(
            "layers that are streamed from disk cannot be cut over devices",
            remedy="leave out --stream-layers, or give --tensor-parallel 1",
        )
    if len(order.shards) > MAX_SHARDS:
        raise UsageError(
            f"{len(order.shards)} shards of one stage, at most {MAX_SHARDS} are possible",
            remedy="name fewer devices",
        )
    names = {device.torch for device in order.shards}
    if names != {"cpu"}:
        raise UsageError(
            f"layers are cut over groups of cores only, not over {', '.join(sorted(names))}",
            remedy="give --tensor-parallel 1: each device then has layers of its own",
        )
