"""Handles the requests of one endpoint: key, limits, body, answer, errors, counters, log line.

Knows their order, and that a request ends when its client disconnects. Must not know what an
endpoint does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from math import ceil
from typing import Any, Final
from urllib.parse import parse_qsl

import msgspec
from starlette.types import Receive, Scope, Send

from shardnet.api.server.bodies import Disconnected, decode_body, decode_form, read_body
from shardnet.api.server.endpoint import (
    FORM,
    JSON,
    AnswerWriter,
    Endpoint,
    Json,
    Reply,
    Rest,
    Stream,
    Text,
)
from shardnet.api.server.errors import RETRY_S, Fault, HttpError, fault_of, refused, too_many
from shardnet.api.server.keys import ApiKey, check_web_page
from shardnet.api.server.service import Exchange, Service
from shardnet.api.server.settings import LogLine, Settings
from shardnet.errors import QueueFullError, ShardnetError, where
from shardnet.transport.admission import host_name
from shardnet.transport.loop import cancel_all
from shardnet.types import whole_number

_log = logging.getLogger(__name__)

TOO_MANY: Final = 429
CLIENT_LEFT: Final = 499
"""The status, in logs and counters, of a request whose client disconnected."""

TRACE_HEADER: Final = b"x-shardnet-trace"
"""With it a request is traced; `GET /traces/REQUEST-ID` gives the trace."""

RESUME_HEADER: Final = b"x-shardnet-resume"
"""Resumes the answer to an earlier request of the same id; its value is how many events to skip."""

MOST_RECEIVED: Final = 1 << 32

_REQUEST_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")


class Handler:
    """An ASGI application for one endpoint."""

    def __init__(self, service: Service, endpoint: Endpoint[Any]) -> None:
        self._service = service
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        headers = {name.lower(): value for name, value in scope["headers"]}
        exchange = Exchange(
            service=self._service,
            request_id=_request_id(headers),
            path_parameters=scope.get("path_params", {}),
            query=dict(parse_qsl(scope["query_string"].decode("latin-1"))),
            is_traced=headers.get(TRACE_HEADER, b"") not in (b"", b"0", b"off"),
            resumes=RESUME_HEADER in headers,
        )
        names = self._endpoint.dialect.id_headers
        exchange.headers += ((name, exchange.request_id) for name in names)
        writer = AnswerWriter(send, exchange.headers)
        has_left = False
        with self._counted():
            try:
                self._check_page(scope["method"], headers)
                host = host_name(scope["client"][0]) if scope.get("client") else ""
                await self._checked(exchange, headers, host, receive, writer)
            except Disconnected:
                has_left = True
            except Exception as error:
                await self._fail(exchange, error, writer)
            finally:
                exchange.leave()
                self._note_end(exchange, CLIENT_LEFT if has_left else writer.status)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        service = self._service
        service.n_active += 1
        service.metrics.active.set(service.n_active)
        try:
            yield
        finally:
            service.n_active -= 1
            service.metrics.active.set(service.n_active)

    def _check_page(self, method: str, headers: dict[bytes, bytes]) -> None:
        """Check the origin of a request by a web page. Raises HttpError 403."""
        settings = self._service.settings
        if not settings.keys:  # a stranger's page does not know them
            check_web_page(method, headers, settings.allowed_hosts, settings.cors_origins)

    async def _checked(
        self,
        exchange: Exchange,
        headers: dict[bytes, bytes],
        host: str,
        receive: Receive,
        writer: AnswerWriter,
    ) -> None:
        """Check key and limits, read the body, and answer."""
        endpoint, settings = self._endpoint, self._service.settings
        keys = settings.keys
        if keys and not endpoint.is_open:
            exchange.key = _key_of(headers, self._service, host)
        with keys.place(exchange.key if endpoint.counts else None) as has_place:
            if not has_place:
                assert exchange.key is not None
                raise too_many(
                    f"{exchange.key.most_requests} requests with the key '{exchange.key.name}' run "
                    "already: it may have no more at once",
                    self._retry_s(exchange.key.name),
                )
            self._check_tokens(exchange.key if endpoint.counts else None)
            if endpoint.counts and self._service.n_active > settings.most_requests:
                raise too_many(
                    f"this server works on {settings.most_requests} requests already",
                    self._retry_s(),
                )
            if exchange.resumes:
                exchange.n_received = _n_received(headers[RESUME_HEADER])
            body = None
            if endpoint.body is not None:  # else the server discards the body, from strangers too
                raw = await read_body(receive, headers, settings.most_body_bytes)
                if endpoint.body_type == FORM:
                    kind = headers.get(b"content-type", b"").decode("latin-1")
                    body = decode_form(raw, kind, endpoint.body)
                else:
                    body = decode_body(raw, endpoint.body)
            await self._unless_left(receive, self._answer(exchange, body, writer))

    def _check_tokens(self, key: ApiKey | None) -> None:
        """Check a key's limit of tokens a minute. Raises HttpError 429."""
        wait_s = self._service.settings.keys.wait_s(key, time.monotonic()) if key else 0.0
        if key and wait_s:
            raise too_many(
                f"the key '{key.name}' has had its {key.tokens_per_minute} tokens a minute",
                ceil(wait_s),
            )

    async def _answer(self, exchange: Exchange, body: Any, writer: AnswerWriter) -> None:
        reply: Reply = await self._endpoint.handle(exchange, body)
        match reply:
            case Json(value=value, status=status):
                await writer.whole(status, JSON, msgspec.json.encode(value))
            case Text(text=text, media_type=media_type, status=status, headers=headers):
                raw = text if isinstance(text, bytes) else text.encode()
                await writer.whole(status, media_type, raw, headers)
            case Stream():
                await self._stream(exchange, reply, writer)

    async def _stream(self, exchange: Exchange, stream: Stream, writer: AnswerWriter) -> None:
        """Send a stream as it is made."""
        settings = self._service.settings
        exchange.hears = stream.heartbeat is not None
        writer.begin(stream.media_type)
        keeping = writer.keep_alive(stream.heartbeat, settings.headers_s, settings.heartbeat_s)
        rest = Rest(exchange.n_received, stream.media_type)
        async with _beside(keeping), aclosing(stream.chunks) as chunks:
            async for chunk in chunks:
                if left := rest.of(chunk):
                    await writer.piece(left)
        await writer.end()

    async def _unless_left(self, receive: Receive, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`; cancel it when the client disconnects or the server stops.

        Raises Disconnected then, or HttpError 503.
        """
        working = asyncio.create_task(work)
        leaving = asyncio.create_task(_until_left(receive))
        stopping = asyncio.create_task(self._service.until_stopped())
        try:
            await asyncio.wait({working, leaving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise Disconnected if leaving.done() else _stopping(self._service.settings)
        finally:
            await cancel_all(working, leaving, stopping)

    async def _fail(self, exchange: Exchange, error: Exception, writer: AnswerWriter) -> None:
        """Answer with an error, or end a stream that has begun with it."""
        fault, dialect = self._fault_of(error), self._endpoint.dialect
        if writer.status:
            await writer.piece(dialect.fault_in_stream(fault))
            await writer.end()
            return
        headers = [*fault.headers]
        if fault.retry_s is not None:
            headers.append(("retry-after", str(fault.retry_s)))
        body = msgspec.json.encode(dialect.fault(fault))
        await writer.whole(fault.status, JSON, body, headers)

    def _fault_of(self, error: Exception) -> Fault:
        fault = fault_of(error)
        fault = replace(fault, message=self._service.models.shown(fault.message))
        if isinstance(error, QueueFullError):
            fault = replace(fault, retry_s=self._retry_s())
        if not isinstance(error, ShardnetError | HttpError):
            _log.error("%s failed: %r in %s", self._endpoint.path, error, where(error))
            _log.debug("in full:", exc_info=error)
        return fault

    def _retry_s(self, key: str = "") -> int:
        return self._service.paces[key].retry_s(time.monotonic())

    def _note_end(self, exchange: Exchange, status: int) -> None:
        endpoint, metrics = self._endpoint, self._service.metrics
        now_s = time.monotonic()
        took_s = now_s - exchange.began_s
        key = exchange.owner
        if endpoint.counts and status != TOO_MANY:
            for whose in ("", key) if key else ("",):
                self._service.paces[whose].ended(now_s)
        exchange.pay()
        if exchange.traces:
            self._service.traces.keep(exchange.request_id, exchange.key, exchange.traces)
        metrics.requests.labels(endpoint.path, str(status), key).inc()
        metrics.seconds.labels(endpoint.path).observe(took_s)
        if endpoint.is_open and status < 400:
            return  # a supervisor asks for it every few seconds
        tokens = f" {exchange.n_prompt}+{exchange.n_generated} tokens" if endpoint.counts else ""
        by = f" key {key}" if key else ""
        line = LogLine.of(
            f"{endpoint.method} {endpoint.path} {status} {took_s:.3f} s{tokens}{by} "
            f"request {exchange.request_id}",
            method=endpoint.method,
            path=endpoint.path,
            status=status,
            seconds=round(took_s, 6),
            prompt_tokens=exchange.n_prompt,
            generated_tokens=exchange.n_generated,
            key=key,
            request=exchange.request_id,
        )
        self._service.settings.log(line)


def _request_id(headers: dict[bytes, bytes]) -> str:
    """Return the client's request id if it is valid, else a new one."""
    given = headers.get(b"x-request-id", b"").decode("latin-1")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _n_received(value: bytes) -> int:
    """Parse how many events a client has received. Raises HttpError 400 if it is no such number."""
    text = value.decode("latin-1").strip()
    n_received = whole_number(text)
    if n_received is None or n_received > MOST_RECEIVED:
        raise refused(
            "x-shardnet-resume says how many events of the stream were received, 0 for none: "
            f"expected a number, got {text[:40]!r}"
        )
    return n_received


def _key_of(headers: dict[bytes, bytes], service: Service, host: str) -> ApiKey:
    """Return the API key of a request from `host`.

    Raises HttpError 401 without a valid one, 429 after too many wrong ones.
    """
    scheme, _, secret = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    if scheme.lower() != "bearer":
        secret = headers.get(b"x-api-key", b"").decode("latin-1")
    now_s = time.monotonic()
    if secret and (wait_s := service.wrong_keys.wait_s(host, now_s)):
        raise too_many("too many wrong API keys came from this address", ceil(wait_s))
    key = service.settings.keys.find(secret.strip()) if secret else None
    if key is not None:
        service.wrong_keys.right(host)
    else:
        if secret:
            service.wrong_keys.wrong(host, now_s)
        what = "is not one of this server's" if secret else "is missing"
        raise refused(
            f"the API key {what}: send it as 'Authorization: Bearer KEY'",
            status=401,
            code="invalid_api_key",
            headers=(("www-authenticate", "Bearer"),),
        )
    return key


def _stopping(settings: Settings) -> HttpError:
    message = "this server is being stopped"
    if settings.has_deputy:
        header = RESUME_HEADER.decode()
        message += f"; the server of another node has the rest, for this id and {header}"
    return HttpError(Fault(status=503, message=message, retry_s=RETRY_S))


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@asynccontextmanager
async def _beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `work` in a task during the context, and cancel it at the end."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        await cancel_all(task)
