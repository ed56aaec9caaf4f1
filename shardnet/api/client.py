"""The client of a node: asks for plans and text, and follows where it is sent.

Knows the client messages. Imports no torch: the work is done where the node is.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from msgspec.structs import replace

from shardnet import __version__
from shardnet.cluster.control import ControlLink, Incoming
from shardnet.cluster.peers import split_address
from shardnet.errors import PeerFailedError, RemoteProtocolError, ShardnetError, UsageError
from shardnet.transport import tcp
from shardnet.transport.link import Link, LinkOptions
from shardnet.wire.control import (
    Done,
    Finished,
    Generate,
    LastRun,
    LastRunRequest,
    ModelChoice,
    NodeProgress,
    PlanReply,
    PlanRequest,
    Redirect,
    ReportReply,
    ReportRequest,
    Status,
    StatusReply,
    TextPiece,
    Unload,
    control_frame,
    read_control,
)
from shardnet.wire.messages import Hello, Purpose, Role

if TYPE_CHECKING:  # not every client needs the library behind it
    from shardnet.transport.identity import Identity

MAX_REDIRECTS = 3
HANDSHAKE_S = 5.0
"""How long a node may take to say its hello."""

GenerateEvent = PlanReply | NodeProgress | TextPiece | Finished
Ask = PlanRequest | LastRunRequest | Generate | Unload


async def dial(
    address: str, identity: Identity | None = None, *, handshake_s: float = HANDSHAKE_S
) -> Link:
    """Open a client's control link to the node at `address` (host:port), within `handshake_s`.

    Raises UsageError for an address that is none, LinkError when no node answers there,
    AuthenticationError when that node does not hold the key that `identity` is made of.
    """
    host, port = split_address(address)
    hello = Hello(
        purpose=Purpose.CONTROL,
        role=Role.CLIENT,
        node=secrets.token_hex(16),
        name="client",
        version=__version__,
    )
    options = LinkOptions(identity=identity, handshake_s=handshake_s)
    return await tcp.connect(host, port, hello, options=options)


class Client:
    """A client of one node. Use `connect`, or `open_client` over a link that is up.

    With `identity` it goes where the node sends it.
    """

    def __init__(self, control: ControlLink, identity: Identity | None) -> None:
        self._control = control
        self._identity = identity

    @property
    def address(self) -> str:
        """Where the node is."""
        return self._control.link.peer_address

    async def status(self, *, with_peers: bool) -> StatusReply:
        """Ask the node who it is and, with `with_peers`, whom it knows."""
        message = Status(request=self._control.next_request(), with_peers=with_peers)
        return await self._control.ask(message, StatusReply)

    async def report(
        self, *, probe: bool = False, with_peers: bool = False, model: str = ""
    ) -> AsyncGenerator[ReportReply, None]:
        """Ask the node what it knows and, with `with_peers`, what those know that it is linked to.

        With `probe` each first knocks at the addresses of all that it knows. `model` is a path to
        look for. Yields the reports as they come. Raises AuthenticationError where the node tells
        only members, LinkError when the link ends.
        """
        message = ReportRequest(
            request=self._control.next_request(), probe=probe, with_peers=with_peers, model=model
        )
        async with self._control.conversation(message) as answers:
            async for answer in answers:
                if not isinstance(answer, ReportReply):
                    return
                yield answer

    async def plan(
        self,
        choice: ModelChoice,
        on_progress: Callable[[NodeProgress], None] | None = None,
        *,
        again: bool = False,
    ) -> PlanReply:
        """Ask for the plan that `choice` would get; with `again` everything is measured anew.

        `on_progress` is called while a narrower wire is measured, which takes as long as the head
        needs to read the whole checkpoint.

        Raises PlanError and its like, UsageError for a choice that cannot be sent.
        """
        message = PlanRequest(request=0, choice=choice, again=again)
        async with contextlib.aclosing(self._follow(message)) as answers:
            async for answer in answers:
                if isinstance(answer, PlanReply):
                    return answer
                if isinstance(answer, NodeProgress) and on_progress is not None:
                    on_progress(answer)
        raise _no_answer(self.address)

    async def last_run(self) -> LastRun:
        """Ask for the last generation that the node, or the head of its ring, has led.

        Raises UsageError when there was none.
        """
        message = LastRunRequest(request=0)
        async with contextlib.aclosing(self._follow(message)) as answers:
            async for answer in answers:
                if isinstance(answer, LastRun):
                    return answer
        raise _no_answer(self.address)

    async def unload(self) -> None:
        """Free the model on every node of the ring. Raises BusyError while requests run."""
        async with contextlib.aclosing(self._follow(Unload(request=0))) as answers:
            async for answer in answers:
                if isinstance(answer, Done):
                    return
        raise _no_answer(self.address)

    async def generate(self, message: Generate) -> AsyncGenerator[GenerateEvent, None]:
        """Run one request and yield its events: the plan, loading, text, and Finished at the end.

        Raises whatever named error the request ends in, UsageError for a message that cannot be
        sent. Closing the generator cancels the request.
        """
        async with contextlib.aclosing(self._follow(message)) as answers:
            async for answer in answers:
                if not isinstance(answer, GenerateEvent):
                    raise RemoteProtocolError(f"{self.address} sent {type(answer).__name__}")
                yield answer
                if isinstance(answer, Finished):
                    return

    async def _follow(self, message: Ask) -> AsyncGenerator[object, None]:
        """Yield the answers of the node, or of the one it sends us to."""
        check_request(message)
        async with contextlib.AsyncExitStack() as stack:
            control = self._control
            for _ in range(MAX_REDIRECTS + 1):
                numbered = replace(message, request=control.next_request())
                redirect: Redirect | None = None
                async with control.conversation(numbered) as answers:
                    async for answer in answers:
                        if isinstance(answer, Redirect):
                            redirect = answer
                            break
                        yield answer
                assert redirect is not None
                link = await dial(redirect.address, self._identity)
                control = await stack.enter_async_context(_serving(link))
            raise PeerFailedError(f"{self.address} and others keep sending us on; try again")


def check_request(message: Ask) -> None:
    """Raise UsageError, which names the field, for values that the protocol has no room for."""
    try:
        read_control(control_frame(message))
    except (RemoteProtocolError, OverflowError, UnicodeEncodeError) as error:
        raise UsageError(f"this cannot be asked: {error.__cause__ or error}") from error


@asynccontextmanager
async def open_client(
    link: Link, identity: Identity | None = None, *, node_name: str = ""
) -> AsyncIterator[Client]:
    """Make a client over a control link that is up; the link is closed at the end.

    `node_name` is how messages call the node, where it is not name and address. `identity` opens
    the links that redirects ask for.
    """
    async with _serving(link, node_name) as control:
        yield Client(control, identity)


@asynccontextmanager
async def connect(address: str, identity: Identity | None = None) -> AsyncIterator[Client]:
    """Connect to the node at `address` (host:port). Raises what `dial` raises."""
    async with open_client(await dial(address, identity), identity) as client:
        yield client


@asynccontextmanager
async def _serving(link: Link, node_name: str = "") -> AsyncIterator[ControlLink]:
    control = ControlLink(link, _refuse, peer_name=node_name)
    reading = asyncio.create_task(_read(control))
    try:
        yield control
    finally:
        await link.close()
        await reading


async def _read(control: ControlLink) -> None:
    """Read until the link ends; whoever waits for an answer is told how."""
    with contextlib.suppress(ShardnetError):
        await control.serve()


async def _refuse(control: ControlLink, message: Incoming) -> None:
    raise RemoteProtocolError(f"a client was asked {type(message).__name__}")


def _no_answer(address: str) -> PeerFailedError:
    return PeerFailedError(f"{address} ended the conversation without an answer")
