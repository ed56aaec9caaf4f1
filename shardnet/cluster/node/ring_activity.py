"""Tells who asks what the ring of this node does now, and cancels requests of it.

Knows where each fact is found. Must not judge: rates and means are the asking side's part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from shardnet.cluster.head.head import Head
from shardnet.cluster.head.lead import Lead, Opening
from shardnet.cluster.peers.control_link import ControlLink, MessageHandlers
from shardnet.cluster.recovery.recovery import RecoveryRecord
from shardnet.errors import UsageError
from shardnet.types import SequenceId
from shardnet.wire.messages.activity import (
    MAX_RECOVERIES_SEEN,
    MAX_REQUESTS_SEEN,
    MAX_STEPS_SEEN,
    CancelSequence,
    GetActivity,
    RecoveryReport,
    RingActivity,
    RingOpening,
    StageProgress,
)
from shardnet.wire.messages.control import Done, Redirect
from shardnet.wire.messages.diagnostics import RingBehind
from shardnet.wire.messages.handshake import explanation


@dataclass(eq=False, repr=False)
class RingWatch:
    """Answers for the ring that `head` leads, for those that were lost before it, and for the
    `rings` that are behind it.
    """

    head: Head
    recoveries: Sequence[RecoveryRecord]
    rings: Callable[[], list[RingBehind]]

    def register(self, handlers: MessageHandlers) -> None:
        """Register the messages of those who watch."""
        handlers.register(GetActivity, self._activity)
        handlers.register(CancelSequence, self._cancel)

    async def _activity(self, control: ControlLink, message: GetActivity) -> None:
        """Reply with the ring's requests and last steps, or Redirect to its head."""
        elsewhere, lead = self.head.elsewhere(), self.head.latest
        if elsewhere is not None:
            control.send(Redirect(request=message.request, address=elsewhere.address))
            return
        opening = _opening(self.head.opening)
        recoveries = [_recovery(one) for one in [*self.recoveries][-MAX_RECOVERIES_SEEN:]]
        if lead is None:
            activity = RingActivity(request=message.request, opening=opening)
        else:
            activity = _activity(message, lead, opening)
        control.send(replace(activity, recoveries=recoveries, rings=self.rings()))

    async def _cancel(self, control: ControlLink, message: CancelSequence) -> None:
        """Cancel a request, or reply Redirect. Raises UsageError for one that has ended."""
        elsewhere, lead = self.head.elsewhere(), self.head.latest
        if elsewhere is not None:
            control.send(Redirect(request=message.request, address=elsewhere.address))
            return
        is_ring = lead is not None and lead.ring.name == message.ring
        if lead is None or not (is_ring and lead.ring.engine.cancel(SequenceId(message.sequence))):
            raise UsageError(f"there is no request {message.sequence}: it has ended")
        control.send(Done(request=message.request))


def _opening(opening: Opening | None) -> RingOpening | None:
    """Return what is done to have a ring, None while there is nothing to tell of it."""
    if opening is None or not opening.progress:
        return None
    return RingOpening(
        model=opening.model,
        age_s=max(0.0, time.monotonic() - opening.began_s),
        stages=[
            StageProgress(rank=rank, phase=phase, done_bytes=done, total_bytes=total)
            for rank, (phase, done, total) in sorted(opening.progress.items())
        ],
    )


def _activity(message: GetActivity, lead: Lead, opening: RingOpening | None) -> RingActivity:
    ring, engine = lead.ring, lead.ring.engine
    is_known = message.known_ring == ring.name
    steps = engine.log.after(message.after_step if is_known else 0)
    return RingActivity(
        request=message.request,
        ring=ring.name,
        is_broken=not lead.stands,
        is_recovering=lead.is_recovering,
        age_us=engine.age_us,
        load=engine.counters,
        plan=None if is_known else lead.plan.reply(0),
        opening=opening,
        requests=engine.requests[:MAX_REQUESTS_SEEN],
        steps=steps[-MAX_STEPS_SEEN:],
    )


def _recovery(record: RecoveryRecord) -> RecoveryReport:
    fields = {name: getattr(record, name) for name in RecoveryReport.__struct_fields__}
    seen = RecoveryReport(**fields)
    return replace(seen, why=explanation(record.why), error=explanation(record.error))
