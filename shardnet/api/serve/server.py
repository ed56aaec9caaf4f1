"""The HTTP server: every dialect over one client, on one socket.

Knows uvicorn. Must not know what the endpoints do.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import errno
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from shardnet.api.anthropic import endpoints as anthropic
from shardnet.api.client import Client
from shardnet.api.ollama import endpoints as ollama
from shardnet.api.openai import endpoints as openai
from shardnet.api.openai.faults import OPENAI
from shardnet.api.server import health
from shardnet.api.server.app import make_app
from shardnet.api.server.model_names import ModelNames
from shardnet.api.server.service import Service
from shardnet.api.server.settings import Listening
from shardnet.cluster.machine.addresses import rank, read_interfaces
from shardnet.errors import ConfigurationError
from shardnet.transport.address import format_address
from shardnet.wire.messages.plans import ModelChoice

STOP_S: Final = 5
"""Whole seconds that running requests have to end when a server stops."""


def application(service: Service) -> ASGIApp:
    """Make the application with the endpoints of every dialect."""
    dialects = [*openai.endpoints(), *anthropic.endpoints(), *ollama.endpoints()]
    return make_app(service, [*dialects, *health.endpoints(OPENAI)], OPENAI)


@asynccontextmanager
async def serving(
    client: Client,
    listening: Listening,
    *,
    current: Callable[[], ModelChoice | None] = lambda: None,
) -> AsyncIterator[str]:
    """Serve HTTP until the context ends; yield the URL.

    Requests that name no model get what `current` returns, else the client's choice. Those that
    still run at the end are told, and have STOP_S seconds. Raises ConfigurationError where the
    address or the files for TLS cannot be used.
    """
    models = ModelNames(client, current=current)
    service = Service(client=client, settings=listening.settings, models=models)
    bound = _bind(listening.host, listening.port)
    try:
        server = _Server(_config(application(service), listening))
    except BaseException:
        bound.close()
        raise
    host, port = bound.getsockname()[:2]
    scheme = "https" if listening.is_secure else "http"
    task = asyncio.create_task(server.serve(sockets=[bound]))
    try:
        await server.until_started(task)
        yield f"{scheme}://{format_address(host, port)}{listening.settings.root_path}"
    finally:
        service.stop()
        server.should_exit = True
        await task


class _Server(uvicorn.Server):
    """A server that leaves signals to the program."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._accepts = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections."""
        await super().startup(sockets)
        self._accepts.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield

    async def until_started(self, serving: asyncio.Task[None]) -> None:
        """Wait until it accepts connections. Raises what ended it before."""
        accepting = asyncio.create_task(self._accepts.wait())
        await asyncio.wait({serving, accepting}, return_when=asyncio.FIRST_COMPLETED)
        accepting.cancel()
        if serving.done():
            await serving


def _config(app: ASGIApp, listening: Listening) -> uvicorn.Config:
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=STOP_S,
        ssl_certfile=listening.certificate or None,
        ssl_keyfile=listening.private_key or None,
    )
    try:
        config.load()
        if listening.cluster_secret:
            config.ssl = _cluster_context(listening)
    except (OSError, ssl.SSLError) as error:
        files = " and ".join(filter(None, (listening.certificate, listening.private_key)))
        raise ConfigurationError(
            f"{files} cannot be used for TLS: {error}",
            remedy="give a certificate and its private key, both PEM files",
        ) from error
    return config


def _cluster_context(listening: Listening) -> ssl.SSLContext:
    """Make the TLS context by the cluster's authority, for all addresses of this machine."""
    from shardnet.api.serve.authority import HttpAuthority, server_context  # few servers need it

    def addresses() -> list[str]:
        return [listening.host, *(address.host for address in rank(read_interfaces()))]

    return server_context(
        HttpAuthority(listening.cluster_secret),
        addresses,
        lambda: datetime.datetime.now(datetime.UTC),
    )


def _bind(host: str, port: int) -> socket.socket:
    """Open a listening socket. Raises ConfigurationError."""
    where = format_address(host, port)
    try:
        [found, *_] = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise ConfigurationError(f"{where} is no address of this machine: {error}") from error
    family, kind, protocol, _, address = found
    opened = socket.socket(family, kind, protocol)
    try:
        if Path("/proc").exists():  # elsewhere the option lets two programs share a port
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(address)
        opened.listen(2048)
        opened.setblocking(False)
    except OSError as error:
        opened.close()
        taken = error.errno == errno.EADDRINUSE
        raise ConfigurationError(
            f"cannot serve HTTP at {where}: {error.strerror}",
            remedy="choose another port" if taken else "choose an address of this machine",
        ) from error
    return opened
