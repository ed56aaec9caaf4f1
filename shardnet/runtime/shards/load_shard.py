"""From a job to a loaded shard of a stage, in the process of that shard.

Knows what a StageOrder says. Must not know the calls that follow.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.errors import CheckpointError
from shardnet.model.config.quantization import Quantization
from shardnet.model.kernels.linear import probe
from shardnet.model.shards.memory_group import MemoryGroup, SharedMemory
from shardnet.runtime.shards.calls import ShardJob
from shardnet.stage.load import load_stage
from shardnet.stage.packs.pack_cache import PackCache
from shardnet.stage.stage_model import StageModel
from shardnet.types import Arith, DType, KvDType, LayerRange


def load_shard(
    job: ShardJob, memory: SharedMemory, progress: Callable[[int, int], None]
) -> StageModel:
    """Load a shard. Raises what loading a stage raises."""
    folder = Path(job.folder)
    checkpoint = Checkpoint.open(folder, ignore_unknown=job.ignore_unknown)
    if checkpoint.model_id != job.model_id:
        raise CheckpointError(
            f"{folder}: it has changed while its shards were loaded", remedy="ask again"
        )
    device = torch.device(job.device)
    quantization = Quantization(job.quantization) if job.quantization else None
    dtype, arith = DType(job.dtype), Arith(job.arith)
    choice = probe(device, dtype, checkpoint.config.checkpoint_dtype, quantization, arith)
    return load_stage(
        checkpoint,
        LayerRange(*job.layers),
        choice=choice,
        device=device,
        room_blocks=job.room_blocks,
        progress=progress,
        context=job.context,
        packs=pack_cache(job, quantization),
        kv_dtype=KvDType(job.kv_dtype),
        group=MemoryGroup(memory, job.index, job.size),
    )


def pack_cache(job: ShardJob, quantization: Quantization | None) -> PackCache | None:
    """Return where the shard's quantised weights are cached: apart from those of other shards."""
    if not job.packs or quantization is None:
        return None
    packs = PackCache(Path(job.packs), job.pack_identity, job.model, quantization)
    packs.touch()
    return packs
