"""Which stage a node is to load."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shardnet.model.config.quantization import Quantization
from shardnet.types import Arith, DType, KvDType, LayerRange, WireDType


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOrder:
    """Which stage to load, in the ring's `dtype`. Equal orders give the same stage.

    `folder` is where the checkpoint `model` lies on this machine.
    """

    model: str
    folder: Path
    model_id: str
    layers: LayerRange
    dtype: DType
    context: int
    is_tail: bool
    """Whether the stage has the last layer, so that it samples."""
    device: str
    quantization: Quantization | None = None
    kv_dtype: KvDType = KvDType.AUTO
    n_streamed: int = 0
    """How many of the layers are streamed from disk."""
    ignore_unknown: bool = False
    """Whether unknown keys of the config are ignored."""
    arith: Arith = Arith.FAST
    shard: int = 0
    """Which part of a stage that spans `n_nodes` this node has."""
    n_nodes: int = 1
    gather_dtype: WireDType | None = None
    """The dtype in which parts travel between these nodes, None for their own."""
