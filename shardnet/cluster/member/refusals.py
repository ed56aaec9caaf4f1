"""What a node refuses: while it drains, rests or leaves, while others use it, and unfit orders.

Knows what a node can tell from an order of a head alone. That the model has the layers and the
context is checked when its files are open (runtime/loading/loading.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shardnet.cluster.member.ring_membership import RingMembership
from shardnet.errors import BusyError, PeerFailedError, SupersededError, TakenError, UsageError
from shardnet.model.shards.cut import MAX_SHARDS
from shardnet.types import LayerRange, remember
from shardnet.wire.messages.stages import LoadStage

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
        remember(self._superseded, former, (epoch, owner), MAX_SUPERSEDED)

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


def check_threads(threads: int, most: int) -> None:
    """Raise UsageError for an order of more threads than `most`."""
    if threads > most:
        raise UsageError(
            f"{threads} threads were ordered, and this node may use {most}",
            remedy="lower --threads, or leave it out",
        )


def check_load_order(
    order: LoadStage, most_threads: int, n_devices: int = 1, *, is_own: bool = True
) -> None:
    """Raise UsageError for a stage that cannot be a part of any ring, or not on this node.

    The node has `n_devices` and may compute with `most_threads` threads. Where the order `is_own`
    it leads the ring.
    """
    check_threads(order.threads, most_threads)
    n_layers = len(LayerRange(*order.layers))
    first_layer, _ = order.layers
    n_nodes = len(order.shard_nodes) or 1
    faults = {
        "its ring has no name": not order.ring,
        f"rank {order.rank} of {order.n_stages} stages": order.rank >= order.n_stages,
        # A ring of one would be linked to itself, and never end.
        "its first stage is not its head's": not (order.rank or order.shard or is_own),
        f"{len(order.addresses)} addresses for {order.n_stages} stages": (
            len(order.addresses) != order.n_stages
        ),
        f"layer {first_layer} is the first one of rank {order.rank}": (
            (first_layer == 0) != (order.rank == 0)
        ),
        f"{order.n_streamed} of {n_layers} layers are to be streamed": (
            order.n_streamed > n_layers
        ),
        "a context of 0 positions": order.form.context == 0,
        "its parts are not its layers": order.parts != [] and not _covers(order),
        "layers of more than one device are to be streamed": (
            order.n_streamed > 0 and len(order.parts) > 1
        ),
        f"shard {order.shard} of {n_nodes} nodes": order.shard >= n_nodes,
        f"it spans {len(order.shard_nodes)} nodes": (
            len(order.shard_nodes) == 1 or len(order.shard_nodes) > MAX_SHARDS
        ),
        f"{len(order.shares)} shares of {n_nodes} nodes": (
            order.shares != [] and len(order.shares) != len(order.shard_nodes)
        ),
        "its adapters have parts for other layers": any(
            not first_layer <= part.layer < order.layers[1]
            for adapter in order.adapters
            for part in adapter.layers
        ),
        "it spans several nodes and is streamed": n_nodes > 1 and order.n_streamed > 0,
    }
    for fault, holds in faults.items():
        if holds:
            raise UsageError(f"a stage was ordered that no ring has: {fault}")
    named = [place for part in order.parts for place in part.devices]
    if len(set(named)) < len(named) or any(place >= n_devices for place in named):
        raise UsageError(
            f"parts of a stage were ordered for the devices {named}, and this node has {n_devices}",
            remedy="ask again: the node was started anew with others",
        )


def _covers(order: LoadStage) -> bool:
    """Say whether the parts of a stage follow each other from its first layer to its last."""
    at, end = order.layers
    for part in order.parts:
        if part.layers[0] != at or part.layers[1] <= at or not part.devices:
            return False
        at = part.layers[1]
    return at == end
