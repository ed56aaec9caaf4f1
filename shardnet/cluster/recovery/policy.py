"""What to do when a ring is lost, and when nodes come or come back, in a better ring. Pure.

Knows what attempts have come to so far, which nodes are here, since when, and how often each was
lost. Must not know time, plans, links or how a ring is built.
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
AWAIT_S: Final = 1.0
"""The same while a node is expected back."""
MOST_IN_VAIN: Final = 3
IN_VAIN_S: Final = 30.0
"""How many rings may be lost one after the other before any request has made a token on them, and
how long that may go on: what they have in common, a request or the model, ends the next one too."""
STUCK_S: Final = 120.0
"""How long a node whose stage hung or computed wrong is left out; twice as long each time."""
APART_S: Final = 10.0
"""The same for one that another node of the ring cannot reach, though this one can."""
LONGEST_S: Final = 3600.0


SETTLE_S: Final = 3.0
"""How long a node must be here before it is used, also after its first loss; twice as long after
each further one."""
LONGEST_SETTLE_S: Final = 600.0
FORGIVEN_S: Final = 1800.0
"""A node that was here for so long is taken for one that was never lost."""
GAIN_BETWEEN: Final = 1.05
"""How much faster a ring must be to replace one that nobody uses."""
GAIN_AT_ONCE: Final = 1.2
"""The same where requests run, which stand still meanwhile."""


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
    _awaited_until_s: float = 0.0

    def await_node(self, until_s: float) -> None:
        """Try again until then where the nodes that are there cannot do it: one comes back."""
        self._awaited_until_s = until_s

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
            if now_s < self._awaited_until_s:
                return Attempt(after_s=AWAIT_S, without=self.left_out(now_s + AWAIT_S))
            absences = [*self._apart.values(), *self._wrong.values()]
            if not self._refusing and not any(now_s < one.until_s for one in absences):
                return GiveUp(error=error)
            self._refusing.clear()  # they may be free by then
            for absence in absences:
                absence.until_s = now_s
        if self._n_attempts >= len(DELAYS_S):
            self._forget()  # the ring is opened again with who comes back
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


@dataclass(slots=True, kw_only=True)
class Returns:
    """The nodes beside this one. All moments are of one clock, in seconds."""

    _since_s: dict[NodeId, float] = field(default_factory=dict)
    _n_lost: dict[NodeId, int] = field(default_factory=dict)
    _told: set[NodeId] = field(default_factory=set)

    def look(self, now_s: float, here: Collection[NodeId], asleep: Collection[str] = ()) -> None:
        """Take which nodes are here now; those `asleep` have not been lost."""
        for node in [*self._since_s]:
            if node not in here:
                been_s = now_s - self._since_s.pop(node)
                self._told.discard(node)
                if node not in asleep:
                    n_lost = 0 if been_s >= FORGIVEN_S else self._n_lost.get(node, 0)
                    self._n_lost[node] = n_lost + 1
        for node in here:
            self._since_s.setdefault(node, now_s)

    def settle_s(self, node: NodeId) -> float:
        """Return how long a node must be here before it is used."""
        doubled = min(max(self._n_lost.get(node, 0) - 1, 0), 16)
        return float(min(LONGEST_SETTLE_S, SETTLE_S * 2**doubled))

    def unsettled(self, now_s: float) -> set[NodeId]:
        """Return the nodes that are here and not for long enough."""
        return {
            node for node, since_s in self._since_s.items() if now_s < since_s + self.settle_s(node)
        }

    def is_news(self, now_s: float, used: Collection[NodeId]) -> bool:
        """Say whether nodes have settled that no plan has seen, beside those that are used."""
        settled = self._since_s.keys() - self.unsettled(now_s)
        return bool(settled - self._told - set(used))

    def planned(self, now_s: float, unheard: Collection[str] = ()) -> None:
        """Note that a plan has seen the nodes that have settled, but for those `unheard`."""
        self._told |= self._since_s.keys() - self.unsettled(now_s) - {*unheard}


def is_better(
    now_tok_s: float | None, next_tok_s: float | None, *, is_complete: bool, is_used: bool
) -> bool:
    """Say whether a planned ring should replace the present one.

    `is_complete` says that it has all nodes that a client named, and the present one has not: that
    is reason enough between requests. Rings whose speed was not predicted are no better.
    """
    if now_tok_s and next_tok_s:
        gain = next_tok_s / now_tok_s
        if gain >= (GAIN_AT_ONCE if is_used else GAIN_BETWEEN):
            return True
    return is_complete and not is_used
