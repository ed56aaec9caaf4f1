"""The parts of a node, built in three functions from leaves up: links, stage, services.

Knows which part needs which. Each function takes what the one before it has built; what a part
reports to one that is built later goes through NodeEvents.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from shardnet.cluster.deputy.copying import Copying
from shardnet.cluster.head.clients import Clients
from shardnet.cluster.head.constraints import Constraints
from shardnet.cluster.head.drafts import Drafts
from shardnet.cluster.head.encoders import Encoders
from shardnet.cluster.head.head import Head
from shardnet.cluster.head.model_lists import ModelLists
from shardnet.cluster.head.ring_builder import RingBuilder
from shardnet.cluster.machine.folders import PACKS_FOLDER, PREFIXES_FOLDER
from shardnet.cluster.machine.owner_use import OwnerUse
from shardnet.cluster.machine.power import runs_on_battery
from shardnet.cluster.machine.stalls import memory_stalled
from shardnet.cluster.machine.temperature import Thermometer, gpu_use
from shardnet.cluster.measuring.figure_cache import FigureCache
from shardnet.cluster.measuring.link_benchmark import LinkBenchmark
from shardnet.cluster.measuring.measurement_service import MeasurementService
from shardnet.cluster.measuring.node_benchmark import NodeBenchmark
from shardnet.cluster.member.audit_orders import AuditOrders
from shardnet.cluster.member.dialer import Dialer
from shardnet.cluster.member.kv_orders import HostedKv, KvOrders
from shardnet.cluster.member.prefix_orders import PrefixOrders
from shardnet.cluster.member.stage_host import StageHost
from shardnet.cluster.member.stage_orders import StageOrders, stage_devices
from shardnet.cluster.member.stage_span import DataEnd
from shardnet.cluster.node.dispatcher import Dispatcher
from shardnet.cluster.node.drain import NodeDrain
from shardnet.cluster.node.events import NodeEvents
from shardnet.cluster.node.messages import NodeMessages
from shardnet.cluster.node.own_state import OwnState
from shardnet.cluster.node.pressure import NodePressure
from shardnet.cluster.node.reporter import NodeReporter
from shardnet.cluster.node.ring_activity import RingWatch
from shardnet.cluster.node.settings import NodeSettings
from shardnet.cluster.node.unused_models import UnusedModels
from shardnet.cluster.peers.advertisement import Advertisement
from shardnet.cluster.peers.message_handlers import MessageHandlers
from shardnet.cluster.peers.node_directory import NodeDirectory
from shardnet.cluster.peers.peers import Peers
from shardnet.cluster.peers.rejected_handshakes import RejectedHandshakes
from shardnet.cluster.planning.planning import Planner
from shardnet.cluster.planning.wire_loss import WireLoss
from shardnet.cluster.pressure.memory_strain import MemoryLook
from shardnet.cluster.pressure.owner_watch import OwnerLook
from shardnet.cluster.recovery.audits import Audits
from shardnet.cluster.recovery.node_watch import NodeWatch
from shardnet.cluster.recovery.planned import PlannedChanges
from shardnet.cluster.recovery.recovery import Recovery
from shardnet.cluster.recovery.stand_in import StandIn
from shardnet.cluster.recovery.standbys import Standbys
from shardnet.cluster.router.router import Router
from shardnet.cluster.sharing.send_rate import SendRate
from shardnet.cluster.sharing.sharing import Sharing
from shardnet.cluster.store.disk_jobs import DiskJobs
from shardnet.errors import ConfigurationError
from shardnet.runtime.stage.executor import Executor
from shardnet.stage.prefixes.prefix_store import PrefixStore
from shardnet.transport.link import Link
from shardnet.transport.memory import memory_pair
from shardnet.transport.traffic import Traffic
from shardnet.wire.messages.handshake import PeerRole, Purpose


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkParts:
    """What opens, keeps and counts links to other nodes."""

    dialer: Dialer
    advertisement: Advertisement
    peers: Peers
    refusals: RejectedHandshakes
    traffic: Traffic

    async def dial_bulk(self, address: str) -> Link:
        """Open a link for weights, by whichever address of the node answers."""
        return await self.peers.dial_by(address, self.dialer.bulk)

    async def dial_data(self, address: str, own: DataEnd) -> Link:
        """Open a data link of a ring, by whichever address of the node answers."""

        async def dial(at: str) -> Link:
            return await self.dialer.data(at, own)

        return await self.peers.dial_by(address, dial)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageParts:
    """What holds and measures this node's stage.

    `reader` is the thread that tokenises, `disk` reads and writes files.
    """

    reader: Executor
    disk: DiskJobs
    host: StageHost
    sharing: Sharing
    orders: StageOrders
    kv: KvOrders
    own: OwnState
    directory: NodeDirectory
    links: LinkBenchmark
    measuring: MeasurementService


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceParts:
    """What serves clients and peers."""

    head: Head
    recovery: Recovery
    router: Router
    standbys: Standbys
    audits: Audits
    planned: PlannedChanges
    stand_in: StandIn
    drain: NodeDrain
    nodes: NodeWatch
    drafts: Drafts
    encoders: Encoders
    constraints: Constraints
    wire_loss: WireLoss
    handlers: MessageHandlers
    dispatcher: Dispatcher
    unused: UnusedModels
    pressure: NodePressure


def build_links(settings: NodeSettings, events: NodeEvents, tasks: asyncio.TaskGroup) -> LinkParts:
    """Build what needs nothing else of the node, and the peers on top of it."""
    traffic = Traffic(settings.node)
    dialer = Dialer(
        node=settings.node,
        name=settings.name,
        identity=settings.identity,
        progress=events.heartbeat_progress,
        traffic=traffic,
    )
    advertisement = Advertisement(
        node=settings.node, name=settings.name, on_changed=events.addresses_changed
    )
    refusals = RejectedHandshakes()
    peers = Peers(
        node=settings.node,
        name=settings.name,
        dial=dialer.control,
        dial_as_client=dialer.dial_as_client,
        handler=events.message_received,
        tasks=tasks,
        own_hosts=lambda: advertisement.local,
        own_addresses=lambda: advertisement.addresses,
        log=settings.log,
        on_member=refusals.forget,
        rests=events.rests,
    )
    return LinkParts(
        dialer=dialer,
        advertisement=advertisement,
        peers=peers,
        refusals=refusals,
        traffic=traffic,
    )


def build_stage(settings: NodeSettings, links: LinkParts) -> StageParts:
    """Build what loads a stage, and what measures this node, over its links."""
    peers = links.peers
    disk = DiskJobs("shardnet-disk", niceness=10)
    prefixes = None
    if settings.prefix_cache_bytes:
        prefixes = PrefixStore(settings.cache / PREFIXES_FOLDER, settings.prefix_cache_bytes)
    host = StageHost(
        dial=links.dial_data,
        node=settings.node,
        packs=settings.cache / PACKS_FOLDER,
        prefixes=prefixes,
        plugin=settings.budget.device.plugin,
        may_spin=lambda: settings.spins and not runs_on_battery(),
        devices=stage_devices(settings.budget.devices),
    )
    sharing = Sharing(
        node=settings.node,
        name=settings.name,
        cache=settings.models,
        peers=peers,
        dial=links.dial_bulk,
        rate=SendRate(settings.share_rate),
        disk=disk,
        log=settings.log,
        kv=HostedKv(host),
    )
    orders = StageOrders(
        host=host,
        sharing=sharing,
        budget=settings.budget,
        asked_threads=settings.threads,
        local_nodes=settings.local_nodes,
        watch=peers.links.watch,
        latest=peers.links.latest,
        log=settings.log,
    )
    own = OwnState(settings=settings, advertisement=links.advertisement, host=host, orders=orders)
    cache = FigureCache(settings.cache, settings.log)
    link_benchmark = LinkBenchmark(
        link_of=peers.links.link_of, wait_for_compute=host.wait_for_compute
    )
    measuring = MeasurementService(
        node=settings.node,
        own=NodeBenchmark(host=host, orders=orders, disk=disk, cache=cache),
        links=link_benchmark,
        control_to=sharing.control,
    )
    return StageParts(
        reader=Executor("shardnet-read", niceness=10),
        disk=disk,
        host=host,
        sharing=sharing,
        orders=orders,
        kv=KvOrders(host, links.dial_bulk),
        own=own,
        directory=NodeDirectory(own_info=own.info, peers=peers, advertisement=links.advertisement),
        links=link_benchmark,
        measuring=measuring,
    )


def build_services(
    settings: NodeSettings,
    events: NodeEvents,
    links: LinkParts,
    stage: StageParts,
    tasks: asyncio.TaskGroup,
) -> ServiceParts:
    """Build what plans, leads rings and answers, and fill the table of message handlers."""
    planner = Planner(
        node=settings.node,
        directory=stage.directory,
        sharing=stage.sharing,
        measuring=stage.measuring,
        threads=stage.disk,
        log=settings.log,
    )
    builder = RingBuilder(
        node=settings.node,
        name=settings.name,
        host=stage.host,
        orders=stage.orders,
        kv=stage.kv,
        sharing=stage.sharing,
        peers=links.peers,
        disk=stage.disk,
        on_broken=events.ring_broken,
    )
    head = Head(
        node=settings.node,
        host=stage.host,
        planner=planner,
        builder=builder,
        on_broken=events.lead_broken,
        log=settings.log,
    )
    standbys = Standbys(head=head, log=settings.log)
    recovery = Recovery(
        head=head, planner=planner, standbys=standbys, tasks=tasks, log=settings.log
    )
    audits = Audits(
        head=head, share=settings.audit_share, distrust=stage.host.distrust, log=settings.log
    )
    copying = Copying(link_of=links.peers.links.link_of, log=settings.log)
    planned = PlannedChanges(
        head=head, planner=planner, left_out=recovery.left_out, log=settings.log
    )
    link_of = links.peers.links.link_of
    drafts = Drafts(
        disk=stage.disk,
        device=settings.budget.device.for_torch,
        spare_bytes=stage.own.memory_free_bytes,
        threads=stage.own.threads,
    )
    constraints = Constraints()
    wire_loss = WireLoss(cache=settings.cache, threads=stage.own.threads, log=settings.log)
    lists = ModelLists(
        own_info=stage.own.info,
        sharing=stage.sharing,
        cache=settings.models,
        peers=links.peers,
        directory=stage.directory,
        disk=stage.disk,
    )
    encoders = Encoders(
        own_info=stage.own.info,
        ring_model=lambda: head.model,
        lists=lists,
        planner=planner,
        orders=stage.orders,
        disk=stage.disk,
        address_of=links.peers.address_of,
        log=settings.log,
    )
    clients = Clients(
        head,
        planner,
        stage.reader,
        stage.disk,
        drafts,
        constraints,
        wire_loss,
        lists,
        encoders,
        copying,
        settings.cache,
        settings.log,
    )
    router = Router(
        head=head,
        planner=planner,
        clients=clients,
        encoders=encoders,
        copying=copying,
        own_link=lambda: own_client(links, dispatcher),
        link_to=links.peers.link_to,
        address_of=links.peers.address_of,
        tasks=tasks,
        log=settings.log,
    )
    stand_in = StandIn(
        node=settings.node,
        head=head,
        planner=planner,
        router=router,
        copying=copying,
        links=links.peers.links,
        address_of=links.peers.address_of,
        tasks=tasks,
        log=settings.log,
    )
    drain = NodeDrain(
        head=head,
        host=stage.host,
        n_routed=lambda: router.n_requests,
        link_of=link_of,
        hand_over=stand_in.hand_over,
        log=settings.log,
    )
    reporter = NodeReporter(
        own_info=stage.own.info,
        stage_state=stage.host.state,
        n_requests=lambda: head.n_requests,
        ring_work=lambda: head.work,
        rings=lambda: router.rings,
        traffic=links.traffic,
        cluster=settings.cluster,
        advertisement=links.advertisement,
        peers=links.peers,
        discovery=settings.discovery,
        refusals=links.refusals,
        dial_as_client=links.dialer.probe,
        checkpoints=stage.disk,
        disk=settings.cache,
        bandwidth=stage.links.quick_rate,
        resolve=lists.resolve,
        temperature=Thermometer(settings.budget.device.kind).read,
        pressure=lambda: pressure.state(),
        deputies=lambda: (stand_in.deputy, stand_in.deputy_of),
        audit=lambda: audits.state,
    )
    unused = UnusedModels(
        router=router,
        host=stage.host,
        link_of=link_of,
        idle_s=settings.idle_unload_s,
        log=settings.log,
    )
    pressure = NodePressure(
        head=head,
        host=stage.host,
        drain=drain,
        unused=unused,
        drafts=drafts,
        encoders=encoders,
        link_of=link_of,
        memory=_memory_look(settings)
        if any(device.kind == "cpu" for device in settings.budget.devices)
        else None,
        owner=_owner_look(settings, head, stage.host) if settings.yields else None,
        on_changed=links.peers.rest_changed,
        log=settings.log,
    )
    messages = NodeMessages(
        own=stage.own,
        host=stage.host,
        orders=stage.orders,
        sharing=stage.sharing,
        peers=links.peers,
        directory=stage.directory,
        head=head,
    )
    handlers = MessageHandlers()
    orders = (stage.orders, PrefixOrders(stage.host), AuditOrders(stage.host))
    rooms = (messages, *orders, stage.kv, stage.measuring)
    watch = RingWatch(head, recovery.records, lambda: router.rings)
    for room in (
        *rooms,
        head,
        planned,
        drain,
        stand_in,
        clients,
        router,
        lists,
        encoders,
        reporter,
        watch,
    ):
        room.register(handlers)
    dispatcher = Dispatcher(
        own_hello=links.dialer.hello,
        handle=handlers.handle,
        host=stage.host,
        sharing=stage.sharing,
        peers=links.peers,
        tasks=tasks,
        log=settings.log,
    )
    return ServiceParts(
        head=head,
        recovery=recovery,
        router=router,
        standbys=standbys,
        audits=audits,
        planned=planned,
        stand_in=stand_in,
        drain=drain,
        nodes=NodeWatch(
            head=head,
            recovery=recovery,
            replace=planned.put,
            planner=planner,
            linked=links.peers.ready,
            log=settings.log,
        ),
        drafts=drafts,
        encoders=encoders,
        constraints=constraints,
        wire_loss=wire_loss,
        handlers=handlers,
        dispatcher=dispatcher,
        unused=unused,
        pressure=pressure,
    )


async def own_client(links: LinkParts, dispatcher: Dispatcher) -> Link:
    """Open a control link to this node from its own process."""
    ours = links.dialer.hello(Purpose.CONTROL)
    near, far = await memory_pair(
        replace(ours, role=PeerRole.CLIENT), ours, options=links.dialer.options
    )
    await dispatcher.accept(far)
    return near


def _memory_look(settings: NodeSettings) -> Callable[[], MemoryLook]:
    def look() -> MemoryLook:
        available_bytes, total_bytes = settings.budget.system_bytes()
        return MemoryLook(
            available_bytes=available_bytes, total_bytes=total_bytes, stalled=memory_stalled()
        )

    return look


def _owner_look(settings: NodeSettings, head: Head, host: StageHost) -> Callable[[], OwnerLook]:
    def own_processes() -> list[int]:
        with contextlib.suppress(ConfigurationError, OSError):  # the register cannot be read
            return list({os.getpid(), *(node.pid for node in settings.local_nodes.list())})
        return [os.getpid()]

    def gpu() -> float | None:
        """Return its use by others, where nothing is computed here."""
        return None if head.is_in_use or host.is_busy else gpu_use(own_processes())

    has_gpu = any(device.kind == "cuda" for device in settings.budget.devices)
    return OwnerUse(own_processes, gpu if has_gpu else lambda: None).look
