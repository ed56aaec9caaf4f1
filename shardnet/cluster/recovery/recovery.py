"""Replace rings that are lost, while their requests wait.

Knows the order: hold the requests, plan over the nodes that are left, build, go on; policy.py says
when to try again, and when to give up. Must not know how plans are made, or rings are built.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from shardnet.cluster.head.head import Head
from shardnet.cluster.head.lead import Lead
from shardnet.cluster.peers.supervision import SupervisedJobs
from shardnet.cluster.planning.plan import Plan
from shardnet.cluster.planning.planning import Planner
from shardnet.cluster.recovery.policy import (
    Attempt,
    Blame,
    BlameKind,
    Decision,
    GiveUp,
    RecoveryPolicy,
)
from shardnet.cluster.recovery.standbys import ANSWER_S, Standbys
from shardnet.cluster.ring.ring import Ring
from shardnet.errors import PeerFailedError, ShardnetError, SupersededError, internal_error
from shardnet.runtime.scheduling.sequences import ComputedSequence
from shardnet.types import NodeId
from shardnet.wire.framing.schema import Phase
from shardnet.wire.messages.diagnostics import RingWaitKind, waiting_words

EXPECTED_S = 1.0
"""How long a recovery is expected to take, beside loading."""
PLAN_S: Final = 0.5
"""How long asking the nodes and planning are expected to take."""
TELL_S: Final = 1.0
"""How long what was told of loading is left as it is."""


MAX_RECORDS: Final = 64
"""Recoveries that are remembered."""


@dataclass(kw_only=True, eq=False, repr=False)
class Recovery:
    """Replaces the rings of `head`. Its work runs in `tasks`, a group that outlives it.

    Nodes that lack memory may be given some within `room_s`: requests wait so long for that.
    """

    head: Head
    planner: Planner
    standbys: Standbys
    tasks: asyncio.TaskGroup
    log: Callable[[str], None]
    room_s: float = 0.0

    def __post_init__(self) -> None:
        self._jobs = SupervisedJobs(self.tasks, self.log)
        self._lead: Lead | None = None
        self._policy = RecoveryPolicy()
        """That of `_lead`."""
        self._is_closing = False
        self.records: deque[RecoveryRecord] = deque(maxlen=MAX_RECORDS)
        """The last recoveries, the latest at the end."""

    def begin(self, lead: Lead) -> bool:
        """Begin to replace the ring of `lead`, which broke; return whether that will be done.

        A ring that nobody uses is not replaced, unless a node of it is to be left out: the next
        request has one built.
        """
        ring = lead.ring
        if lead.is_recovering:
            return True
        if self._is_closing or not (ring.is_in_use or ring.wrong) or ring.broken is None:
            return False
        if self.room_s:
            self.await_node(lead, self.room_s)
        error = ring.broken
        computed = ring.engine.computed()
        record = self._hold(lead, error.message)
        decision = self._policy_of(lead).broke(time.monotonic(), error, _blames(ring))
        self._jobs.begin(partial(self._go_on, lead, record, decision, computed), "a recovery")
        return True

    def _hold(self, lead: Lead, why: str) -> RecoveryRecord:
        """Have the requests of a lead wait for another ring."""
        engine = lead.ring.engine
        expected_s = EXPECTED_S + lead.ring.built_s + engine.waits.reading_s()
        record = RecoveryRecord(at_s=time.time(), why=why, n_requests=engine.n_active)
        if self.records and not self.records[-1].is_over:
            self.records[-1].interrupt(why)
        self.records.append(record)
        lead.is_recovering = True
        record.notice_s = engine.suspend(why, expected_s)
        self.log(record.first_words)
        return record

    def _wait(self, lead: Lead, kind: RingWaitKind, what: str, expected_s: float) -> None:
        """Tell the requests, and the log, what they wait for now."""
        lead.ring.engine.waits.tell(kind, what, expected_s)
        self.log(waiting_words(what, expected_s))

    def left_out(self, lead: Lead) -> dict[NodeId, str]:
        """Return the nodes that are not to be used for a lead now, and why."""
        return self._policy_of(lead).left_out(time.monotonic())

    def await_node(self, lead: Lead, returns_s: float) -> None:
        """Have requests of a lead wait so long for a node that leaves, and comes back."""
        self._policy_of(lead).await_node(time.monotonic() + returns_s)

    async def close(self) -> None:
        """End what runs."""
        self._is_closing = True
        await self._jobs.close()

    def _policy_of(self, lead: Lead) -> RecoveryPolicy:
        if self._lead is not lead:
            self._lead, self._policy = lead, RecoveryPolicy()
            self._policy.avoid(time.monotonic(), lead.avoided)
        return self._policy

    async def _go_on(
        self,
        lead: Lead,
        record: RecoveryRecord,
        decision: Decision,
        computed: Sequence[ComputedSequence],
    ) -> None:
        """Have a standby go on, else another ring. `computed` is what the lost one had.

        What wrong values have left in a KV cache is of no use.
        """
        starts_anew = isinstance(decision, GiveUp) or bool(lead.ring.wrong)
        if starts_anew or not await self._stood_in(lead, record, computed):
            await self._recover(lead, record, decision)

    async def _stood_in(
        self, lead: Lead, record: RecoveryRecord, computed: Sequence[ComputedSequence]
    ) -> bool:
        """Have the standby of the node that was lost go on; return whether it does."""
        former, began_s = lead.ring, time.monotonic()
        if lead.plan.standbys:
            self._wait(lead, "nodes", "asking who is left", ANSWER_S)
        ready = await self.standbys.ready_for(former)
        record.plan_s += time.monotonic() - began_s
        if ready is None:
            return False
        began_s = time.monotonic()
        stands_by = ready.ring.ports[ready.rank].node_name
        self._wait(lead, "load", f"{stands_by} takes over from {ready.name}", EXPECTED_S)
        record.n_attempts += 1
        record.lost, record.nodes = (ready.name,), tuple(n.name for n in ready.plan.ring_nodes)
        ready.ring.on_replayed = partial(self._replayed, lead, record)
        ready.ring.on_acquitted = self._policy_of(lead).acquit
        try:
            async with self.head.led.changing(lead):
                record.n_moved = len(await self.standbys.take_over(lead, ready, computed))
        except ShardnetError as failure:
            self.log(f"the standby of {ready.name} cannot go on: {failure}")
            return False
        finally:
            record.load_s += time.monotonic() - began_s
        self._resumed(lead, record, former, ready.plan)
        return True

    async def _recover(self, lead: Lead, record: RecoveryRecord, decision: Decision) -> None:
        """Try until a ring is built, or give up: then every request fails by name."""
        policy = self._policy_of(lead)
        error: ShardnetError = PeerFailedError("the node is leaving")
        tried: list[Ring] = []
        try:
            while isinstance(decision, Attempt):
                began_s = time.monotonic()
                what = "asking who is left, and planning"
                self._wait(lead, "plan", what, decision.after_s + PLAN_S)
                await asyncio.sleep(decision.after_s)
                record.plan_s += time.monotonic() - began_s
                record.n_attempts += 1
                tried.clear()
                try:
                    async with self.head.led.changing(lead):
                        await self._attempt(lead, record, decision.without, tried)
                    return
                except ShardnetError as failure:
                    blamed = [blame for ring in tried for blame in _blames(ring)]
                    if isinstance(failure, SupersededError) and await self.head.successor():
                        raise  # its requests were sent there
                    if self.head.led.lead is not lead:
                        raise
                    decision = policy.failed(time.monotonic(), failure, blamed)
                    self.log(f"no ring yet: {failure}")
            error = decision.error
        except ShardnetError as failure:
            error = failure
        except Exception as failure:
            error = internal_error("a recovery", failure)
            raise
        finally:
            if lead.is_recovering:
                lead.is_recovering = False
                lead.is_given_up = not self._is_closing
                lead.ring.give_up(error)
                record.error, record.is_over = str(error), True
                if not self._is_closing:
                    self._free(self.head.led.take_vain())  # they keep stages for one more
                self.log(record.words)

    async def _attempt(
        self, lead: Lead, record: RecoveryRecord, without: Mapping[NodeId, str], tried: list[Ring]
    ) -> None:
        """Plan, build, and have the requests go on."""
        began_s = time.monotonic()
        former, former_plan = lead.ring, lead.plan
        try:
            plan = await self.planner.replan(lead.opened, lead.plan, without)
        finally:
            planned_s = time.monotonic()
            record.plan_s += planned_s - began_s
        names = tuple(node.name for node in plan.ring_nodes)
        left = {node.node for node in plan.ring_nodes}
        record.nodes = names
        record.lost = tuple(n.name for n in former_plan.ring_nodes if n.node not in left)

        loading = Loading.of(former_plan, plan, former.built_s)
        self._wait(lead, "load", loading.what, loading.expected_s)
        tell = partial(former.engine.waits.tell, "load", loading.what)
        try:
            ring = await self.head.led.ring_instead(lead, plan)
            tried.append(ring)
            ring.on_replayed = partial(self._replayed, lead, record)
            ring.on_acquitted = self._policy_of(lead).acquit
            await self.head.led.put_instead(
                lead, plan, ring, partial(loading.take, tell, time.monotonic)
            )
        finally:
            record.load_s += time.monotonic() - planned_s
        self._resumed(lead, record, former, plan)

    def _resumed(self, lead: Lead, record: RecoveryRecord, former: Ring, plan: Plan) -> None:
        """Note that requests go on over the ring of `plan`; free what is left of the lost one."""
        lead.is_recovering = False
        record.resumed_at_s = time.monotonic()
        self._finish(lead, record)
        if (wait := lead.ring.engine.waits.now) is not None:
            self.log(waiting_words(wait.what, wait.expected_s))
        keep = {node.address for node in plan.ring_nodes}
        self._free([former, *self.head.led.take_vain()], keep)

    def _free(self, rings: Sequence[Ring], keep: Collection[str] = ()) -> None:
        """Have the stages freed of rings that are over, but at nodes of the next one."""
        for ring in rings:
            self._jobs.begin(partial(ring.release, keep), "freeing stages of a lost ring")

    def _replayed(self, lead: Lead, record: RecoveryRecord) -> None:
        self._policy_of(lead).went_on()
        record.is_replayed = True
        if record.resumed_at_s is not None:
            record.replay_s = time.monotonic() - record.resumed_at_s
        self._finish(lead, record)

    def _finish(self, lead: Lead, record: RecoveryRecord) -> None:
        if record.is_replayed and record.resumed_at_s is not None and not record.is_over:
            record.is_over = True
            lead.ring.engine.totals.add_recovery(record.pause_s)
            self.log(record.words)


def _blames(ring: Ring) -> list[Blame]:
    """Return what the nodes beside the head have to do with the end of a ring.

    The head is never left out: no other node has its requests. It is asked again.
    """
    blames: list[Blame] = []
    kind: BlameKind
    for node, error in ring.blamed.items():
        is_wrong, is_stuck = node in ring.wrong, node in ring.stuck
        kind = "wrong" if is_wrong else "stuck" if is_stuck else "refused"
        blames.append(Blame(node=node, error=error, kind=kind))
    for node, error in ring.unreached.items():
        if node not in ring.blamed:
            blames.append(Blame(node=node, error=error, kind="unreached"))
    head = ring.ports[0].node
    return [blame for blame in blames if blame.node != head]


@dataclass(slots=True, kw_only=True)
class Loading:
    """The layers that nodes load for the next ring: `what` in words, and how long that may take."""

    what: str
    expected_s: float
    began_s: float = 0.0
    told_s: float = 0.0
    left: dict[int, float] = field(default_factory=dict)
    """What part of its bytes each rank lacks still."""

    @classmethod
    def of(cls, former: Plan, plan: Plan, built_s: float) -> Loading:
        """Find what nodes of `plan` lack that were in `former`, which took `built_s` to build."""
        before = layers_by_node(former)
        after = layers_by_node(plan)
        names = {node.node: node.name for node in plan.ring_nodes}
        new = {node: len(layers - before.get(node, set())) for node, layers in after.items()}
        loads = [
            f"{n_layers} layer{'s' * (n_layers > 1)} at {names[node]}"
            for node, n_layers in new.items()
            if n_layers
        ]
        if not loads:
            return cls(what="connecting the nodes that are left", expected_s=EXPECTED_S)
        part = max(new.values()) / max(map(len, before.values()))
        return cls(what=f"loading {', '.join(loads)}", expected_s=built_s * part)

    def take(
        self,
        tell: Callable[[float], None],
        now: Callable[[], float],
        rank: int,
        phase: Phase,
        done_bytes: int,
        total_bytes: int,
    ) -> None:
        """Tell from the progress of ranks how long they may still take, every second."""
        now_s = now()
        self.began_s = self.began_s or now_s
        self.told_s = self.told_s or now_s
        self.left[rank] = 1 - done_bytes / total_bytes if total_bytes else 0.0
        left = max(self.left.values())
        if now_s - self.told_s >= TELL_S and 0 < left < 1:
            self.told_s = now_s
            tell((now_s - self.began_s) * left / (1 - left))


def layers_by_node(plan: Plan) -> dict[str, set[int]]:
    """Return the layers that each node of a plan has, or a part of which it has."""
    return {
        node: {*range(stage.layers.start, stage.layers.end)}
        for stage in plan.placement.stages
        for node in (stage.node, *stage.shards)
    }


@dataclass(slots=True, kw_only=True)
class RecoveryRecord:
    """One replacement of a ring by another. All times in seconds, `at_s` counted from 1970.

    `notice_s` is how long the oldest step in flight had waited when the loss was noticed, `plan_s`
    and `load_s` are sums over all attempts, waiting included, `replay_s` is how long after that
    every request had a token again. `lost` are the names of the nodes that the next ring did
    without. `error` is why it was given up, "" unless it was. `n_requests` were waiting or running.
    """

    at_s: float
    why: str
    n_requests: int
    notice_s: float = 0.0
    plan_s: float = 0.0
    load_s: float = 0.0
    replay_s: float = 0.0
    n_attempts: int = 0
    n_moved: int = 0
    """Requests that a standby went on with, of which next to nothing was computed again."""
    lost: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    error: str = ""
    resumed_at_s: float | None = None
    """When the next ring was built, by a clock that does not jump."""
    is_replayed: bool = False
    is_over: bool = False

    def interrupt(self, why: str) -> None:
        """Note that the next ring was lost too before its requests went on."""
        self.is_over, self.error = True, why

    @property
    def pause_s(self) -> float:
        """How long requests stood still, from the last sign of the lost ring to the last replay."""
        return self.notice_s + self.plan_s + self.load_s + self.replay_s

    @property
    def first_words(self) -> str:
        """The line for the log when it begins."""
        waiting = "1 request waits" if self.n_requests == 1 else f"{self.n_requests} requests wait"
        return f"recovering: {self.why}; {waiting}"

    @property
    def words(self) -> str:
        """The line for the log when it is over."""
        parts = (
            f"notice {self.notice_s:.2f}, plan {self.plan_s:.2f}, load {self.load_s:.2f}, "
            f"replay {self.replay_s:.2f} s"
        )
        attempts = f", {self.n_attempts} attempts" if self.n_attempts > 1 else ""
        if self.error:
            return f"gave up the ring after {self.pause_s:.2f} s ({parts}{attempts}): {self.error}"
        requests = f"{self.n_requests} request" + "s" * (self.n_requests != 1)
        moved = f", {self.n_moved} of them with their KV cache" if self.n_moved else ""
        without = f" without {', '.join(self.lost)}" if self.lost else ""
        return (
            f"recovered in {self.pause_s:.2f} s ({parts}{attempts}): {requests} went on over "
            f"{', '.join(self.nodes)}{without}{moved}"
        )
