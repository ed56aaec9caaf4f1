"""Control links: requests and answers between two nodes, or a client and a node.

Knows how to match answers to requests, that progress may precede a reply, and that every wait has
a deadline. Must not know what the requests do: the link's owner passes a handler.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, Final, TypeVar

from msgspec.structs import replace

from shardnet import __version__
from shardnet.errors import (
    CancelledRequestError,
    PeerSilentError,
    RemoteProtocolError,
    ShardnetError,
    VersionMismatchError,
    first_error,
    internal_error,
    where,
)
from shardnet.transport.deadline import deadline
from shardnet.transport.link import Link
from shardnet.transport.loop import unheard
from shardnet.wire.framing.frames import FrameKind
from shardnet.wire.framing.schema import Envelope, Numbered, Phase, Reply, read_envelope
from shardnet.wire.messages.activity import ActivityRequest
from shardnet.wire.messages.chat import DescribeTokenizer
from shardnet.wire.messages.control import (
    ControlMessage,
    Failed,
    Redirect,
    control_frame,
    failed,
    read_control,
    reported_error,
)
from shardnet.wire.messages.deputies import (
    DeputyRequest,
    RequestCopied,
    StandBy,
    StandByRefused,
    TakenOver,
    TokensCopied,
)
from shardnet.wire.messages.drafting import DraftRequest
from shardnet.wire.messages.generation import Cancel, TextRequest
from shardnet.wire.messages.handshake import error_frame
from shardnet.wire.messages.household import HouseholdLed, HouseholdRequest
from shardnet.wire.messages.measurements import MeasuringRequest
from shardnet.wire.messages.membership import MembershipRequest, PeersKnown
from shardnet.wire.messages.plans import PlanRequest
from shardnet.wire.messages.stages import LoadProgress, RingBroken, StageRequest
from shardnet.wire.messages.updates import UpdateRequest

_log = logging.getLogger(__name__)

REPLY_SILENCE_S = 30.0
"""Timeout of a request without reply or progress on a link that lives."""

REPORT_S = 5.0
"""How often progress is reported to a peer that asked for long work."""

_PROCESS_ENDS = (KeyboardInterrupt, SystemExit)
"""What a handler may not swallow."""

ControlRequest = (
    ActivityRequest
    | DeputyRequest
    | DraftRequest
    | HouseholdRequest
    | TextRequest
    | MeasuringRequest
    | MembershipRequest
    | StageRequest
    | UpdateRequest
    | PlanRequest
    | DescribeTokenizer
)
Notice = (
    RingBroken
    | PeersKnown
    | StandBy
    | StandByRefused
    | RequestCopied
    | TokensCopied
    | TakenOver
    | HouseholdLed
)
Incoming = ControlRequest | Notice
Answer = TypeVar("Answer", bound=Numbered)
_ANSWERS: Final = frozenset(
    kind.__name__ for kind in ControlMessage.__args__ if issubclass(kind, Reply)
)
Handler = Callable[["ControlLink", Incoming], Coroutine[None, None, None]]
OnAnswer = Callable[[Numbered | ShardnetError], None]


_NO_USE: Final = {
    *("Status", "Ping", "PeersKnown", "ReportRequest", "ListModels", "GetActivity", "ReadClock"),
    *("LastRunRequest", "AuditStage", "ComputeLayer", "StandBy", "HouseholdLed", "ListHousehold"),
}
"""What comes also while nobody uses a node: looks at it, and what heads do beside requests."""

M = TypeVar("M", bound=Incoming)


class ControlLink:
    """Requests and answers over one link, in both directions.

    Incoming requests and notices go to `handler`, each in a task of its own. A ShardnetError that
    it raises is sent back as Failed; any other exception, a library's panic too, is a bug, which is
    logged and ends its request only. Cancelling the wait for an answer cancels the request at the
    peer. `on_lost` is called when the link ends by itself, before `serve` has waited for handlers.
    """

    def __init__(
        self,
        link: Link,
        handler: Handler,
        *,
        peer_name: str = "",
        on_lost: Callable[[ShardnetError], None] = lambda error: None,
    ) -> None:
        self.link = link
        self.peer_name = peer_name or f"{link.peer.name} ({link.peer_address})"
        """Name of the peer in messages to people."""
        self._handler = handler
        self._on_lost = on_lost
        self._numbers = count(1)
        self._answers: dict[int, OnAnswer] = {}
        self._handling: dict[int, asyncio.Task[None]] = {}
        self.ended: ShardnetError | None = None
        """The error that ended the link, None while it lives."""

    @property
    def is_idle(self) -> bool:
        """Whether no request is pending in either direction, as far as this side knows."""
        return not self._answers and not self._handling

    def send(self, message: Numbered | Notice) -> None:
        """Send one message. Raises LinkError if the link has ended."""
        self.link.send(control_frame(message))

    def tell(self, message: Numbered | Notice) -> None:
        """Send one message, unless the link has ended."""
        if not self.link.closed:
            self.send(message)

    def tell_progress(
        self, request: int, done_bytes: int, total_bytes: int, phase: Phase = "loading"
    ) -> None:
        """Tell the peer how far its request is."""
        done = LoadProgress(request=request, done_bytes=done_bytes, total_bytes=total_bytes)
        self.tell(replace(done, phase=phase))

    async def report_until(self, request: int, work: asyncio.Future[Any]) -> None:
        """Send progress for a request of the peer until its `work` has ended."""
        try:
            while not work.done():
                await asyncio.wait([work], timeout=REPORT_S)
                if not work.done():
                    self.tell_progress(request, 0, 0)
        except BaseException:  # nobody hears how it ends
            work.add_done_callback(unheard)
            raise

    async def answer_with(self, request: int, work: Coroutine[Any, Any, Numbered]) -> None:
        """Send progress for a request of the peer while `work` runs, then what it returns.

        Raises its error. Cancelling this call cancels the work.
        """
        task = asyncio.ensure_future(work)
        try:
            await self.report_until(request, task)
            self.send(task.result())
        finally:
            task.cancel()

    async def ask(
        self,
        message: ControlRequest,
        expected: type[Answer],
        *,
        on_progress: Callable[[LoadProgress], None] | None = None,
    ) -> Answer:
        """Number and send a request, and return its one reply.

        `on_progress` gets the progress reports that precede it. Raises the error that the peer
        reported, LinkError if the link ends, PeerSilentError after 30 s without reply or progress,
        RemoteProtocolError if the reply is not an `expected`.
        """
        async with self.conversation(message) as answers:
            while True:
                try:
                    async with deadline(REPLY_SILENCE_S):
                        answer = await anext(answers)
                except TimeoutError:
                    raise PeerSilentError(
                        f"{self.peer_name} did not answer {type(message).__name__} for "
                        f"{REPLY_SILENCE_S:.0f} s",
                        remedy="read that node's output or restart it",
                    ) from None
                if isinstance(answer, LoadProgress) and on_progress is not None:
                    on_progress(answer)
                elif isinstance(answer, expected):
                    return answer
                else:
                    raise RemoteProtocolError(
                        f"{self.peer_name} answered {type(message).__name__} with "
                        f"{type(answer).__name__}"
                    )

    async def try_to_ask(
        self, message: ControlRequest, expected: type[Answer], within_s: float
    ) -> Answer | None:
        """Ask; None where the peer does not answer in time, or not so."""
        with contextlib.suppress(ShardnetError, TimeoutError):
            async with asyncio.timeout(within_s):
                return await self.ask(message, expected)
        return None

    @asynccontextmanager
    async def conversation(self, message: ControlRequest) -> AsyncIterator[AsyncIterator[Numbered]]:
        """Number and send a request, and iterate over its answers, without a deadline.

        An error that leaves the context, a cancelled wait too, cancels the request at the peer;
        who leaves it otherwise has had the last answer. The iterator raises the error that the peer
        reported with Failed, and LinkError if the link ends.
        """
        answers: asyncio.Queue[Numbered | ShardnetError] = asyncio.Queue()
        request = self.begin(message, answers.put_nowait)
        is_over = False
        try:
            yield _unpacked(answers, self.peer_name)
            is_over = True
        finally:
            self.end(request, cancel=not is_over)  # the peer knows of what has failed

    def begin(self, message: ControlRequest, on_answer: OnAnswer) -> int:
        """Number and send a request, and pass its answers to `on_answer`, until `end`.

        The error that ends the link counts as an answer. Raises it if the link has ended already.
        Returns the number.
        """
        if self.ended is not None:
            raise self.ended
        request = next(self._numbers)
        self.send(replace(message, request=request))
        self._answers[request] = on_answer
        return request

    def end(self, request: int, *, cancel: bool) -> None:
        """Ignore further answers to a request; with `cancel`, cancel it at the peer."""
        del self._answers[request]
        if cancel:
            self.tell(Cancel(request=request))

    async def serve(self) -> None:
        """Read the link until it ends; raises its LinkError then.

        Cancels the handlers that still run.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                try:
                    await self._read(tasks)
                except ShardnetError as lost:
                    if self.link.closed:  # told now: a handler that is cancelled may await a disk
                        self._note_end(lost)
                        self._on_lost(lost)
                    raise
        except ExceptionGroup as group:
            first = first_error(group)
            error = internal_error("a control link", first)
            if error is not first:
                _log.error("the link of %s failed: %r in %s", self.peer_name, first, where(first))
            self._note_end(error)
            if not self.link.closed:  # this side ended it: report why
                self.link.send(error_frame(error))
                await self.link.close()
            raise error from None

    async def serve_to_the_end(self) -> None:
        """Read the link until it ends, and close it: those who wait for answers get its error."""
        try:
            with contextlib.suppress(ShardnetError):
                await self.serve()
        finally:
            await self.link.close()

    def _note_end(self, error: ShardnetError) -> None:
        """Note what has ended the link, once, and tell whoever waits for an answer."""
        if self.ended is None:
            self.ended = error
            for on_answer in self._answers.values():
                on_answer(error)

    async def _read(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            frame = await self.link.receive()
            if frame.kind is not FrameKind.CONTROL:
                raise RemoteProtocolError(f"{self.peer_name} sent {frame.kind.name} for control")
            try:
                message = read_control(frame)
            except RemoteProtocolError as error:
                if self.link.peer.version == __version__:
                    raise
                self._not_understood(read_envelope(frame), error)
                continue
            match message:
                case Cancel(request=request):
                    if request in self._handling:
                        self._handling[request].cancel()
                case notice if isinstance(notice, Notice):
                    tasks.create_task(self._handle_notice(notice))
                    await asyncio.sleep(0)  # it begins, also where the link ends behind it
                case request if isinstance(request, ControlRequest):
                    self._accept(request, tasks)
                case answer if answer.request in self._answers:
                    self._answers[answer.request](answer)

    def _not_understood(self, sent: Envelope, error: RemoteProtocolError) -> None:
        """Refuse a request of another release, or fail the one that is answered in its words.

        What nobody waits for is dropped.
        """
        peer = self.link.peer
        said = f"does not understand {sent.type} of shardnet"
        _log.info("%s %s, by %s: %s", said, peer.version, self.peer_name, error.message)
        if sent.request is None:
            return
        if sent.type not in _ANSWERS:
            older = VersionMismatchError(
                f"shardnet {__version__} {said} {peer.version}: {error.message}",
                remedy="update the older one",
            )
            self.tell(failed(sent.request, older))
        elif sent.request in self._answers:
            self._answers[sent.request](error)

    def _accept(self, message: ControlRequest, tasks: asyncio.TaskGroup) -> None:
        if message.request in self._handling:
            raise RemoteProtocolError(f"{self.peer_name} used request {message.request} twice")
        task = tasks.create_task(self._handle(message))
        self._handling[message.request] = task
        task.add_done_callback(lambda _: self._handling.pop(message.request))

    async def _handle(self, message: ControlRequest) -> None:
        """Handle a request; report the error that ends it to the peer."""
        try:
            await self._handler(self, message)
        except RedirectedError as error:
            self.tell(Redirect(request=message.request, address=error.address))
        except ShardnetError as error:
            self._refuse(message, error)
        except asyncio.CancelledError:
            self._refuse(message, CancelledRequestError("the request was cancelled"))
            raise
        except _PROCESS_ENDS:
            raise
        except BaseException as error:  # our own bug, or a library's panic: it must end alone
            self._refuse(message, self._internal_error(message, error))

    async def _handle_notice(self, message: Notice) -> None:
        """Handle a message without an answer. A ShardnetError of the handler ends the link."""
        try:
            await self._handler(self, message)
        except (ShardnetError, asyncio.CancelledError, *_PROCESS_ENDS):
            raise
        except BaseException as error:  # our own bug, or a library's panic: there are other peers
            self._internal_error(message, error)

    def _internal_error(self, message: Incoming, error: BaseException) -> ShardnetError:
        what = type(message).__name__
        _log.error("%s of %s failed: %r in %s", what, self.peer_name, error, where(error))
        _log.debug("in full:", exc_info=error)
        return internal_error(what, error)

    def _refuse(self, message: ControlRequest, error: ShardnetError) -> None:
        self.tell(failed(message.request, error))


async def _unpacked(
    answers: asyncio.Queue[Numbered | ShardnetError], peer_name: str
) -> AsyncIterator[Numbered]:
    while True:
        answer = await answers.get()
        if isinstance(answer, ShardnetError):
            raise answer
        if isinstance(answer, Failed):
            raise reported_error(answer, peer_name)
        yield answer


class RedirectedError(Exception):
    """Raised by the handler of a request that is to be sent to the node at `address` instead."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.address = address


async def refuse(control: ControlLink, message: Incoming) -> None:
    """Handle nothing: the handler of a link on which this side only asks."""
    raise RemoteProtocolError(f"{control.peer_name} asked {type(message).__name__} of a client")


class MessageHandlers:
    """The handlers of one node, by message type."""

    def __init__(self) -> None:
        self._by_type: dict[type[object], Callable[..., Coroutine[Any, Any, None]]] = {}
        self._n_at_work = 0
        self.used_s = time.monotonic()
        """When a message was handled last that puts this node to use."""

    @property
    def is_at_work(self) -> bool:
        """Whether such a message is handled now."""
        return self._n_at_work > 0

    @property
    def types(self) -> frozenset[type[object]]:
        """Message types that have a handler."""
        return frozenset(self._by_type)

    def register(
        self, kind: type[M], handler: Callable[[ControlLink, M], Coroutine[Any, Any, None]]
    ) -> None:
        """Register `handler` for messages of type `kind`, which must have none yet."""
        assert kind not in self._by_type, f"{kind.__name__} has a handler already"
        self._by_type[kind] = handler

    async def handle(self, control: ControlLink, message: Incoming) -> None:
        """Handle one message of `control`. The request fails with the ShardnetError this raises."""
        is_use = type(message).__name__ not in _NO_USE
        self._n_at_work += is_use
        try:
            await self._by_type[type(message)](control, message)
        finally:
            self._n_at_work -= is_use
            self.used_s = time.monotonic() if is_use else self.used_s
