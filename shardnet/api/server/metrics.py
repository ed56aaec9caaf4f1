"""Counters for Prometheus: of an HTTP server, and of the nodes, rings and links behind it."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from shardnet.wire.messages.diagnostics import (
    LinkTraffic,
    NodeReport,
    RingLoad,
    RingWaitKind,
    RingWork,
)
from shardnet.wire.messages.household import HouseholdModelState
from shardnet.wire.messages.membership import NodeInfo, ReportReply

_LOAD: Final = {
    "running": "Requests that run on the ring",
    "waiting": "Requests that wait for the ring",
    "paused": "Requests that make room for others",
    "warm_slots": "Slots whose prefixes can be continued",
    "room_slots": "Sequences that the ring runs at once at most",
    "warm_blocks": "Blocks of the KV cache that warm slots hold, of one stage",
    "used_blocks": "Blocks of the KV cache in use, of one stage",
    "room_blocks": "Blocks of the KV cache there are, of one stage",
    "restored_positions": "Positions of prompts that were read from disk instead of computed",
}

_WORK: Final = {
    "steps": ("n_steps", "Steps that came round the ring", 1.0),
    "wire_seconds": ("wire_us", "Time of steps beside all computing and queueing", 1e-6),
    "prompts": ("n_prompts", "Prompts that began to run", 1.0),
    "prefix_hits": ("n_prefix_hits", "Prompts whose beginning was in the KV cache", 1.0),
    "prompt_tokens": ("n_prompt_tokens", "Tokens of prompts that began to run", 1.0),
    "prefix_tokens": ("n_prefix_tokens", "Tokens of prompts that were in the KV cache", 1.0),
    "flown_steps": ("n_flown", "Steps that went behind drafts in flight", 1.0),
    "wasted_steps": ("n_wasted", "Steps that went behind a wrong draft", 1.0),
}

_DRAFTS: Final = (
    ("drafted_tokens", "n_drafted", "Drafted tokens of requests that have ended"),
    ("accepted_tokens", "n_accepted", "Drafted tokens that were right"),
    ("drafted_steps", "n_steps", "Steps that began with drafts"),
)

_NODE: Final = {
    "uptime_seconds": ("uptime_s", "How long a node has run"),
    "memory_bytes": ("memory_bytes", "Memory that a node may take for weights and KV cache"),
    "memory_free_bytes": ("memory_free_bytes", "What of that is not taken by weights"),
}

_Column = tuple[type[GaugeMetricFamily] | type[CounterMetricFamily], str, str, str]
"""A metric's kind and name, the field that has its value, and what that is."""
_PRESSURE: Final[Sequence[_Column]] = (
    (
        GaugeMetricFamily,
        "node_memory_stalled_ratio",
        "stalled",
        "Share of the last 10 s in which programs of a node's machine waited for memory",
    ),
    (CounterMetricFamily, "node_cache_drops", "n_drops", "Caches freed since memory was short"),
    (CounterMetricFamily, "node_rests", "n_rests", "Times that a node gave its layers away"),
)
_AUDITS: Final[Sequence[_Column]] = (
    (CounterMetricFamily, "audits", "n_audits", "Stages that a head has audited"),
    (CounterMetricFamily, "audit_seconds", "busy_s", "Time that audits kept stages from steps"),
    (
        CounterMetricFamily,
        "audited_weight_bytes",
        "looked_bytes",
        "Bytes of weights that were held against what they were",
    ),
)
_METERS: Final[Sequence[_Column]] = (
    (CounterMetricFamily, "node_energy_joules", "joules", "Joules that a source has counted"),
    (GaugeMetricFamily, "node_power_watts", "watts", "What a source says is drawn now"),
)
_JOULES: Final = "Joules that a stage's nodes took for a token of the ring in the last request"
_RINGS: Final[Sequence[_Column]] = (
    (GaugeMetricFamily, "rings_requests", "n_requests", "Requests that a ring behind the head has"),
    (
        CounterMetricFamily,
        "rings_taken_over",
        "n_taken_over",
        "Requests that a ring took over from one that was lost",
    ),
)
_LINKS: Final[Sequence[_Column]] = (
    (GaugeMetricFamily, "links_up", "n_links", "Links that are up"),
    (CounterMetricFamily, "link_sent_bytes", "sent_bytes", "Bytes sent"),
    (CounterMetricFamily, "link_received_bytes", "received_bytes", "Bytes received"),
    (CounterMetricFamily, "link_failures", "n_failed", "Links that were broken"),
    (
        CounterMetricFamily,
        "link_resent_segments",
        "n_resent",
        "Segments that TCP had to send again",
    ),
)


@dataclass(frozen=True, slots=True)
class _Node:
    """A node that reported. Its label is its name, with its id where another has the same."""

    label: str
    info: NodeInfo
    report: NodeReport


_HOUSEHOLD: Final[Mapping[str, tuple[Callable[[HouseholdModelState], float], str]]] = {
    "loaded": (lambda state: state.state == "loaded", "1 for a model that has a ring"),
    "requests": (lambda state: state.n_requests, "Requests that run or wait on a model's ring"),
    "waiting": (lambda state: state.n_waiting, "Requests that wait for a model's ring"),
}


class RingMetrics(Collector):
    """Writes the reports it was given last."""

    def __init__(self) -> None:
        self._nodes: tuple[_Node, ...] = ()
        self._load: RingLoad | None = None
        self._household: Sequence[HouseholdModelState] = ()

    def take(
        self,
        replies: Iterable[ReportReply],
        load: RingLoad | None,
        household: Sequence[HouseholdModelState] = (),
    ) -> None:
        """Take the reports of nodes, and the load of the ring, which counts if no node has one.

        Models of the household have rings of their own.
        """
        self._household = household
        told = [(r.info, r.report) for r in replies if r.info is not None and r.report is not None]
        names = collections.Counter(info.name for info, _ in told)
        self._nodes = tuple(
            _Node(info.name if names[info.name] == 1 else f"{info.name} {info.node}", info, report)
            for info, report in told
        )
        work = self._work
        self._load = work.load if work is not None else load

    @property
    def _work(self) -> RingWork | None:
        """What the ring of these nodes has done: the one with the most steps if there are more."""
        works = [node.report.ring for node in self._nodes if node.report.ring is not None]
        return max(works, key=lambda work: work.n_steps, default=None)

    def collect(self) -> Iterator[Metric]:
        """Write all metrics."""
        yield from self._of_nodes()
        for name, text in _LOAD.items():
            value = 0 if self._load is None else getattr(self._load, name)
            yield GaugeMetricFamily(f"shardnet_ring_{name}", text, value=value)
        yield from self._of_waits()
        yield from self._of_ring()
        yield from self._of_rings()
        yield from self._of_links()
        yield from self._of_household()

    def _of_household(self) -> Iterator[Metric]:
        for name, (value, text) in _HOUSEHOLD.items():
            values = [([state.model.name], value(state)) for state in self._household]
            yield _family(GaugeMetricFamily, f"household_{name}", text, ["model"], values)
        yield _family(
            GaugeMetricFamily,
            "household_memory_bytes",
            "Memory that a model of the household may take on a node",
            ["model", "node"],
            [
                ([state.model.name, share.name], share.memory_bytes)
                for state in self._household
                for share in state.shares
            ],
        )

    def _of_nodes(self) -> Iterator[Metric]:
        nodes = self._nodes
        yield _family(
            GaugeMetricFamily,
            "node_info",
            "A node, its version and its device; always 1",
            ["node", "version", "device"],
            [([node.label, node.info.version, node.info.device], 1) for node in nodes],
        )
        for name, (field, text) in _NODE.items():
            values = [([node.label], getattr(node.info, field)) for node in nodes]
            yield _family(GaugeMetricFamily, f"node_{name}", text, ["node"], values)
        rests = [([node.label], bool(node.info.rests)) for node in nodes]
        text = "1 for a node that takes no layers now"
        yield _family(GaugeMetricFamily, "node_resting", text, ["node"], rests)
        yield from _families(
            ["node"], _PRESSURE, [([n.label], n.report.pressure) for n in self._nodes]
        )
        meters = [([n.label, m.source], m) for n in self._nodes for m in n.info.meters]
        yield from _families(["node", "source"], _METERS, meters)
        yield from _families(["node"], _AUDITS, [([n.label], n.report.audit) for n in self._nodes])
        audits = [node.report.audit for node in nodes if node.report.audit is not None]
        wrong = collections.Counter(found.name for audit in audits for found in audit.findings)
        values = [([name], n_times) for name, n_times in wrong.items()]
        text = "Times that a node was found computing wrong"
        yield _family(CounterMetricFamily, "wrong_bits", text, ["node"], values)

    def _of_ring(self) -> Iterator[Metric]:
        work = self._work
        for name, (field, text, unit) in _WORK.items():
            value = 0 if work is None else getattr(work, field) * unit
            yield CounterMetricFamily(f"shardnet_ring_{name}", text, value=value)
        reused = work.reused.items() if work is not None else ()
        text = "Positions of prompts that were not computed, by where they were"
        values = [([tier], n_positions) for tier, n_positions in reused]
        yield _family(CounterMetricFamily, "ring_reused_positions", text, ["tier"], values)
        drafters = work.drafters if work is not None else ()
        for name, field, text in _DRAFTS:
            values = [([one.drafter], getattr(one, field)) for one in drafters]
            yield _family(CounterMetricFamily, f"ring_{name}", text, ["drafter"], values)
        yield CounterMetricFamily(
            "shardnet_recoveries",
            "Lost rings whose requests went on over another one",
            value=0 if work is None else work.n_recoveries,
        )
        yield SummaryMetricFamily(
            "shardnet_recovery_seconds",
            "How long requests stood still while a lost ring was replaced",
            count_value=0 if work is None else work.n_recoveries,
            sum_value=0.0 if work is None else work.recovery_us / 1e6,
        )
        joules = (GaugeMetricFamily, "ring_joules_per_token", "joules_per_token", _JOULES)
        stages = [([str(s.rank), s.name], s) for s in work.stages] if work is not None else []
        yield from _families(["rank", "node"], [joules], stages)
        for name, text in (
            ("compute", "Time that a stage has computed"),
            ("queue", "Time that steps have waited in a stage"),
        ):
            values = [(where, getattr(stage, f"{name}_us") / 1e6) for where, stage in stages]
            labels = ["rank", "node"]
            yield _family(CounterMetricFamily, f"stage_{name}_seconds", text, labels, values)

    def _of_waits(self) -> Iterator[Metric]:
        """Write for what requests wait behind a lost ring, 0 for what they do not."""
        wait = None if self._load is None else self._load.wait
        waits = {} if wait is None else {wait.kind: wait.expected_s}
        yield _family(
            GaugeMetricFamily,
            "ring_recovery_waiting_seconds",
            "About how long requests of a lost ring wait still, by what for",
            ["for"],
            [([kind], waits.get(kind, 0.0)) for kind in get_args(RingWaitKind)],
        )

    def _of_rings(self) -> Iterator[Metric]:
        """Write how the rings are that are behind one head."""
        rings = [(["+".join(ring.names)], ring) for n in self._nodes for ring in n.report.rings]
        up = [(name, not ring.why) for name, ring in rings]
        text = "1 for a ring behind the head that takes requests"
        yield _family(GaugeMetricFamily, "rings_up", text, ["ring"], up)
        yield from _families(["ring"], _RINGS, rings)

    def _of_links(self) -> Iterator[Metric]:
        labels = ["node", "peer", "purpose"]
        links = [
            ([node.label, link.name, link.purpose], link, node.report)
            for node in self._nodes
            for link in node.report.links
        ]
        trips = [(where, _round_trip_s(report, link)) for where, link, report in links]
        known = [(where, trip_s) for where, trip_s in trips if trip_s is not None]
        text = "Round trip of a link"
        yield _family(GaugeMetricFamily, "link_round_trip_seconds", text, labels, known)
        yield from _families(labels, _LINKS, [(where, link) for where, link, _ in links])


def _family(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    text: str,
    labels: Sequence[str],
    values: Iterable[tuple[list[str], float]],
) -> Metric:
    """Make a family of metrics, of a value for each place."""
    metric = kind(f"shardnet_{name}", text, labels=labels)
    for where, value in values:
        metric.add_metric(where, value)
    return metric


def _families(
    labels: Sequence[str], columns: Sequence[_Column], rows: Sequence[tuple[list[str], object]]
) -> Iterator[Metric]:
    """Make a family of each column, of what `rows` have of it."""
    for kind, name, field, text in columns:
        told = [(where, getattr(row, field, None)) for where, row in rows]
        known = [(where, value) for where, value in told if value is not None]
        yield _family(kind, name, text, labels, known)


def _round_trip_s(report: NodeReport, link: LinkTraffic) -> float | None:
    """Return the round trip of a link: the kernel's, or that of pings on a control link."""
    if link.round_trip_us is not None:
        return link.round_trip_us / 1e6
    if link.purpose != "control":
        return None
    pinged = [view.rtt_s for view in report.peers if view.name == link.name]
    return max((rtt_s for rtt_s in pinged if rtt_s is not None), default=None)


MEDIA_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_BETWEEN_S: Final = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5)


class Metrics:
    """The counters, by what they count."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self.requests = counter(
            "shardnet_http_requests",
            "Requests that ended, by endpoint, status and API key; 499: the client went away",
            ["endpoint", "status", "key"],
        )
        self.seconds = histogram(
            "shardnet_http_request_seconds",
            "Time from a request to the end of its answer",
            ["endpoint"],
            buckets=_SECONDS,
        )
        self.active = gauge("shardnet_http_requests_active", "Requests that are being answered")
        whose = ["key", "model"]
        self.prompt_tokens = counter(
            "shardnet_prompt_tokens", "Tokens of prompts, by API key and model", whose
        )
        self.cached_tokens = counter(
            "shardnet_prompt_tokens_cached",
            "Tokens of prompts whose keys and values were there already, by API key and model",
            whose,
        )
        self.generated_tokens = counter(
            "shardnet_generated_tokens", "Tokens that were generated, by API key and model", whose
        )
        self.first_token_s = histogram(
            "shardnet_time_to_first_token_seconds",
            "Time from a request to its first token",
            buckets=_SECONDS,
        )
        self.between_tokens_s = histogram(
            "shardnet_time_between_tokens_seconds",
            "Time between two tokens of one request",
            buckets=_BETWEEN_S,
        )
        self.node_up = gauge("shardnet_node_up", "Whether the node answers: 1 or 0")
        self.up_s = gauge("shardnet_http_uptime_seconds", "How long the server has run")
        began_s = time.monotonic()
        self.up_s.set_function(lambda: time.monotonic() - began_s)
        self.ring = RingMetrics()
        registry.register(self.ring)

    def written(self) -> bytes:
        """Write all of them in Prometheus' text format."""
        return generate_latest(self._registry)
