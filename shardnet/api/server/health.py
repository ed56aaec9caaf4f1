"""Endpoints for whoever watches a server: is it alive, can it work, what did it do."""

from __future__ import annotations

import asyncio
from typing import Final

from shardnet import __version__
from shardnet.api.server.endpoint import Dialect, Endpoint, Json, Reply, Text
from shardnet.api.server.metrics import MEDIA_TYPE
from shardnet.api.server.service import Exchange
from shardnet.errors import ShardnetError
from shardnet.wire.messages.membership import StatusReply

STATUS_S: Final = 3.0
"""How long the node may take to say how it is."""


async def alive(exchange: Exchange, body: None) -> Reply:
    """Say that this process answers, whatever the ring does."""
    return Json(value={"status": "ok", "version": __version__})


async def ready(exchange: Exchange, body: None) -> Reply:
    """Say whether the node answers, and whether its ring is whole: else no request succeeds."""
    switch = exchange.service.switch
    if switch.is_rebuilding:
        reason = f"a node of the ring was lost: {switch.doing}"
        return Json(value={"status": "unavailable", "reason": reason}, status=503)
    status = await _status(exchange)
    if isinstance(status, str):
        return Json(value={"status": "unavailable", "reason": status}, status=503)
    stage = status.node.stage
    return Json(
        value={
            "status": "ready",
            "node": status.node.name,
            "version": status.node.version,
            "model": stage.model if stage is not None else None,
            "loading": switch.doing or None,
        }
    )


async def metrics(exchange: Exchange, body: None) -> Reply:
    """Return all counters, those of the ring as they are now."""
    counters, status = exchange.service.metrics, await _status(exchange)
    counters.node_up.set(0 if isinstance(status, str) else 1)
    counters.take_load(None if isinstance(status, str) else status.load)
    return Text(text=counters.written(), media_type=MEDIA_TYPE)


async def _status(exchange: Exchange) -> StatusReply | str:
    """Ask the node how it is; return why it does not say."""
    try:
        async with asyncio.timeout(STATUS_S):
            return await exchange.service.client.status()
    except ShardnetError as error:
        return str(error)
    except TimeoutError:
        return f"the node did not answer for {STATUS_S:g} s"


def endpoints(dialect: Dialect) -> list[Endpoint[None]]:
    """List these endpoints; faults are written as `dialect` does."""
    return [
        Endpoint(
            method="GET",
            path="/healthz",
            summary="Whether the server is alive",
            handle=alive,
            dialect=dialect,
            is_open=True,
        ),
        Endpoint(
            method="GET",
            path="/readyz",
            summary="Whether the node behind the server answers",
            handle=ready,
            dialect=dialect,
            is_open=True,
        ),
        Endpoint(
            method="GET",
            path="/metrics",
            summary="Counters for Prometheus",
            handle=metrics,
            dialect=dialect,
        ),
    ]
