"""What to do when a ring is lost: try again, when, without whom; or give it up. Pure.

Knows what attempts have come to so far. Must not know time, plans, links or how a ring is built.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from shardnet.errors import PeerSilentError, PeerUnreachableError, PlanError, ShardnetError
from shardnet.types import NodeId

DELAYS_S: Final = (0.0, 0.0, 0.1, 0.5, 1.0, 2.0, 4.0)
"""How long to wait before each attempt to build another ring; there are no more attempts."""
MOST_IN_VAIN: Final = 3
"""Rings that may be lost one after the other before any request has made a token on them: what
they have in common, a request or the model, is likely to end the next one too."""
STUCK_S: Final = 120.0
"""How long a node whose stage hung is left out; twice as long each time."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """What a node has to do with the end of a ring, or of an attempt to build one.

    refused: it did not do what was asked of it, or was lost. stuck: it answers, and its stage does
    not compute. unreached: another node could not open a link to it, maybe just now, or heard
    nothing of it any more.
    """

    node: NodeId
    error: ShardnetError
    kind: Literal["refused", "stuck", "unreached"] = "refused"


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
    _stuck: dict[NodeId, _Absence] = field(default_factory=dict)
    _apart: dict[NodeId, _Absence] = field(default_factory=dict)
    _refusing: dict[NodeId, str] = field(default_factory=dict)
    _unreached: set[NodeId] = field(default_factory=set)

    def broke(self, now_s: float, error: ShardnetError, blamed: Collection[Blame]) -> Decision:
        """Handle the loss of a ring that was built."""
        self._n_in_vain += 1
        self._n_attempts = 0
        self._forget()
        self._note(now_s, blamed)
        if self._n_in_vain > MOST_IN_VAIN:
            return GiveUp(
                error=type(error)(
                    f"{error.message} (and {MOST_IN_VAIN} rings before it were lost without a "
                    "token)",
                    remedy=error.remedy,
                )
            )
        return self._next(now_s)

    def failed(self, now_s: float, error: ShardnetError, blamed: Collection[Blame]) -> Decision:
        """Handle an attempt that has failed. Nodes that refused are left out of the next one."""
        self._note(now_s, blamed)
        for blame in blamed:
            if blame.kind == "refused":
                self._refusing[blame.node] = blame.error.message
        if isinstance(error, PlanError):
            if not self._refusing and not any(now_s < one.until_s for one in self._apart.values()):
                return GiveUp(error=error)
            self._refusing.clear()  # they may be free by then
            for absence in self._apart.values():
                absence.until_s = now_s
        if self._n_attempts >= len(DELAYS_S):
            return GiveUp(error=error)
        return self._next(now_s)

    def went_on(self) -> None:
        """Note that the requests of the lost ring have all made a token on another one."""
        self._n_in_vain = 0
        self._refusing.clear()

    def avoid(self, now_s: float, nodes: Mapping[NodeId, ShardnetError]) -> None:
        """Leave out nodes that others could not reach when the first ring was built."""
        for node, error in nodes.items():
            _leave_out(self._apart, node, now_s, APART_S, error)

    def left_out(self, now_s: float) -> dict[NodeId, str]:
        """Return the nodes that are not to be used now, and why."""
        absent = [*self._apart.items(), *self._stuck.items()]
        return {node: one.why for node, one in absent if now_s < one.until_s} | self._refusing

    def _forget(self) -> None:
        """Forget what the attempts to build one ring have met: another one is built."""
        self._refusing.clear()
        self._unreached.clear()

    def _next(self, now_s: float) -> Attempt:
        after_s = DELAYS_S[self._n_attempts]
        self._n_attempts += 1
        return Attempt(after_s=after_s, without=self.left_out(now_s + after_s))

    def _note(self, now_s: float, blamed: Collection[Blame]) -> None:
        for blame in blamed:
            node, error = blame.node, blame.error
            if blame.kind == "stuck":
                _leave_out(self._stuck, node, now_s, STUCK_S, error)
            elif blame.kind == "unreached":
                is_silent = isinstance(error, PeerSilentError | PeerUnreachableError)
                if is_silent or node in self._unreached:
                    _leave_out(self._apart, node, now_s, APART_S, error)
                self._unreached.add(node)


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
