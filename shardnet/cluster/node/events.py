"""What the parts of a node that are built first report to those that are built last.

Knows which events there are. Must not know what becomes of them.
"""

from __future__ import annotations

from typing import Protocol

from shardnet.cluster.head.lead import Lead
from shardnet.cluster.peers.control_link import ControlLink, Incoming
from shardnet.errors import ShardnetError
from shardnet.types import NodeId


class NodeListener(Protocol):
    """What takes the events of a node."""

    def addresses_changed(self) -> None:
        """Take note that this node's own addresses have changed."""

    def heartbeat_progress(self) -> tuple[int, int]:
        """Return (epoch, last completed step) for a heartbeat."""

    def rests(self) -> str:
        """Return why this node takes no layers now, "" while it does."""

    async def message_received(self, control: ControlLink, message: Incoming) -> None:
        """Handle one control message."""

    def ring_broken(self, ring: str, error: ShardnetError, silent: NodeId | None) -> None:
        """Take note that this node's own stage has left a ring that this node leads."""

    def lead_broken(self, lead: Lead) -> bool:
        """Take note that a ring that this node leads broke; return whether it is replaced."""


class NodeEvents:
    """Passes events on to the listener. Made before all parts of a node.

    Nothing happens in a node before it is complete, so no event comes before `listener` is set.
    """

    def __init__(self) -> None:
        self._listener: NodeListener | None = None

    def connect(self, listener: NodeListener) -> None:
        """Pass all events on to `listener`."""
        self._listener = listener

    @property
    def listener(self) -> NodeListener:
        """What takes the events. Must have been connected."""
        assert self._listener is not None, "an event came before the node was complete"
        return self._listener

    def addresses_changed(self) -> None:
        """Report that this node's own addresses have changed."""
        self.listener.addresses_changed()

    def heartbeat_progress(self) -> tuple[int, int]:
        """Report that a heartbeat is due. Returns (epoch, last completed step)."""
        return self.listener.heartbeat_progress()

    def rests(self) -> str:
        """Ask why this node takes no layers now. Returns "" while it does."""
        return self.listener.rests()

    async def message_received(self, control: ControlLink, message: Incoming) -> None:
        """Report a control message. Raises what its handler raises."""
        await self.listener.message_received(control, message)

    def ring_broken(self, ring: str, error: ShardnetError, silent: NodeId | None) -> None:
        """Report that this node's own stage has left a ring that this node leads."""
        self.listener.ring_broken(ring, error, silent)

    def lead_broken(self, lead: Lead) -> bool:
        """Report that a ring that this node leads broke. Returns whether it is replaced."""
        return self.listener.lead_broken(lead)
