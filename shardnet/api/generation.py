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
from dataclasses import dataclass, field
from dataclasses import replace as changed
from typing import Protocol, Unpack

from msgspec.structs import replace

from shardnet.api.events import (
    ActiveRequest,
    GenerationEvent,
    GenerationResult,
    GenerationTiming,
    LikelyToken,
    RequestState,
    Routing,
    RowData,
    Rows,
    StageTime,
    TokenLogprob,
    Usage,
)
from shardnet.api.requests import GenerationOptions, Prompts, Request
from shardnet.api.traces import RequestTrace
from shardnet.cluster.peers.control_link import ControlLink
from shardnet.errors import (
    BusyError,
    CapacityError,
    DeadlineError,
    LinkError,
    NumericalError,
    PeerFailedError,
    RemoteProtocolError,
    ShardnetError,
    UsageError,
)
from shardnet.sampling_params import SamplingParams
from shardnet.wire.messages import generation as wire
from shardnet.wire.messages.control import ControlMessage, Failed, Redirect, reported_error
from shardnet.wire.messages.deputies import CopiedTo, Resume
from shardnet.wire.messages.generation import Generate
from shardnet.wire.messages.plans import ModelChoice, NodeProgress, PlanReply
from shardnet.wire.messages.traces import TracePiece

MAX_REDIRECTS = 3
RESUME_S = 10.0
"""How long a request waits for another node to go on with it."""
AGAIN_S = 0.2

WINDOW = 128
"""Most requests of one call that a node holds at a time: more than run at once."""

REQUEST_ERRORS = (UsageError, CapacityError, DeadlineError, NumericalError)
"""Errors of one request: they do not mean that the other requests of the call fail too."""

ShouldStop = Callable[[Sequence[ActiveRequest]], Iterable[int]]
"""Takes the requests that have not ended and returns the ids of those to cancel."""

OnPlan = Callable[[PlanReply], None]
OnLoading = Callable[[NodeProgress], None]


class _Again:
    """Comes when a request is to be sent again."""


_Answer = ControlMessage | ShardnetError | _Again


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


@dataclass(slots=True, kw_only=True, eq=False)
class _Running:
    """A request that has not ended: the link it was sent on, and its output so far."""

    request: Request
    view: ActiveRequest
    address: str = ""
    """Where it was redirected to, "" for the node of the client."""
    control: ControlLink | None = None
    number: int = 0
    is_answered: bool = False
    resumes: bool = False
    """Whether it is sent as Resume: another node may have made the first part of its answer."""
    copied_to: str = ""
    """The node that goes on if its link ends, "" for none."""
    until_s: float | None = None
    """When to stop asking that node, None while nothing is wrong."""
    is_repeated: bool = False
    """Whether it was sent twice, since the first link ended before any answer."""
    n_redirects: int = 0
    n_reused: int = 0
    token_ids: list[int] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=lambda: [None])
    rows: dict[str, Rows] = field(default_factory=dict)
    routing: Routing | None = None
    trace: RequestTrace | None = None

    def __post_init__(self) -> None:
        self.view.token_ids = self.token_ids
        self.resumes = self.request.resumes

    def send(self, control: ControlLink, on_answer: Callable[[_Answer], None]) -> None:
        """Send the request on this link. Raises LinkError when that has ended."""
        number, message = control.next_request(), self.request.message
        asked: Generate | Resume = replace(message, request=number)
        if self.resumes:
            asked = Resume(request=number, key=message.key, n_tokens=len(self.token_ids))
        control.begin(asked, on_answer)
        self.control, self.number = control, number

    def detach(self, *, give_up: bool) -> None:
        """Stop receiving answers; with `give_up` also cancel the request on the node."""
        if self.control is not None:
            self.control.end(self.number, cancel=give_up)
            self.control = None

    def take(self, answer: _Answer, peer: str) -> GenerationEvent | None:
        """Turn an answer of the node named `peer` into an event, and store its output.

        None where it is no event.
        """
        match answer:
            case wire.StateChanged(state=state, ahead=ahead, n_kept=n_kept, prompt_tail=tail):
                self.view.state = RequestState(state.value)
                if self.view.state is RequestState.RUNNING:
                    self.n_reused = n_kept
                return changed(
                    self._event(),
                    ahead=ahead,
                    prompt_tail=tail,
                    why=answer.why,
                    expected_s=answer.expected_s,
                )
            case wire.TextPiece():
                self.until_s = None
                return self._take_text(answer)
            case CopiedTo(address=address):
                self.copied_to = address
                return None
            case wire.RowsPiece():
                return self._take_rows(answer)
            case TracePiece():
                return self._take_trace(answer)
            case wire.Finished():
                return self._finished(answer)
            case Failed():
                return self.failed(reported_error(answer, peer))
            case ShardnetError():
                return self.failed(answer)
            case _:
                what = type(answer).__name__
                return self.failed(
                    RemoteProtocolError(f"{peer} answered Generate with an unexpected {what}")
                )

    def failed(self, error: ShardnetError) -> GenerationEvent:
        """Make the event of a request that failed."""
        self.view.state = RequestState.FAILED
        return changed(self._event(), error=error)

    def recovering(self, error: ShardnetError) -> GenerationEvent:
        """Make the event of a request that goes on elsewhere."""
        self.view.state = RequestState.RECOVERING
        return changed(self._event(), why=str(error))

    def lost(self, answer: _Answer, peer: str) -> ShardnetError | None:
        """Return why nothing more comes from where it was sent, None unless others may go on."""
        if not (self.copied_to or self.resumes):
            return None
        error = reported_error(answer, peer) if isinstance(answer, Failed) else answer
        if isinstance(error, LinkError | PeerFailedError | BusyError):
            return error
        return error if isinstance(error, UsageError) and self.resumes else None

    def cancelled(self) -> GenerationEvent:
        """Make the event of a request that the hook cancelled."""
        self.view.state = RequestState.CANCELLED
        return self._event()

    def _event(self) -> GenerationEvent:
        view = self.view
        return GenerationEvent(
            request_id=view.request_id, index=view.index, sample=view.sample, state=view.state
        )

    def _take_text(self, piece: wire.TextPiece) -> GenerationEvent:
        logprobs = None
        if piece.logprobs is not None:
            logprobs = tuple(map(_logprob, piece.logprobs))
            self.logprobs += logprobs
        scored = None
        if piece.prompt_logprobs is not None:
            scored = tuple(map(_logprob, piece.prompt_logprobs))
            self.prompt_logprobs += scored
        self.token_ids += piece.token_ids
        self.tokens += piece.tokens
        self.view.text += piece.text
        return changed(
            self._event(),
            token_ids=tuple(piece.token_ids),
            tokens=tuple(piece.tokens),
            text=piece.text,
            logprobs=logprobs,
            prompt_logprobs=scored,
        )

    def _take_rows(self, piece: wire.RowsPiece) -> GenerationEvent:
        """Append logits or hidden states to those of the result; return them as an event."""
        if piece.kind == "routing":
            return self._take_routing(piece)
        rows = Rows(position=piece.position, width=piece.width, data=piece.data)
        held = self.rows.setdefault(piece.kind, changed(rows, data=bytearray()))
        if not _append(held, rows):
            return self._out_of_order(piece)
        if piece.kind == "logits":
            return changed(self._event(), logits=rows)
        return changed(self._event(), hidden=rows)

    def _take_routing(self, piece: wire.RowsPiece) -> GenerationEvent:
        """Append routing to that of the result; return it as an event."""
        rows = Routing(
            position=piece.position, width=piece.width, top_k=piece.top_k, data=piece.data
        )
        self.routing = self.routing or changed(rows, data=bytearray())
        is_shape = 0 < rows.top_k == self.routing.top_k and rows.width % rows.top_k == 0
        if not is_shape or not _append(self.routing, rows):
            return self._out_of_order(piece)
        return changed(self._event(), routing=rows)

    def _take_trace(self, piece: TracePiece) -> GenerationEvent | None:
        """Keep steps for the result; they are no event."""
        if self.trace is None:
            self.trace = RequestTrace.of(piece)
        else:
            self.trace.add(piece)
        return None

    def _out_of_order(self, piece: wire.RowsPiece) -> GenerationEvent:
        return self.failed(
            RemoteProtocolError(f"{piece.kind} of position {piece.position} came out of order")
        )

    def _finished(self, finished: wire.Finished) -> GenerationEvent:
        self.view.state = RequestState.FINISHED
        self.view.text += finished.text
        message, sampling = self.request.message, self.request.message.sampling
        n_prompt = len(finished.prompt_token_ids)
        result = GenerationResult(
            model=message.choice.model,
            index=self.view.index,
            sample=self.view.sample,
            prompt_token_ids=tuple(finished.prompt_token_ids),
            token_ids=tuple(self.token_ids),
            tokens=tuple(self.tokens),
            text=self.view.text,
            finish_reason=finished.finish_reason,
            seed=sampling.seed,
            sample_index=sampling.sample_index,
            logprobs=None if sampling.n_logprobs is None else tuple(self.logprobs),
            usage=Usage(n_prompt=n_prompt, n_generated=len(self.token_ids), n_reused=self.n_reused),
            timing=_timing(finished.timing),
            prompt_logprobs=None
            if message.outputs.n_prompt_logprobs is None
            else tuple(self.prompt_logprobs),
            logits=self.rows.get("logits"),
            hidden=self.rows.get("hidden"),
            routing=self.routing,
            trace=self.trace,
        )
        return changed(self._event(), text=finished.text, result=result)


def _append(held: RowData, rows: RowData) -> bool:
    """Append `rows` to `held`; return False unless they continue them."""
    is_whole = rows.width > 0 and len(rows.data) % rows.row_bytes == 0
    if not is_whole or rows.width != held.width or rows.position != held.end:
        return False
    assert isinstance(held.data, bytearray)
    held.data.extend(rows.data)
    return True


class Generations:
    """The requests of one call. They are sent on the link that `reach` returns for "", or for the
    address that they were redirected to.

    The first request is sent alone until a ring has accepted it. If no ring can be opened, the
    others fail with the same error, without planning and loading again for each. A request whose
    link ends before any answer is sent once more: the link may have been cut long before, while the
    event loop stood still. One that is copied to another node is resumed there when its link ends,
    or its head gives up; `on_copied` takes that node's address.
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
        self._running: dict[int, _Running] = {}
        self._answers: asyncio.Queue[tuple[int, _Answer]] = asyncio.Queue()
        self._plan: PlanReply | None = None
        self._is_served = False

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
        while self._waiting and len(self._running) < window:
            running = self._next()
            self._running[running.view.request_id] = running
            with contextlib.suppress(LinkError):  # each request gets it as its own event
                self._send(running, self._first)
                await self._first.link.drain(shared=True)

    def _next(self) -> _Running:
        request = self._waiting.popleft()
        view = ActiveRequest(request_id=next(self._ids), index=request.index, sample=request.sample)
        return _Running(request=request, view=view)

    def _send(self, running: _Running, control: ControlLink) -> None:
        request_id = running.view.request_id

        def on_answer(answer: _Answer) -> None:
            self._answers.put_nowait((request_id, answer))

        try:
            running.send(control, on_answer)
        except LinkError as error:
            on_answer(error)

    async def _take(self, running: _Running, answer: _Answer) -> GenerationEvent | None:
        """Handle an answer; None if it is no event of the request itself."""
        if isinstance(answer, LinkError) and not (running.is_answered or running.is_repeated):
            running.is_repeated = True
            event = await self._send_to(running, running.address)
            if event is not None and event.state.is_end:
                self._end(running, give_up=False)
            return event
        if isinstance(answer, _Again):
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

    def _resume(self, running: _Running, error: ShardnetError) -> GenerationEvent | None:
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
        again = (running.view.request_id, _Again())
        asyncio.get_running_loop().call_later(wait_s, self._answers.put_nowait, again)
        # The first event of a request has the end of its prompt, which this one cannot know.
        return running.recovering(error) if running.token_ids else None

    async def _ask_again(self, running: _Running) -> GenerationEvent | None:
        """Ask for the rest of an answer, where it is copied."""
        running.address = running.copied_to
        try:
            control = await self._reach(running.address)
        except ShardnetError as error:
            return self._resume(running, error)
        self._send(running, control)
        return None

    async def _follow(self, running: _Running, address: str) -> GenerationEvent | None:
        """Send the request to the node at `address`; return an event if that fails."""
        running.n_redirects += 1
        if running.n_redirects > MAX_REDIRECTS:
            return running.failed(too_many_redirects(address))
        running.is_answered = running.is_repeated = False
        running.resumes |= bool(running.copied_to)
        return await self._send_to(running, address)

    async def _send_to(self, running: _Running, address: str) -> GenerationEvent | None:
        """Send the request to the node at `address`, "" for the client's; return an event if that
        fails.
        """
        running.detach(give_up=False)
        running.address = address
        try:
            control = await self._reach(address)
        except ShardnetError as error:
            return self._resume(running, error) if running.resumes else running.failed(error)
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

    def _end(self, running: _Running, *, give_up: bool) -> None:
        running.detach(give_up=give_up)
        self._running.pop(running.view.request_id, None)


def _logprob(detail: wire.TokenDetail) -> TokenLogprob:
    return TokenLogprob(
        token_id=detail.token_id,
        token=detail.token,
        bytes=bytes(detail.bytes),
        logprob=detail.logprob,
        top=tuple(LikelyToken(top.token_id, top.token, top.logprob) for top in detail.top),
    )


def _timing(timing: wire.Timing) -> GenerationTiming:
    return GenerationTiming(
        load_s=timing.load_s,
        ttft_s=timing.ttft_s,
        decode_tok_s=timing.decode_tok_s,
        total_s=timing.total_s,
        per_stage=tuple(
            StageTime(
                rank=stage.rank,
                compute_ms=stage.compute_ms,
                queue_ms=stage.queue_ms,
                wire_ms=stage.wire_ms,
            )
            for stage in timing.per_stage
        ),
        n_drafted=timing.n_drafted,
        n_accepted=timing.n_accepted,
    )


def too_many_redirects(address: str) -> PeerFailedError:
    """Make the error of a request that was redirected more than MAX_REDIRECTS times."""
    return PeerFailedError(f"{address} and others keep redirecting the request", remedy="try again")
