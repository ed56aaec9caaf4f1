"""Which node leads the household: tells peers what is led here, and hears what is led elsewhere.

Knows of one other leader, and when this node takes its place. Must not know rings, nor what leading
a model takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from shardnet.cluster.peers.control_link import ControlLink
from shardnet.cluster.peers.peer_links import PeerLinks
from shardnet.errors import LinkError
from shardnet.types import NodeId
from shardnet.wire.messages.handshake import Capability
from shardnet.wire.messages.household import HouseholdLed, LedModel

SUCCEED_S: Final = 5.0
"""How long a leader may be gone before the first of its peers leads in its place. Each next one
waits as long again."""
_NOTHING: Final = HouseholdLed(term=0, models=[])


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader:
    """Another node that leads: who it is, and what it has said last."""

    node: NodeId
    name: str
    told: HouseholdLed


@dataclass(kw_only=True, eq=False, repr=False)
class Leadership:
    """Decides who leads. `own` lists what this `node` does.

    `lead` takes models whose leader is gone, `give_up` is called where another node leads in place
    of this one, `named` with a leader's models whenever it says which there are.
    """

    node: NodeId
    links: PeerLinks
    own: Callable[[], list[LedModel]]
    lead: Callable[[Sequence[LedModel]], None]
    give_up: Callable[[Leader], None]
    named: Callable[[Sequence[LedModel]], None]
    log: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    other: Leader | None = None
    """Who leads, None while this node does, or none."""
    _term: int = 0
    _here_s: float = 0.0
    """When the other leader was seen last."""
    _said: HouseholdLed = _NOTHING
    _told: dict[ControlLink, HouseholdLed] = field(default_factory=dict)

    @property
    def is_gone(self) -> bool:
        """Whether the other leader is not linked any more."""
        return self.other is not None and self.links.link_of(self.other.node) is None

    @property
    def link(self) -> ControlLink:
        """The link to the other leader. Raises LinkError if there is none."""
        link = self.links.link_of(self.other.node) if self.other is not None else None
        if link is None:
            raise LinkError(f"{self.other.name if self.other else 'a node'} led the household")
        return link

    async def take(self, control: ControlLink, message: HouseholdLed) -> None:
        """Take what a peer says that it leads, unless it is about to hear that it does not."""
        peer, other, own = control.link.peer, self.other, self.own()
        claim = (message.term, peer.node)
        if other is not None and peer.node == other.node:
            if not message.models:
                self.other = None
                self.named(())
                return
        else:
            rival = (self._term, self.node) if own else (0, "")
            if other is not None and not self.is_gone:
                rival = (other.told.term, other.node)
            if not message.models or claim < rival:
                return
        self._here_s = self.clock()
        self.other = Leader(node=NodeId(peer.node), name=peer.name, told=message)
        if own:
            self.log(f"{peer.name} leads the household in place of this node")
            self.give_up(self.other)
        else:
            self.named(message.models)

    def look(self) -> None:
        """Tell peers what they do not know yet; lead in place of a node that is gone for long."""
        self._succeed()
        if self.other is not None:
            self._told = {}
            return
        said = HouseholdLed(term=self._term, models=self.own())
        if said != self._said:
            self._said = said
            self.named(said.models)
        told: dict[ControlLink, HouseholdLed] = {}
        for control in self._able():
            if said.models != self._told.get(control, _NOTHING).models:
                control.tell(said)
            told[control] = said
        self._told = told

    def _succeed(self) -> None:
        if self.other is None or not self.is_gone:
            self._here_s = self.clock()
            return
        before = sum(control.link.peer.node < self.node for control in self._able())
        if self.clock() - self._here_s > SUCCEED_S * (1 + before):
            self.log(f"{self.other.name} led the household and is gone: this node leads it")
            models, self._term = self.other.told.models, self.other.told.term + 1
            self.other = None
            self.lead(models)

    def _able(self) -> list[ControlLink]:
        """List the links to nodes that take part in households."""
        linked = self.links.linked()
        return [one for one in linked if not one.link.peer.lacking(Capability.HOUSEHOLD)]
