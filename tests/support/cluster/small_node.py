"""A node in this process, of little memory, that knows nobody."""

from __future__ import annotations

from pathlib import Path

from shardnet.cluster.machine.local_nodes import LocalNodes
from shardnet.cluster.machine.profile import Device, MemoryBudget
from shardnet.cluster.node.settings import NodeSettings
from shardnet.cluster.store.model_cache import ModelCache
from shardnet.transport.identity import Identity
from shardnet.types import DType, NodeId


def small_settings(folder: Path, identity: Identity | None = None) -> NodeSettings:
    """Settings of a node whose files are in `folder`; with an `identity` it speaks TLS."""
    return NodeSettings(
        node=NodeId("a" * 32),
        name="anna",
        budget=MemoryBudget(
            device=Device(kind="cpu", description="cpu", dtypes=(DType.FLOAT32,)),
            asked_bytes=1 << 28,
        ),
        threads=1,
        peers=(),
        local_nodes=LocalNodes(folder),
        cache=folder,
        models=ModelCache(folder),
        log=lambda line: None,
        identity=identity,
    )
