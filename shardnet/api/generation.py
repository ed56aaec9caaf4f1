"""Runs the requests of one call, at most WINDOW at a time, and turns their answers into events.

Knows the messages that answer Generate. Must not know how links are made, nor start tasks: answers
to all requests go into one queue, so a caller that stops iterating leaves nothing running.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from dataclasses import replace as changed
from typing import Protocol, Unpack

from msgspec.structs import replace

from shardnet.api.events import ActiveRequest, GenerationEvent
from shardnet.api.requests import GenerationOptions, Prompts, Request
from shardnet.api.running_request import Answer, RunningRequest, SendAgain
from shardnet.cluster.peers.control_link import ControlLink
from shardnet.errors import (
    CapacityError,
    DeadlineError,
    LinkError,
    NumericalError,
    PeerFailedError,
    PeerUnreachableError,
    ShardnetError,
    UsageError,
    VersionMismatchError,
)
from shardnet.sampling_params import SamplingParams
from shardnet.wire.messages.control import Redirect
from shardnet.wire.messages.deputies import CopiedTo
from shardnet.wire.messages.plans import ModelChoice, NodeProgress, PlanReply

MAX_REDIRECTS = 6
RESUME_S = 10.0
"""How long a request waits for another node to go on with it."""
AGAIN_S = 0.2

WINDOW = 128
"""Most requests of one call that a node holds at a time: more than run at once."""
LOCKSTEP_SET = 16
"""Requests of a call in lockstep that run together; the next ones wait until all have ended."""

REQUEST_ERRORS = (UsageError, CapacityError, DeadlineError, NumericalError)
"""Errors of one request: they do not mean that the other requests of the call fail too."""

ShouldStop = Callable[[Sequence[ActiveRequest]], Iterable[int]]
"""Takes the requests that have not ended and returns the ids of those to cancel."""

OnPlan = Callable[[PlanReply], None]
OnLoading = Callable[[NodeProgress], None]


class Generator(Protocol):
    """What generates: a client, or what stands before one."""

    def generate(
        self,
        prompts: Prompts,
        sampling: SamplingParams,
        *,
        n: int = 1,
        model: str | ModelChoice | None = None,
        **options: Unpack[GenerationOptions],
    ) -> AsyncGenerator[GenerationEvent, None]:
        """Generate as `shardnet.api.Client.generate` does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """Callbacks of the caller. They run on the event loop and must not block."""

    should_stop: ShouldStop | None = None
    on_plan: OnPlan | None = None
    on_loading: OnLoading | None = None


class Generations:
    """The requests of one call. They are sent on the link that `reach` returns for "", or for the
    address that they were redirected to.

    The first request is sent alone until a ring has accepted it. If no ring can be opened, the
    others fail with the same error, without planning and loading again for each. A request whose
    link ends before any output, and before it was copied, is sent once more: the link may have been
    cut long before, while the event loop stood still, or its head may be gone and another node
    lead. One that is copied to another node is resumed there when its link ends, or its head gives
    up; `on_copied` takes that node's address.
    """

    def __init__(
        self,
        requests: Iterable[Request],
        ids: Iterator[int],
        reach: Callable[[str], Awaitable[ControlLink]],
        hooks: Hooks,
        on_copied: Callable[[str], None] = lambda address: None,
    ) -> None:
        self._on_copied = on_copied
        self._waiting = deque(requests)
        self._ids = ids
        self._reach = reach
        self._first: ControlLink
        self._hooks = hooks
        self._running: dict[int, RunningRequest] = {}
        self._answers: asyncio.Queue[tuple[int, Answer]] = asyncio.Queue()
        self._plan: PlanReply | None = None
        self._is_served = False
        self._n_of_set = self._set = self._set_size = 0

    def end_thought(self, request_id: int) -> bool:
        """Have a request end its reasoning: it is sent anew with the tokens so far, for which the
        ring has everything. Returns False for one that does not run; raises UsageError.
        """
        running = self._running.get(request_id)
        if running is None or running.control is None:
            return False
        control = running.control
        running.end_thought()
        running.detach(give_up=True)
        untaken = [self._answers.get_nowait() for _ in range(self._answers.qsize())]
        for one in untaken:  # tokens that it has not got are made anew
            if one[0] != request_id:
                self._answers.put_nowait(one)
        self._send(running, control)
        return True

    async def events(self) -> AsyncGenerator[GenerationEvent, None]:
        """Run all requests and yield their events. Closing the iterator cancels those that run."""
        try:
            self._first = await self._reach("")
        except ShardnetError as error:
            while self._waiting:
                yield self._next().failed(error)
            return
        try:
            while self._waiting or self._running:
                await self._send_more()
                request_id, answer = await self._answers.get()
                running = self._running.get(request_id)
                event = None if running is None else await self._take(running, answer)
                if event is None:
                    continue
                yield event
                for other in (*self._fail_waiting(event), *self._cancel_by_hook()):
                    yield other
        finally:
            for running in self._running.values():
                running.detach(give_up=True)

    async def _send_more(self) -> None:
        """Send waiting requests until the window is full."""
        window = WINDOW if self._is_served else 1
        if not self._running:
            self._n_of_set = 0
            self._set_size = min(len(self._waiting), LOCKSTEP_SET)
        while self._waiting and len(self._running) < window:
            if self._waiting[0].message.lockstep and self._n_of_set == LOCKSTEP_SET:
                return  # the next set begins when this one has ended
            self._n_of_set += 1
            running = self._next()
            self._running[running.view.request_id] = running
            with contextlib.suppress(LinkError):  # each request gets it as its own event
                self._send(running, self._first)
                await self._first.link.drain(shared=True)

    def _next(self) -> RunningRequest:
        request, request_id = self._waiting.popleft(), next(self._ids)
        view = ActiveRequest(request_id=request_id, index=request.index, sample=request.sample)
        return RunningRequest(request=self._in_set(request, request_id), view=view)

    def _in_set(self, request: Request, request_id: int) -> Request:
        """Say of a request in lockstep which set it is in: its head waits for all of that.

        A set has the id of its first request.
        """
        message = request.message
        if not message.lockstep:
            return request
        if self._n_of_set == 1:
            self._set = request_id
        message = replace(message, lockstep_set=self._set, lockstep_size=self._set_size)
        return changed(request, message=message)

    def _send(self, running: RunningRequest, control: ControlLink) -> None:
        request_id = running.view.request_id

        def on_answer(answer: Answer) -> None:
            self._answers.put_nowait((request_id, answer))

        try:
            running.send(control, on_answer)
        except (LinkError, VersionMismatchError) as error:
            on_answer(error)

    async def _take(self, running: RunningRequest, answer: Answer) -> GenerationEvent | None:
        """Handle an answer; None if it is no event of the request itself."""
        if isinstance(answer, LinkError) and running.may_repeat:
            running.is_repeated = True
            event = await self._send_to(running, "")
            if event is not None and event.state.is_end:
                self._end(running, give_up=False)
            return event
        if isinstance(answer, SendAgain):
            return await self._ask_again(running)
        error = running.lost(answer, (running.control or self._first).peer_name)
        if error is not None:
            return self._resume(running, error)
        if isinstance(answer, CopiedTo):
            self._on_copied(answer.address)
        running.is_answered = True
        match answer:
            case PlanReply():
                self._report_plan(answer)
                return None
            case NodeProgress():
                if self._hooks.on_loading is not None:
                    self._hooks.on_loading(answer)
                return None
            case Redirect(address=address):
                event = await self._follow(running, address)
            case _:
                event = running.take(answer, (running.control or self._first).peer_name)
        if event is not None and event.state.is_end:
            self._end(running, give_up=False)
        return event

    def _resume(self, running: RunningRequest, error: ShardnetError) -> GenerationEvent | None:
        """Have the rest of an answer asked for, soon; return an event that says so.

        If that was in vain for RESUME_S, the request fails with `error`.
        """
        now_s, wait_s = time.monotonic(), 0.0
        if running.until_s is not None:
            wait_s = AGAIN_S
        if now_s > (running.until_s or now_s + 1):
            self._end(running, give_up=False)
            return running.failed(error)
        running.until_s = running.until_s or now_s + RESUME_S
        running.detach(give_up=False)
        running.resumes, running.n_redirects = True, 0
        again = (running.view.request_id, SendAgain())
        asyncio.get_running_loop().call_later(wait_s, self._answers.put_nowait, again)
        # The first event of a request has the end of its prompt, which this one cannot know.
        return running.recovering(error) if running.token_ids else None

    async def _ask_again(self, running: RunningRequest) -> GenerationEvent | None:
        """Ask for the rest of an answer, where it is copied."""
        running.address = running.copied_to
        try:
            control = await self._reach(running.address)
        except ShardnetError as error:
            return self._resume(running, error)
        self._send(running, control)
        return None

    async def _follow(self, running: RunningRequest, address: str) -> GenerationEvent | None:
        """Send the request to the node at `address`; return an event if that fails."""
        running.n_redirects += 1
        if running.n_redirects > MAX_REDIRECTS:
            return running.failed(too_many_redirects(address))
        running.is_answered = running.is_repeated = False
        running.resumes |= bool(running.copied_to)
        return await self._send_to(running, address)

    async def _send_to(self, running: RunningRequest, address: str) -> GenerationEvent | None:
        """Send the request to the node at `address`, "" for the client's; return an event if that
        fails.
        """
        running.detach(give_up=False)
        running.address = address
        try:
            control = await self._reach(address)
        except ShardnetError as error:
            if running.resumes:
                return self._resume(running, error)
            is_gone = isinstance(error, PeerUnreachableError)
            if not (address and is_gone) or running.unreached is not None:
                return running.failed(running.unreached or error)
            running.unreached = error  # it was told to ask there, which may be news of before
            return await self._send_to(running, "")
        if not address:
            self._first = control
        self._send(running, control)
        return None

    def _fail_waiting(self, event: GenerationEvent) -> Iterator[GenerationEvent]:
        """Fail the waiting requests if this event shows that no ring can be opened."""
        error = event.error
        self._is_served = self._is_served or error is None or isinstance(error, REQUEST_ERRORS)
        while self._waiting and error is not None and not self._is_served:
            yield self._next().failed(error)

    def _report_plan(self, plan: PlanReply) -> None:
        """Call `on_plan` unless this plan is the last reported one."""
        reported, self._plan = self._plan, replace(plan, request=0)
        if self._hooks.on_plan is not None and self._plan != reported:
            self._hooks.on_plan(plan)

    def _cancel_by_hook(self) -> Iterator[GenerationEvent]:
        """Cancel the requests that `should_stop` returns; unknown and ended ids are ignored."""
        if self._hooks.should_stop is None:
            return
        active = [running.view for running in self._running.values()]
        for request_id in self._hooks.should_stop(active):
            running = self._running.get(request_id)
            if running is not None:
                self._end(running, give_up=True)
                yield running.cancelled()

    def _end(self, running: RunningRequest, *, give_up: bool) -> None:
        running.detach(give_up=give_up)
        self._running.pop(running.view.request_id, None)


def too_many_redirects(address: str) -> PeerFailedError:
    """Make the error of a request that was redirected more than MAX_REDIRECTS times."""
    return PeerFailedError(f"{address} and others keep redirecting the request", remedy="try again")
