"""The HTTP server: every dialect over one client, on one socket, whose connections may wait."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import errno
import socket
import ssl
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from shardnet.api.anthropic import endpoints as anthropic
from shardnet.api.batches import batches
from shardnet.api.client import Client
from shardnet.api.dashboard import endpoints as dashboard
from shardnet.api.dashboard import page_files
from shardnet.api.dashboard.board import Dashboard
from shardnet.api.ollama import endpoints as ollama
from shardnet.api.openai import endpoints as openai
from shardnet.api.openai.faults import OPENAI
from shardnet.api.responses import responses
from shardnet.api.server import health
from shardnet.api.server.app import make_app
from shardnet.api.server.endpoint import Endpoint
from shardnet.api.server.model_names import ModelNames
from shardnet.api.server.service import Service
from shardnet.api.server.settings import Listening
from shardnet.cluster.machine.addresses import rank, read_interfaces
from shardnet.errors import ConfigurationError, ShardnetError
from shardnet.plugins import ENDPOINTS, installed, installed_names
from shardnet.transport.address import format_address
from shardnet.transport.admission import host_name
from shardnet.transport.loop import cancel_all
from shardnet.transport.tcp_link import keep_port
from shardnet.wire.messages.generation import Encode
from shardnet.wire.messages.plans import ModelChoice

HEADERS_S: Final = 10.0
"""A connection may wait so long for the whole headers of a request."""
KEPT_S: Final = 75
"""And so many whole seconds for the first byte of a further one: longer than the usual programs and
proxies (60 s) keep one that they mean to use again, which would else send into one that is closed.
"""
MOST_WAITING: Final = 256
MOST_OF_HOST: Final = 64
"""Connections that may wait at one time, in all and of one host: the oldest makes room."""
SETTLE_S: Final = 0.25
"""Within so long: a program may make many at once, whose requests are there and not yet read."""
LOG_EVERY_S: Final = 60.0


class WaitingConnection(Protocol):
    """One that can be closed without a word."""

    def abort(self) -> None:
        """Close it."""


@dataclass(slots=True)
class Waiting:
    """The connections that wait, oldest first, and how many were closed since the last line.

    `log` takes a line, once in LOG_EVERY_S at most.
    """

    log: Callable[[str], None]
    _hosts: dict[WaitingConnection, str] = field(default_factory=dict)
    _n_of_host: Counter[str] = field(default_factory=Counter)
    _closed: Counter[str] = field(default_factory=Counter)
    _logged_s: float = -LOG_EVERY_S
    _is_settling: bool = False

    def begin(self, connection: WaitingConnection, host: str) -> None:
        """Count a connection that waits from now on; close another where there are too many."""
        self.end(connection)
        self._hosts[connection] = host
        self._n_of_host[host] += 1
        n_of_host, n = self._n_of_host[host], len(self._hosts)
        if n_of_host > MOST_WAITING or n > 2 * MOST_WAITING:
            self._settle()
        elif (n_of_host > MOST_OF_HOST or n > MOST_WAITING) and not self._is_settling:
            self._is_settling = True
            asyncio.get_running_loop().call_later(SETTLE_S, self._settle)

    def end(self, connection: WaitingConnection) -> None:
        """Count one no more that has asked or is gone."""
        host = self._hosts.pop(connection, None)
        if host is not None:
            self._n_of_host[host] -= 1
            if not self._n_of_host[host]:
                del self._n_of_host[host]

    def close(self, connection: WaitingConnection) -> None:
        """Close one that has waited too long, or that makes room."""
        if connection not in self._hosts:
            return
        self._closed[self._hosts[connection]] += 1
        self.end(connection)
        connection.abort()
        now_s = time.monotonic()
        if now_s - self._logged_s >= LOG_EVERY_S:
            [(host, _)] = self._closed.most_common(1)
            n_closed = self._closed.total()
            self.log(f"HTTP: closed {n_closed} connections without a whole request, as of {host}")
            self._closed.clear()
            self._logged_s = now_s

    def _settle(self) -> None:
        """Close those that are too many."""
        self._is_settling = False
        for host, n in [*self._n_of_host.items()]:
            for _ in range(n - MOST_OF_HOST):
                self._close_oldest(host)
        while len(self._hosts) > MOST_WAITING:
            [(most, _)] = self._n_of_host.most_common(1)
            self._close_oldest(most)

    def _close_oldest(self, host: str) -> None:
        self.close(next(one for one, of in self._hosts.items() if of == host))


class WaitingProtocol(H11Protocol):
    """A connection that is closed when no whole request comes in time."""

    def __init__(self, *arguments: Any, waiting: Waiting, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._waiting = waiting
        self._timer: asyncio.TimerHandle | None = None
        self._is_kept = False
        """Whether nothing has come since a request was answered; after KEPT_S uvicorn closes it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Read a request, or more of one. Waiting ends with its headers."""
        was_kept, self._is_kept = self._is_kept, False
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._wait_no_more()
        elif was_kept:
            self._wait()

    def on_response_complete(self) -> None:
        """Wait for the next request, unless it has come already."""
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            is_read = self.conn.our_state is self.conn.their_state  # both IDLE; else it sends still
            self._is_kept = is_read and not self.conn.trailing_data[0]
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._wait_no_more()
        super().connection_lost(exc)

    def abort(self) -> None:
        """See WaitingConnection."""
        self.transport.abort()

    def _wait(self) -> None:
        self._wait_no_more()
        self._waiting.begin(self, host_name(self.client[0]) if self.client else "")
        if not self._is_kept:
            self._timer = self.loop.call_later(HEADERS_S, self._waiting.close, self)

    def _wait_no_more(self) -> None:
        self._waiting.end(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


@dataclass(slots=True, eq=False)
class Handshake:
    """A connection on its way to TLS: it waits as others do for a request, and makes room too."""

    waiting: Waiting
    context: ssl.SSLContext
    factory: Callable[[], WaitingProtocol]
    _shaking: asyncio.Task[None] | None = None

    def begin(self, plain: socket.socket, host: str) -> asyncio.Task[None]:
        """Begin it; return the task, which does not raise."""
        self._shaking = asyncio.create_task(self._shake(plain))
        self.waiting.begin(self, host)
        return self._shaking

    def abort(self) -> None:
        """See WaitingConnection."""
        if self._shaking is not None:
            self._shaking.cancel()

    async def _shake(self, plain: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(HEADERS_S):
                await loop.connect_accepted_socket(self.factory, plain, ssl=self.context)
        except TimeoutError:
            self.waiting.close(self)
        except OSError:
            pass
        finally:
            self.waiting.end(self)


STOP_S: Final = 5
"""Whole seconds that running requests have to end when a server stops."""
ACCEPT_AGAIN_S: Final = 1.0
"""After so long a connection is accepted again where this process had no descriptors left."""


def application(service: Service, added: Sequence[Endpoint[Any]] = ()) -> ASGIApp:
    """Make the application with the endpoints of every dialect, and those that are `added`.

    Raises ConfigurationError for one of these whose path is taken.
    """
    people = [
        *dashboard.endpoints(Dashboard(service), OPENAI),
        *page_files.endpoints(OPENAI, service.settings.root_path),
    ]
    own = [*endpoints(), *people]
    check_added(own, added)
    return make_app(service, [*own, *added], OPENAI)


def endpoints() -> list[Endpoint[Any]]:
    """List the endpoints of every dialect."""
    dialects = [
        *openai.endpoints(),
        *responses.endpoints(),
        *anthropic.endpoints(),
        *ollama.endpoints(),
    ]
    return [*dialects, *batches.endpoints(dialects), *health.endpoints(OPENAI)]


@asynccontextmanager
async def serving(
    client: Client,
    listening: Listening,
    *,
    current: Callable[[], ModelChoice | None] | None = None,
    on_loaded: Callable[[ShardnetError | None], None] | None = None,
    added: Sequence[Endpoint[Any]] = (),
    on_server: Callable[[Callable[[], bool]], None] = lambda has_connections: None,
) -> AsyncIterator[str]:
    """Serve HTTP until the context ends; yield the URL.

    `added` are endpoints beside shardnet's own and those of installed packages. Requests that name
    no model get what `current` returns, else the client's choice. With `on_loaded` the default
    model is loaded at once, and that is called at the end with the error, if there was one.
    `on_server` takes what says whether there are connections.
    Requests that still run at the end are told, and have STOP_S seconds. Raises ConfigurationError
    where the address, the files for TLS or what a package adds cannot be used.
    """
    settings = listening.settings
    client.speculate = settings.speculate
    client.choice = client.choice.drafting(settings.speculate)
    models = ModelNames(
        client, current=current, may_switch=settings.may_switch, aliases=settings.aliases
    )
    service = Service(client=client, settings=listening.settings, models=models)
    app = application(service, [*installed_endpoints(), *added])
    bound = _bind(listening.host, listening.port)
    try:
        waiting = Waiting(settings.log)
        server = _Server(_config(app, listening), waiting)
    except BaseException:
        bound.close()
        raise
    on_server(lambda: bool(server.server_state.connections))
    host, port = bound.getsockname()[:2]
    scheme = "https" if listening.is_secure else "http"
    task = asyncio.create_task(server.serve(sockets=[bound]))
    loading = asyncio.create_task(_load(service, on_loaded)) if on_loaded is not None else None
    announcing = asyncio.create_task(_announce(listening, host, port))
    try:
        await server.until_started(task)
        yield f"{scheme}://{format_address(host, port)}{listening.settings.root_path}"
    finally:
        await cancel_all(announcing)
        service.stop()
        server.should_exit = True
        await task
        if loading is not None:
            await cancel_all(loading)
        await service.close()


async def _announce(listening: Listening, host: str, port: int) -> None:
    """Announce the server by mDNS until cancelled, if it is to be."""
    if listening.name:
        from shardnet.cluster.discovery.http_announcement import HttpServer, announce  # few need it

        path = f"{listening.settings.root_path}/"
        server = HttpServer(listening.name, host, port, path, listening.is_secure)
        await announce(server, listening.mdns_interfaces, listening.settings.log)


async def _load(service: Service, on_loaded: Callable[[ShardnetError | None], None]) -> None:
    """Have the default model loaded before the first request comes; an encoder is by that."""
    choice, failure = service.models.default.choice, None
    try:
        service.switch.leave(await service.switch.admit(choice))
    except ShardnetError as error:
        failure = error
        with contextlib.suppress(ShardnetError):
            told = await service.client.encode(Encode(request=0, model=choice.model))
            failure = None if told.kind else error
    on_loaded(failure)


class _Server(uvicorn.Server):
    """A server that leaves signals to the program, and shakes hands itself where it has TLS."""

    def __init__(self, config: uvicorn.Config, waiting: Waiting) -> None:
        super().__init__(config)
        self._waiting = waiting
        self._protocol = partial(WaitingProtocol, waiting=waiting)
        config.http_protocol_class = self._protocol  # type: ignore[assignment]
        self._accepts = asyncio.Event()
        self._shaking: set[asyncio.Task[None]] = set()
        """Handshakes, and the task that accepts connections for them."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections."""
        assert sockets is not None
        context = self.config.ssl
        await super().startup([] if context is not None else sockets)
        if context is not None:
            self._shaking |= {asyncio.create_task(self._accept(one, context)) for one in sockets}
        self._accepts.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more, and end requests."""
        await cancel_all(*self._shaking)
        await super().shutdown(sockets)

    async def _accept(self, bound: socket.socket, context: ssl.SSLContext) -> None:
        loop = asyncio.get_running_loop()
        factory = partial(
            self._protocol,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        while True:
            try:
                plain, address = await loop.sock_accept(bound)
            except OSError:
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            handshake = Handshake(self._waiting, context, factory)
            task = handshake.begin(plain, host_name(address[0]))
            self._shaking.add(task)
            task.add_done_callback(self._shaking.discard)

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
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",  # what strangers send is no news, and there is more of it
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=STOP_S,
        timeout_keep_alive=KEPT_S,
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
        if sys.platform in ("linux", "win32"):  # elsewhere two programs would share a port
            keep_port(opened)
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


def installed_endpoints() -> list[Endpoint[Any]]:
    """List them. Raises ConfigurationError for a package that cannot be used."""
    return [one for name in installed_names(ENDPOINTS) for one in _endpoints_of(name)]


def check_added(own: Sequence[Endpoint[Any]], added: Sequence[Endpoint[Any]]) -> None:
    """Raise ConfigurationError for an added endpoint whose method and path another one has."""
    taken = {(one.method, one.path) for one in own}
    for one in added:
        if (one.method, one.path) in taken:
            raise ConfigurationError(
                f"{one.method} {one.path} of the format {one.dialect.name!r} is taken",
                remedy="uninstall the package that adds it, or have it use another path",
            )
        taken.add((one.method, one.path))


def _endpoints_of(name: str) -> list[Endpoint[Any]]:
    make = installed(ENDPOINTS, name)
    try:
        made = cast(Callable[[], object], make)()
    except Exception as error:  # of somebody else's code: any
        raise _unusable(name) from error
    if isinstance(made, list) and all(isinstance(one, Endpoint) for one in made):
        return made
    raise _unusable(name)


def _unusable(name: str) -> ConfigurationError:
    return ConfigurationError(
        f"{name!r} of {ENDPOINTS} should be a function that returns a list of endpoints",
        remedy="uninstall the package that adds it, or tell its makers",
    )
