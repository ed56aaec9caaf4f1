"""What a model weighs on this machine, so that tests can give nodes too little memory for it.

Whether weights, activations and the KV cache take two bytes a number or four depends on the CPU.
"""

from __future__ import annotations

from pathlib import Path

import torch

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.cluster.placement.figures import ModelShape
from shardnet.cluster.planning.model_shape import model_shape
from shardnet.model.kernels.linear import probe
from shardnet.types import DType


def shape_here(folder: Path, context: int, *, is_measured: bool = True) -> ModelShape:
    """What nodes of this machine plan a checkpoint with; before they are measured, no less."""
    config = Checkpoint.open(folder).config
    choice = probe(torch.device("cpu"), "auto", config.checkpoint_dtype or DType.FLOAT32)
    stored = choice.stored_dtype if is_measured else choice.dtype
    return model_shape(config, choice.dtype, context, stored=stored)
