"""A ring that this node leads, or will, and requests in lockstep that wait for their set."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from shardnet.cluster.peers.control_link import ControlLink
from shardnet.cluster.planning.plan import Plan
from shardnet.cluster.planning.ring_dtypes import settle_wires
from shardnet.cluster.ring.ring import Ring
from shardnet.errors import ShardnetError
from shardnet.tokenizers.grammar.grammars import Grammars
from shardnet.tokenizers.tokenizer import Tokenizer
from shardnet.types import NodeId, parse_wires
from shardnet.wire.framing.schema import Phase
from shardnet.wire.messages.deputies import StandBy
from shardnet.wire.messages.generation import Generate
from shardnet.wire.messages.plans import ModelChoice


@dataclass(slots=True, kw_only=True, eq=False)
class Lead:
    """A ring that this node leads, its plan, and the tokenizer if the checkpoint has one, with
    what constrains its output.

    Plan and ring change when another ring replaces this one; `opened` is the plan of the first.
    """

    plan: Plan
    ring: Ring
    tokenizer: Tokenizer | None
    eos_ids: tuple[int, ...]
    grammars: Grammars | None = None
    is_recovering: bool = False
    """Whether the ring is broken, or given up, for another one that is being built."""
    is_replacing: bool = False
    """Whether the stages of another ring are made ready while this one goes on."""
    is_given_up: bool = False
    """Whether the ring is broken and no other could be built: the nodes there cannot do it."""
    avoided: dict[NodeId, ShardnetError] = field(default_factory=dict)
    """Nodes that are there, and to which another node could open no link; with what came of it."""
    instead: ModelChoice | None = None
    """What the lost head was asked for in whose place this ring is."""
    opened: Plan = field(init=False)
    _told: tuple[Plan, Ring, StandBy] | None = None

    def __post_init__(self) -> None:
        self.opened = self.plan

    @property
    def stands(self) -> bool:
        """Whether requests can be given to its engine: they run, or wait for the next ring."""
        return self.is_recovering or self.ring.broken is None

    @property
    def told(self) -> StandBy:
        """What the deputy needs to know of plan and ring; the same object while they are."""
        if self._told is None or self._told[0] is not self.plan or self._told[1] is not self.ring:
            self._told = self.plan, self.ring, self.plan.stand_by(self.ring.epoch)
        return self._told[2]

    def suits(self, choice: ModelChoice) -> bool:
        """Say whether the ring is what `choice` asks for.

        A client that names no nodes takes any ring with its model; the absence of a wire dtype
        means lossless. Who names nodes or layers with a head that is lost means the ring in its
        place.
        """
        plan, had = self.plan, self.plan.choice
        lost = self.instead or had
        return (
            plan.computes(choice)
            and (not choice.nodes or choice.nodes in (had.nodes, lost.nodes))
            and (not choice.layers or choice.layers in (had.layers, lost.layers))
            and choice.stream_layers in (0, "auto", had.stream_layers)
            and plan.wires
            == settle_wires(choice.wire_dtype, plan.dtype, plan.nodes, plan.measured.links)
            and parse_wires(choice.wire_dtype).gather == plan.gather_dtype
        )


@dataclass(slots=True, kw_only=True)
class Opening:
    """A ring that is looked for or built for a request, and how far each rank is with that.

    `progress` has phase, bytes done and bytes in all; with the phase `measuring` counts of nodes
    and links. `began_s` is monotonic.
    """

    model: str
    began_s: float
    progress: dict[int, tuple[Phase, int, int]] = field(default_factory=dict)

    def take(self, rank: int, phase: Phase, done: int, total: int) -> None:
        """Take progress. What was measured is over when something else begins."""
        if "measuring" in (phase, *(known for known, _, _ in self.progress.values())):
            self.progress.clear()
        self.progress[rank] = (phase, done, total)


PATIENCE_S: Final = 5.0
"""How long the ready requests of a set wait for one more of it, before they begin without."""


@dataclass(slots=True, kw_only=True)
class _Set:
    size: int
    n_here: int = 0
    n_settled: int = 0
    """How many are ready, or have ended before."""
    waiting: dict[int, asyncio.Future[None]] = field(default_factory=dict)
    """The ready ones by the number of their request."""
    is_begun: bool = False

    def settle(self) -> None:
        """Note that one more need not be waited for."""
        self.n_settled += 1
        if self.n_settled >= self.size:  # the last one is about to wait like the others
            asyncio.get_running_loop().call_soon(self.begin)

    def begin(self) -> None:
        """Let all that are ready begin, in the order in which they were sent."""
        self.is_begun = True
        for number in sorted(self.waiting):
            if not self.waiting[number].done():
                self.waiting[number].set_result(None)


@dataclass(slots=True, kw_only=True)
class Member:
    """One request of a set, of none where it is None."""

    number: int
    of: _Set | None
    is_settled: bool = False

    @property
    def waits(self) -> bool:
        """Whether it has others to wait for."""
        return self.of is not None and not self.of.is_begun

    async def begin(self) -> None:
        """Wait until every other of the set is ready too, or gone; PATIENCE_S for each at most.

        Those that wait go on in one turn of the event loop, in the order in which they were sent.
        """
        one = self.of
        if one is None or not self.waits:
            return
        begun = one.waiting[self.number] = asyncio.get_running_loop().create_future()
        self.is_settled = True
        one.settle()
        while not begun.done():
            n_settled = one.n_settled
            await asyncio.wait([begun], timeout=PATIENCE_S)
            if n_settled == one.n_settled and not begun.done():
                one.begin()


class LockstepSets:
    """The sets of all clients. A client numbers its own."""

    def __init__(self) -> None:
        self._sets: dict[tuple[ControlLink, int], _Set] = {}

    @contextlib.contextmanager
    def member(self, control: ControlLink, message: Generate) -> Iterator[Member]:
        """Count a request to its set within the context; one that leaves is waited for no more."""
        if not message.lockstep or message.lockstep_size < 2:
            yield Member(number=message.request, of=None)
            return
        key = (control, message.lockstep_set)
        one = self._sets.setdefault(key, _Set(size=message.lockstep_size))
        one.n_here += 1
        member = Member(number=message.request, of=one)
        try:
            yield member
        finally:
            one.n_here -= 1
            one.waiting.pop(member.number, None)
            if not member.is_settled:
                one.settle()
            if not one.n_here:
                del self._sets[key]
