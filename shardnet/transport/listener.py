"""A listening socket, the connections that wait, the handshakes, and the handlers of the links.

Knows sockets and the loop. Leaves to admission.py who may shake hands, and reads nothing of a
connection before that: one that waits costs a descriptor, also while its ClientHello comes in
drops.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

from shardnet.errors import (
    AuthenticationError,
    ConfigurationError,
    LinkClosedError,
    LinkError,
    PeerSilentError,
    ShardnetError,
)
from shardnet.transport.address import format_address
from shardnet.transport.admission import GRACE_S, Admission, KnownHosts, ReportedFailures
from shardnet.transport.deadline import deadline
from shardnet.transport.link import Link, LinkOptions
from shardnet.transport.tcp_link import TcpLink, keep_port, set_buffers
from shardnet.transport.tls import MAX_HELLO_BYTES, Begun, cut_short, hello_begun
from shardnet.wire.connection.connection import HelloAnswer
from shardnet.wire.messages.handshake import Hello

_log = logging.getLogger(__name__)

ACCEPT_PAUSE_S: Final = 0.5
"""How long to wait when no connection can be accepted: the process has too many files open."""
BACKLOG: Final = 1024
"""Connections that the kernel may hold before they are accepted."""
TICK_S: Final = 0.1
"""Interval (s) of the looks at who has waited too long, while anybody waits."""
_NO_ROOM: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

Address = tuple[Any, ...]
OnLink = Callable[[Link], Awaitable[None]]
OnFailure = Callable[[ShardnetError], None]
"""Called with why a peer's link did not come up, or its handler failed. It names the peer."""
OnRefused = Callable[[str, ShardnetError], None]
"""Called with the host of each handshake that came to nothing, and why."""


@dataclass(slots=True)
class _Waiting:
    sock: socket.socket
    address: Address
    is_silent: bool = True
    n_came: int = 0
    """So many bytes of what it says first have come, of a ClientHello that is not whole."""


@dataclass(eq=False, repr=False)
class Listener:
    """A listening socket, the handshakes in progress and the handlers of the links."""

    hello: Hello | HelloAnswer
    on_link: OnLink
    on_failure: OnFailure
    on_refused: OnRefused
    options: LinkOptions
    known: KnownHosts

    def __post_init__(self) -> None:
        self._admission = Admission(
            connections=min(self.options.max_unfinished, _most_descriptors() // 2),
            handshakes=self.options.max_handshakes,
            per_host=self.options.max_handshakes_per_host,
            wait_s=self.options.handshake_s,
            known=self.known,
        )
        self._reported = ReportedFailures()
        self._loop = asyncio.get_running_loop()
        self._listening: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._tickets = count()
        self._waiting: dict[int, _Waiting] = {}
        self._handshakes: dict[int, TcpLink] = {}
        self._ticking: asyncio.TimerHandle | None = None
        self._turns_are_due = False
        self._is_closed = False
        self._peeked_bytes = 1 if self.options.identity is None else MAX_HELLO_BYTES
        self.host = ""
        self.port = 0

    @property
    def address(self) -> str:
        """`host:port` as bound."""
        return format_address(self.host, self.port)

    async def start(self, host: str, port: int) -> None:
        """Bind and listen. Raises ConfigurationError when the address cannot be used."""
        try:
            self._listening = await _bind(host, port, self.options)
        except OSError as error:
            where = format_address(host, port)
            raise _cannot_listen(where, error) from error
        self.host, self.port = self._listening.getsockname()[:2]
        self._accepting = self._start(self._accept_all(self._listening))

    async def close(self) -> None:
        """Stop listening and cancel the handlers; their links are aborted."""
        self._is_closed = True
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait([self._accepting])
            await asyncio.sleep(0)  # the last one that may shake hands will close its socket
        if self._ticking is not None:
            self._ticking.cancel()
        for waiting in self._waiting.values():
            self._hang_up(waiting)
        self._waiting.clear()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._listening is not None:
            self._listening.close()

    # --- connections that wait

    async def _accept_all(self, listening: socket.socket) -> None:
        """Accept connections. They wait unread until they may shake hands."""
        is_told = False
        while True:
            accepting = asyncio.ensure_future(self._loop.sock_accept(listening))
            try:
                sock, address = await asyncio.shield(accepting)
            except asyncio.CancelledError:
                await _give_up(accepting, listening)
                raise
            except OSError as error:
                if error.errno in _NO_ROOM and (ticket := self._admission.shed()) is not None:
                    self._refuse(ticket, "closed unanswered, this process has no room for more")
                    continue
                if not is_told:
                    is_told = True
                    _log.warning("no connection can be accepted for a moment: %s", error)
                await asyncio.sleep(ACCEPT_PAUSE_S)
            else:
                is_told = False
                self._wait(sock, address)

    def _wait(self, sock: socket.socket, address: Address) -> None:
        """Have a new connection wait for its first byte."""
        ticket = next(self._tickets)
        self._waiting[ticket] = _Waiting(sock, address)
        closed = self._admission.arrive(ticket, address[0], self._loop.time())
        if closed is not None:
            self._refuse(closed, f"closed unanswered, {len(self._waiting) - 1} others wait")
        if ticket in self._waiting:
            self._look(ticket)
        if self._ticking is None and self._waiting:
            self._ticking = self._loop.call_later(TICK_S, self._tick)

    def _look(self, ticket: int) -> None:
        """Note how far a connection has begun, or its end; else be called when more comes."""
        waiting = self._waiting[ticket]
        try:
            came = waiting.sock.recv(self._peeked_bytes, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            begun = Begun.PARTLY
        except OSError:
            begun = None
        else:
            begun = self._begun(came)
            waiting.n_came = len(came)
        if begun is Begun.PARTLY and self._wakes(ticket, waiting):
            return
        self._stop_looking(waiting)
        if begun is None:
            self._close(ticket, LinkClosedError("the peer closed the connection, and said nothing"))
        elif begun is Begun.TOO_LONG:
            self._close(ticket, AuthenticationError("the TLS handshake failed: it begins too long"))
        else:
            waiting.is_silent = False
            self._admission.speak(ticket)
            self._take_turns_soon()

    def _begun(self, came: bytes) -> Begun | None:
        """Say how far what a connection has to say first has come, None for its end."""
        if not came:
            return None
        return Begun.WHOLE if self.options.identity is None else hello_begun(came)

    def _wakes(self, ticket: int, waiting: _Waiting) -> bool:
        """Be called when more comes than is there, or the end; return whether that can be.

        Not on Windows: there it may begin without having said all.
        """
        try:
            self._loop.add_reader(waiting.sock, self._look_again, ticket)
        except NotImplementedError:
            return False
        waiting.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, waiting.n_came + 1)
        return True

    def _look_again(self, ticket: int) -> None:
        waiting = self._waiting[ticket]
        n_came = waiting.n_came
        self._look(ticket)
        if waiting.is_silent and waiting.n_came == n_came and ticket in self._waiting:
            self._close(ticket, cut_short())

    def _close(self, ticket: int, error: ShardnetError) -> None:
        """Close a connection that will not begin, for what its peer has done."""
        waiting = self._waiting.pop(ticket)
        self._admission.forget(ticket)
        self._hang_up(waiting)
        where = format_address(*waiting.address[:2])
        self._report(waiting.address, type(error)(f"{where}: {error.message}", remedy=error.remedy))

    def _tick(self) -> None:
        """Take turns that time alone has made possible, and end waits that are too long."""
        self._ticking = None
        self._take_turns()
        for ticket in self._admission.expired(self._loop.time()):
            self._expire(ticket)
        if self._waiting:
            self._ticking = self._loop.call_later(TICK_S, self._tick)

    def _expire(self, ticket: int) -> None:
        waiting = self._waiting[ticket]
        if waiting.is_silent:
            self._look(ticket)  # after a suspend, what has come is not read yet
            if ticket not in self._waiting or not waiting.is_silent:
                return
        self._admission.forget(ticket)
        if waiting.is_silent:
            self._report(waiting.address, self._no_hello(waiting.address))
            self._hang_up(self._waiting.pop(ticket))
        else:
            limit = f"{self.options.handshake_s:g} s"
            self._refuse(ticket, f"closed unanswered after {limit}, too many connect at once")

    def _refuse(self, ticket: int, why: str) -> None:
        """Close a connection that the admission has forgotten."""
        waiting = self._waiting.pop(ticket)
        self._hang_up(waiting)
        where = format_address(*waiting.address[:2])
        self._report(waiting.address, LinkError(f"{where}: {why}"))

    def _hang_up(self, waiting: _Waiting) -> None:
        self._stop_looking(waiting)
        with contextlib.suppress(OSError):  # what is unread would make a reset of the end
            waiting.sock.recv(MAX_HELLO_BYTES)
        waiting.sock.close()

    def _stop_looking(self, waiting: _Waiting) -> None:
        with contextlib.suppress(NotImplementedError):  # Windows
            self._loop.remove_reader(waiting.sock)
            waiting.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)

    # --- handshakes

    def _take_turns_soon(self) -> None:
        """Take turns once, however many connections have spoken or left meanwhile."""
        if not self._turns_are_due:
            self._turns_are_due = True
            self._loop.call_soon(self._take_turns)

    def _take_turns(self) -> None:
        self._turns_are_due = False
        if self._is_closed:
            return
        turns = self._admission.take_turns(self._loop.time())
        for ticket in turns.ended:
            link = self._handshakes[ticket]
            link.abort(f"its handshake took more than {GRACE_S:g} s, and others wait")
        for ticket in turns.begun:
            waiting = self._waiting.pop(ticket)
            self._handshakes[ticket] = TcpLink(self.hello, initiator=False, options=self.options)
            self._start(self._supervise(ticket, waiting))

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finish)
        return task

    def _finish(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._loop.call_exception_handler(
                {"message": "the handler of a link failed", "exception": error, "task": task}
            )

    async def _supervise(self, ticket: int, waiting: _Waiting) -> None:
        """Run one link's handler; whatever ends it, the link does not outlive a failure."""
        link = self._handshakes[ticket]
        try:
            if await self._shake_hands(ticket, waiting):
                await self.on_link(link)
        except ShardnetError as error:
            link.abort("its handler failed")
            self.on_failure(error)
        except BaseException:
            link.abort("its handler was stopped")
            raise

    async def _shake_hands(self, ticket: int, waiting: _Waiting) -> bool:
        """Wait until the link is up. Returns whether it is, and reports why not."""
        link, address = self._handshakes[ticket], waiting.address
        up = False
        try:
            await link.take_over(waiting.sock)
            async with deadline(self.options.handshake_s):
                await link.wait_up()
            up = True
            self._reported.clear(address[0])
        except TimeoutError:
            self._report(address, self._no_hello(address))
            link.abort("no hello came")
        except ShardnetError as error:
            self._report(address, error)
            await link.wait_lost()  # it may still be telling the peer why
        finally:
            del self._handshakes[ticket]
            self._admission.leave(ticket, self._loop.time(), failed=not up)
            self._take_turns_soon()
        return up

    def _no_hello(self, address: Address) -> PeerSilentError:
        where = format_address(*address[:2])
        return PeerSilentError(f"{where}: no hello came within {self.options.handshake_s:g} s")

    def _report(self, address: Address, error: ShardnetError) -> None:
        where = format_address(*address[:2])
        bare = type(error)(error.message.removeprefix(f"{where}: "), remedy=error.remedy)
        self.on_refused(address[0], bare)
        if self._reported.is_news(address[0], bare):
            self.on_failure(error)


def _most_descriptors() -> int:
    """Return how many files and sockets this process may have open."""
    if sys.platform == "win32":
        return sys.maxsize
    import resource

    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if most == resource.RLIM_INFINITY else most


async def _bind(host: str, port: int, options: LinkOptions) -> socket.socket:
    if not host:
        host = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
    infos = await asyncio.get_running_loop().getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    family, kind, number, _, address = infos[0]
    listening = socket.socket(family, kind, number)
    try:
        keep_port(listening)
        if host == "::":  # IPv4 comes here too
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        set_buffers(listening, options)
        listening.setblocking(False)
        listening.bind(address)
        listening.listen(BACKLOG)  # of two that bind one port at once, the second fails only here
    except OSError:
        listening.close()
        raise
    return listening


def _cannot_listen(where: str, error: OSError) -> ConfigurationError:
    match error.errno:
        case errno.EADDRINUSE:
            cause = "the port is in use"
            remedy = "choose another with --port, or stop what holds it"
        case errno.EADDRNOTAVAIL | socket.EAI_NONAME:
            cause, remedy = "this machine has no such address", "choose another with --host"
        case errno.EACCES if sys.platform == "win32":
            cause = "another program or Windows itself keeps that port"
            remedy = (
                "choose another with --port; `netsh interface ipv4 show excludedportrange tcp` "
                "lists those that Windows keeps"
            )
        case errno.EACCES:
            cause = "this user may not use that port"
            remedy = "choose one above 1023 with --port"
        case _:
            cause, remedy = str(error), "choose another with --host or --port"
    return ConfigurationError(f"cannot listen on {where}: {cause}", remedy=remedy)


async def _give_up(
    accepting: asyncio.Future[tuple[socket.socket, Any]], listening: socket.socket
) -> None:
    """Accept no more; what has come at the last moment is closed."""
    with contextlib.suppress(NotImplementedError):  # Windows
        asyncio.get_running_loop().remove_reader(listening)
    await asyncio.sleep(0)  # what was accepted already becomes the result
    if not accepting.cancel() and not accepting.cancelled() and accepting.exception() is None:
        accepting.result()[0].close()
