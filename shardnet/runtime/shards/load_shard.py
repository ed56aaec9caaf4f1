"""From a job to a loaded shard of a stage, and what comes for its slots, in the process of it.

Knows what a StageOrder says, and which KV heads are the shard's. Must not know sequences, how rows
travel, nor the calls that follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.errors import CheckpointError
from shardnet.model.cache.kv_cache import KvCache
from shardnet.model.cache.slot_blocks import SlotContents
from shardnet.model.kernels.codec import to_bytes
from shardnet.model.kernels.linear import probe
from shardnet.model.shards.group import MemoryGroup, SharedMemory
from shardnet.runtime.shards.calls import AdoptRows, ShardJob
from shardnet.stage.load import load_stage
from shardnet.stage.packs.pack_cache import PackCache
from shardnet.stage.stage_model import StageModel
from shardnet.types import SlotId


def load_shard(
    job: ShardJob, memory: SharedMemory, progress: Callable[[int, int], None]
) -> StageModel:
    """Load a shard. Raises what loading a stage raises."""
    order = job.order
    checkpoint = Checkpoint.open(order.folder, ignore_unknown=order.ignore_unknown)
    if checkpoint.model_id != order.model_id:
        raise CheckpointError(
            f"{order.folder}: it has changed while its shards were loaded", remedy="ask again"
        )
    device, own = torch.device(order.device), checkpoint.config.checkpoint_dtype
    return load_stage(
        checkpoint,
        order.layers,
        choice=probe(device, order.dtype, own, order.quantization, order.arith),
        device=device,
        room_blocks=job.room_blocks,
        progress=progress,
        context=order.context,
        packs=pack_cache(job),
        kv_dtype=order.kv_dtype,
        group=MemoryGroup(memory, job.index, job.size),
    )


def pack_cache(job: ShardJob) -> PackCache | None:
    """Return where the shard's quantised weights are cached: apart from those of other shards."""
    quantization = job.order.quantization
    if not job.packs or quantization is None:
        return None
    packs = PackCache(Path(job.packs), job.pack_identity, job.order.model, quantization)
    packs.touch()
    return packs


class ArrivingSlot:
    """Collects rows of all KV heads for a slot of `kv`, and keeps those of its own heads."""

    def __init__(self, kv: KvCache, first_head: int) -> None:
        """Keep as many heads from `first_head` on as a layer of `kv` has."""
        self._kv = kv
        self._first_head = first_head
        self._contents: SlotContents | None = None
        self._states: dict[int, Tensor] = {}

    def clear(self) -> None:
        """Forget what has come."""
        self._contents = None
        self._states.clear()

    def take(self, call: AdoptRows, data: Tensor) -> None:
        """Take some rows of a layer, as plain bytes, of all heads."""
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
        held = contents.keys if call.part == "keys" else contents.values
        if call.begin == 0:
            n_heads, _, width = held[layer].shape
            held[layer] = held[layer].new_empty(n_heads, call.n_rows, width)
        own = held[layer]
        rows = data.view(own.dtype).view(-1, call.n, own.shape[2])
        own_rows = rows[self._first_head : self._first_head + own.shape[0]]
        own[:, call.begin : call.begin + call.n] = own_rows

    def adopt(self, slot: SlotId, firsts: Sequence[int], n_blocks: int) -> None:
        """Let the slot hold what has come."""
        contents = self._contents or self._kv.new_contents(0)
        self.clear()
        contents.firsts[:] = firsts
        self._kv.adopt(slot, contents, n_blocks)

    @staticmethod
    def as_bytes(tensor: Tensor) -> memoryview:
        """Return a tensor as plain bytes."""
        return to_bytes(tensor)
