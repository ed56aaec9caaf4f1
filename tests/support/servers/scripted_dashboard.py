"""The dashboard's data as a test wants it, in the form of docs/dashboard.md.

Knows no cluster: a test sets what is told, and reads what was asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from shardnet.api.openai.faults import OPENAI
from shardnet.api.server.endpoint import Endpoint, Json, Reply, Stream, named_event
from shardnet.api.server.errors import refused
from shardnet.api.server.service import Exchange

Value = dict[str, Any]


def node(name: str, **other: Any) -> Value:
    """Describe a node that has nothing loaded."""
    return {
        "node": f"id-of-{name}",
        "name": name,
        "address": "10.0.0.5:7433",
        "state": "up",
        "why": None,
        "since_s": 0.0,
        "version": "0.2.0",
        "uptime_s": 3600.0,
        "device": "cpu",
        "isa": "avx2",
        "threads": 8,
        "cores": 16,
        "memory_bytes": 16 << 30,
        "memory_free_bytes": 4 << 30,
        "temperature_c": 61.0,
        "host": name,
        "is_asked": False,
        "model": None,
        "layers": None,
        "rank": None,
        "weight_bytes": None,
        "kv_positions": None,
        "kv_used_positions": None,
        "kernel": None,
        "dtype": None,
        "n_sequences": None,
        "links": [],
    } | other


def stage(rank: int, name: str, layers: list[int]) -> Value:
    """Describe a stage of the ring."""
    return {
        "rank": rank,
        "node": f"id-of-{name}",
        "name": name,
        "layers": layers,
        "weight_bytes": 1 << 30,
        "kv_bytes": 1 << 28,
        "streamed_layers": 0,
        "predicted_compute_ms": 12.5,
        "predicted_hop_ms": 0.4,
        "compute_ms": 13.1,
        "queue_ms": 0.1,
        "wire_ms": 0.6,
        "busy": 0.41,
    }


def state_of_two() -> Value:
    """Describe a ring of two nodes, anna and bert, with one request whose prompt is read."""
    stages = [stage(0, "anna", [0, 18]), stage(1, "bert", [18, 36])]
    held = {"model": "org/Tiny-Llama", "kv_positions": 4096, "kv_used_positions": 1024}
    request = {
        "id": "42",
        "state": "running",
        "phase": "prefill",
        "n_prompt": 6000,
        "n_prefilled": 1500,
        "n_cached": 0,
        "n_generated": 0,
        "max_tokens": 256,
        "age_s": 3.1,
        "priority": 0,
        "ahead": 0,
    }
    step = {
        "step": 1,
        "sent_ms": 10.0,
        "round_trip_ms": 40.0,
        "rows": 1,
        "prompt_rows": 0,
        "tokens": 1,
        "wire_ms": 1.0,
        "stages": [
            {"rank": 0, "start_ms": 0.3, "queue_ms": 0.0, "compute_ms": 13.0},
            {"rank": 1, "start_ms": 14.0, "queue_ms": 0.0, "compute_ms": 20.0},
        ],
    }
    load = {"running": 1, "waiting": 0, "paused": 0, "warm_slots": 2, "used_blocks": 12}
    return {
        "server": {
            "version": "0.2.0",
            "uptime_s": 12.5,
            "node": "id-of-anna",
            "name": "anna",
            "answers": True,
            "failure": None,
            "model": "org/Tiny-Llama",
            "active_requests": 2,
            "has_keys": False,
        },
        "nodes": [
            node("anna", is_asked=True, layers=[0, 18], rank=0, weight_bytes=1 << 30, **held),
            node("bert", layers=[18, 36], rank=1, weight_bytes=1 << 30, **held),
        ],
        "ring": {
            "id": "5b",
            "model": "org/Tiny-Llama",
            "head": "id-of-anna",
            "context": 8192,
            "dtype": "bfloat16",
            "wire_dtype": "bfloat16",
            "quant": None,
            "kv_dtype": "auto",
            "predicted_tok_s": 31.5,
            "why": "measured",
            "age_s": 60.0,
            "state": "ready",
            "load": {**load, "room_blocks": 256},
            "stages": stages,
            "left_out": [],
            "rings": [],
            "drafters": [
                {
                    "drafter": "mtp",
                    "node": "bert",
                    "why": "",
                    "n_drafted": 150,
                    "n_accepted": 120,
                    "n_steps": 80,
                    "n_tokens": 200,
                }
            ],
        },
        "requests": [request],
        "rates": {
            "tokens_per_s": 24.5,
            "prefill_tokens_per_s": 812.0,
            "steps_per_s": 24.5,
            "round_trip_ms": 40.2,
        },
        "steps": {"ring": "5b", "now_ms": 60.0, "steps": [step]},
        "jobs": [],
    }


@dataclass(slots=True, kw_only=True)
class ScriptedDashboard:
    """Tells `state` and each change of it; `asked` has every path that something was begun at."""

    state: Value = field(default_factory=state_of_two)
    answers: dict[str, Any] = field(default_factory=lambda: {"household": {"models": []}})
    """What is answered below the API's path; an exception is raised."""
    asked: list[tuple[str, Any]] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _queues: list[asyncio.Queue[bytes]] = field(default_factory=list)

    def tell(self, name: str, value: Any) -> None:
        """Change a part of the state, and tell all pages."""
        self.state[name] = value
        for queue in self._queues:
            queue.put_nowait(named_event(name, value))

    async def until_asked(self, path: str) -> Any:
        """Wait until something was begun at a path; return the body."""
        while True:
            for asked, body in self.asked:
                if asked == path:
                    return body
            self._changed.clear()
            await self._changed.wait()

    def endpoints(self) -> list[Endpoint[Any]]:
        """List the endpoints."""
        found: list[Endpoint[Any]] = [
            Endpoint(
                method="GET",
                path="/dashboard/api/events",
                summary="",
                handle=self._events,
                dialect=OPENAI,
            )
        ]
        for method, path in (
            *(("GET", "models"), ("GET", "doctor"), ("POST", "plan"), ("POST", "programs")),
            *(("POST", "load"), ("POST", "unload"), ("POST", "pull")),
            *(("POST", "jobs/{id}/cancel"), ("POST", "requests/{id}/cancel")),
            *(("GET", "household"), ("DELETE", "household/{id:path}")),
        ):
            found.append(
                Endpoint(
                    method=method,
                    path=f"/dashboard/api/{path}",
                    summary="",
                    handle=self._answer(path),
                    dialect=OPENAI,
                    body=dict if path in ("plan", "programs", "load", "pull") else None,
                )
            )
        return found

    async def _events(self, exchange: Exchange, body: None) -> Reply:
        async def tell() -> AsyncGenerator[bytes, None]:
            queue: asyncio.Queue[bytes] = asyncio.Queue()
            self._queues.append(queue)
            try:
                for name, value in self.state.items():
                    yield named_event(name, value)
                while True:
                    yield await queue.get()
            finally:
                self._queues.remove(queue)

        return Stream(chunks=tell())

    def _answer(self, path: str) -> Any:
        async def answer(exchange: Exchange, body: Any) -> Reply:
            asked = path.replace(":path", "")
            asked = asked.replace("{id}", exchange.path_parameters.get("id", ""))
            self.asked.append((asked, body))
            self._changed.set()
            value = self.answers.get(path)
            if value is None:
                raise refused(f"nothing is scripted for {path}")
            return Json(value=value)

        return answer
