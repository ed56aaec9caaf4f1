"""Endpoints for monitoring a server: is it alive, is it ready, what has it done."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from shardnet import __version__
from shardnet.api.server.endpoint import Dialect, Endpoint, Json, Reply, Text
from shardnet.api.server.errors import refused
from shardnet.api.server.metrics import MEDIA_TYPE
from shardnet.api.server.service import MAX_TRACES, Exchange
from shardnet.api.traces import chrome_trace
from shardnet.checkpoint.model_names import short_name
from shardnet.errors import ShardnetError
from shardnet.wire.messages.household import HouseholdModelState
from shardnet.wire.messages.membership import StatusReply

STATUS_S: Final = 3.0
"""How long the node may take to say how it is."""


async def alive(exchange: Exchange, body: None) -> Reply:
    """Say that this process answers, whatever the ring does."""
    service = exchange.service
    return Json(
        value={
            "status": "ok",
            "node": service.client.node_name,
            "version": __version__,
            "uptime_s": service.uptime_s,
        }
    )


async def ready(exchange: Exchange, body: None) -> Reply:
    """Say whether the node answers, and its ring is whole and loaded: else no request succeeds."""
    switch = exchange.service.switch
    if switch.is_rebuilding:
        return _unready(exchange, f"a node of the ring was lost: {switch.doing}")
    status = await _status(exchange)
    if isinstance(status, str):
        return _unready(exchange, status)
    if switch.doing:
        return _unready(exchange, switch.doing)
    stage = status.node.stage
    return Json(
        value={
            "status": "ready",
            "node": status.node.name,
            "version": status.node.version,
            "uptime_s": round(status.node.uptime_s, 3),
            "model": short_name(stage.model) if stage is not None else None,
        }
    )


def _unready(exchange: Exchange, reason: str) -> Reply:
    reason = exchange.service.models.shown(reason)
    return Json(value={"status": "unavailable", "reason": reason}, status=503)


async def metrics(exchange: Exchange, body: None) -> Reply:
    """Return all counters, those of the nodes as they are now."""
    counters = exchange.service.metrics
    status, (reports, _), household = await asyncio.gather(
        _status(exchange), exchange.service.client.reports(STATUS_S), _household(exchange)
    )
    counters.node_up.set(0 if isinstance(status, str) else 1)
    counters.ring.take(reports, None if isinstance(status, str) else status.load, household)
    return Text(text=counters.written(), media_type=MEDIA_TYPE)


async def trace(exchange: Exchange, body: None) -> Reply:
    """Return the trace of one of the last requests that asked for it with the same key."""
    request_id = exchange.path_parameters["request_id"]
    traces = exchange.service.traces.find(request_id, exchange.key)
    if traces is None:
        raise refused(
            f"there is no trace of request {request_id[:128]}: send the header "
            f"X-Shardnet-Trace: 1 with one, and ask when it has ended; {MAX_TRACES} are kept",
            status=404,
        )
    return Json(value=chrome_trace(traces))


async def _status(exchange: Exchange) -> StatusReply | str:
    """Ask the node how it is; return why it does not say."""
    try:
        async with asyncio.timeout(STATUS_S):
            return await exchange.service.client.status()
    except ShardnetError as error:
        return str(error)
    except TimeoutError:
        return f"the node did not answer for {STATUS_S:g} s"


async def _household(exchange: Exchange) -> list[HouseholdModelState]:
    """Ask how the models of the household are; none where nobody says so in time."""
    with contextlib.suppress(ShardnetError, TimeoutError):
        async with asyncio.timeout(STATUS_S):
            return await exchange.service.client.household()
    return []


def endpoints(dialect: Dialect) -> list[Endpoint[None]]:
    """List these endpoints; faults are written as `dialect` does."""
    return [
        dialect.at("GET /healthz", "Whether the server is alive", alive, is_open=True),
        dialect.at("GET /health", "The same, where other servers have it", alive, is_open=True),
        dialect.at(
            "GET /readyz", "Whether the node behind the server answers", ready, is_open=True
        ),
        dialect.at("GET /metrics", "Counters for Prometheus", metrics),
        dialect.at(
            "GET /traces/{request_id}",
            "Where the time of a request went that was sent with X-Shardnet-Trace: 1",
            trace,
        ),
    ]
