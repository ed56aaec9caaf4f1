"""Settle the dtypes of a ring: computing, stored weights, activations on the wire.

Knows what the client asked for and what the nodes support. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardnet.cluster.measuring.measurement import Measured
from shardnet.errors import UsageError
from shardnet.model.config.model_config import ModelConfig
from shardnet.runtime.stage.loading import ModelFacts
from shardnet.types import (
    DType,
    WireDType,
)
from shardnet.wire.messages.membership import NodeInfo

NARROW_WIRES = ("bfloat16", "float16", "int8")
"""Values of --wire-dtype."""


def settle_dtype(requested: str, config: ModelConfig, nodes: Sequence[NodeInfo]) -> DType:
    """Settle the dtype that a ring computes in: `requested`, else the first that all nodes support.

    The checkpoint's own dtype comes first, then bfloat16 for half-precision checkpoints, then
    float32. Raises UsageError for an unknown name.
    """
    if requested != "auto":
        try:
            return DType(requested)
        except ValueError:
            raise UsageError(
                f"--dtype {requested}: choose auto, bfloat16, float16 or float32"
            ) from None
    own = config.checkpoint_dtype or DType.FLOAT32
    wanted = [own] if own is DType.FLOAT32 else [own, DType.BFLOAT16]
    for dtype in wanted:
        if all(dtype.value in node.dtypes for node in nodes):
            return dtype
    return DType.FLOAT32


def settle_stored_dtype(
    facts: ModelFacts, dtype: DType, nodes: Sequence[NodeInfo], measured: Measured
) -> DType:
    """Settle the dtype in which linear weights are stored in a ring that computes in `dtype`.

    That is the checkpoint's dtype of 16 bits if every node has measured that its kernels keep it,
    else `dtype`, which never takes less memory than a stage needs.
    """
    keeps = dtype is DType.FLOAT32 and all(node.node in measured.keeping_halves for node in nodes)
    own = facts.linear_dtype
    return own if keeps and own in (DType.BFLOAT16, DType.FLOAT16) else dtype


def settle_wire_dtype(requested: str, dtype: DType) -> WireDType:
    """Settle the dtype of activations on the wire; `requested` "" is `dtype`, which is lossless.

    Raises UsageError for an unknown name, and for float32, which saves nothing.
    """
    if not requested:
        return WireDType.own(dtype)
    if requested not in NARROW_WIRES:
        raise UsageError(f"--wire-dtype {requested}: choose {', '.join(NARROW_WIRES)}")
    return WireDType(requested)
