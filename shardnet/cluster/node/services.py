"""What serves clients and peers, and leads rings: the parts of a node that are built last.

Knows which part needs which, and fills the table of message handlers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from functools import partial
from typing import Final

from msgspec.structs import replace

from shardnet.cluster.deputy.copying import Copying, KeptValues
from shardnet.cluster.head.clients import Clients
from shardnet.cluster.head.drafters import Drafters
from shardnet.cluster.head.drafts import Drafts
from shardnet.cluster.head.encoders import Encoders
from shardnet.cluster.head.head import Head
from shardnet.cluster.head.lent_drafters import DrafterLoader, LentDrafters
from shardnet.cluster.head.model_lists import ModelLists
from shardnet.cluster.head.pictures import Pictures
from shardnet.cluster.head.requests import Constraints
from shardnet.cluster.head.ring_builder import RingBuilder
from shardnet.cluster.household.household import Household
from shardnet.cluster.household.runners import Runner, Runners
from shardnet.cluster.machine.device_list import CUDA, NVIDIA
from shardnet.cluster.machine.temperature import OwnerUse, gpu_use, memory_stalled
from shardnet.cluster.member.stage_host import StageHost
from shardnet.cluster.node.dispatcher import Dispatcher, NodeMessages
from shardnet.cluster.node.key_rotation import KeyRotation
from shardnet.cluster.node.parts import LinkParts, StageParts
from shardnet.cluster.node.pressure import NodeDrain, NodePressure, UnusedModels
from shardnet.cluster.node.reporter import NodeReporter, RingWatch
from shardnet.cluster.node.settings import NodeSettings
from shardnet.cluster.node.sleep import NodeSleep
from shardnet.cluster.node.updates import NodeUpdates
from shardnet.cluster.peers.control_link import ControlLink, Incoming, MessageHandlers
from shardnet.cluster.planning.planning import Planner
from shardnet.cluster.planning.wire_loss import WireLoss
from shardnet.cluster.pressure.policy import MemoryLook, OwnerLook
from shardnet.cluster.recovery.audits import Audits
from shardnet.cluster.recovery.recovery import Recovery
from shardnet.cluster.recovery.ring_replacement import NodeWatch, PlannedChanges
from shardnet.cluster.recovery.stand_in import StandIn
from shardnet.cluster.recovery.standbys import Standbys
from shardnet.cluster.ring.stage_port import LocalPort
from shardnet.cluster.router.router import Router
from shardnet.errors import ConfigurationError, LinkError, ShardnetError
from shardnet.runtime.loading.model_facts import processor_at
from shardnet.transport.link import Link
from shardnet.transport.memory import memory_pair
from shardnet.types import NodeId
from shardnet.wire.messages.handshake import PeerRole, Purpose
from shardnet.wire.messages.membership import NodeInfo
from shardnet.wire.messages.plans import ModelChoice

ROOM_S: Final = 20.0
"""How long whoever leads a household may take to give the runners of a broken ring more memory."""


class Services:
    """What plans, leads rings and answers; its parts are built in the order of the methods."""

    def __init__(
        self, settings: NodeSettings, links: LinkParts, stage: StageParts, tasks: asyncio.TaskGroup
    ) -> None:
        self.settings, self.links, self.stage = settings, links, stage
        self._tasks, self._log = tasks, settings.log
        self._link_of = links.peers.links.link_of
        self.handlers = MessageHandlers()
        """What handles each control message."""
        self.dispatcher = Dispatcher(
            own_hello=links.dialer.hello,
            handle=self.handle,
            host=stage.host,
            gathers=stage.gathers,
            sharing=stage.sharing,
            peers=links.peers,
            tasks=tasks,
            log=settings.log,
        )
        self.keys = KeyRotation(
            node=settings.node,
            identity=settings.identity,
            peers=links.peers,
            clients=lambda: self.dispatcher.clients,
            disk=stage.disk,
            on_changed=self.cluster_renamed,
            log=settings.log,
        )
        self._build_head()
        self._build_answers()
        self._build_household()
        self._build_router()
        self._build_yielding()
        self._register()

    def open_runner(
        self, model: str, choice: ModelChoice
    ) -> contextlib.AbstractAsyncContextManager[Runner]:
        """Run a runner of this node for a model of the household."""
        raise NotImplementedError

    async def handle(self, control: ControlLink, message: Incoming) -> None:
        """Handle one message, unless its sender is no member any more."""
        self.keys.check(control.link)
        await self.handlers.handle(control, message)

    def cluster_renamed(self) -> None:
        """Advertise the node by the names that its cluster has now."""
        discovery = self.settings.discovery
        if discovery is not None:
            discovery.clusters = self.settings.clusters
            discovery.fingerprint = self.settings.cluster or ""
            discovery.announce()

    def _build_head(self) -> None:
        """Build what plans, leads rings and replaces them."""
        settings, stage, peers = self.settings, self.stage, self.links.peers
        self.planner = Planner(
            node=settings.node,
            directory=stage.directory,
            sleepers=peers.sleepers,
            sharing=stage.sharing,
            measuring=stage.measuring,
            threads=stage.disk,
            log=self._log,
        )
        own_port = LocalPort(
            host=stage.host,
            stages=stage.orders,
            answers=stage.answers,
            node=settings.node,
            name=settings.name,
            on_broken=lambda ring, error, silent: self.head.ring_broken(ring, error, silent),
        )
        builder = RingBuilder(
            own_port=own_port, sharing=stage.sharing, peers=peers, disk=stage.disk
        )
        self.head = Head(
            node=settings.node,
            host=stage.host,
            planner=self.planner,
            builder=builder,
            on_broken=lambda lead: self.recovery.begin(lead),
            log=self._log,
        )
        self.standbys = Standbys(head=self.head, log=self._log)
        self.recovery = Recovery(
            head=self.head,
            planner=self.planner,
            standbys=self.standbys,
            tasks=self._tasks,
            log=self._log,
            room_s=ROOM_S if self.settings.serves is not None else 0.0,
        )
        self.planned = PlannedChanges(
            head=self.head,
            planner=self.planner,
            left_out=self.recovery.left_out,
            await_node=self.recovery.await_node,
            log=self._log,
        )
        self.nodes = NodeWatch(
            head=self.head,
            recovery=self.recovery,
            replace=self.planned.put,
            planner=self.planner,
            linked=peers.ready,
            log=self._log,
        )
        self.audits = Audits(
            head=self.head,
            share=settings.audit_share,
            distrust=stage.host.distrust,
            log=self._log,
        )

    def _build_answers(self) -> None:
        """Build what answers clients."""
        settings, stage, peers = self.settings, self.stage, self.links.peers
        self.copying = Copying(link_of=self._link_of, log=self._log)
        loader = DrafterLoader(disk=stage.disk, planner=self.planner, orders=stage.orders)
        self.lent = LentDrafters(loader=loader, log=self._log)
        self.drafts = Drafts(
            drafters=Drafters(
                own_info=stage.own.info,
                loader=loader,
                peers=peers,
                directory=stage.directory,
                plan=lambda: lead.plan if (lead := self.head.led.lead) is not None else None,
                log=self._log,
            )
        )
        self.head.on_unloaded = self.drafts.close
        self.constraints = Constraints()
        self.pictures = Pictures(disk=stage.disk, find=processor_at)
        self.wire_loss = WireLoss(cache=settings.cache, threads=stage.own.threads, log=self._log)
        self.lists = ModelLists(
            own_info=stage.own.info,
            sharing=stage.sharing,
            cache=settings.models,
            peers=peers,
            directory=stage.directory,
            disk=stage.disk,
        )
        self.encoders = Encoders(
            own_info=stage.own.info,
            ring_model=lambda: self.head.model,
            lists=self.lists,
            planner=self.planner,
            orders=stage.orders,
            disk=stage.disk,
            address_of=peers.address_of,
            log=self._log,
        )
        self.clients = Clients(
            self.head,
            self.planner,
            stage.reader,
            stage.disk,
            self.drafts,
            self.constraints,
            self.wire_loss,
            self.lists,
            self.encoders,
            self.pictures,
            self.copying,
            settings.cache,
            self._log,
        )

    def _build_household(self) -> None:
        """Build what has several models loaded side by side. A runner has no runners itself."""
        stage, peers = self.stage, self.links.peers

        async def reach(node: NodeId) -> ControlLink:
            if node != self.settings.node and peers.links.link_of(node) is None:
                raise LinkError("that node is not linked")
            return await self.router.reach(node, peers.address_of(node))

        async def is_encoder(model: str) -> bool:
            with contextlib.suppress(ShardnetError):
                return await self.encoders.find(await self.lists.resolve(model)) is not None
            return False

        async def nodes() -> list[NodeInfo]:
            own = replace(stage.own.info(), address="")
            return [own, *await stage.directory.listed()]

        self.runners = Runners(
            open_node=self.open_runner,
            tasks=self._tasks,
            free_bytes=lambda: stage.own.info().memory_free_bytes,
            is_limited=self.settings.budget.asked_bytes is not None,
            log=self._log,
        )
        stage.orders.promised_bytes = lambda: self.runners.promised_bytes
        self.household = Household(
            node=self.settings.node,
            nodes=nodes,
            reach=reach,
            dial=self.links.dialer.dial_as_client,
            node_address=peers.address_of,
            links=peers.links,
            is_encoder=is_encoder,
            named=self.runners.close,
            tasks=self._tasks,
            log=self._log,
        )
        self.lists.household, self.lists.encoder = self.household.names, self.household.encoder
        self.encoders.ask_for_room = self.household.make_room

    def _build_router(self) -> None:
        """Build what gives requests to one of several rings, and what goes on for a lost head."""
        peers = self.links.peers
        self.router = Router(
            head=self.head,
            planner=self.planner,
            clients=self.clients,
            encoders=self.encoders,
            copying=self.copying,
            household=self.household,
            serves=self.settings.serves,
            own_link=partial(own_client, self.links, self.dispatcher),
            link_to=peers.link_to,
            address_of=peers.address_of,
            tasks=self._tasks,
            log=self._log,
        )
        self.stand_in = StandIn(
            node=self.settings.node,
            head=self.head,
            planner=self.planner,
            router=self.router,
            copying=self.copying,
            links=peers.links,
            address_of=peers.address_of,
            tasks=self._tasks,
            log=self._log,
        )

    def _build_yielding(self) -> None:
        """Build what gives layers, memory and processors back."""
        settings, host = self.settings, self.stage.host
        self.drain = NodeDrain(
            head=self.head,
            host=host,
            n_routed=lambda: self.router.n_requests,
            link_of=self._link_of,
            hand_over=self.stand_in.hand_over,
            has_deputy=lambda: self.stand_in.deputy is not None,
            drain_runners=self.runners.leave,
            log=self._log,
        )
        self.updates = NodeUpdates(
            keeper=settings.keeper,
            identity=settings.identity,
            drain=self.drain,
            deputy=lambda: self.stand_in.deputy,
            cut_off="answers of its own HTTP server (--http) end with it" * settings.serves_http,
            log=self._log,
        )
        self.stage.sharing.server.take_wheel = self.updates.receive
        self.unused = UnusedModels(
            router=self.router,
            host=host,
            link_of=self._link_of,
            idle_s=settings.idle_unload_s,
            log=self._log,
        )
        has_cpu = any(device.kind == "cpu" for device in settings.budget.devices)
        self.pressure = NodePressure(
            head=self.head,
            host=host,
            drain=self.drain,
            unused=self.unused,
            drafts=self.drafts,
            lent=self.lent,
            encoders=self.encoders,
            disk=self.stage.disk,
            link_of=self._link_of,
            memory=_memory_look(settings) if has_cpu else None,
            owner=_owner_look(settings, self.head, host) if settings.yields else None,
            on_changed=self.links.peers.rest_changed,
            log=self._log,
        )
        self.sleep = NodeSleep(self)

    def _register(self) -> None:
        """Fill the table of message handlers."""
        stage, peers = self.stage, self.links.peers
        watch = RingWatch(
            self.head, self.recovery.records, lambda: self.router.rings, self.clients.drafted
        )
        own = (NodeMessages(stage=stage, peers=peers, head=self.head), NodeReporter(self), watch)
        orders = (stage.orders, stage.answers)
        ring = (self.head, self.planned, self.drain, self.updates, self.sleep, self.stand_in)
        kept = KeptValues(peers.links.linked)
        answers = (self.clients, self.router, self.lists, self.encoders, self.lent, kept)
        for room in (*own, *orders, stage.measuring, *ring, self.keys, *answers):
            room.register(self.handlers)
        if self.settings.serves is None:
            self.household.register(self.handlers)
            self.runners.register(self.handlers)


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

    gpus = [each for each in settings.budget.devices if each.kind in (CUDA, NVIDIA)]

    def gpu() -> float | None:
        """Return the most that others use one of its cards, where nothing is computed here."""
        if head.is_in_use or host.is_busy:
            return None
        ours = own_processes()
        shares = [gpu_use(ours, each.index or 0) for each in gpus]
        return max((share for share in shares if share is not None), default=None)

    return OwnerUse(own_processes, gpu).look
