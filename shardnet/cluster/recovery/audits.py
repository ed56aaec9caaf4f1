"""Audits the stages of a ring, one after the other, and does without a node that computes wrong.

Knows who is asked next, who computes for a comparison, and who is wrong of those that disagree.
Must not know how stages look at themselves, nor how a ring is replaced (recovery.py).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from shardnet.cluster.head.head import Head
from shardnet.cluster.head.lead import Lead
from shardnet.cluster.planning.plan import Plan
from shardnet.cluster.ring.ring import Ring
from shardnet.errors import ChangedMemoryError, ShardnetError, WrongValuesError
from shardnet.types import NodeId
from shardnet.wire.messages.diagnostics import MAX_FINDINGS, AuditFinding, AuditState
from shardnet.wire.messages.handshake import explanation
from shardnet.wire.messages.stages import AuditStage, ComputeLayer, LayerComputed, StageAudited

LOOK_S: Final = 2.0
"""The shortest pause between two audits, and how often is looked whether there is a ring."""
ANSWER_S: Final = 60.0
"""How long a node may take to audit its stage, or to compute a layer from its checkpoint."""
NOT_A_MACHINE: Final = (
    "it was so before on another machine, or on this one with its layers loaded anew: report it as "
    "a bug of shardnet; rows are audited no more until this node is started again"
)
CHECK_BOTH: Final = (
    "test the memory of both machines (memtest86+), and set the clocks of their processors and "
    "memory back to what their makers say"
)


class Answer(NamedTuple):
    """What the node of a rank has made of the rows of an audited stage."""

    rank: int
    after: bytes


@dataclass(slots=True, kw_only=True, eq=False)
class _Progress:
    """How far the audits of one ring are.

    Others have computed the layers `confirmed` alike: they are not compared again. Where it
    `is_disputed` which of two nodes is wrong, none is. `good_at` is when nothing was found last,
    by place among the ring's nodes.
    """

    ring: Ring
    good_at: dict[int, float] = field(default_factory=dict)
    n_audits: int = 0
    confirmed: set[int] = field(default_factory=set)
    is_disputed: bool = False


@dataclass(kw_only=True, eq=False, repr=False)
class Audits:
    """Audits the ring that `head` leads, for `share` of the time of its stages, 0 for never.

    `distrust` has the head's own stage loaded anew with the next ring.
    """

    head: Head
    share: float
    distrust: Callable[[], None]
    log: Callable[[str], None]

    def __post_init__(self) -> None:
        self._progress: _Progress | None = None
        self._n_audits = self._looked_bytes = 0
        self._busy_s = 0.0
        self._unlike: set[NodeId] = set()
        """Nodes whose rows came out unlike."""
        self._trusts_rows = True
        self._findings: deque[AuditFinding] = deque(maxlen=MAX_FINDINGS)

    @property
    def state(self) -> AuditState | None:
        """What was audited so far, and what was found; None where nothing is audited."""
        if not self._n_audits and not self._findings:
            return None
        return AuditState(
            n_audits=self._n_audits,
            busy_s=self._busy_s,
            looked_bytes=self._looked_bytes,
            n_confirmed=len(self._progress.confirmed) if self._progress is not None else 0,
            findings=[*self._findings],
        )

    async def run(self) -> None:
        """Audit one stage after the other, until cancelled; pause so long that `share` is kept."""
        pause_s = LOOK_S
        while self.share:
            await asyncio.sleep(pause_s)
            pause_s = max(LOOK_S, await self.audit() / self.share)

    async def audit(self) -> float:
        """Audit the next stage. Return the seconds for which it, or another node, was kept busy."""
        lead = self.head.latest
        if lead is None or lead.is_recovering or lead.ring.broken is not None:
            self._progress = None
            return 0.0
        if self._progress is None or self._progress.ring is not lead.ring:
            self._progress = _Progress(ring=lead.ring)
        progress, seats = self._progress, lead.ring.seats
        turn, place = divmod(progress.n_audits, len(seats))
        layers = lead.ring.spec.layers[seats[place].rank]
        layer = layers.start + turn % len(layers)
        progress.n_audits += 1
        try:
            return await self._audit(lead, progress, place, layer)
        except WrongValuesError as error:
            self._found(progress, place, layer, error)
        except (ShardnetError, TimeoutError):  # it cannot, or is lost: the ring notices that itself
            pass
        return 0.0

    async def _audit(self, lead: Lead, progress: _Progress, place: int, layer: int) -> float:
        """Audit the node at a place among the ring's. Parts of a stage compute no rows alone."""
        ring, asked_at = lead.ring, time.time()
        order = AuditStage(
            request=0,
            ring=ring.name,
            epoch=ring.epoch,
            layer=layer,
            with_rows=self._trusts_rows and not lead.plan.spans,
        )
        async with asyncio.timeout(ANSWER_S):
            audited = await ring.seats[place].port.order(order, StageAudited)
        self._n_audits += 1
        self._looked_bytes += audited.looked_bytes
        self._busy_s += audited.took_s
        took_s, answers = 0.0, list[Answer]()
        is_due = layer not in progress.confirmed and not progress.is_disputed
        if audited.after and is_due and _are_alike(lead.plan):
            took_s, answers = await self._compare(ring, place, layer, audited.before, audited.after)
        if answers and answers[0].after != audited.after:
            self._disagree(progress, layer, Answer(place, audited.after), answers)
            return 0.0
        if answers:
            progress.confirmed.add(layer)
        progress.good_at[place] = asked_at
        return audited.took_s + took_s

    async def _compare(
        self, ring: Ring, rank: int, layer: int, before: bytes, after: bytes
    ) -> tuple[float, list[Answer]]:
        """Have a layer computed from checkpoints, by other nodes first; by two if they disagree."""
        took_s, answers = 0.0, list[Answer]()
        message = ComputeLayer(
            request=0, ring=ring.name, epoch=ring.epoch, layer=layer, before=before
        )
        others = [other for other in range(len(ring.ports)) if other != rank]
        for other in (*others, rank):
            try:
                async with asyncio.timeout(ANSWER_S):
                    computed = await ring.ports[other].order(message, LayerComputed)
            except (ShardnetError, TimeoutError):  # it lacks the layer, or has no memory for it
                continue
            took_s += computed.took_s
            answers.append(Answer(other, computed.after))
            if computed.after == after or len(answers) == 2:
                break
        return took_s, answers

    def _disagree(
        self, progress: _Progress, layer: int, audited: Answer, answers: Sequence[Answer]
    ) -> None:
        """Find out who of those that have computed a layer unlike is wrong, and do without it."""
        wrong, names = judge(audited, answers), progress.ring.node_names
        if wrong is None:
            progress.is_disputed = True
            other = names[answers[0].rank]
            what = f"it and {other} compute the same rows unlike, and one of them is wrong"
            self._note(progress, audited.rank, layer, what, CHECK_BOTH, is_left_out=False)
            return
        others = [each.rank for each in (audited, *answers) if each.rank != wrong]
        by = names[others[0]] if others else "itself with weights from its checkpoint"
        error = WrongValuesError.received(f"the same rows have other bits than by {by}")
        self._found(progress, wrong, layer, error)

    def _found(self, progress: _Progress, place: int, layer: int, error: WrongValuesError) -> None:
        """Do without a node that is wrong; the head stays, and has its layers loaded anew."""
        port = progress.ring.seats[place].port
        what = error.message.removeprefix(f"{port.name}: ")
        if self._is_doubtful(port.node, error, is_head=not place):
            self._trusts_rows = False
            progress.ring.on_acquitted()
            self._note(progress, place, layer, what, NOT_A_MACHINE, is_left_out=False)
            return
        if not place:
            self.distrust()
        self._note(progress, place, layer, what, error.remedy, is_left_out=place > 0)
        progress.ring.found_wrong(place, error)

    def _is_doubtful(self, node: NodeId, error: WrongValuesError, *, is_head: bool) -> bool:
        """Say whether rows came out unlike on another machine before, or on the head again.

        Then it is more likely a bug of ours than bad machines.
        """
        if isinstance(error, ChangedMemoryError):
            return False
        is_again = is_head and node in self._unlike
        self._unlike.add(node)
        return is_again or len(self._unlike) > 1

    def _note(
        self,
        progress: _Progress,
        place: int,
        layer: int,
        what: str,
        remedy: str,
        *,
        is_left_out: bool,
    ) -> None:
        port = progress.ring.seats[place].port
        self.log(f"{port.node_name} computes wrong bits in layer {layer}: {what}; {remedy}")
        self._findings.append(
            AuditFinding(
                node=port.node,
                name=port.node_name,
                layer=layer,
                at=time.time(),
                good_at=progress.good_at.get(place, 0.0),
                what=explanation(what),
                remedy=explanation(remedy),
                is_left_out=is_left_out,
            )
        )


def _are_alike(plan: Plan) -> bool:
    """Say whether all nodes of a ring give equal bits, by the compiled library."""
    return plan.exactness.batch and len({form.arithmetic for form in plan.forms}) == 1


def judge(audited: Answer, answers: Sequence[Answer]) -> int | None:
    """Return the rank of the node that is wrong, None where that cannot be told.

    `answers` are what one or two others, or the node itself at last, have made of the same rows
    with weights from their checkpoints; the first is not what was `audited`. What two of three
    machines agree on is right. One that disagrees with itself is wrong whatever others compute.
    """
    first, *rest = answers
    if first.rank == audited.rank:
        return audited.rank
    if rest and rest[0].after == first.after:
        return audited.rank
    if rest and rest[0].after == audited.after and rest[0].rank != audited.rank:
        return first.rank
    return None
