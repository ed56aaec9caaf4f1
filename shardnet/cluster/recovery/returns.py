"""When nodes that came, or came back, are used, and what a better ring must gain. Pure.

Knows which nodes are here, since when, and how often each was lost. Must not know time, plans or
links.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from shardnet.types import NodeId

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


@dataclass(slots=True, kw_only=True)
class Returns:
    """The nodes beside this one. All moments are of one clock, in seconds."""

    _since_s: dict[NodeId, float] = field(default_factory=dict)
    _n_lost: dict[NodeId, int] = field(default_factory=dict)
    _told: set[NodeId] = field(default_factory=set)

    def look(self, now_s: float, here: Collection[NodeId]) -> None:
        """Take which nodes are here now."""
        for node in [*self._since_s]:
            if node not in here:
                been_s = now_s - self._since_s.pop(node)
                n_lost = 0 if been_s >= FORGIVEN_S else self._n_lost.get(node, 0)
                self._n_lost[node] = n_lost + 1
                self._told.discard(node)
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

    def planned(self, now_s: float) -> None:
        """Note that a plan has seen the nodes that have settled."""
        self._told |= self._since_s.keys() - self.unsettled(now_s)


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
