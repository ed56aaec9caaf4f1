"""Loads a stage of a model that transformers' own modules compute.

Knows what is refused of such a stage. Runs on the loading thread.
"""

from __future__ import annotations

import torch

from shardnet.model.config.module_outline import ModuleOutline
from shardnet.model.kernels.codec import torch_dtype
from shardnet.model.kernels.linear import probe
from shardnet.runtime.loading.loading import kv_room
from shardnet.runtime.stage.compute import PluggedStage, StageJob
from shardnet.runtime.stage.stage_order import StageOrder
from shardnet.runtime.stage.torch_compute import TorchCompute
from shardnet.stage.estimate.memory_estimate import stage_weight_bytes
from shardnet.stage.estimate.stored_dtype import weight_form
from shardnet.stage.module_stage import ModuleRoom, load_module_stage
from shardnet.types import WireDType

KERNEL = "transformers"


def load_by_modules(job: StageJob) -> PluggedStage:
    """Load a stage as a plug-in does.

    Raises UnsupportedModelError for what these modules do not do, CapacityError where the stage or
    one context does not fit, CheckpointError for tensors that do not match the model.
    """
    order, checkpoint = job.order, job.checkpoint
    config, device = checkpoint.config, torch.device(order.device.torch)
    assert config.outline is not None, "others are loaded with layers of ours"
    _check_order(order, config.outline)
    choice = probe(device, order.form.dtype, config.checkpoint_dtype, None, order.arith)
    form = weight_form(checkpoint, choice)
    room = kv_room(
        config,
        order.layers,
        form,
        order.form.context,
        job.memory_bytes,
        held_bytes=job.held_bytes,
    )
    stage = load_module_stage(
        checkpoint,
        order.layers,
        dtype=torch_dtype(choice.dtype),
        hidden_dtype=None if choice.hidden_dtype is None else torch_dtype(choice.hidden_dtype),
        device=device,
        room=ModuleRoom(context=order.form.context, room_blocks=room.blocks),
        progress=job.progress,
    )
    return PluggedStage(
        compute=TorchCompute(stage, job.sampler, WireDType.own(order.form.dtype)),
        weight_bytes=stage_weight_bytes(config, order.layers, form),
        room_blocks=room.blocks,
        room_states=room.states,
        kernel=KERNEL,
    )


def _check_order(order: StageOrder, outline: ModuleOutline) -> None:
    """Raise UnsupportedModelError, which names the flag, for what only layers of ours do."""
    for flag, is_asked in (
        ("--quant", bool(order.form.quant)),
        ("--kv-dtype", order.form.kv_dtype != "auto"),
        ("--stream-layers", bool(order.n_streamed)),
        ("--tensor-parallel", bool(order.shards)),
        ("--nodes-per-stage", order.n_nodes > 1),
        ("--mtp", order.form.mtp),
    ):
        if is_asked:
            raise outline.refusal(flag)
