"""Links over TCP: connect, again where the peer is busy, and listen.

Knows addresses and what the errors of the operating system mean to a person. Knows nothing of what
travels on a link.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import random
import socket
import sys
from typing import Any, Final

from shardnet.errors import LinkClosedError, PeerUnreachableError, ShardnetError, UsageError
from shardnet.transport.address import format_address
from shardnet.transport.admission import KnownHosts
from shardnet.transport.deadline import deadline
from shardnet.transport.link import Link, LinkOptions
from shardnet.transport.listener import Listener, OnFailure, OnLink, OnRefused
from shardnet.transport.tcp_link import TcpLink, set_buffers
from shardnet.wire.connection.connection import HelloAnswer
from shardnet.wire.messages.handshake import Hello

_log = logging.getLogger(__name__)

RETRY_PAUSES_S: Final = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
"""Pauses before connecting again, where the peer has closed before its hello; each is varied by
half, so that those refused together come apart."""


async def connect(
    host: str, port: int, hello: Hello, *, options: LinkOptions | None = None
) -> Link:
    """Open a link to the node at `host` and `port`, and wait for its hello.

    A node that too many connect to closes connections unanswered: this tries again, all within
    `handshake_s`. Raises UsageError for a port that cannot be, PeerUnreachableError when nothing
    answers there in that time, LinkClosedError when every connection is closed before the hello,
    VersionMismatchError, RemoteProtocolError when something else answers, or whatever error the
    node refuses the link with.
    """
    _check_port(port, lowest=1)
    options = options or LinkOptions()
    where = format_address(host, port)
    begun = asyncio.get_running_loop().time()
    n_closed = 0
    try:
        async with deadline(options.handshake_s):
            for pause_s in (*RETRY_PAUSES_S, None):
                link = await _connect_once(host, port, hello, options)
                if link is not None:
                    return link
                n_closed += 1
                if pause_s is not None:
                    await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
    except OSError as error:
        if not n_closed or not isinstance(error, TimeoutError):
            raise _unreachable(where, error, options) from error
    took_s = asyncio.get_running_loop().time() - begun
    raise LinkClosedError(
        f"{where}: it closed the connection before its hello, {n_closed} times in {took_s:.1f} s: "
        "it is busy, or too many connect to it at once",
        remedy="try again in a moment; its log may say why",
    )


async def listen(
    host: str,
    port: int,
    hello: Hello | HelloAnswer,
    on_link: OnLink,
    *,
    on_failure: OnFailure | None = None,
    on_refused: OnRefused | None = None,
    known: KnownHosts | None = None,
    options: LinkOptions | None = None,
) -> Listener:
    """Accept links on the first address of `host`, on all interfaces if it is empty; port 0 takes
    a free one.

    `hello` is sent to every peer with purpose, ring and epoch of the peer's own, or is a function
    that makes the answer to the peer's hello and may refuse it by raising ShardnetError. `on_link`
    runs as a task for each link that is up and owns it: when it raises, the link is aborted, when
    it returns, the link continues. What fails goes to `on_failure` (default: the log), a handshake
    once per host and kind of error. Hosts in `known`, and those whose links come up, which join it,
    have places of their own when strangers take all others.

    Raises UsageError for a port that cannot be, ConfigurationError when the address cannot be used.
    """
    _check_port(port, lowest=0)
    listener = Listener(
        hello,
        on_link,
        on_failure or _log_failure,
        on_refused or _tell_nobody,
        options or LinkOptions(),
        KnownHosts() if known is None else known,
    )
    await listener.start(host, port)
    return listener


async def _connect_once(host: str, port: int, hello: Hello, options: LinkOptions) -> TcpLink | None:
    """Connect and wait for the hello; None if the peer closes the connection before it."""
    link = TcpLink(hello, initiator=True, options=options)
    up = False
    try:
        await link.take_over(await _dial(host, port, options))
        await link.wait_up()
        up = True
        return link
    except LinkClosedError:
        if not link.was_cut_off:
            raise
        return None
    finally:
        if not up:
            link.abort("the link did not come up")


async def _dial(host: str, port: int, options: LinkOptions) -> socket.socket:
    """Connect to the first address of `host` that answers; each has its share of the time."""
    loop = asyncio.get_running_loop()
    if "%" in host:  # a link-local address with its scope, which uvloop's own resolver loses
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    else:
        infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for last, (family, kind, number, _, address) in enumerate(infos, start=1 - len(infos)):
        sock = None
        connected = False
        try:
            sock = socket.socket(family, kind, number)  # which fails for a family not had here
            sock.setblocking(False)
            set_buffers(sock, options)
            async with deadline(options.handshake_s / len(infos)):
                await _connect(sock, address)
            connected = True
            return sock
        except OSError:
            if last == 0:
                raise
        finally:
            if sock is not None and not connected:
                sock.close()
    raise PeerUnreachableError(f"{format_address(host, port)}: the host has no address")


async def _connect(sock: socket.socket, address: tuple[Any, ...]) -> None:
    """Connect as `loop.sock_connect` does, to addresses with an IPv6 scope too: uvloop loses it."""
    loop = asyncio.get_running_loop()
    if not any(address[3:]) or sys.platform == "win32":  # where uvloop is not
        await loop.sock_connect(sock, address)
        return
    code = sock.connect_ex(address)
    if code == errno.EINPROGRESS:
        writable = asyncio.Event()
        loop.add_writer(sock, writable.set)
        try:
            await writable.wait()
        finally:
            loop.remove_writer(sock)
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))


def _check_port(port: int, *, lowest: int) -> None:
    if not lowest <= port <= 65535:  # the resolver would take it modulo 65536
        raise UsageError(f"port {port} is not a number from {lowest} to 65535")


def _unreachable(where: str, error: OSError, options: LinkOptions) -> PeerUnreachableError:
    match error:
        case socket.gaierror():
            cause = f"the host is unknown ({error.strerror})"
            remedy = "check the name or use its IP address"
        case TimeoutError(errno=None):
            cause = f"no answer within {options.handshake_s:g} s"
            remedy = "check that a node runs there and that no firewall is between"
        case ConnectionRefusedError():
            cause = "nothing listens there"
            remedy = "start `shardnet node` on that machine or check the port"
        case _:
            cause = f"it cannot be reached ({error})"
            remedy = "check the address and the network"
    return PeerUnreachableError(f"{where}: {cause}", remedy=remedy)


def _log_failure(error: ShardnetError) -> None:
    _log.warning("a link failed: %s", error)


def _tell_nobody(host: str, error: ShardnetError) -> None:
    """Take no note of a refused handshake."""
