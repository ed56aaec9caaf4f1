"""What the endpoints of one server share: the client, the models, the counters.

Knows how generated tokens are counted. Must not know HTTP, nor any dialect.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final, Unpack

from shardnet.api.client import Client
from shardnet.api.events import GenerationEvent
from shardnet.api.requests import GenerationOptions, Prompts
from shardnet.api.server.keys import ApiKey
from shardnet.api.server.metrics import Metrics
from shardnet.api.server.model_names import ModelNames
from shardnet.api.server.settings import Settings
from shardnet.api.traces import RequestTrace
from shardnet.types import SamplingParams
from shardnet.wire.messages.chat import TokenizerDescribed
from shardnet.wire.messages.plans import ModelChoice, NodeProgress

TOKENIZER_FRESH_S: Final = 60.0
"""What is known of a tokenizer counts for so long: files may change."""
MAX_TOKENIZERS: Final = 8
MAX_TRACES: Final = 16
"""HTTP requests whose traces are kept."""
MAX_TRACED_AT_ONCE: Final = 8
"""Generations of one HTTP request that are traced."""


@dataclass(slots=True)
class KeptTraces:
    """The traces of the latest requests that asked for one, by request id and key."""

    _kept: dict[tuple[str, str], dict[str, RequestTrace]] = field(default_factory=dict)

    def keep(self, request_id: str, key: ApiKey | None, traces: dict[str, RequestTrace]) -> None:
        """Keep what one HTTP request has traced; the oldest is dropped."""
        place = (request_id, key.name if key is not None else "")
        self._kept.pop(place, None)
        self._kept[place] = traces
        if len(self._kept) > MAX_TRACES:
            del self._kept[next(iter(self._kept))]

    def find(self, request_id: str, key: ApiKey | None) -> dict[str, RequestTrace] | None:
        """Return what a request with this key has traced, None where nothing is kept of it."""
        return self._kept.get((request_id, key.name if key is not None else ""))


@dataclass(slots=True, kw_only=True)
class Service:
    """One server: what it asks, and how it is set up."""

    client: Client
    settings: Settings
    models: ModelNames
    metrics: Metrics = field(default_factory=Metrics)
    n_active: int = 0
    """Requests that are being answered."""
    tokenizers: dict[str, tuple[float, TokenizerDescribed]] = field(default_factory=dict)
    """What is known of the tokenizers of models, and since when."""
    traces: KeptTraces = field(default_factory=KeptTraces)
    began_s: float = field(default_factory=time.monotonic)
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def uptime_s(self) -> float:
        """How long the server has run, in seconds to the millisecond."""
        return round(time.monotonic() - self.began_s, 3)

    def stop(self) -> None:
        """End all requests: each gets an error that says so."""
        self._stopping.set()

    async def until_stopped(self) -> None:
        """Wait until `stop` is called."""
        await self._stopping.wait()


@dataclass(slots=True, kw_only=True)
class Exchange:
    """One HTTP request on its way. Generates as a client does, and counts.

    `note` says what it waits for, for a stream's comments. With `is_traced` it keeps `traces` of
    what is generated for it, MAX_TRACED_AT_ONCE at most.
    """

    service: Service
    request_id: str
    path_parameters: dict[str, str]
    began_s: float = field(default_factory=time.monotonic)
    key: ApiKey | None = None
    note: str = "waiting"
    n_prompt: int = 0
    n_generated: int = 0
    is_traced: bool = False
    traces: dict[str, RequestTrace] = field(default_factory=dict)

    async def generate(
        self,
        prompts: Prompts,
        sampling: SamplingParams,
        *,
        n: int = 1,
        model: str | ModelChoice | None = None,
        **options: Unpack[GenerationOptions],
    ) -> AsyncGenerator[GenerationEvent, None]:
        """Generate as `shardnet.api.Client.generate` does."""
        if self.is_traced and len(self.traces) < MAX_TRACED_AT_ONCE:
            options["trace"] = True
        events = self.service.client.generate(
            prompts, sampling, n=n, model=model, on_loading=self.loading, **options
        )
        last_s: dict[int, float] = {}
        async with aclosing(events):
            async for event in events:
                self._count(event, last_s)
                yield event

    async def describe_tokenizer(
        self, *, model: str | ModelChoice | None = None
    ) -> TokenizerDescribed:
        """Describe a tokenizer as `shardnet.api.Client.describe_tokenizer` does."""
        known, client = self.service.tokenizers, self.service.client
        name = model if isinstance(model, str) else (model or client.choice).model
        now = time.monotonic()
        if name in known and now - known[name][0] < TOKENIZER_FRESH_S:
            return known[name][1]
        described = await client.describe_tokenizer(model=model, on_progress=self.loading)
        known.pop(name, None)
        known[name] = (now, described)
        if len(known) > MAX_TOKENIZERS:
            del known[next(iter(known))]
        return described

    def loading(self, progress: NodeProgress) -> None:
        """Note what a node does before the request can run."""
        self.note = progress.phase
        if progress.total_bytes:
            self.note += f" {100 * progress.done_bytes // progress.total_bytes} %"

    def _count(self, event: GenerationEvent, last_s: dict[int, float]) -> None:
        metrics = self.service.metrics
        if event.ahead:
            self.note = f"queued behind {event.ahead}"
        elif event.state.value == "running":
            self.note = "reading the prompt" if event.request_id not in last_s else "generating"
        if event.token_ids:
            now = time.monotonic()
            before = last_s.get(event.request_id)
            if before is None:
                metrics.first_token_s.observe(now - self.began_s)
            else:
                metrics.between_tokens_s.observe(now - before)
            last_s[event.request_id] = now
            metrics.generated_tokens.inc(len(event.token_ids))
            self.n_generated += len(event.token_ids)
        if event.result is not None:
            usage = event.result.usage
            metrics.prompt_tokens.inc(usage.n_prompt)
            metrics.cached_tokens.inc(usage.n_reused)
            self.n_prompt += usage.n_prompt
            if event.result.trace is not None and len(self.traces) < MAX_TRACED_AT_ONCE:
                self.traces[f"{self.request_id} {len(self.traces)}"] = event.result.trace
