"""Load the shards of a stage: the first one here, each other one in a process of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.errors import CheckpointError, ConfigurationError, UsageError
from shardnet.model.cache.kv_cache import KvCache
from shardnet.model.cache.slot_blocks import SlotContents
from shardnet.model.kernels.linear import KernelChoice
from shardnet.model.shards.cut import MAX_SHARDS
from shardnet.model.shards.group import MemoryGroup, SharedMemory
from shardnet.runtime.shards.calls import AdoptRows, ShardJob
from shardnet.runtime.shards.processes import Launch, ShardProcesses, launch
from shardnet.runtime.stage.stage_order import StageDevice, StageOrder
from shardnet.stage.load import choose_kernels, load_stage
from shardnet.stage.packs.pack_cache import PackCache
from shardnet.stage.stage_model import StageModel
from shardnet.stage.tensor_reader import Progress
from shardnet.types import SlotId


def load_shard(
    job: ShardJob, memory: SharedMemory, progress: Callable[[int, int], None]
) -> StageModel:
    """Load a shard. Raises what loading a stage raises."""
    order, form = job.order, job.order.form
    checkpoint = order.opened()
    if checkpoint.model_id != form.model_id:
        raise CheckpointError(
            f"{order.folder}: it has changed while its shards were loaded", remedy="ask again"
        )
    device = torch.device(order.device.torch)
    return load_stage(
        checkpoint,
        order.layers,
        choice=choose_kernels(checkpoint, form, order.arith, device),
        device=device,
        room_blocks=job.room_blocks,
        progress=progress,
        context=form.context,
        packs=PackCache.used(job.packs, job.pack_identity, form),
        group=MemoryGroup(memory, job.index, job.size),
    )


class ArrivingSlot:
    """Collects rows of all KV heads for a slot of `kv`, and keeps those of its own heads."""

    def __init__(self, kv: KvCache, first_head: int) -> None:
        """Keep as many heads from `first_head` on as a layer of `kv` has."""
        self._kv = kv
        self._first_head = first_head
        self._contents: SlotContents | None = None
        self._states: dict[int, Tensor] = {}

    def clear(self) -> None:
        """Drop the rows collected so far."""
        self._contents = None
        self._states.clear()

    def take(self, call: AdoptRows, data: Tensor) -> None:
        """Add rows of all KV heads of a layer, or a piece of its state, as plain bytes."""
        if self._contents is None:
            self._contents = self._kv.new_contents(0)
        contents, layer = self._contents, call.layer
        if call.part == "state":
            flat = self._states.setdefault(layer, torch.empty(call.n_rows, dtype=torch.uint8))
            flat[call.begin : call.begin + call.n] = data
            if call.begin + call.n == call.n_rows:
                contents.states[layer].write(self._states.pop(layer))
                contents.states[layer].end = call.end
            return
        if call.part == "keys" and call.begin == 0:
            for held in (contents.keys, contents.values):  # one without columns is not sent
                n_heads, _, width = held[layer].shape
                held[layer] = held[layer].new_empty(n_heads, call.n_rows, width)
        own = (contents.keys if call.part == "keys" else contents.values)[layer]
        rows = data.view(own.dtype).view(-1, call.n, own.shape[2])
        own_rows = rows[self._first_head : self._first_head + own.shape[0]]
        own[:, call.begin : call.begin + call.n] = own_rows

    def adopt(self, slot: SlotId, firsts: Sequence[int], n_blocks: int) -> None:
        """Move the collected rows and states into the slot."""
        contents = self._contents or self._kv.new_contents(0)
        self.clear()
        contents.firsts[:] = firsts
        self._kv.adopt(slot, contents, n_blocks)


_MOST_ROWS: Final = 1024
"""Rows that a call has room for, more than the largest frame has."""
_MESSAGE_BYTES: Final = 1 << 20
"""Room for the token ids and masks of a call."""


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

    `packs` is the folder of quantised weights, `files` identifies the checkpoint's files in it.
    `launch` starts a process. Raises what loading raises in any of them, ConfigurationError where a
    process cannot be given what it needs.
    """
    _check(order)
    n_shards, config = len(order.devices), checkpoint.config
    mailbox_bytes = _MESSAGE_BYTES + _MOST_ROWS * 4 * config.row_width
    processes = ShardProcesses(n_shards, mailbox_bytes, launch)

    def job(index: int, memory: int, mailbox: int, n_bytes: int) -> ShardJob:
        device = order.devices[index]
        return ShardJob(
            order=replace(order, devices=(device,)),
            index=index,
            size=n_shards,
            memory=memory,
            mailbox=mailbox,
            mailbox_bytes=n_bytes,
            n_threads=n_threads_of(device, n_shards),
            room_blocks=room_blocks,
            packs="" if packs is None else str(packs),
            pack_identity=json.dumps([*files, f"shard {index} of {n_shards}, heads apportioned"]),
        )

    processes.start(job)
    own = job(0, -1, -1, 0)
    model = load_stage(
        checkpoint,
        order.layers,
        choice=choice,
        device=torch.device(order.device.torch),
        room_blocks=room_blocks,
        context=order.form.context,
        progress=progress,
        packs=PackCache.used(own.packs, own.pack_identity, order.form),
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
    if len(order.devices) > MAX_SHARDS:
        raise UsageError(
            f"{len(order.devices)} shards of one stage, at most {MAX_SHARDS} are possible",
            remedy="name fewer devices",
        )
    names = {device.torch for device in order.devices}
    if names != {"cpu"}:
        raise UsageError(
            f"layers are cut over groups of cores only, not over {', '.join(sorted(names))}",
            remedy="give --tensor-parallel 1: each device then has layers of its own",
        )
