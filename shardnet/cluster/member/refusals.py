"""What a node refuses: while it drains, rests or leaves, and while others use it."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardnet.cluster.member.ring_membership import RingMembership
from shardnet.errors import BusyError, PeerFailedError, SupersededError, TakenError

MAX_SUPERSEDED = 64
"""Former heads that are remembered."""


@dataclass(slots=True, kw_only=True)
class Refusals:
    """Whose orders `node` refuses. Its own it takes while it drains."""

    node: str
    is_draining: bool = False
    """Whether this node takes no more stages of other heads."""
    rests: str = ""
    """Why this node takes no stages now, "" while it does."""
    is_closing: bool = False
    _superseded: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Former heads, with the epochs and heads of the rings that took the place of theirs."""

    def supersede(self, former: str, epoch: int, owner: str) -> None:
        """Note that a ring of `owner`, of this epoch, took the place of those of a former head."""
        self._superseded.pop(former, None)
        self._superseded[former] = epoch, owner
        if len(self._superseded) > MAX_SUPERSEDED:
            del self._superseded[next(iter(self._superseded))]

    def head_lost(self, owner: str) -> None:
        """Note that a head is lost: whoever it took the place of may lead again.

        It may not have said so to them, and nobody else will.
        """
        kept = {node: by for node, by in self._superseded.items() if by[1] != owner}
        self._superseded = kept

    def check_not_superseded(
        self, owner: str, epoch: int, membership: RingMembership | None
    ) -> None:
        """Raise SupersededError for an order of a head from before another took its place.

        That one has to lead here still: it may have given up before it told the former head.
        """
        first, successor = self._superseded.get(owner, (0, ""))
        if epoch < first and membership is not None and membership.owner == successor:
            raise SupersededError(
                "another node leads this ring since its head was lost", remedy="ask again"
            )

    def check_not_draining(self, owner: str, membership: RingMembership | None) -> None:
        """Raise PeerFailedError while this node takes no stages of `owner`.

        The head of the ring that it is a member of may need it in the next one: until somebody
        else has its layers, a node that leaves is as good as any.
        """
        if membership is not None and membership.owner == owner:
            return
        if self.is_draining and owner != self.node:
            raise draining()
        if self.rests:
            raise resting(self.rests)

    def check_not_closing(self) -> None:
        """Raise PeerFailedError once this node leaves."""
        if self.is_closing:
            raise leaving()


def refuse_if_busy(membership: RingMembership | None, owner: str) -> None:
    """Raise BusyError while sequences of another head than `owner` are open."""
    if membership is not None and membership.is_busy and membership.owner != owner:
        raise generating_with(membership.model)


def refuse_others(membership: RingMembership | None, owner: str) -> None:
    """Raise as `refuse_if_busy`, and TakenError while another head builds a ring here."""
    refuse_if_busy(membership, owner)
    if membership is not None and membership.is_forming and membership.owner != owner:
        raise TakenError(
            f"this node is loading {membership.model} for {membership.owner_name}",
            remedy="wait until that ends, or stop the command that asked for it",
        )


def generating_with(model: str) -> BusyError:
    """Make the BusyError of a node that is generating with `model`."""
    return BusyError(
        f"this node is generating with {model}", remedy="wait until that ends, or stop it"
    )


def draining() -> PeerFailedError:
    """Make the error of a node that takes nothing more."""
    return PeerFailedError("this node is draining, and ends soon", remedy="ask another node")


def resting(why: str) -> PeerFailedError:
    """Make the error of a node that takes nothing now."""
    return PeerFailedError(f"this node takes part in no ring now: {why}", remedy="ask another node")


def leaving() -> PeerFailedError:
    """Make the error of a node that leaves."""
    return PeerFailedError("this node is leaving", remedy="start it again, or ask without it")
