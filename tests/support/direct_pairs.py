"""Both ends of a connection for parts, without the links that they come up as."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

from support.transport_harness import IDENTITY

from shardnet.transport.direct_connection import DirectConnection
from shardnet.transport.tls import TlsEngine
from shardnet.transport.traffic import Meter


@contextmanager
def direct_pair(*, is_encrypted: bool) -> Iterator[tuple[DirectConnection, DirectConnection]]:
    """Two ends, named "zero" and "one" by each other, closed at the end."""
    engines = _shaken() if is_encrypted else (None, None)
    ends = [
        DirectConnection(
            sock, engine, peer=peer, meter=Meter(tcp=lambda: None), on_close=lambda failed: None
        )
        for sock, engine, peer in zip(socket.socketpair(), engines, ("one", "zero"), strict=True)
    ]
    try:
        yield ends[0], ends[1]
    finally:
        for end in ends:
            end.close()


def _shaken() -> tuple[TlsEngine, TlsEngine]:
    """A client and a server that have shaken hands."""
    made = []
    for context, is_server in ((IDENTITY.client, False), (IDENTITY.server, True)):
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        engine = context.wrap_bio(incoming, outgoing, server_side=is_server)
        made.append(TlsEngine(engine=engine, incoming=incoming, outgoing=outgoing))
    client, server = made
    for _ in range(4):
        for one, other in ((client, server), (server, client)):
            with contextlib.suppress(ssl.SSLWantReadError):
                one.engine.do_handshake()
            other.incoming.write(one.outgoing.read())
    return client, server
