"""The first parts of a node: its links to others, and its stage. node/services.py has the rest.

What a part reports to one that is built later goes through the Node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from dataclasses import replace as with_options
from typing import TYPE_CHECKING

from msgspec import UNSET
from msgspec.structs import replace

from shardnet import __version__
from shardnet.cluster.machine.device_list import CUDA, NVIDIA
from shardnet.cluster.machine.folders import PACKS_FOLDER, PREFIXES_FOLDER
from shardnet.cluster.machine.power import PowerWatch
from shardnet.cluster.machine.profile import machine_name
from shardnet.cluster.machine.temperature import runs_on_battery
from shardnet.cluster.measuring.figure_cache import FigureCache
from shardnet.cluster.measuring.link_benchmark import GatherBenchmark, LinkBenchmark
from shardnet.cluster.measuring.measurement_service import MeasurementService
from shardnet.cluster.measuring.node_benchmark import NodeBenchmark
from shardnet.cluster.member.kv_orders import HostedKv, KvOrders, StageAnswers
from shardnet.cluster.member.ring_membership import DataEnd
from shardnet.cluster.member.stage_host import StageHost
from shardnet.cluster.member.stage_orders import StageOrders, stage_devices
from shardnet.cluster.node.pressure import OwnState
from shardnet.cluster.node.settings import NodeSettings
from shardnet.cluster.peers.advertisement import Advertisement
from shardnet.cluster.peers.node_directory import NodeDirectory
from shardnet.cluster.peers.peers import Peers
from shardnet.cluster.peers.rejected_handshakes import RejectedHandshakes
from shardnet.cluster.peers.rtt_probe import HANDSHAKE_S as PROBE_S
from shardnet.cluster.peers.sleepers import Sleepers
from shardnet.cluster.sharing.bulk_client import SendRate
from shardnet.cluster.sharing.sharing import Sharing
from shardnet.cluster.store.disk_jobs import DiskJobs
from shardnet.errors import LinkError
from shardnet.runtime.stage.executor import Executor
from shardnet.stage.prefixes.prefix_store import PrefixStore
from shardnet.transport import tcp
from shardnet.transport.address import host_of, split_address
from shardnet.transport.admission import KnownHosts
from shardnet.transport.identity import Identity
from shardnet.transport.link import Link, LinkOptions
from shardnet.transport.traffic import Traffic
from shardnet.types import NodeId
from shardnet.wire.messages.handshake import MEASURED_RING, Capability, Hello, PeerRole, Purpose

if TYPE_CHECKING:
    from shardnet.cluster.node.node import Node

BULK_FRAMES = 8
"""Pieces of weights that may wait to be written, per link."""
BULK_WINDOW_BYTES = 128 * 1024
"""Bytes of weights on their way at a time, per link: activations wait behind no more, wherever
both leave by one interface. Enough for 1 Gbit/s over 1 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialer:
    """Opens links for one node. `progress` returns what its heartbeats carry: (epoch, last step).
    `traffic` counts what goes over them.

    Hosts that answer join `known`: their own links to this node come up when strangers flood it.
    Every method that opens a link raises UsageError if the address is not `host:port`, and what
    tcp.connect raises.
    """

    node: NodeId
    name: str
    identity: Identity | None
    progress: Callable[[], tuple[int, int]]
    known: KnownHosts = field(default_factory=KnownHosts)
    traffic: Traffic | None = None

    @property
    def options(self) -> LinkOptions:
        """Options of every link of this node."""
        return LinkOptions(
            identity=self.identity,
            progress=self.progress,
            traffic=self.traffic,
        )

    def hello(self, purpose: Purpose) -> Hello:
        """Return the hello of this node for a link of `purpose`."""
        return Hello(
            purpose=purpose,
            role=PeerRole.NODE,
            node=self.node,
            name=self.name,
            version=__version__,
            capabilities=[*Capability],
        )

    async def control(self, address: str) -> Link:
        """Open a control link to another node."""
        return await self._connect(address, self.hello(Purpose.CONTROL), self.options)

    async def dial_as_client(self, address: str) -> Link:
        """Open a control link as a client, to see who answers."""
        hello = replace(self.hello(Purpose.CONTROL), role=PeerRole.CLIENT)
        return await self._connect(address, hello, self.options)

    async def probe(self, address: str) -> Link:
        """Open a control link as a client, with a short limit on the handshake."""
        hello = replace(self.hello(Purpose.CONTROL), role=PeerRole.CLIENT)
        return await self._connect(address, hello, with_options(self.options, handshake_s=PROBE_S))

    async def bulk(self, address: str) -> Link:
        """Open a link for weights."""
        options = with_options(
            self.options, receive_frames=BULK_FRAMES, socket_buffer_bytes=BULK_WINDOW_BYTES
        )
        return await self._connect(address, self.hello(Purpose.BULK), options)

    async def gathers(self, address: str) -> Link:
        """Open a link of parts that belongs to no ring, to measure gathers."""
        options = with_options(self.options, handshake_s=PROBE_S)
        hello = replace(self.hello(Purpose.PARTS), ring=MEASURED_RING)
        return await self._connect(address, hello, options)

    async def data(self, address: str, own: DataEnd) -> Link:
        """Open a link from this node, whose end is `own`, to another one of a ring."""
        hello = replace(
            self.hello(own.purpose),
            ring=own.ring,
            epoch=own.epoch,
            rank=own.rank,
            shard=UNSET if own.shard is None else own.shard,
        )
        return await self._connect(address, hello, self.options)

    async def _connect(self, address: str, hello: Hello, options: LinkOptions) -> Link:
        host, port = split_address(address)
        link = await tcp.connect(host, port, hello, options=options)
        self.known.add(host_of(link.peer_address))
        return link


class LinkParts:
    """What opens, keeps and counts links to other nodes: it needs nothing else of the node."""

    def __init__(self, settings: NodeSettings, node: Node, tasks: asyncio.TaskGroup) -> None:
        self.settings = settings
        self.disk = DiskJobs("shardnet-disk", niceness=10)
        """Reads and writes files."""
        self.traffic = Traffic(settings.node)
        self.dialer = Dialer(
            node=settings.node,
            name=settings.name,
            identity=settings.identity,
            progress=lambda: node.stage.host.progress,
            traffic=self.traffic,
        )
        self.advertisement = Advertisement(
            node=settings.node, name=settings.name, on_changed=node.addresses_changed
        )
        self.refusals = RejectedHandshakes()
        self.peers = Peers(
            node=settings.node,
            name=settings.name,
            dial=self.dialer.control,
            dial_as_client=self.dialer.dial_as_client,
            handler=lambda control, message: node.handle(control, message),
            tasks=tasks,
            own_hosts=lambda: self.advertisement.local,
            own_addresses=lambda: self.advertisement.addresses,
            log=settings.log,
            sleepers=Sleepers(
                path=settings.cache / "sleepers.json" if settings.remembers else None,
                cluster=settings.cluster or "",
                own=lambda: self.advertisement.local,
                wait_s=settings.sleeps.wait_s,
                on_disk=self.disk.submit,
                log=settings.log,
            ),
            on_member=self.refusals.forget,
            on_named=lambda address: node.search.remember(address),
            is_present=lambda link: settings.identity is None or settings.identity.is_present(link),
            rests=lambda: node.stage.host.refusals.rests,
        )

    async def dial_bulk(self, address: str) -> Link:
        """Open a link for weights, by whichever address of the node answers."""
        return await self.peers.dial_by(address, self.dialer.bulk)

    async def dial_data(self, address: str, own: DataEnd) -> Link:
        """Open a data link of a ring, by whichever address of the node answers."""

        async def dial(at: str) -> Link:
            return await self.dialer.data(at, own)

        return await self.peers.dial_by(address, dial)

    async def dial_gathers(self, node: NodeId) -> Link:
        """Open a link to measure gathers with a node. Raises LinkError if it has no address."""
        address = self.peers.address_of(node)
        if not address:
            raise LinkError("no address of that node is known")
        return await self.dialer.gathers(address)


class StageParts:
    """What loads this node's stage, and what measures the node, over its `links`."""

    def __init__(self, settings: NodeSettings, links: LinkParts) -> None:
        peers = links.peers
        self.reader = Executor("shardnet-read", niceness=10)
        """The thread that tokenises."""
        self.disk = links.disk
        prefixes = None
        if settings.prefix_cache_bytes:
            prefixes = PrefixStore(settings.cache / PREFIXES_FOLDER, settings.prefix_cache_bytes)
        self.host = StageHost(
            dial=links.dial_data,
            node=settings.node,
            packs=settings.cache / PACKS_FOLDER,
            prefixes=prefixes,
            plugin=settings.budget.device.plugin,
            may_spin=lambda: settings.spins and not runs_on_battery(),
            devices=stage_devices(settings.budget.devices),
            compute=settings.compute,
        )
        self.sharing = Sharing(
            node=settings.node,
            name=settings.name,
            cache=settings.models,
            peers=peers,
            dial=links.dial_bulk,
            rate=SendRate(settings.share_rate),
            disk=self.disk,
            log=settings.log,
            kv=HostedKv(self.host).held,
        )
        self.orders = StageOrders(
            host=self.host,
            sharing=self.sharing,
            budget=settings.budget,
            asked_threads=settings.threads,
            local_nodes=settings.local_nodes,
            watch=peers.links.watch,
            latest=peers.links.latest,
            log=settings.log,
        )
        self.kv = KvOrders(self.host, links.dial_bulk)
        self.answers = StageAnswers(self.host, self.kv, settings.budget.system_bytes)
        self.power = PowerWatch(
            work=self._work,
            cards=[
                each.index or 0 for each in settings.budget.devices if each.kind in (CUDA, NVIDIA)
            ],
            command=settings.power_command,
            kept=settings.cache / f"power-{machine_name()}.json",
            log=settings.log,
        )
        self.own = OwnState(
            settings=settings,
            advertisement=links.advertisement,
            host=self.host,
            orders=self.orders,
            power=self.power,
        )
        self.directory = NodeDirectory(
            own_info=self.own.info, peers=peers, advertisement=links.advertisement
        )
        self._build_measuring(settings, links)

    def _work(self) -> tuple[bool, int] | None:
        """Tell whether sequences are open here, and the last step; None in a stage of several."""
        membership = self.host.membership
        if membership is not None and membership.span is not None:
            return None
        return self.host.is_busy, self.host.progress[1]

    def _build_measuring(self, settings: NodeSettings, links: LinkParts) -> None:
        """Build what measures this node and its links."""
        self.gathers = GatherBenchmark(compute=self.host, dial=links.dial_gathers)
        self.links = LinkBenchmark(
            link_of=links.peers.links.link_of,
            wait_for_compute=self.host.wait_for_compute,
            measure_gathers=self.gathers.measure,
        )
        cache = FigureCache(settings.cache, settings.log)
        self.measuring = MeasurementService(
            node=settings.node,
            own=NodeBenchmark(host=self.host, orders=self.orders, disk=self.disk, cache=cache),
            links=self.links,
            control_to=self.sharing.control,
            sleepers=links.peers.sleepers,
        )
