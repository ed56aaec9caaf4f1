"""One of several rings behind this head: kept, watched, taken back when it is whole again.

Knows the conversation with the ring's own head. Must not know how rings are built, nor which ring a
request is given to.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from shardnet.cluster.peers.control_link import REPLY_SILENCE_S, ControlLink, ControlRequest
from shardnet.cluster.planning.plan import Plan
from shardnet.cluster.router.choosing import RecentPrompts, RingView
from shardnet.errors import (
    LinkClosedError,
    PeerFailedError,
    PeerSilentError,
    RemoteProtocolError,
    ShardnetError,
)
from shardnet.runtime.loading.model_facts import check_model_id
from shardnet.transport.deadline import deadline
from shardnet.wire.framing.schema import Numbered
from shardnet.wire.messages.activity import KeepRing, RingKept
from shardnet.wire.messages.control import Failed, Redirect, reported_error
from shardnet.wire.messages.diagnostics import RingBehind, RingLoad
from shardnet.wire.messages.generation import Generate
from shardnet.wire.messages.handshake import explanation
from shardnet.wire.messages.plans import NodeProgress, PlanReply

AGAIN_S: Final = (0.1, 0.5, 1.0, 2.0, 5.0)
"""How long to wait before a ring that was lost is asked for again; the last one ever after."""
BUILDING: Final = "it is being built"

OnProgress = Callable[[NodeProgress], None]
Answers = asyncio.Queue[Numbered | ShardnetError]


@dataclass(eq=False, repr=False)
class KeptRing:
    """A ring that its own head, this node or another one, builds and keeps for this one.

    `reach` gives the control link to that head. `on_changed` is called when it begins to take
    requests, and when it takes none any more.
    """

    plan: Plan
    reach: Callable[[], Awaitable[ControlLink]]
    on_changed: Callable[[KeptRing], None]
    log: Callable[[str], None]

    def __post_init__(self) -> None:
        self._control: ControlLink | None = None
        self._running: set[Answers] = set()
        self.prompts = RecentPrompts()
        self.why = BUILDING
        """Why it takes no requests, "" while it does."""
        self.is_hopeful = True
        """Whether it is being built, or recovers: then it is worth waiting for."""
        self.error: ShardnetError = PeerFailedError(f"the ring of {self.name} is not there yet")
        """What was wrong with it last."""
        self.n_times = 0
        """How often it has begun to take requests."""
        self.n_taken_over = 0
        """Requests that it took over from rings that were lost."""
        self.load: RingLoad | None = None

    @property
    def name(self) -> str:
        """The names of its nodes."""
        return "+".join(node.name for node in self.plan.nodes)

    @property
    def is_whole(self) -> bool:
        """Whether it takes requests."""
        return not self.why

    @property
    def n_requests(self) -> int:
        """Requests that it has."""
        return len(self._running)

    def view(self, prompt: bytes) -> RingView:
        """Say what counts of it for a request with this prompt."""
        load, tok_s = self.load, self.plan.placement.predicted_tok_s
        return RingView(
            tok_s=tok_s or 1.0,
            n_requests=self.n_requests,
            has_room=load is None or has_room(load),
            shared_bytes=self.prompts.shared_bytes(prompt),
        )

    def seen(self) -> RingBehind:
        """Describe it for people."""
        head = self.plan.nodes[0]
        return RingBehind(
            node=head.node,
            address=head.address,
            names=[node.name for node in self.plan.nodes],
            why=explanation(self.why),
            n_requests=self.n_requests,
            n_taken_over=self.n_taken_over,
            load=self.load,
            predicted_tok_s=self.plan.placement.predicted_tok_s,
        )

    # --- requests

    @contextlib.asynccontextmanager
    async def asking(self, message: Generate) -> AsyncIterator[Answers]:
        """Send a request; yield what comes of it, errors of the link and of this ring included.

        Leaving the context before the end cancels it there. Raises LinkError.
        """
        control, answers = await self._roomy_link(), Answers()
        is_over = False

        def take(answer: Numbered | ShardnetError) -> None:
            nonlocal is_over
            is_over |= isinstance(answer, Failed)
            answers.put_nowait(answer)

        control.link.peer.require(*message.needed)
        choice = self.plan.choice.asked_as(message.choice)
        request = control.begin(replace(message, choice=choice), take)
        self._running.add(answers)
        try:
            yield answers
            is_over = True
        finally:
            self._running.discard(answers)
            control.end(request, cancel=not is_over)

    @contextlib.asynccontextmanager
    async def conversation(self, message: ControlRequest) -> AsyncIterator[AsyncIterator[Numbered]]:
        """Ask the ring's head something else."""
        control = await self._roomy_link()
        async with control.conversation(message) as answers:
            yield answers

    async def _roomy_link(self) -> ControlLink:
        """Return the link to its head when little waits there: it ends where too much does.

        Raises LinkError if there is none.
        """
        control = self._control
        if control is None:
            raise LinkClosedError(f"the ring of {self.name} was lost just now")
        while control.link.is_full:
            await control.link.drain(shared=True)
        return control

    def give_up(self, error: ShardnetError) -> None:
        """End its requests here with this error."""
        for answers in self._running:
            answers.put_nowait(error)

    def recovers(self, why: str) -> None:
        """Note that it is lost, and that its head builds another one of its nodes."""
        self._takes_none(PeerFailedError(why), is_hopeful=True)
        self.prompts.clear()

    # --- keeping it

    async def keep(self, on_progress: OnProgress) -> None:
        """Have it built, and built again when it is lost, until cancelled."""
        n_failed = 0
        while True:
            n_times = self.n_times
            try:
                await self._keep_once(on_progress)
            except ShardnetError as error:
                n_failed = 0 if self.n_times > n_times else n_failed + 1
                if n_failed <= 1:
                    self.log(f"the ring of {self.name} takes no requests: {error}")
                self._control = None
                self.prompts.clear()
                self._takes_none(error, is_hopeful=not n_failed)
            await asyncio.sleep(AGAIN_S[min(n_failed, len(AGAIN_S) - 1)])

    async def _keep_once(self, on_progress: OnProgress) -> None:
        control = await self.reach()
        message = KeepRing(request=0, choice=self.plan.choice)
        async with control.conversation(message) as answers:
            is_kept = False
            while True:
                try:
                    # While it is built its head may have nothing to tell; then links tell enough.
                    async with deadline(REPLY_SILENCE_S) if is_kept else contextlib.nullcontext():
                        answer = await anext(answers)
                except TimeoutError:
                    raise PeerSilentError(
                        f"{control.peer_name} said nothing of its ring for {REPLY_SILENCE_S:.0f} s"
                    ) from None
                match answer:
                    case NodeProgress():
                        on_progress(answer)
                    case PlanReply(model_id=model_id):
                        model = self.plan.choice.model
                        check_model_id(Path(model), model_id, self.plan.facts.model_id)
                    case RingKept():
                        is_kept = True
                        self._kept(control, answer)
                    case Redirect():
                        raise PeerFailedError(f"{control.peer_name} does not lead its ring")
                    case Failed():
                        raise reported_error(answer, control.peer_name)
                    case _:
                        what = type(answer).__name__
                        raise RemoteProtocolError(f"{control.peer_name} answered KeepRing: {what}")

    def _kept(self, control: ControlLink, told: RingKept) -> None:
        self._control, self.load = control, told.load
        if told.is_recovering:
            if not self.why:
                self.recovers(f"the ring of {self.name} recovers")
        elif self.why:
            self.why, self.is_hopeful = "", True
            self.n_times += 1
            self.log(f"the ring of {self.name} takes requests")
            self.on_changed(self)

    def _takes_none(self, error: ShardnetError, *, is_hopeful: bool) -> None:
        self.error, self.why, self.is_hopeful = error, str(error), is_hopeful
        self.load = None
        self.on_changed(self)


def has_room(load: RingLoad) -> bool:
    """Say whether those that wait at a ring fit, at the size of those that run, and one more.

    That requests wait says nothing alone: each does until the next step, however empty the ring is.
    """
    n_waiting, n_blocks = load.waiting + load.paused, load.used_blocks - load.warm_blocks
    blocks_each = n_blocks / load.running if load.running else 0
    has_slots = not load.room_slots or load.running + n_waiting < load.room_slots
    return has_slots and load.room_blocks - n_blocks > n_waiting * blocks_each
