"""Stages of models that transformers' modules compute, one behind the other."""

from __future__ import annotations

from pathlib import Path

import torch
from support.rings.stage_chain import Rows, batch_of

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.stage.module_stage import ModuleRoom, ModuleStage, load_module_stage
from shardnet.stage.runs import Run
from shardnet.types import LayerRange

CPU = torch.device("cpu")
CONTEXT = 512


def load(folder: Path, ranges: list[LayerRange]) -> list[ModuleStage]:
    """Load a checkpoint's layers, split as `ranges` say, in float32."""
    checkpoint = Checkpoint.open(folder)
    return [
        load_module_stage(
            checkpoint,
            layers,
            dtype=torch.float32,
            hidden_dtype=None,
            device=CPU,
            room=ModuleRoom(context=CONTEXT, room_blocks=8),
            progress=lambda done, total: None,
        )
        for layers in ranges
    ]


def step(stages: list[ModuleStage], *groups: Rows) -> torch.Tensor:
    """Send one micro-batch through the stages: logits of all rows."""
    hidden = None
    for stage in stages:
        hidden = stage.run_alone(Run(batch=batch_of(groups), hidden=hidden))
    assert hidden is not None
    return stages[-1].logits(hidden)


def rows(slot: int, position: int, ids: list[int]) -> Rows:
    return Rows(slot=slot, position=position, ids=ids, n_sampled=len(ids))
