"""What the endpoints of one server share: the client, the models, the counters.

Knows how generated tokens are counted. Must not know HTTP, nor any dialect.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from math import ceil
from typing import Any, Final, TypeVar, Unpack

from msgspec.structs import replace

from shardnet.api.chat.request import ChatRequest, fetch_picture
from shardnet.api.chat.run import ChatEvent, run_chat
from shardnet.api.client import Client
from shardnet.api.events import GenerationEvent, RequestState
from shardnet.api.generation import AGAIN_S, RESUME_S
from shardnet.api.requests import GenerationOptions, Message, Prompt, Prompts
from shardnet.api.server.errors import RETRY_S
from shardnet.api.server.keys import ApiKey, WrongKeys
from shardnet.api.server.metrics import Metrics
from shardnet.api.server.model_names import ModelNames
from shardnet.api.server.settings import Settings
from shardnet.api.switching.model_switch import PATIENCE_S, Keep, ModelSwitch
from shardnet.api.switching.turns import Ticket
from shardnet.api.traces import RequestTrace
from shardnet.errors import (
    BusyError,
    LinkError,
    PeerFailedError,
    QueueFullError,
    ShardnetError,
    ShortageError,
    UsageError,
    shown,
)
from shardnet.sampling_params import SamplingParams
from shardnet.transport.loop import cancel_all
from shardnet.types import remember
from shardnet.wire.framing.schema import MAX_SECONDS
from shardnet.wire.messages.chat import MAX_PICTURES_BYTES, TokenizerDescribed
from shardnet.wire.messages.generation import Detokenized, Encode, Encoded, Tokenized
from shardnet.wire.messages.plans import ModelChoice, NodeProgress

MAX_RETRY_S: Final = 60
_REMEMBERED: Final = 64


class Pace:
    """How fast requests end. Times are of any clock, in seconds.

    Each request that is turned away is told of another place: who comes again together would be
    turned away together.
    """

    def __init__(self) -> None:
        self._ends_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._promised_s = 0.0

    def ended(self, now_s: float) -> None:
        """Note that a request has ended."""
        self._ends_s.append(now_s)

    def retry_s(self, now_s: float) -> int:
        """Return in how many whole seconds a place should be free; RETRY_S where nothing is known.

        At least 1, at most MAX_RETRY_S.
        """
        if len(self._ends_s) < 2:
            return RETRY_S
        # To now, and not to the last end: a pace that slows down shows at once.
        each_s = (now_s - self._ends_s[0]) / len(self._ends_s)
        latest_s = now_s + MAX_RETRY_S
        self._promised_s = min(max(now_s, self._promised_s) + each_s, latest_s)
        return max(1, min(MAX_RETRY_S, ceil(self._promised_s - now_s)))


TOKENIZER_FRESH_S: Final = 60.0
"""What is known of a tokenizer counts for so long: files may change."""
MAX_TOKENIZERS: Final = 8
MAX_DISPLACED: Final = 3
"""How often a request begins again that found another program's model on the ring."""
MAX_TRACES: Final = 16
"""HTTP requests whose traces are kept."""
MAX_TRACED_AT_ONCE: Final = 8
"""Generations of one HTTP request that are traced."""

LEFT_OUT_HEADER: Final = "x-shardnet-schema-left-out"
"""Names the keywords of a request's schemas that only narrow them, and that were not kept."""
MOST_HEADER: Final = 500

Answer = TypeVar("Answer")
AnyPrompt = TypeVar("AnyPrompt")


@dataclass(slots=True)
class KeptTraces:
    """The traces of the latest requests that asked for one, by request id and key."""

    _kept: dict[tuple[str, str], dict[str, RequestTrace]] = field(default_factory=dict)

    def keep(self, request_id: str, key: ApiKey | None, traces: dict[str, RequestTrace]) -> None:
        """Keep what one HTTP request has traced; the oldest is dropped."""
        place = (request_id, key.name if key is not None else "")
        remember(self._kept, place, traces, MAX_TRACES)

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
    paces: defaultdict[str, Pace] = field(default_factory=lambda: defaultdict(Pace))
    """How fast requests end, by the name of their key, "" for all together."""
    tokenizers: dict[str, tuple[float, TokenizerDescribed]] = field(default_factory=dict)
    """What is known of the tokenizers of models, and since when."""
    switch: ModelSwitch = field(init=False)
    """What has the ring load the models that are asked for."""
    traces: KeptTraces = field(default_factory=KeptTraces)
    exchanges: dict[tuple[str, str], Exchange] = field(default_factory=dict)
    """Those that generate chats now, by key and the names that their clients have for them."""
    wrong_keys: WrongKeys = field(default_factory=WrongKeys)
    began_s: float = field(default_factory=time.monotonic)
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _background: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        settings = self.settings
        keep = Keep(settings.idle_unload_s)
        self.switch = ModelSwitch(self.client, keep=keep, log=settings.log)

    def keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do work that goes on when its request has ended, until `close`. It must not raise."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

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

    async def close(self) -> None:
        """End what goes on beside requests, what `keep` was given too. None may come any more."""
        await cancel_all(*self._background)
        await self.switch.close()


@dataclass(slots=True, kw_only=True)
class Exchange:
    """One HTTP request on its way. Generates as a client does, and counts.

    `headers` go with its answer: its id, and what is left out of the schemas of its output.
    `note` says what it waits for, for a stream's comments; `hears` whether the client gets those.
    `keep` is how long its model stays loaded after it, None for as long as usual. With `is_traced`
    it keeps `traces` of what is generated for it, MAX_TRACED_AT_ONCE at most.

    What needs the ring waits until that has the model, which it keeps until the exchange ends.
    """

    service: Service
    request_id: str
    path_parameters: dict[str, str]
    query: dict[str, str] = field(default_factory=dict)
    began_s: float = field(default_factory=time.monotonic)
    key: ApiKey | None = None
    note: str = "waiting"
    hears: bool = False
    keep: Keep | None = None
    headers: list[tuple[str, str]] = field(default_factory=list)
    n_prompt: int = 0
    n_generated: int = 0
    is_traced: bool = False
    traces: dict[str, RequestTrace] = field(default_factory=dict)
    resumes: bool = False
    """Whether the answer to an earlier request of this id is wanted again."""
    outlives: bool = False
    """Whether another server may go on with it, if this one ends."""
    n_received: int = 0
    """Events of its stream that the client has."""
    n_calls: int = 0
    running: set[int] = field(default_factory=set)
    """The requests of the client that run for it."""
    _place: Ticket | None = None
    _waited_for: str = ""
    """The model of the household that was loaded when this asked for it first."""

    @property
    def owner(self) -> str:
        """The name of the request's key, "" without one: what is kept for it is that key's."""
        return self.key.name if self.key is not None else ""

    @property
    def keep_s(self) -> float | None:
        """How long an encoder is to stay loaded, None where the request does not say."""
        if self.keep is None:
            return None
        return MAX_SECONDS if self.keep.seconds is None else self.keep.seconds

    async def use(self, model: str | ModelChoice | None = None) -> ModelChoice:
        """Wait until the ring has a model, the default for None; return what nodes are sent.

        Raises what ModelSwitch.admit raises: BusyError where the client would hear nothing.
        """
        choice = self._chosen(model)
        if self.service.models.is_of_household(choice.model):
            if not (self.hears or self.resumes or self._waited_for == choice.model):
                await self._be_loaded(choice)
                self._waited_for = choice.model
            return choice
        if self.resumes:  # the ring has the model, or gets it from whoever takes it over
            return choice
        if self._place is None or self._place.model != choice.model:
            self.leave()
            self._place = await self.service.switch.admit(
                choice,
                note=self._wait_for,
                patience_s=None if self.hears else PATIENCE_S,
                keep=self.keep,
            )
        return choice

    async def _be_loaded(self, choice: ModelChoice) -> None:
        """Wait until a model of the household is loaded. Raises BusyError after PATIENCE_S."""
        client = self.service.client
        try:
            async with asyncio.timeout(PATIENCE_S):
                await client.tokenize([0], model=choice, on_progress=self.loading)
        except TimeoutError:
            why = {one.model.name: one.why for one in await client.household()}.get(choice.model)
            error = BusyError(why or f"{choice.model} is not loaded", remedy="ask again")
            error.retry_s = RETRY_S
            raise error from None

    def leave(self) -> None:
        """Let the ring have other models."""
        place, self._place = self._place, None
        if place is not None:
            self.service.switch.leave(place)

    def pay(self) -> None:
        """Count the tokens that this took for its key; once, when it has ended."""
        exchanges = self.service.exchanges
        for name in [name for name, one in exchanges.items() if one is self]:
            del exchanges[name]
        if self.key is not None:
            n_tokens = self.n_prompt + self.n_generated
            self.service.settings.keys.spend(self.key, n_tokens, time.monotonic())

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
        choice, n_displaced = self._chosen(model), 0
        prompts = await self._with_pictures(prompts)
        constraint = options.get("constraint")
        if constraint is not None and constraint.left_out:
            left_out = re.sub("[^ -~]", "?", ", ".join(constraint.left_out))[:MOST_HEADER]
            self.headers.append((LEFT_OUT_HEADER, left_out.strip()))
        while True:
            await self.use(choice)
            has_begun = False
            if self.is_traced and len(self.traces) < MAX_TRACED_AT_ONCE:
                options["trace"] = True
            if self.service.settings.has_deputy or self.resumes or self.outlives:
                options["key"], options["resume"] = self._next_key(), self.resumes
            events = self.service.client.generate(
                prompts, sampling, n=n, model=choice, on_loading=self.loading, **options
            )
            last_s: dict[int, float] = {}
            counted: set[int] = set()
            labels = self._labels(choice.model)
            try:
                async with aclosing(events):
                    async for event in events:
                        self.running.add(event.request_id)
                        if event.state.is_end:
                            self.running.discard(event.request_id)
                        if event.error is not None:
                            if not has_begun and _is_displaced(event.error):
                                raise event.error
                            self._note_failure(choice, event.error)
                        has_begun = True
                        self._count(event, labels, last_s, counted)
                        yield event
            except ShardnetError as error:
                self._note_failure(choice, error)
                n_displaced += 1
                if has_begun or not _is_displaced(error) or n_displaced > MAX_DISPLACED:
                    raise
            else:
                if self.keep == Keep(0.0) and self.service.models.is_of_household(choice.model):
                    with suppress(BusyError):
                        await self.unload(choice)
                return

    async def unload(self, choice: ModelChoice) -> None:
        """Have a model unloaded, as soon as nobody uses it if it is the one of the ring.

        Raises BusyError for a model of the household that is in use.
        """
        if self.service.models.is_of_household(choice.model):
            await self.service.client.unload(model=choice.model)
        else:
            await self.service.switch.unload(choice.model)

    async def tokenize(
        self,
        prompt: str | Sequence[int] | Sequence[Message] | Prompt,
        *,
        model: str | ModelChoice | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Tokenized:
        """Return token ids as `shardnet.api.Client.tokenize` does."""
        client = self.service.client
        told = await self._with_pictures(prompt)
        return await self._ask(
            model,
            lambda choice: client.tokenize(told, model=choice, on_progress=self.loading, **options),
        )

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        keep_special_tokens: bool = False,
        model: str | ModelChoice | None = None,
    ) -> Detokenized:
        """Return text as `shardnet.api.Client.detokenize` does."""
        client = self.service.client
        return await self._ask(
            model,
            lambda choice: client.detokenize(
                token_ids, keep_special_tokens=keep_special_tokens, model=choice
            ),
        )

    async def encode(self, message: Encode) -> Encoded:
        """Ask an encoder as `shardnet.api.Client.encode` does. The ring keeps its model."""
        if message.texts:
            message = replace(message, keep_s=self.keep_s)
        answer = await self.service.client.encode(message, self.loading)
        n_tokens = sum(answer.n_tokens)
        labels = self._labels(message.model)
        self.service.metrics.prompt_tokens.labels(*labels).inc(n_tokens)
        self.n_prompt += n_tokens
        return answer

    def chat(self, request: ChatRequest, *, is_streamed: bool) -> AsyncGenerator[ChatEvent, None]:
        """Run a chat request as `run_chat` does, with this server's settings."""
        settings = self.service.settings
        self.go_by(self.request_id)
        return run_chat(
            self,
            request,
            is_streamed=is_streamed,
            most_equal_calls=settings.most_equal_calls,
            thought_budget=settings.thought_budget,
        )

    def go_by(self, name: str) -> None:
        """Have it found by a name that its client knows, until it has ended."""
        self.service.exchanges[self.owner, name] = self

    def end_thought(self) -> None:
        """Have the model end its reasoning and answer, in each of the samples that run."""
        for request_id in [*self.running]:
            self.service.client.end_thought(request_id)

    async def describe_tokenizer(
        self, *, model: str | ModelChoice | None = None
    ) -> TokenizerDescribed:
        """Describe a tokenizer as `shardnet.api.Client.describe_tokenizer` does."""
        known, client = self.service.tokenizers, self.service.client
        name = self._chosen(model).model
        now = time.monotonic()
        if name in known and now - known[name][0] < TOKENIZER_FRESH_S:
            return known[name][1]
        described = await self._ask(
            model,
            lambda choice: client.describe_tokenizer(model=choice, on_progress=self.loading),
        )
        remember(known, name, (now, described), MAX_TOKENIZERS)
        return described

    async def _with_pictures(self, prompt: AnyPrompt) -> AnyPrompt:
        """Fetch the pictures that messages name by their URL.

        Raises UsageError where this server fetches none, and what fetching raises.
        """
        if not isinstance(prompt, list):
            return prompt
        n_bytes = 0
        for said in prompt:
            content = said.get("content") if isinstance(said, dict) else None
            for part in content if isinstance(content, list) else ():
                if not isinstance(part.get("image"), str):
                    continue
                if not self.service.settings.fetches_pictures:
                    raise UsageError(
                        f"the picture at {shown(part['image'][:200])} is not fetched: send it as a "
                        "data: URL in base64, or start the server with --fetch-images"
                    )
                part["image"] = await fetch_picture(part["image"])
                n_bytes += len(part["image"])
                if n_bytes > MAX_PICTURES_BYTES:
                    raise UsageError(
                        f"the pictures have more than {MAX_PICTURES_BYTES} bytes together",
                        remedy="send fewer, or smaller ones",
                    )
        return prompt

    def _next_key(self) -> str:
        """Name a call so that the same one of an equal request finds it, and no other key's can."""
        self.n_calls += 1
        told = f"{self.owner}\0{self.request_id}\0{self.n_calls}"
        return hashlib.sha256(told.encode()).hexdigest()[:48]

    def loading(self, progress: NodeProgress) -> None:
        """Note what a node does before the request can run."""
        self.note = progress.phase
        if progress.total_bytes:
            self.note += f" {100 * progress.done_bytes // progress.total_bytes} %"

    def _wait_for(self, what: str) -> None:
        self.note = self.service.models.shown(what)

    def _chosen(self, model: str | ModelChoice | None) -> ModelChoice:
        if isinstance(model, str):
            return replace(self.service.client.choice, model=model)
        return self.service.client.choice if model is None else model

    async def _ask(
        self,
        model: str | ModelChoice | None,
        ask: Callable[[ModelChoice], Awaitable[Answer]],
    ) -> Answer:
        """Ask a short question of the ring that has the model.

        For an answer that is resumed it is asked again until a ring without its head can have been
        taken over.
        """
        choice, n_displaced, until_s = self._chosen(model), 0, time.monotonic() + RESUME_S
        while True:
            await self.use(choice)
            try:
                return await ask(choice)
            except ShardnetError as error:
                is_lost = isinstance(error, LinkError | PeerFailedError)
                if self.resumes and is_lost and time.monotonic() < until_s:
                    await asyncio.sleep(AGAIN_S)
                    continue
                self._note_failure(choice, error)
                n_displaced += 1
                if not _is_displaced(error) or n_displaced > MAX_DISPLACED:
                    raise

    def _note_failure(self, choice: ModelChoice, error: ShardnetError) -> None:
        """Have the model loaded again if the ring has broken, or has got another model."""
        is_broken = isinstance(error, PeerFailedError | LinkError)
        if is_broken or _is_displaced(error):
            self.leave()
            self.service.switch.lost(choice.model, is_broken=is_broken)

    def _labels(self, model: str) -> tuple[str, str]:
        """Return whose tokens of which model are counted."""
        return self.owner, self.service.models.shown(model)

    def _count(
        self,
        event: GenerationEvent,
        labels: tuple[str, str],
        last_s: dict[int, float],
        counted: set[int],
    ) -> None:
        """Count what an event says: a prompt when it runs, since its client may leave then."""
        metrics = self.service.metrics
        result = event.result
        n_prompt = result.usage.n_prompt if result is not None else event.n_prompt
        if n_prompt and event.request_id not in counted:
            counted.add(event.request_id)
            metrics.prompt_tokens.labels(*labels).inc(n_prompt)
            self.n_prompt += n_prompt
        if event.ahead:
            self.note = f"queued behind {event.ahead}"
        elif event.why:
            self.note = event.waits
        elif event.state in (RequestState.RUNNING, RequestState.RESUMED):
            self.note = "reading the prompt" if event.request_id not in last_s else "generating"
        if event.token_ids:
            now = time.monotonic()
            before = last_s.get(event.request_id)
            if before is None:
                metrics.first_token_s.observe(now - self.began_s)
            else:
                metrics.between_tokens_s.observe(now - before)
            last_s[event.request_id] = now
            metrics.generated_tokens.labels(*labels).inc(len(event.token_ids))
            self.n_generated += len(event.token_ids)
        if result is not None:
            metrics.cached_tokens.labels(*labels).inc(result.usage.n_reused)
            if result.trace is not None and len(self.traces) < MAX_TRACED_AT_ONCE:
                self.traces[f"{self.request_id} {len(self.traces)}"] = result.trace


def _is_displaced(error: ShardnetError) -> bool:
    """Say whether another program's requests use the ring, with another model."""
    return isinstance(error, BusyError) and not isinstance(error, QueueFullError | ShortageError)
