"""From a plan to a ring that can be built: its ports, sources of weights, and its tokenizer.

Knows how this node reaches each stage, itself included. Must not plan, nor know clients.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

from shardnet.cluster.peers.peers import Peers
from shardnet.cluster.planning.plan import Plan
from shardnet.cluster.planning.ring_dtypes import node_ariths
from shardnet.cluster.ring.ring import OnBusy, Ring
from shardnet.cluster.ring.ring_spec import RingSpec
from shardnet.cluster.ring.stage_port import LocalPort, RemotePort, StagePort
from shardnet.cluster.sharing.replica_sources import check_same_model, choose_sources
from shardnet.cluster.sharing.sharing import Sharing
from shardnet.cluster.store.disk_jobs import DiskJobs
from shardnet.stage_form import StageForm
from shardnet.tokenizers.tokenizer import TextProcess, Tokenizer, read_eos_ids
from shardnet.transport.loop import finish, shielded
from shardnet.types import Epoch
from shardnet.wire.framing.schema import MAX_STAGES
from shardnet.wire.messages.membership import NodeInfo
from shardnet.wire.messages.stages import DevicePart


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRing:
    """All that building a ring needs. `sources` are addresses that have the model's weights.

    Its tokenizer is to be closed.
    """

    plan: Plan
    ports: tuple[StagePort, ...]
    spans: tuple[tuple[StagePort, ...], ...]
    sources: tuple[str, ...]
    tokenizer: Tokenizer | None
    eos_ids: tuple[int, ...]

    def ring(self, epoch: Epoch, on_busy: OnBusy, former: Ring | None = None) -> Ring:
        """Make the ring, not built yet. `on_busy` decides how to treat a busy node.

        It takes over the requests of the ring `former`.
        """
        plan, spec = self.plan, ring_spec(self.plan)
        return Ring(
            spec, self.ports, epoch, self.sources, plan.chunk_s, on_busy, former, self.spans
        )


@dataclass(kw_only=True, eq=False, repr=False)
class RingBuilder:
    """Prepares rings that this node leads, whose own stage has `own_port`."""

    own_port: LocalPort
    sharing: Sharing
    peers: Peers
    disk: DiskJobs

    async def prepare(self, plan: Plan, *, with_tokenizer: bool = True) -> PreparedRing:
        """Check that all nodes of the plan hold the same model, and read its tokenizer.

        Without `with_tokenizer` it has none: there is one from a ring before.

        Raises PlanError if they do not, CheckpointError for a damaged tokenizer, LinkError for a
        node that cannot be reached.
        """
        ports = [await self._port(node) for node in plan.nodes]
        spans = [tuple([await self._port(node) for node in further]) for further in plan.spans]
        members = plan.ring_nodes
        replicas = await self.sharing.sources(plan.facts, plan.choice.model, members)
        check_same_model(replicas[: len(members)])
        sources = choose_sources(plan.facts.model_id, replicas, limit=MAX_STAGES)
        tokenizer: Tokenizer | None = None
        eos_ids: tuple[int, ...] = ()
        if with_tokenizer:
            tokenizer, eos_ids = await _open_tokenizer(self.disk, plan.facts.path)
        return PreparedRing(
            plan=plan,
            ports=tuple(ports),
            spans=tuple(spans),
            sources=tuple(sources),
            tokenizer=tokenizer,
            eos_ids=eos_ids,
        )

    async def _port(self, node: NodeInfo) -> StagePort:
        if node.node == self.own_port.node:
            return self.own_port
        return RemotePort(await self.sharing.control(node), self.peers.links)


async def _open_tokenizer(disk: DiskJobs, path: Path) -> tuple[Tokenizer | None, tuple[int, ...]]:
    """Open the tokenizer of a checkpoint, and read its eos ids.

    If this is cancelled, its processes are ended.
    """
    processes: list[TextProcess] = []

    def read() -> tuple[Tokenizer | None, tuple[int, ...]]:
        tokenizer = Tokenizer.load_optional(path, begun=processes.append)
        return tokenizer, tokenizer.eos_ids if tokenizer else read_eos_ids(path)

    def alive() -> object:
        """Return what changes while a process reads: each of its jobs has its own deadline."""
        return time.monotonic() if any(process.pid is not None for process in processes) else None

    async def abandon() -> None:
        while True:
            for process in processes:
                await asyncio.to_thread(process.close)
            if reading.done():
                break
            await asyncio.wait([reading], timeout=0.1)

    reading = disk.submit(path, read, alive)
    try:
        return await shielded(reading)
    except asyncio.CancelledError:
        await finish(abandon())
        raise


def ring_spec(plan: Plan) -> RingSpec:
    """Return the spec of the ring that `plan` asks for."""
    return RingSpec(
        form=StageForm.of(
            plan.choice,
            model_id=plan.facts.model_id,
            dtype=plan.dtype,
            context=plan.context,
            gather_dtype=plan.gather_dtype,
        ),
        addresses=tuple(node.address for node in plan.nodes),
        layers=tuple(stage.layers for stage in plan.placement.stages),
        n_streamed=tuple(stage.n_streamed for stage in plan.placement.stages),
        parts=tuple(
            tuple(
                DevicePart(layers=(part.layers.start, part.layers.end), devices=[*part.devices])
                for part in stage.parts
            )
            for stage in plan.placement.stages
        ),
        wires=plan.wires,
        threads=plan.choice.threads,
        config=plan.facts.config,
        ariths=tuple(node_ariths(plan.choice.arith, plan.arith, plan.nodes).values()),
        spans=tuple(tuple(node.address for node in further) for further in plan.spans),
        shares=tuple(stage.shares for stage in plan.placement.stages),
        adapters=plan.facts.adapters,
    )
