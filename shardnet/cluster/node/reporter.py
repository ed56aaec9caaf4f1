"""Report this node's state, its view of every peer, and the activity of its ring.

Reports to members of the cluster and to processes of this machine only.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from shardnet.cluster.head.head import Head
from shardnet.cluster.head.lead import Lead, Opening
from shardnet.cluster.machine.addresses import is_loopback
from shardnet.cluster.machine.temperature import Thermometer
from shardnet.cluster.peers.control_link import ControlLink, MessageHandlers
from shardnet.cluster.peers.peer_links import clock_ahead
from shardnet.cluster.peers.peer_table import KnownNode
from shardnet.cluster.peers.rtt_probe import judge, probe
from shardnet.cluster.recovery.recovery import RecoveryRecord
from shardnet.errors import AuthenticationError, ShardnetError, UsageError
from shardnet.runtime.loading.model_facts import config_text, identify_at
from shardnet.transport.address import host_of, split_address
from shardnet.transport.loop import together
from shardnet.transport.memory import MEMORY_HOSTS
from shardnet.types import SequenceId
from shardnet.wire.framing.frames import PROTOCOL_VERSION
from shardnet.wire.framing.schema import MAX_PEER_ADDRESSES
from shardnet.wire.messages import activity, diagnostics
from shardnet.wire.messages.control import Done
from shardnet.wire.messages.handshake import explained, explanation
from shardnet.wire.messages.membership import ReportReply, ReportRequest

if TYPE_CHECKING:
    from shardnet.cluster.node.services import Services

PEER_REPORT_S: Final = 4.0
"""How long a peer may take for its report, its probes included."""
PROBES_AT_ONCE: Final = 32
"""Addresses probed at once; more would use up the peer's slots for handshakes."""
IDENTIFY_S: Final = 3.0
"""How long identifying a checkpoint may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """What NodeReport says of the model that was asked about."""

    model_id: str = ""
    failure: str = ""
    config: str = ""


class NodeReporter:
    """Answers ReportRequest for one node."""

    def __init__(self, of: Services) -> None:
        self.of, settings = of, of.settings
        self.cluster = settings.cluster
        """The fingerprint of the key, None without one."""
        self._disk = settings.cache
        """A folder on the disk where weights are kept."""
        self._discovery = settings.discovery
        device = settings.budget.device
        self._temperature = Thermometer(device.kind, device.index or 0).read
        self._probe_slots = asyncio.Semaphore(PROBES_AT_ONCE)

    def register(self, handlers: MessageHandlers) -> None:
        """Register the message that asks for reports."""
        handlers.register(ReportRequest, self.answer)

    async def answer(self, control: ControlLink, message: ReportRequest) -> None:
        """Send this node's report and, if wanted, those of its peers as they come.

        Raises AuthenticationError if the asker is on another machine and no member.
        """
        received_at = time.time()
        self._check_member(control)
        if message.model and message.with_peers:
            with contextlib.suppress(ShardnetError, TimeoutError):  # each node says what it lacks
                async with asyncio.timeout(IDENTIFY_S):
                    message = replace(message, model=await self.of.lists.resolve(message.model))
        async with together() as tasks:
            if message.with_peers:
                for peer in self.of.links.peers.links.linked():
                    tasks.create_task(self._relay(control, message, peer))
            control.send(await self._own(message, received_at))
        control.send(Done(request=message.request))

    def _check_member(self, control: ControlLink) -> None:
        host = host_of(control.link.peer_address)
        if self.cluster is None and not (is_loopback(host) or host in MEMORY_HOSTS):
            raise AuthenticationError(
                "a node without a cluster key reports only to its own machine",
                remedy="run `shardnet key new` on one machine and `shardnet key join` on the "
                "others",
            )

    async def _relay(self, control: ControlLink, message: ReportRequest, peer: ControlLink) -> None:
        """Ask one peer for its report and pass it on, or the reason why there is none."""
        node, name = peer.link.peer.node, peer.link.peer.name
        try:
            reply = await self._ask(message, peer)
        except (ShardnetError, TimeoutError) as error:
            late = f"no report within {PEER_REPORT_S:g} s"
            why = explanation(error if isinstance(error, ShardnetError) else late)
            reply = ReportReply(request=message.request, node=node, name=name, failure=why)
        control.tell(reply)

    async def _ask(self, message: ReportRequest, peer: ControlLink) -> ReportReply:
        """Ask a peer for its own report, and compare its clock with ours."""
        hello = peer.link.peer
        request = ReportRequest(request=0, probe=message.probe, model=message.model)
        asked_at = time.time()
        async with asyncio.timeout(PEER_REPORT_S):
            reply = await peer.ask(request, ReportReply)
        answered_at = time.time()
        report, ahead_s = reply.report, None
        if report is not None:
            ahead_s = clock_ahead(asked_at, report.received_at, report.sent_at, answered_at)
        return ReportReply(
            request=message.request,
            node=hello.node,
            name=hello.name,
            info=reply.info,
            report=report,
            failure=reply.failure,
            clock_ahead_s=ahead_s,
        )

    async def _own(self, message: ReportRequest, received_at: float) -> ReportReply:
        info = self.of.stage.own.info()
        views, model = await asyncio.gather(
            self._views(message.probe), self._look_for(message.model)
        )
        now = time.monotonic()
        report = diagnostics.NodeReport(
            cluster=self.cluster or "",
            protocol=PROTOCOL_VERSION,
            uptime_s=info.uptime_s,
            received_at=received_at,
            interfaces=self._interfaces(),
            multicast=self._multicast(now),
            peers=views,
            unreached=[
                _unreached(address, error)
                for address, error in self.of.links.peers.unreached.items()
            ][: diagnostics.MAX_VIEWS],
            refused=self.of.links.refusals.report(now),
            disk_free_bytes=free_bytes(self._disk),
            n_requests=self.of.head.n_requests,
            stage=self.of.stage.host.state(),
            model_id=model.model_id,
            model_failure=model.failure,
            model_config=model.config,
            temperature_c=self._temperature(),
            ring=self.of.head.work,
            rings=self.of.router.rings,
            pressure=self.of.pressure.state(),
            deputy=self.of.stand_in.deputy,
            deputy_of=self.of.stand_in.deputy_of,
            audit=self.of.audits.state,
            links=self.of.links.traffic.counts(),
            power_failure=self.of.stage.power.failure,
            gpu_troubles=self.of.stage.power.troubles[: diagnostics.MAX_VIEWS],
            sent_at=time.time(),
        )
        return ReportReply(
            request=message.request, node=info.node, name=info.name, info=info, report=report
        )

    async def _look_for(self, model: str) -> _Model:
        """Identify the model at a path here, or say why there is none."""
        if not model:
            return _Model()
        try:
            async with asyncio.timeout(IDENTIFY_S):
                look = partial(identify_at, model, ignore_unknown_config=True)
                facts = await self.of.stage.disk.run(model, look)
                return _Model(model_id=facts.model_id, config=config_text(facts))
        except ShardnetError as error:
            return _Model(failure=explanation(error))
        except TimeoutError:
            return _Model(failure=f"its files were not read within {IDENTIFY_S:g} s")

    async def _views(self, with_probes: bool) -> list[diagnostics.PeerView]:
        nodes = sorted(self.of.links.peers.known(), key=lambda known: not known.is_linked)[
            : diagnostics.MAX_VIEWS
        ]
        return list(await asyncio.gather(*(self._view(known, with_probes) for known in nodes)))

    async def _view(self, known: KnownNode, with_probes: bool) -> diagnostics.PeerView:
        addresses = self.of.links.peers.order(known.addresses)[:MAX_PEER_ADDRESSES]
        bytes_per_s = None
        asked = with_probes and not (known.refusal or known.sleeps)
        if asked and (known.is_linked or known.reported_by):
            views = await probe(
                known.node, addresses, self.of.links.dialer.probe, self._probe_slots
            )
            if known.is_linked:
                bytes_per_s = await self.of.stage.links.quick_rate(known.node)
        else:
            views = [_remembered(known, address) for address in addresses]
        link, record = self.of.links.peers.links.link_of(known.node), None
        if self._discovery is not None:
            record = self._discovery.records.get(known.node)
        version = link.link.peer.version if link else record.version if record else ""
        return diagnostics.PeerView(
            node=known.node,
            name=known.name,
            version=version,
            is_linked=known.is_linked,
            address=known.address,
            rtt_s=known.rtt_s,
            bytes_per_s=bytes_per_s,
            told_by=list(known.reported_by)[: diagnostics.MAX_TELLERS],
            refusal=explanation(known.refusal),
            addresses=[] if known.sleeps else views,
            sleeps=self.of.links.peers.sleepers.words_of(known.node) if known.sleeps else "",
        )

    def _interfaces(self) -> list[diagnostics.InterfaceAddress]:
        told = {split_address(address)[0] for address in self.of.links.advertisement.addresses}
        return [
            diagnostics.InterfaceAddress(
                interface=address.interface,
                host=address.host,
                prefix=address.net.network.prefixlen,
                verdict=address.verdict.value,
                mtu=address.mtu,
                speed_mbit=address.speed_mbit,
                is_told=address.host in told,
            )
            for address in self.of.links.advertisement.local[: diagnostics.MAX_VIEWS]
        ]

    def _multicast(self, now: float) -> diagnostics.MulticastState:
        discovery = self._discovery
        if discovery is None:
            return diagnostics.MulticastState(state="off")
        heard = [
            diagnostics.MulticastHeard(
                node=h.node, interface=h.interface, age_s=max(0.0, now - h.at)
            )
            for h in discovery.listener.heard()
        ]
        return diagnostics.MulticastState(
            state="on" if discovery.hosts else "failed",
            failure=explanation(discovery.failure),
            hosts=list(discovery.hosts)[: diagnostics.MAX_VIEWS],
            listening=list(discovery.listener.interfaces)[: diagnostics.MAX_VIEWS],
            listening_s=now - discovery.listener.since,
            heard=heard[: 4 * diagnostics.MAX_VIEWS],
            others=sorted(discovery.listener.others)[: diagnostics.MAX_VIEWS],
            records=[
                diagnostics.MdnsRecord(
                    node=record.node,
                    name=record.name,
                    version=record.version,
                    protocol=record.protocol,
                    cluster=record.fingerprint,
                    address=record.addresses[0],
                )
                for record in list(discovery.records.values())[: diagnostics.MAX_VIEWS]
            ],
        )


def free_bytes(folder: Path) -> int | None:
    """Return the free space of the disk where `folder` is or would be made, None if unknown."""
    try:
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _unreached(address: str, error: ShardnetError) -> diagnostics.AddressView:
    why, remedy = explained(error, diagnostics.MAX_REASON)
    return diagnostics.AddressView(address=address, seen=judge(error), why=why, remedy=remedy)


def _remembered(known: KnownNode, address: str) -> diagnostics.AddressView:
    """Return the outcome of the last attempt at an address."""
    why = explanation(known.failures.get(address, ""), diagnostics.MAX_REASON)
    if address == known.address and not why:
        return diagnostics.AddressView(address=address, seen="answers", rtt_s=known.rtt_s)
    return diagnostics.AddressView(address=address, seen="failed" if why else "not tried", why=why)


@dataclass(eq=False, repr=False)
class RingWatch:
    """Answers requests about the ring that `head` leads, what was `drafted` on it, its `recoveries`
    so far, and the further `rings` behind this head.
    """

    head: Head
    recoveries: Sequence[RecoveryRecord]
    rings: Callable[[], list[diagnostics.RingBehind]]
    drafted: Callable[[Lead], list[diagnostics.Drafted]]

    def register(self, handlers: MessageHandlers) -> None:
        """Register the messages that ask for activity and cancel requests."""
        handlers.register(activity.GetActivity, self._activity)
        handlers.register(activity.CancelSequence, self._cancel)

    async def _activity(self, control: ControlLink, message: activity.GetActivity) -> None:
        """Reply with the ring's requests and last steps, or Redirect to its head."""
        self.head.check_leads()
        lead, opening = self.head.latest, _opening(self.head.opening)
        recoveries = [_recovery(one) for one in [*self.recoveries][-activity.MAX_RECOVERIES_SEEN :]]
        if lead is None:
            shown = activity.RingActivity(request=message.request, opening=opening)
        else:
            shown = replace(_activity(message, lead, opening), drafters=self.drafted(lead))
        control.send(replace(shown, recoveries=recoveries, rings=self.rings()))

    async def _cancel(self, control: ControlLink, message: activity.CancelSequence) -> None:
        """Cancel a request, or reply Redirect. Raises UsageError for one that has ended."""
        self.head.check_leads()
        lead = self.head.latest
        is_ring = lead is not None and lead.ring.name == message.ring
        if lead is None or not (is_ring and lead.ring.engine.cancel(SequenceId(message.sequence))):
            raise UsageError(f"there is no request {message.sequence}: it has ended")
        control.send(Done(request=message.request))


def _opening(opening: Opening | None) -> activity.RingOpening | None:
    """Return the progress of loading a ring, None while there is none to report."""
    if opening is None or not opening.progress:
        return None
    return activity.RingOpening(
        model=opening.model,
        age_s=max(0.0, time.monotonic() - opening.began_s),
        stages=[
            activity.StageProgress(rank=rank, phase=phase, done_bytes=done, total_bytes=total)
            for rank, (phase, done, total) in sorted(opening.progress.items())
        ],
    )


def _activity(
    message: activity.GetActivity, lead: Lead, opening: activity.RingOpening | None
) -> activity.RingActivity:
    ring, engine = lead.ring, lead.ring.engine
    is_known = message.known_ring == ring.name
    steps = engine.log.after(message.after_step if is_known else 0)
    return activity.RingActivity(
        request=message.request,
        ring=ring.name,
        is_broken=not lead.stands,
        is_recovering=lead.is_recovering,
        age_us=engine.age_us,
        load=engine.counters,
        plan=None if is_known else lead.plan.reply(0),
        opening=opening,
        requests=engine.requests[: activity.MAX_REQUESTS_SEEN],
        steps=steps[-activity.MAX_STEPS_SEEN :],
    )


def _recovery(record: RecoveryRecord) -> activity.RecoveryReport:
    fields = {name: getattr(record, name) for name in activity.RecoveryReport.__struct_fields__}
    seen = activity.RecoveryReport(**fields)
    return replace(seen, why=explanation(record.why), error=explanation(record.error))
