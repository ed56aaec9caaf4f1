"""Have nodes that came, or came back, take part in the ring that this node leads.

Knows when to plan again, by policy.py. Must not know how a ring is replaced.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from shardnet.cluster.head.head import Head
from shardnet.cluster.head.lead import Lead
from shardnet.cluster.planning.plan import Plan
from shardnet.cluster.planning.planning import Planner
from shardnet.cluster.recovery.policy import Returns, is_better
from shardnet.cluster.recovery.recovery import Recovery
from shardnet.errors import BusyError, LinkError, ShardnetError
from shardnet.types import NodeId

LOOK_S: Final = 1.0
"""Interval of the looks at which nodes are here."""
AGAIN_S: Final = 5.0
"""When to plan again for a ring, or with a node, that is in use now."""
MOST_DOUBLED: Final = 4
"""How often that is doubled for such a node: requests wait a moment at each attempt."""


@dataclass(kw_only=True, eq=False, repr=False)
class NodeWatch:
    """Watches the nodes beside `head`; `linked` returns those that are here.

    `replace` puts the ring of a plan in the place of a lead's, for a reason that requests see.
    """

    head: Head
    recovery: Recovery
    replace: Callable[[Lead, Plan, str], Awaitable[None]]
    planner: Planner
    linked: Callable[[], Sequence[NodeId]]
    log: Callable[[str], None]

    def __post_init__(self) -> None:
        self._returns = Returns()
        self._not_before_s = 0.0
        self._said = ""
        self._n_busy = 0
        """How often a node was not to be had, since the last plan was carried out."""

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Use a node that has come, if it is time to and worth it."""
        now_s = time.monotonic()
        lead = self.head.latest
        left_out = self.recovery.left_out(lead) if lead is not None else {}
        self._returns.look(now_s, [node for node in self.linked() if node not in left_out])
        if lead is None or lead.is_recovering or now_s < self._not_before_s:
            return
        used = [NodeId(node.node) for node in lead.plan.ring_nodes] if lead.stands else []
        if not self._returns.is_news(now_s, used):
            return
        try:
            if lead.stands:
                await self._consider(lead)
            else:
                self._returns.planned(now_s)
                if lead.is_given_up:
                    await self._open_again(lead)
        except ShardnetError as error:
            # until another head lets go of a node, or one that was lost meanwhile is left out
            if isinstance(error, BusyError | LinkError):
                self._put_off(now_s)
            else:
                self._returns.planned(now_s)
            if self._said != (said := f"the ring stays without the nodes that came: {error}"):
                self._said = said
                self.log(said)

    async def _consider(self, lead: Lead) -> None:
        """Plan with the nodes that came; replace the ring if that gains enough."""
        opened, now = lead.opened, lead.plan
        now_s = time.monotonic()
        n_named = len(opened.choice.nodes)
        if n_named and len(now.ring_nodes) == n_named:
            self._returns.planned(now_s)
            return
        without = dict.fromkeys(self._returns.unsettled(now_s), "it has come just now")
        without |= self.recovery.left_out(lead)
        is_used = lead.ring.is_in_use
        plan = await self.planner.replan(opened, now, without, measures=not is_used)
        if lead is not self.head.latest or lead.plan is not now or lead.is_recovering:
            return  # it was replaced meanwhile
        unheard = [out.node for out in plan.silent]
        is_other = _stages(plan) != _stages(now)
        tok_s = now.placement.predicted_tok_s, plan.placement.predicted_tok_s
        is_complete = bool(n_named) and len(plan.ring_nodes) == n_named
        if is_other and is_better(*tok_s, is_complete=is_complete, is_used=lead.ring.is_in_use):
            before = {node.node for node in now.ring_nodes}
            came = [node.name for node in plan.ring_nodes if node.node not in before]
            await self.replace(lead, plan, f"{', '.join(came) or 'another order'} joins")
            self._returns.planned(now_s, unheard)
            self._n_busy = 0
        elif is_other and (is_used or lead.ring.is_in_use):
            self._not_before_s = now_s + AGAIN_S
        else:
            self._returns.planned(now_s, unheard)
            if self._returns.is_news(now_s, [NodeId(node.node) for node in now.ring_nodes]):
                self._put_off(now_s)  # a link to it broke, or it is too busy to answer

    def _put_off(self, now_s: float) -> None:
        """Plan again later, each time in turn twice as much later."""
        self._not_before_s = now_s + AGAIN_S * 2**self._n_busy
        self._n_busy = min(self._n_busy + 1, MOST_DOUBLED)

    async def _open_again(self, lead: Lead) -> None:
        """Have the ring that was given up built again, for requests to come."""
        choice = lead.opened.choice
        async with self.head.lead(
            choice, on_plan=lambda plan: None, on_progress=lambda *_: None
        ) as found:
            if isinstance(found, Lead):
                names = ", ".join(node.name for node in found.plan.nodes)
                self.log(f"{choice.model} is served again, over {names}")


def _stages(plan: Plan) -> list[tuple[str, int, int]]:
    return [
        (node, stage.layers.start, stage.layers.end)
        for stage in plan.placement.stages
        for node in (stage.node, *stage.shards)
    ]
