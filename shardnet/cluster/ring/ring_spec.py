"""What makes a ring, and the order to load that each of its nodes gets."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardnet.checkpoint.adapters.layer_files import AdapterFacts
from shardnet.cluster.sharing.adapter_sharing import ring_adapter
from shardnet.model.config.model_config import ModelConfig
from shardnet.stage_form import StageForm
from shardnet.types import Arith, Epoch, LayerRange, WireDType
from shardnet.wire.messages.stages import DevicePart, LoadStage


@dataclass(frozen=True, slots=True, kw_only=True)
class RingSpec:
    """What each stage of a ring is told to load, in which form, and on which nodes."""

    form: StageForm
    addresses: tuple[str, ...]
    layers: tuple[LayerRange, ...]
    n_streamed: tuple[int, ...]
    """How many layers of each stage are streamed from disk."""
    wires: tuple[WireDType, ...]
    """The dtypes of activations from each stage to the next."""
    threads: int
    config: ModelConfig
    """What the model computes, with the layers of its adapters and what predicts tokens."""
    ariths: tuple[Arith, ...]
    """How each stage computes."""
    parts: tuple[tuple[DevicePart, ...], ...] = ()
    """Which layers of each stage are on which devices of its node."""
    spans: tuple[tuple[str, ...], ...] = ()
    """For each stage the further nodes that it spans; () where none spans any."""
    shares: tuple[tuple[int, ...], ...] = ()
    """For each stage what of a layer each of its nodes has, () for equal parts."""
    adapters: tuple[AdapterFacts, ...] = ()
    """The LoRA adapters that requests can have."""

    def shard_nodes(self, rank: int) -> tuple[str, ...]:
        """Return the nodes of a stage, the ring's member first."""
        return (self.addresses[rank], *(self.spans[rank] if self.spans else ()))

    @property
    def n_parts(self) -> int:
        """How many of its steps may be computed at a time: one by each part of each stage."""
        parts = self.parts or ((),) * len(self.layers)
        return sum(max(1, len(own)) for own in parts)

    @property
    def caching(self) -> list[LayerRange]:
        """The layers of which each stage has keys, values or states."""
        *before, last = self.layers
        return [*before, LayerRange(last.start, last.end + self.form.mtp)]

    def order(
        self,
        rank: int,
        shard: int = 0,
        *,
        ring: str,
        epoch: Epoch,
        sources: Sequence[str],
        instead_of: str,
    ) -> LoadStage:
        """Return the order to load of a rank of a `ring`; for the rest see Ring."""
        own, nodes = WireDType.own(self.form.dtype), self.shard_nodes(rank)
        spans = len(nodes) > 1
        return LoadStage(
            request=0,
            ring=ring,
            epoch=epoch,
            rank=rank,
            n_stages=len(self.layers),
            form=self.form.of_stage(is_first=rank == 0, is_cut=spans),
            border_width=self.config.row_width,
            layers=(self.layers[rank].start, self.layers[rank].end),
            n_streamed=self.n_streamed[rank],
            wire_dtype=[*self.wires, own][rank],
            received_dtype=[own, *self.wires][rank],
            arith=self.ariths[rank],
            threads=self.threads,
            addresses=list(self.addresses),
            sources=[source for source in sources if source != nodes[shard]],
            instead_of=instead_of,
            shard_nodes=list(nodes) if spans else [],
            shard=shard,
            shares=list(self.shares[rank]) if self.shares else [],
            parts=list(self.parts[rank]) if self.parts else [],
            adapters=[ring_adapter(each, self.layers[rank]) for each in self.adapters],
        )


class RingUse:
    """Who uses a ring, and those that replace it."""

    def __init__(self) -> None:
        self.n_users = 0
        self.is_used = asyncio.Event()
        """Set while there is a user."""
        self._used_at_s = time.monotonic()

    @property
    def idle_s(self) -> float:
        """Seconds since the last use, 0 while there is one."""
        return 0.0 if self.n_users else time.monotonic() - self._used_at_s

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Count a user within the context."""
        self.n_users += 1
        self.is_used.set()
        try:
            yield
        finally:
            self.n_users -= 1
            if not self.n_users:
                self.is_used.clear()
            self._used_at_s = time.monotonic()
