"""A ring that this node leads, or will, and requests in lockstep that wait for their set."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Final, TypeVar

from msgspec.structs import replace

from shardnet.cluster.head.ring_builder import RingBuilder
from shardnet.cluster.member.refusals import generating_with
from shardnet.cluster.member.stage_host import StageHost
from shardnet.cluster.peers.control_link import ControlLink
from shardnet.cluster.planning.plan import Plan
from shardnet.cluster.planning.planning import Elsewhere
from shardnet.cluster.planning.ring_dtypes import settle_wires
from shardnet.cluster.ring.ring import OnStageProgress, Ring, give_up
from shardnet.errors import BusyError, PeerFailedError, ShardnetError, TakenError
from shardnet.tokenizers.grammar.grammars import Grammars
from shardnet.tokenizers.tokenizer import Tokenizer, no_tokenizer
from shardnet.transport.loop import finish
from shardnet.types import Epoch, NodeId, parse_wires
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
            told = self.plan.stand_by(self.ring.epoch)
            if self.instead is not None:  # its clients still name that one
                told = replace(told, choice=self.instead)
            self._told = self.plan, self.ring, told
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


T = TypeVar("T")

OTHERS_S: Final = 60.0
"""How long building one ring waits for other heads, over all its nodes."""
ASK_EVERY_S: Final = 0.5


@dataclass(eq=False, repr=False)
class BusyBackoff:
    """Backoff for one ring that is being built. `is_vain` says that waiting is pointless."""

    is_vain: Callable[[], bool]
    _: KW_ONLY
    now_s: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    def __post_init__(self) -> None:
        self._ends_s: float | None = None

    async def wait(self, error: BusyError) -> None:
        """Wait before the node that answered `error` is asked again.

        A node that was generating when it was first asked is not waited for; one that was loading
        is, and the generation that follows. Raises `error` if waiting is pointless, and once
        OTHERS_S have passed, which the message says.
        """
        if self._ends_s is None:
            if not isinstance(error, TakenError):
                raise error
            self._ends_s = self.now_s() + OTHERS_S
        if self.is_vain():
            raise error
        if self.now_s() >= self._ends_s:
            waited = f"{error.message} (this head has waited {OTHERS_S:.0f} s)"
            raise type(error)(waited, remedy=error.remedy)
        await self.sleep(ASK_EVERY_S)


@dataclass(kw_only=True, eq=False, repr=False)
class LedRing:
    """At most one ring. `lead` is the one that was built last and not unloaded, broken or not.

    For `on_broken` see Head.
    """

    node: NodeId
    host: StageHost
    builder: RingBuilder
    on_broken: Callable[[Lead], bool]

    def __post_init__(self) -> None:
        self.lock = asyncio.Lock()
        """Held by who builds or unloads a ring."""
        self.lead: Lead | None = None
        self.epoch = 0
        """That of the ring that was begun last."""
        self.building: Ring | None = None
        """The ring that is being built."""
        self._vain: list[Ring] = []
        """Rings that were to replace one and could not be built; nodes may hold stages of them."""
        self._openings: list[Opening] = []

    @property
    def opening(self) -> Opening | None:
        """What is done now to have a ring for a request; the latest, while one is downloaded."""
        return self._openings[-1] if self._openings else None

    @property
    def is_in_use(self) -> bool:
        """Whether requests wait or run on the ring that this node leads."""
        return self.lead is not None and self.lead.stands and self.lead.ring.is_in_use

    def check_idle(self) -> None:
        """Raise BusyError, which names the model, while requests run on this node's ring."""
        if self.lead is not None and self.is_in_use:
            raise generating_with(self.lead.plan.choice.model)

    @contextlib.contextmanager
    def opened(self, model: str, on_progress: OnStageProgress) -> Iterator[OnStageProgress]:
        """Keep the progress within the context; yield what takes it, for `on_progress` too."""
        opening = Opening(model=model, began_s=time.monotonic())
        self._openings.append(opening)

        def take(rank: int, phase: Phase, done: int, total: int) -> None:
            opening.take(rank, phase, done, total)
            on_progress(rank, phase, done, total)

        try:
            yield take
        finally:
            self._openings.remove(opening)

    def elsewhere_with(self, choice: ModelChoice) -> Elsewhere | None:
        """Return another head whose ring with this node, built or being built, has the model."""
        elsewhere = self.other_head()
        is_same = elsewhere is not None and elsewhere.model == choice.model
        return elsewhere if is_same and not choice.nodes else None

    def other_head(self) -> Elsewhere | None:
        """Return the head of the ring that this node is a member of, None if that is itself."""
        membership = self.host.membership
        if membership is None or membership.owner == self.node or membership.is_over:
            return None
        return Elsewhere(address=membership.addresses[0], model=membership.model)

    async def build(
        self,
        plan: Plan,
        tokenizer_for: str,
        on_progress: OnStageProgress,
        on_loaded: Callable[[float], None],
        on_ring: Callable[[Ring], None],
        instead_of: str = "",
    ) -> Lead:
        """Prepare the new ring, free the old one, and build the new one.

        It comes `instead_of` that of another head, "" for none.

        Nodes with which another head builds a ring are waited for, unless that ring would do.
        `on_ring` takes the ring before it is built.
        """
        prepared = await self.builder.prepare(plan)
        if tokenizer_for and prepared.tokenizer is None:
            raise no_tokenizer(plan.facts.path, tokenizer_for)
        try:
            self.check_idle()  # again: who asked for the ring that stands did not wait for this
            if self.lead is not None:
                await self.unload({node.address for node in plan.ring_nodes})
            self.epoch += 1
            backoff = BusyBackoff(lambda: self.elsewhere_with(plan.choice) is not None)
            ring = self.building = prepared.ring(Epoch(self.epoch), backoff.wait)
            ring.instead_of = instead_of
            on_ring(ring)
            on_loaded(await ring.build(on_progress))
        except BaseException:
            await _close(prepared.tokenizer)
            raise
        finally:
            self.building = None
        lead = self.lead = Lead(
            plan=plan,
            ring=ring,
            tokenizer=prepared.tokenizer,
            eos_ids=prepared.eos_ids,
            grammars=None
            if prepared.tokenizer is None
            else Grammars(
                prepared.tokenizer.table,
                n_ids=ring.spec.config.vocab_size,
                eos_ids=prepared.eos_ids,
                turn_ends=prepared.tokenizer.turn_ends,
            ),
        )
        self._watch(lead)
        return lead

    @contextlib.asynccontextmanager
    async def changing(self, lead: Lead) -> AsyncIterator[None]:
        """Keep others from building or unloading rings within the context.

        Raises PeerFailedError if `lead` has ended meanwhile.
        """
        async with self.lock:
            if self.lead is not lead:
                raise PeerFailedError("the ring was unloaded")
            yield

    async def ring_instead(self, lead: Lead, plan: Plan) -> Ring:
        """Prepare the ring of `plan`, to which the requests of `lead` are to go over.

        It is not built. Must be called within `changing`. Raises what preparing raises, and as
        `unless_lost` while the ring of `lead` works.
        """
        preparing = self.builder.prepare(plan, with_tokenizer=False)
        works = lead.ring.broken is None
        prepared = await (unless_lost(lead.ring, preparing) if works else preparing)
        self.epoch += 1
        return prepared.ring(Epoch(self.epoch), give_up, lead.ring)

    async def put_instead(
        self, lead: Lead, plan: Plan, ring: Ring, on_progress: OnStageProgress = lambda *_: None
    ) -> None:
        """Build a ring that `ring_instead` has prepared; the requests of `lead` go over to it.

        Must be called within `changing`. Raises what building raises; then the lead is as it was.
        """
        self.building = ring
        with self.opened(plan.choice.model, on_progress) as told:
            try:
                await ring.build(told)
            except BaseException:
                self._vain.append(ring)
                raise
            finally:
                self.building = None
        lead.plan, lead.ring = plan, ring
        self._watch(lead)

    def take_vain(self) -> list[Ring]:
        """Return the rings that were not built to their end, whose stages the caller frees."""
        vain, self._vain = self._vain, []
        return vain

    def _watch(self, lead: Lead) -> None:
        """Have `on_broken` called when the ring of a lead breaks."""
        lead.ring.on_broken = lambda ring: lead.ring is ring and self.on_broken(lead)

    async def unload(self, keep: Collection[str] = ()) -> None:
        """End the ring; free it, and those that could not replace it, but at nodes of `keep`."""
        if self.lead is not None:
            await self.lead.ring.unload(keep=keep)
        await asyncio.gather(*(ring.release(keep) for ring in self.take_vain()))
        await self.forget()

    async def forget(self) -> None:
        """Drop the ring, which has ended, and end the processes of its tokenizer."""
        lead, self.lead = self.lead, None
        if lead is not None:
            await _close(lead.tokenizer, lead.grammars)


async def unless_lost(
    ring: Ring, work: Coroutine[Any, Any, T], is_needed: Callable[[], bool] = lambda: True
) -> T:
    """Do work for which a ring must go on. Raises PeerFailedError, at once, when it is lost.

    Then another ring has to be built if it `is_needed`, and that must not wait until nodes have
    answered or loaded stages for this one. Else the work goes on.
    """
    working = asyncio.ensure_future(work)
    broken = asyncio.ensure_future(ring.wait_until_broken())
    try:
        await asyncio.wait({working, broken}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done() and is_needed():
            raise PeerFailedError("the ring was lost before it could be replaced")
        await asyncio.wait({working})
        return working.result()
    finally:
        for one in (working, broken):
            one.cancel()
        await finish(asyncio.wait({working, broken}))
        if not working.cancelled():
            working.exception()  # it is raised above, or what lost the ring is


async def _close(*parts: Tokenizer | Grammars | None) -> None:
    """End the processes of these, off the loop."""
    for part in parts:
        if part is not None:
            await finish(asyncio.to_thread(part.close))
