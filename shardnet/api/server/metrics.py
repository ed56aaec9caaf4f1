"""Counters of an HTTP server, for Prometheus. Each server has its own."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from shardnet.wire.messages.membership import RingLoad

MEDIA_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_BETWEEN_S: Final = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5)

_RING: Final = {
    "running": "Requests that run on the ring",
    "waiting": "Requests that wait for the ring",
    "paused": "Requests that make room for others",
    "warm_slots": "Slots whose prefixes can be continued",
    "used_blocks": "Blocks of the KV cache in use, of one stage",
    "room_blocks": "Blocks of the KV cache there are, of one stage",
    "restored_positions": "Positions of prompts that were read from disk instead of computed",
}


class Metrics:
    """The counters, by what they count."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self.requests = Counter(
            "shardnet_http_requests",
            "Requests that ended, by endpoint, status and API key; 499: the client went away",
            ["endpoint", "status", "key"],
            registry=registry,
        )
        self.seconds = Histogram(
            "shardnet_http_request_seconds",
            "Time from a request to the end of its answer",
            ["endpoint"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.active = Gauge(
            "shardnet_http_requests_active", "Requests that are being answered", registry=registry
        )
        self.prompt_tokens = Counter(
            "shardnet_prompt_tokens", "Tokens of prompts", registry=registry
        )
        self.cached_tokens = Counter(
            "shardnet_prompt_tokens_cached",
            "Tokens of prompts whose keys and values were there already",
            registry=registry,
        )
        self.generated_tokens = Counter(
            "shardnet_generated_tokens", "Tokens that were generated", registry=registry
        )
        self.first_token_s = Histogram(
            "shardnet_time_to_first_token_seconds",
            "Time from a request to its first token",
            buckets=_SECONDS,
            registry=registry,
        )
        self.between_tokens_s = Histogram(
            "shardnet_time_between_tokens_seconds",
            "Time between two tokens of one request",
            buckets=_BETWEEN_S,
            registry=registry,
        )
        self.node_up = Gauge(
            "shardnet_node_up", "Whether the node answers: 1 or 0", registry=registry
        )
        self._ring = {
            name: Gauge(f"shardnet_ring_{name}", text, registry=registry)
            for name, text in _RING.items()
        }

    def take_load(self, load: RingLoad | None) -> None:
        """Take what the ring has in hand now, None without a ring."""
        for name, gauge in self._ring.items():
            gauge.set(0 if load is None else getattr(load, name))

    def written(self) -> bytes:
        """Write all of them in Prometheus' text format."""
        return generate_latest(self._registry)
