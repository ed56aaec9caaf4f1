"""Carry out what a head asks to know whether the stages of its ring compute right.

Knows that a stage is audited between steps, and that a layer for a comparison is read beside them.
Must not know what is compared, nor what becomes of a node at fault.
"""

from __future__ import annotations

import asyncio
import time

from shardnet.cluster.member.stage_host import StageHost
from shardnet.cluster.peers.control_link import ControlLink, MessageHandlers
from shardnet.errors import UsageError
from shardnet.runtime.loading.one_layer import compute_layer
from shardnet.wire.messages.stages import AuditStage, ComputeLayer, LayerComputed, StageAudited

WEIGHTS_S = 0.02
"""How long memory is looked at where no rows are computed, which else say how long."""


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
        computing = asyncio.ensure_future(compute_for_audit(self._host, message))
        try:
            await control.report_until(message.request, computing)
            control.send(computing.result())
        finally:
            computing.cancel()
