"""Control links: requests and what answers them, between two nodes or a client and a node.

Knows how to match answers to requests, that progress may precede a reply, and that every wait has
an end. Must not know what the requests do: whoever owns the link hands in a handler.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from itertools import count
from typing import TypeVar

from shardnet.errors import (
    CancelledRequestError,
    PeerSilentError,
    RemoteProtocolError,
    ShardnetError,
    first_error,
)
from shardnet.transport.deadline import deadline
from shardnet.transport.link import Link
from shardnet.wire.framing.frames import FrameKind
from shardnet.wire.messages.control import (
    ControlMessage,
    Failed,
    control_frame,
    read_control,
    reported_error,
)
from shardnet.wire.messages.generation import Cancel, Generate, LastRunRequest, Unload
from shardnet.wire.messages.handshake import error_frame, explained
from shardnet.wire.messages.measurements import MeasureLinks, MeasureStage
from shardnet.wire.messages.membership import IdentifyModel, PeersKnown, Ping, ReportRequest, Status
from shardnet.wire.messages.plans import PlanRequest
from shardnet.wire.messages.stages import (
    ConnectRing,
    LoadProgress,
    LoadStage,
    RingBroken,
    UnloadStage,
)

_log = logging.getLogger(__name__)

REPLY_SILENCE_S = 30.0
"""A peer whose link lives but that neither replies nor reports progress for so long has failed."""

ControlRequest = (
    Status
    | Ping
    | ReportRequest
    | IdentifyModel
    | MeasureStage
    | MeasureLinks
    | LoadStage
    | ConnectRing
    | UnloadStage
    | PlanRequest
    | LastRunRequest
    | Generate
    | Unload
)
Notice = RingBroken | PeersKnown
Incoming = ControlRequest | Notice
Answer = TypeVar("Answer", bound=ControlMessage)
Handler = Callable[["ControlLink", Incoming], Coroutine[None, None, None]]
OnAnswer = Callable[[ControlMessage | ShardnetError], None]


class ControlLink:
    """Requests and answers over one link, in both directions.

    Whatever comes in and answers none of our requests goes to `handler`, each message in a task of
    its own. What the handler raises is sent back as Failed; if it is no ShardnetError it is a bug
    of ours, which the log tells and which ends nothing but its request. Giving up waiting for an
    answer cancels the request at the peer.
    """

    def __init__(self, link: Link, handler: Handler, *, peer_name: str = "") -> None:
        self.link = link
        self.peer_name = peer_name or f"{link.peer.name} ({link.peer_address})"
        """How to call the peer in messages to people."""
        self._handler = handler
        self._numbers = count(1)
        self._answers: dict[int, OnAnswer] = {}
        self._handling: dict[int, asyncio.Task[None]] = {}
        self.ended: ShardnetError | None = None
        """What ended the link, None while it lives."""

    @property
    def is_idle(self) -> bool:
        """Whether no request waits for its answer, on either side as far as is known here."""
        return not self._answers and not self._handling

    def next_request(self) -> int:
        """Return a request number that is not used yet on this side of the link."""
        return next(self._numbers)

    def send(self, message: ControlMessage) -> None:
        """Send one message. Raises LinkError when the link has ended."""
        self.link.send(control_frame(message))

    async def ask(
        self,
        message: ControlRequest,
        expected: type[Answer],
        *,
        on_progress: Callable[[LoadProgress], None] | None = None,
    ) -> Answer:
        """Send a request and return its one reply.

        Raises what the peer reported, LinkError when the link ends, PeerSilentError after 30 s
        without reply or progress, RemoteProtocolError for a reply of another kind.
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
                        remedy="look at that node's output or restart it",
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

    @asynccontextmanager
    async def conversation(
        self, message: ControlRequest
    ) -> AsyncIterator[AsyncIterator[ControlMessage]]:
        """Send a request and give everything that answers it, without a deadline of its own.

        The iterator raises what the peer reported with Failed, and LinkError when the link ends.
        """
        answers: asyncio.Queue[ControlMessage | ShardnetError] = asyncio.Queue()
        self.begin(message, answers.put_nowait)
        is_over = False
        try:
            yield _unpacked(answers, self.peer_name)
            is_over = True
        finally:
            self.end(message.request, give_up=not is_over)  # of what has failed it is no news

    def begin(self, message: ControlRequest, on_answer: OnAnswer) -> None:
        """Send a request and hand everything that answers it to `on_answer`, until `end`.

        What ends the link counts as an answer. Raises LinkError when it has ended already.
        """
        if self.ended is not None:
            raise self.ended
        self.send(message)
        self._answers[message.request] = on_answer

    def end(self, request: int, *, give_up: bool) -> None:
        """Take no more answers to a request; with `give_up` the peer is told to end it."""
        del self._answers[request]
        if give_up and not self.link.closed:
            self.send(Cancel(request=request))

    async def serve(self) -> None:
        """Read the link until it ends. Returns the way it ended by raising its LinkError.

        Handlers that still run are cancelled then.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._read(tasks)
        except* ShardnetError as group:
            error = first_error(group)
            self.ended = error
            for on_answer in self._answers.values():
                on_answer(error)
            if not self.link.closed:  # it was we who ended it, and the peer should know why
                self.link.send(error_frame(error))
                await self.link.close()
            raise error from None

    async def _read(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            frame = await self.link.receive()
            if frame.kind is not FrameKind.CONTROL:
                raise RemoteProtocolError(f"{self.peer_name} sent {frame.kind.name} for control")
            match read_control(frame):
                case Cancel(request=request):
                    if request in self._handling:
                        self._handling[request].cancel()
                case message if isinstance(message, Notice):
                    tasks.create_task(self._handle_notice(message))
                case message if isinstance(message, ControlRequest):
                    self._accept(message, tasks)
                case answer if answer.request in self._answers:
                    self._answers[answer.request](answer)

    def _accept(self, message: ControlRequest, tasks: asyncio.TaskGroup) -> None:
        if message.request in self._handling:
            raise RemoteProtocolError(f"{self.peer_name} used request {message.request} twice")
        task = tasks.create_task(self._handle(message))
        self._handling[message.request] = task
        task.add_done_callback(lambda _: self._handling.pop(message.request))

    async def _handle(self, message: ControlRequest) -> None:
        """Carry out a request; whatever ends it early is told to the peer."""
        try:
            await self._handler(self, message)
        except ShardnetError as error:
            self._refuse(message, error)
        except asyncio.CancelledError:
            self._refuse(message, CancelledRequestError("the request was cancelled"))
            raise
        except Exception as error:  # our own bug: it must end by name, and alone
            self._refuse(message, self._internal_error(message, error))

    async def _handle_notice(self, message: Notice) -> None:
        """Take in what asks for no answer. What is wrong with it ends the link."""
        try:
            await self._handler(self, message)
        except ShardnetError:
            raise
        except Exception as error:  # our own bug: the node has other peers
            self._internal_error(message, error)

    def _internal_error(self, message: Incoming, error: Exception) -> ShardnetError:
        what = type(message).__name__
        _log.error("%s of %s failed", what, self.peer_name, exc_info=error)
        return ShardnetError(
            f"internal error in {what}: {error!r}, a bug of shardnet",
            remedy="report it, with the trace in that node's output",
        )

    def _refuse(self, message: ControlRequest, error: ShardnetError) -> None:
        if not self.link.closed:
            text, remedy = explained(error)
            self.send(Failed(request=message.request, code=error.code, message=text, remedy=remedy))


async def _unpacked(
    answers: asyncio.Queue[ControlMessage | ShardnetError], peer_name: str
) -> AsyncIterator[ControlMessage]:
    while True:
        answer = await answers.get()
        if isinstance(answer, ShardnetError):
            raise answer
        if isinstance(answer, Failed):
            raise reported_error(answer, peer_name)
        yield answer
