"""What to do when a ring is lost: try again, when, without whom; or give it up. Pure.

Knows what attempts have come to so far. Must not know time, plans, links or how a ring is built.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from shardnet.errors import (
    DamagedFrameError,
    PeerSilentError,
    PeerUnreachableError,
    PlanError,
    ProtocolError,
    ShardnetError,
)
from shardnet.types import NodeId

DELAYS_S: Final = (0.0, 0.0, 0.1, 0.5, 1.0, 2.0, 4.0)
"""How long to wait before each attempt to build another ring; there are no more attempts. Rings
that are lost one after the other without a token are replaced after these times too."""
MOST_IN_VAIN: Final = 3
IN_VAIN_S: Final = 30.0
"""How many rings may be lost one after the other before any request has made a token on them, and
how long that may go on: what they have in common, a request or the model, ends the next one too."""
STUCK_S: Final = 120.0
"""How long a node whose stage hung or computed wrong is left out; twice as long each time."""
APART_S: Final = 10.0
"""The same for one that another node of the ring cannot reach, though this one can."""
LONGEST_S: Final = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """Build another ring in `after_s` seconds. `without` are the nodes to leave out, and why."""

    after_s: float
    without: Mapping[NodeId, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """End all requests with this error."""

    error: ShardnetError


Decision = Attempt | GiveUp
BlameKind = Literal["refused", "stuck", "wrong", "unreached"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """What a node has to do with the end of a ring, or of an attempt to build one.

    refused: it did not do what was asked of it, or was lost. stuck: it answers, and its stage does
    not compute. wrong: it computed what is no number. unreached: another node could not open a link
    to it, maybe just now, or heard nothing of it any more, or what breaks the protocol.
    """

    node: NodeId
    error: ShardnetError
    kind: BlameKind = "refused"


@dataclass(slots=True, kw_only=True)
class _Absence:
    """A node that is left out for a time: how often it was so far, and until when."""

    n_times: int
    until_s: float
    why: str


@dataclass(slots=True, kw_only=True)
class RecoveryPolicy:
    """Decides for one ring, and for those that replace it. All moments are of one clock, in s."""

    _n_attempts: int = 0
    _n_in_vain: int = 0
    _in_vain_since_s: float = 0.0
    _stuck: dict[NodeId, _Absence] = field(default_factory=dict)
    _wrong: dict[NodeId, _Absence] = field(default_factory=dict)
    _apart: dict[NodeId, _Absence] = field(default_factory=dict)
    _refusing: dict[NodeId, str] = field(default_factory=dict)
    _unreached: set[NodeId] = field(default_factory=set)

    def broke(self, now_s: float, error: ShardnetError, blamed: Collection[Blame]) -> Decision:
        """Handle the loss of a ring that was built."""
        if not self._n_in_vain:
            self._in_vain_since_s = now_s
        self._n_in_vain += 1
        self._n_attempts = 0
        self._forget()
        self._note(now_s, blamed)
        took_s = now_s - self._in_vain_since_s
        if self._n_in_vain > MOST_IN_VAIN and took_s >= IN_VAIN_S:
            return GiveUp(
                error=type(error)(
                    f"{error.message} (and {self._n_in_vain - 1} rings before it, in {took_s:.0f} "
                    "s, were lost without a token)",
                    remedy=error.remedy,
                )
            )
        return self._next(now_s, min(self._n_in_vain, len(DELAYS_S)) - 1)

    def failed(self, now_s: float, error: ShardnetError, blamed: Collection[Blame]) -> Decision:
        """Handle an attempt that has failed. Nodes that refused are left out of the next one."""
        self._note(now_s, blamed)
        for blame in blamed:
            if blame.kind == "refused":
                self._refusing[blame.node] = blame.error.message
        if isinstance(error, PlanError):
            absences = [*self._apart.values(), *self._wrong.values()]
            if not self._refusing and not any(now_s < one.until_s for one in absences):
                return GiveUp(error=error)
            self._refusing.clear()  # they may be free by then
            for absence in absences:
                absence.until_s = now_s
        if self._n_attempts >= len(DELAYS_S):
            return GiveUp(error=error)
        return self._next(now_s, self._n_attempts)

    def went_on(self) -> None:
        """Note that the requests of the lost ring have all made a token on another one."""
        self._n_in_vain = 0
        self._refusing.clear()

    def acquit(self) -> None:
        """Use the nodes again that computed wrong values: others do so too."""
        self._wrong.clear()

    def avoid(self, now_s: float, nodes: Mapping[NodeId, ShardnetError]) -> None:
        """Leave out nodes that others could not reach when the first ring was built."""
        for node, error in nodes.items():
            _leave_out(self._apart, node, now_s, APART_S, error)

    def left_out(self, now_s: float) -> dict[NodeId, str]:
        """Return the nodes that are not to be used now, and why."""
        absent = [*self._apart.items(), *self._wrong.items(), *self._stuck.items()]
        return {node: one.why for node, one in absent if now_s < one.until_s} | self._refusing

    def _forget(self) -> None:
        """Forget what the attempts to build one ring have met: another one is built."""
        self._refusing.clear()
        self._unreached.clear()

    def _next(self, now_s: float, delay: int) -> Attempt:
        after_s = DELAYS_S[delay]
        self._n_attempts += 1
        return Attempt(after_s=after_s, without=self.left_out(now_s + after_s))

    def _note(self, now_s: float, blamed: Collection[Blame]) -> None:
        for blame in blamed:
            node, error = blame.node, blame.error
            if blame.kind == "stuck":
                _leave_out(self._stuck, node, now_s, STUCK_S, error)
            elif blame.kind == "wrong":
                _leave_out(self._wrong, node, now_s, STUCK_S, error)
            elif blame.kind == "unreached":
                if _lasts(error) or node in self._unreached or self._n_in_vain > 1:
                    _leave_out(self._apart, node, now_s, APART_S, error)
                self._unreached.add(node)
            elif self._n_in_vain > 1 and not self._n_attempts:  # it is lost again and again
                _leave_out(self._apart, node, now_s, APART_S, error)


def _lasts(error: ShardnetError) -> bool:
    """Say whether what is wrong with a link is likely to be so on the next one too."""
    if isinstance(error, DamagedFrameError):
        return False
    return isinstance(error, PeerSilentError | PeerUnreachableError | ProtocolError)


def _leave_out(
    absences: dict[NodeId, _Absence],
    node: NodeId,
    now_s: float,
    least_s: float,
    error: ShardnetError,
) -> None:
    """Leave a node out for a time, twice as long as the last."""
    known = absences.get(node)
    n_times = 1 if known is None else known.n_times + 1
    absences[node] = _Absence(
        n_times=n_times,
        until_s=now_s + min(LONGEST_S, least_s * 2 ** (n_times - 1)),
        why=error.message,
    )
