"""Loads the tower of a checkpoint, which encodes pictures."""

from __future__ import annotations

from dataclasses import replace

import torch

from shardnet.checkpoint.pictures import Pictures
from shardnet.model.families.stage_tensors import StageTensors
from shardnet.model.kernels.codec import torch_dtype
from shardnet.model.kernels.device_memory import capacity_error_for
from shardnet.model.kernels.linear import KernelChoice
from shardnet.model.vision.tower import TowerEncoder
from shardnet.stage.tensor_reader import Progress
from shardnet.stage.weights import StageWeights


@torch.inference_mode()
def load_encoder(
    pictures: Pictures, *, choice: KernelChoice, device: torch.device, progress: Progress
) -> TowerEncoder:
    """Load tower and projector onto `device`. Their weights are never quantised again.

    `progress` is as in `load_stage`. Raises CheckpointError for tensors that do not match the
    config, CapacityError if memory runs out.
    """
    dtype = torch_dtype(choice.dtype)
    choice = replace(choice, quantization=None)
    tensors = StageTensors(embedding={}, layers={0: pictures.table}, head={})
    too_much = f"{device} has no memory for the vision tower in {choice.dtype.value}"
    with capacity_error_for(too_much, remedy="give the node fewer layers"):
        weights = StageWeights(pictures.checkpoint, tensors, choice, device, progress)
        with weights.writer:
            tower = pictures.family.load(pictures.config, weights, dtype, device)
    return TowerEncoder(
        tower=tower,
        processor=pictures.processor,
        weight_bytes=pictures.weight_bytes(choice.dtype),
        dtype=dtype,
        device=device,
    )
