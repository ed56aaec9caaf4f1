"""Carry out what a head asks to know whether the stages of its ring compute right.

Knows that a stage is audited between steps, and that a layer for a comparison is read from the
checkpoint beside them, and how much memory it may take.
Must not know what is compared, nor what becomes of a node at fault.
"""

from __future__ import annotations

import time
from typing import Final

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.cluster.member.stage_host import StageHost
from shardnet.cluster.peers.control_link import ControlLink, MessageHandlers
from shardnet.errors import CapacityError, UsageError
from shardnet.runtime.loading.loading import check_layers
from shardnet.runtime.loading.model_facts import check_model_id
from shardnet.runtime.stage.stage_order import StageOrder
from shardnet.stage.estimate.memory_estimate import stage_weight_bytes
from shardnet.stage.estimate.stored_dtype import weight_form
from shardnet.types import LayerRange
from shardnet.wire.messages.stages import AuditStage, ComputeLayer, LayerComputed, StageAudited

WEIGHTS_S = 0.02
"""How long memory is looked at where no rows are computed, which else say how long."""


MAX_BYTES: Final = 1 << 30
"""The largest layer that is read: the memory is needed for a moment beside all else."""


async def audit_stage(host: StageHost, message: AuditStage) -> StageAudited:
    """Look at memory and compute rows, between steps.

    Raises WrongValuesError for what is wrong, UsageError where nothing can be said.
    """
    part = host.part_with(message.ring, message.epoch, message.layer)
    audit, place = part.audit, part.order.place
    if audit is None or not (audit.promises_bits or audit.weight_bytes):
        raise UsageError("the stage of this node cannot be audited")

    def compute() -> tuple[float, bytes, bytes]:
        began_s = time.perf_counter()
        before, after = audit.compute(message.layer)
        return time.perf_counter() - began_s, before, after

    def look() -> tuple[float, int]:
        began_s = time.perf_counter()
        n_bytes = audit.look_at_memory()
        return time.perf_counter() - began_s, n_bytes

    rows_s, before, after = WEIGHTS_S, b"", b""
    with_rows = message.with_rows and audit.promises_bits
    if with_rows:
        rows_s, before, after = await host.between_steps(compute, place)
    looked_s, looked_bytes = 0.0, 0
    while looked_s < rows_s and looked_bytes < audit.weight_bytes:
        took_s, n_bytes = await host.between_steps(look, place)
        if not n_bytes:
            break
        looked_s, looked_bytes = looked_s + took_s, looked_bytes + n_bytes
    return StageAudited(
        request=message.request,
        took_s=looked_s + (rows_s if with_rows else 0.0),
        looked_bytes=looked_bytes,
        weight_bytes=audit.weight_bytes,
        before=before,
        after=after,
    )


async def compute_for_audit(host: StageHost, message: ComputeLayer) -> LayerComputed:
    """Compute rows with a layer from this node's checkpoint. Raises as compute_layer."""
    order = host.member_order(message.ring, message.epoch)

    def compute() -> tuple[float, bytes]:
        began_s = time.thread_time()
        after = compute_layer(order, message.layer, message.before)
        return time.thread_time() - began_s, after

    took_s, after = await host.beside_steps(compute)
    return LayerComputed(request=message.request, took_s=took_s, after=after)


class AuditOrders:
    """Answers the heads of other nodes."""

    def __init__(self, host: StageHost) -> None:
        self._host = host

    def register(self, handlers: MessageHandlers) -> None:
        """Register both orders."""
        handlers.register(AuditStage, self._audit_for)
        handlers.register(ComputeLayer, self._compute_for)

    async def _audit_for(self, control: ControlLink, message: AuditStage) -> None:
        control.send(await audit_stage(self._host, message))

    async def _compute_for(self, control: ControlLink, message: ComputeLayer) -> None:
        await control.answer_with(message.request, compute_for_audit(self._host, message))


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
