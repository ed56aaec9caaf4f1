"""Computes rows with one layer that is read from the checkpoint for this alone.

What is in the memory of a stage has no part in it. Knows how much memory it may take. Runs on the
loading thread. Must not know who is audited, nor what becomes of the bits.
"""

from __future__ import annotations

from typing import Final

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.errors import CapacityError
from shardnet.runtime.loading.loading import check_layers
from shardnet.runtime.loading.model_facts import check_model_id
from shardnet.runtime.stage.stage_order import StageOrder
from shardnet.stage.estimate.memory_estimate import stage_weight_bytes
from shardnet.stage.estimate.stored_dtype import weight_form
from shardnet.types import LayerRange

MAX_BYTES: Final = 1 << 30
"""The largest layer that is read: the memory is needed for a moment beside all else."""


def compute_layer(order: StageOrder, layer: int, before: bytes) -> bytes:
    """Compute rows with a layer as stages of `order` would, by one thread; return them after it.

    `before` and what is returned are as in StageAudit.compute. Raises CheckpointError where this
    node lacks the layer, UsageError if the model does, CapacityError for one that is larger than
    MAX_BYTES, RemoteProtocolError for what are no rows of the model.
    """
    import torch

    from shardnet.model.kernels.linear import probe
    from shardnet.stage.load import load_stage
    from shardnet.stage.stage_audit import rows_after

    checkpoint = Checkpoint.open(order.folder, ignore_unknown=order.ignore_unknown)
    check_model_id(order.folder, checkpoint.model_id, order.model_id)
    config, device, layers = checkpoint.config, torch.device("cpu"), LayerRange(layer, layer + 1)
    check_layers(config, layers)
    choice = probe(device, order.dtype, config.checkpoint_dtype, order.quantization, order.arith)
    n_bytes = stage_weight_bytes(config, layers, weight_form(checkpoint, choice))
    if n_bytes > MAX_BYTES:
        raise CapacityError(f"layer {layer} takes {n_bytes} bytes, more than is read for an audit")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = load_stage(
            checkpoint,
            layers,
            choice=choice,
            device=device,
            room_blocks=1,
            context=order.context,
            progress=lambda done, total: None,
            kv_dtype=order.kv_dtype,
        )
        return rows_after(model, before, order.dtype)
    finally:
        torch.set_num_threads(threads)
