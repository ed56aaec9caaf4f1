"""The forward pass of one stage, built by the model's family. Imports torch.

Must not know families, checkpoints, slots or steps in flight.
"""

from __future__ import annotations

import os

import torch

from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families.family import FamilyStage
from shardnet.model.families.registry import family_of
from shardnet.model.fused.decode_graphs import Capture, find_capture
from shardnet.model.fused.decoder import StageInputs
from shardnet.model.layers.weight_source import WeightSource
from shardnet.types import LayerRange


def load_family_stage(
    config: ModelConfig,
    layers: LayerRange,
    weights: WeightSource,
    context: int,
    dtype: torch.dtype,
    device: torch.device,
    capture: Capture | None = None,
) -> FamilyStage:
    """Build the forward pass of `layers`, with embedding and head where they belong.

    `context` is the positions of one sequence, `capture` how decode steps become graphs: None for
    what the device can.
    """
    inputs = StageInputs(
        config=config,
        layers=layers,
        weights=weights,
        context=context,
        dtype=dtype,
        device=device,
        capture=capture or find_capture(device, os.environ),
    )
    return family_of(config).load_stage(inputs)
