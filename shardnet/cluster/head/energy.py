"""What the nodes of a ring draw while it answers a request, in joules for each token.

The window begins with the request's second token and ends with its last: what all nodes took in it,
divided by all tokens that the ring made in it, whosesoever they are. Knows how nodes are asked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from dataclasses import replace as with_timing
from typing import Final

from msgspec.structs import replace

from shardnet.cluster.head.lead import Lead
from shardnet.cluster.peers.node_directory import NodeDirectory
from shardnet.runtime.engine.requests import GenerationFinished
from shardnet.wire.framing.schema import MAX_NAME
from shardnet.wire.messages.generation import StageEnergy, Timing
from shardnet.wire.messages.membership import NodeInfo

ASK_S: Final = 0.5
"""How long a node may take to tell what it has drawn."""
MOSTLY: Final = 0.8
"""So much of the time between the readings must lie within the window."""

BEGINS: Final = 2
"""The token with which it begins: answers of one token ask nobody."""

Joules = dict[tuple[str, str], float]
"""What was drawn, by machine and source: several nodes of a machine may have the same one."""


@dataclass(frozen=True, slots=True)
class Look:
    """What nodes had drawn at `at_s`, by their ids, when the ring had made `n_tokens`."""

    at_s: float
    n_tokens: int
    nodes: Mapping[str, NodeInfo]


def joules_between(first: Look, last: Look, nodes: Iterable[NodeInfo]) -> Joules | None:
    """Return what nodes drew between two looks, None where it cannot be said of each.

    Their mean watts between their readings count for all of that time. These may be older than the
    looks: where less than MOSTLY of the time between them lies within, something else was measured.
    """
    drawn: Joules = {}
    for node in nodes:
        before, after = first.nodes.get(node.node, node).meters, last.nodes.get(node.node, node)
        begun = {meter.source: meter for meter in before}
        if not begun or begun.keys() != {meter.source for meter in after.meters}:
            return None
        for meter in after.meters:
            was = begun[meter.source]
            joules, span_s = meter.joules - was.joules, meter.counted_s - was.counted_s
            within_s = last.at_s - meter.age_s - first.at_s
            if span_s <= 0 or joules < 0 or within_s < MOSTLY * span_s:
                return None
            drawn[after.host_id, meter.source] = joules / span_s * (last.at_s - first.at_s)
    return drawn


class EnergyWindow:
    """The window of one request on the ring of `lead`."""

    def __init__(self, lead: Lead, directory: NodeDirectory) -> None:
        self._lead, self._directory = lead, directory
        self._first: asyncio.Task[Look] | None = None

    async def __aenter__(self) -> EnergyWindow:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._first is not None:
            self._first.cancel()

    def take(self, n_tokens: int) -> None:
        """Take that the answer has so many tokens: it begins, and nothing waits for that."""
        if n_tokens == BEGINS:
            self._first = asyncio.ensure_future(self._look())

    async def finished(self, event: GenerationFinished) -> GenerationFinished:
        """Return the end of the request with what was drawn until now.

        That is kept for who watches the ring, too.
        """
        timing = await self._told(event.timing)
        return event if timing is event.timing else with_timing(event, timing=timing)

    async def _told(self, timing: Timing) -> Timing:
        if self._first is None or not self._first.done():
            return timing
        first, totals, plan = self._first.result(), self._lead.ring.engine.totals, self._lead.plan
        if not any(info.meters for info in first.nodes.values()):
            return timing
        last = await self._look()
        n_tokens, stages, all_drawn = last.n_tokens - first.n_tokens, [], Joules()
        for rank, node in enumerate(plan.nodes if n_tokens > 0 else ()):
            further = plan.spans[rank] if plan.spans else ()
            drawn = joules_between(first, last, (node, *further))
            if drawn is not None:
                all_drawn |= drawn
                joules, source = sum(drawn.values()) / n_tokens, " + ".join(s for _, s in drawn)
                each = StageEnergy(rank=rank, joules_per_token=joules, source=source[:MAX_NAME])
                stages.append(each)
        totals.joules = {stage.rank: stage.joules_per_token for stage in stages}
        is_known = len(stages) == len(plan.nodes)
        joules_all = sum(all_drawn.values()) / n_tokens if is_known else None
        return replace(timing, energy=tuple(stages), joules_per_token=joules_all)

    async def _look(self) -> Look:
        at_s, n_tokens = time.monotonic(), self._lead.ring.engine.totals.n_tokens
        asked = {node.node for node in self._lead.plan.ring_nodes}
        infos = await self._directory.of(asked, ASK_S)
        return Look(at_s, n_tokens, {info.node: info for info in infos})
