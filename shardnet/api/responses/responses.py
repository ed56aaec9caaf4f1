"""Responses: their endpoints, the answer, its stream, and what is kept for the next one."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from functools import partial
from itertools import count
from typing import Any, Final

import msgspec

from shardnet.api.chat.request import ChatRequest
from shardnet.api.chat.run import Accepted, Ended, Piece, count_prompt
from shardnet.api.openai.endpoints import Kept
from shardnet.api.openai.faults import ErrorAnswer, error_answer
from shardnet.api.openai.logprobs import chat_logprobs
from shardnet.api.openai.sampling import settle_biases
from shardnet.api.responses.answers import (
    Incomplete,
    InputTokens,
    ItemEvents,
    OutputTokens,
    Response,
    ResponseCompleted,
    ResponseCreated,
    ResponseError,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseQueued,
    ResponseUsage,
    StreamEvent,
)
from shardnet.api.responses.background import BEAT_S, Background, EventLog, place_of
from shardnet.api.responses.body import ItemBody, ResponseBody, input_items, response_request
from shardnet.api.server.endpoint import (
    Dialect,
    Endpoint,
    Json,
    Reply,
    Stream,
    Text,
    comment,
    named_event,
)
from shardnet.api.server.errors import Fault, HttpError, fault_of, refused, too_many
from shardnet.api.server.service import Exchange
from shardnet.errors import ContextExceededError, ShardnetError, UsageError, shown
from shardnet.transport.loop import cancel_all
from shardnet.types import whole_number

_PREFIX: Final = "resp_"
_HEX: Final = 32
"""Digits of a response's id. Those of its items begin with them: so a reference finds it."""


MOST_RUNNING: Final = 32
"""Responses that one server makes in the background."""
RETRY_S: Final = 60
GONE_S: Final = 8.0
"""One of which nothing was heard for so long has lost its server: another one takes it up."""


class _KeptResponse(msgspec.Struct, frozen=True, array_like=True):
    """A response as JSON, and the items of the conversation that it ends, as JSON too.

    One that was made in the background has its `events`, as a log keeps them. While it is being
    made it has the `body` of its request, for any server that takes it up.
    """

    answer: bytes
    items: bytes
    events: bytes = b""
    body: bytes = b""

    @property
    def is_background(self) -> bool:
        """Whether it is, or was, made in the background."""
        return bool(self.events or self.body)


class InputCounted(msgspec.Struct, kw_only=True):
    """How many tokens a conversation has in the model's chat template."""

    object: str = "response.input_tokens"
    input_tokens: int


class Deleted(msgspec.Struct, kw_only=True):
    """Says that a response is kept no longer."""

    id: str
    object: str = "response"
    deleted: bool = True


class Responses:
    """Answers conversations, and keeps them for requests that follow."""

    def __init__(self) -> None:
        self._kept = Kept(what="response", prefix=_PREFIX)
        self._running: dict[tuple[str, str], Background] = {}

    async def respond(self, exchange: Exchange, body: ResponseBody) -> Reply:
        """Answer a conversation."""
        served = await exchange.service.models.find(body.model)
        earlier = await self._earlier(exchange, body.previous_response_id)
        await settle_biases(exchange, body, served.choice)
        await self._put_in_place(exchange, input_items(body))
        request = response_request(body, served.choice, earlier)
        response = _response(body, served.name)
        exchange.go_by(response.id)
        if body.background:
            log = (await self._begin(exchange, body, earlier, response)).log
            if body.stream:
                return Stream(chunks=log.after(-1), heartbeat=lambda: comment(exchange.note))
            return Json(value=response)
        events = _events(
            exchange,
            request,
            response,
            partial(self._keep, exchange, body, earlier, response, b""),
            is_streamed=bool(body.stream),
        )
        if body.stream:
            return Stream(
                chunks=_chunks(events, response), heartbeat=lambda: comment(exchange.note)
            )
        async with aclosing(events):
            async for _ in events:
                pass
        return Json(value=response)

    async def show(self, exchange: Exchange, body: None) -> Reply:
        """Return a response that is kept or being made, or the rest of its stream.

        Raises HttpError 404, and 400 for a stream that was not made in the background.
        """
        found, asked = await self._found(exchange), exchange.query
        if asked.get("stream", "").lower() not in ("true", "1"):
            return _told(found)
        if isinstance(found, _KeptResponse) and not found.is_background:
            raise refused("a stream can be taken up again if its response has background: true")
        after = whole_number(asked.get("starting_after", "0"))
        if after is None:
            raise refused("starting_after is no sequence number", "starting_after")
        rest = self._rest(exchange, found, after if "starting_after" in asked else -1)
        return Stream(chunks=rest, heartbeat=lambda: comment(exchange.note))

    async def cancel(self, exchange: Exchange, body: None) -> Reply:
        """Make no more of a response; one that has ended stays as it is.

        Raises HttpError 404, and 400 for one that is not made in the background.
        """
        found = await self._found(exchange)
        if isinstance(found, Background):
            await found.cancel()
        elif not found.is_background:
            raise refused("only responses with background: true can be cancelled")
        elif found.body:
            raise refused("another server makes this response: cancel it there", status=409)
        return _told(found)

    async def delete(self, exchange: Exchange, body: None) -> Reply:
        """Keep a response no longer, and make no more of it. Raises HttpError 404."""
        name = exchange.path_parameters["response_id"]
        if (running := self._running.get((exchange.owner, name))) is not None:
            await running.cancel()
        await self._kept.drop(exchange.service.client, exchange.owner, name)
        return Json(value=Deleted(id=name))

    async def count(self, exchange: Exchange, body: ResponseBody) -> Reply:
        """Count the tokens of a conversation, one that is longer than the context too."""
        served = await exchange.service.models.find(body.model)
        earlier = await self._earlier(exchange, body.previous_response_id)
        await self._put_in_place(exchange, input_items(body))
        request = response_request(body, served.choice, earlier)
        return Json(value=InputCounted(input_tokens=await count_prompt(exchange, request)))

    async def _found(self, exchange: Exchange) -> Background | _KeptResponse:
        """Find a response. One whose server has ended is made here from now on.

        Raises HttpError 404.
        """
        name, client = exchange.path_parameters["response_id"], exchange.service.client
        if (running := self._running.get((exchange.owner, name))) is not None:
            return running
        kept = _decoded(await self._kept.get(client, exchange.owner, name))
        if not kept.body:
            return kept
        known = await self._kept.listed(client, exchange.owner, name)
        if min((one.age_s for one in known), default=0.0) <= GONE_S:
            return kept
        body = msgspec.json.decode(kept.body, type=ResponseBody)
        earlier = await self._earlier(exchange, body.previous_response_id)
        response = msgspec.json.decode(kept.answer, type=Response)
        return await self._begin(exchange, body, earlier, response, resumes=True)

    async def _rest(
        self, exchange: Exchange, found: Background | _KeptResponse, after: int
    ) -> AsyncGenerator[bytes, None]:
        """Yield the events behind number `after`; those of another server when it has them all."""
        while isinstance(found, _KeptResponse) and found.body:
            exchange.note = "another server makes it"
            await asyncio.sleep(BEAT_S)
            found = await self._found(exchange)
        log = found.log if isinstance(found, Background) else EventLog(found.events)
        async for chunk in log.after(after):
            yield chunk

    async def _begin(
        self,
        exchange: Exchange,
        body: ResponseBody,
        earlier: list[ItemBody],
        response: Response,
        *,
        resumes: bool = False,
    ) -> Background:
        """Begin to make a response in the background, or go on with what another server began.

        Raises HttpError 400 for one that is not kept, 429 for too many.
        """
        service = exchange.service
        if body.store is False:
            raise refused("background needs store: leave it out", "store")
        if len(self._running) >= MOST_RUNNING:
            raise too_many(f"{MOST_RUNNING} responses are made in the background", RETRY_S)
        served = await service.models.find(body.model)
        if body.seed is None:  # whoever takes it up draws the same tokens
            body.seed = secrets.randbits(63)
        request = response_request(body, served.choice, earlier)
        response.status, response.background = "queued", True
        making = _KeptResponse(
            answer=msgspec.json.encode(response), items=b"[]", body=msgspec.json.encode(body)
        )
        own = Exchange(
            service=service,
            request_id=response.id,
            path_parameters={},
            key=exchange.key,
            hears=True,
            resumes=resumes,
            outlives=True,
        )
        await self._kept.put(
            service.client, own.owner, response.id, b"", msgspec.msgpack.encode(making)
        )
        running = self._running[own.owner, response.id] = Background(response=response)
        keep = partial(self._keep, own, body, earlier, response)
        works = (self._make(own, request, running, keep), self._beat(own, response.id))
        running.tasks = [*map(service.keep, works)]
        return running

    async def _make(
        self,
        exchange: Exchange,
        request: ChatRequest,
        running: Background,
        keep: Callable[[bytes], Awaitable[None]],
    ) -> None:
        """Make a response, and keep it before the last of its events are told."""
        response, log, last = running.response, running.log, list[bytes]()
        try:
            try:
                async with place_of(exchange), aclosing(_made(exchange, request, running)) as made:
                    async for chunk in made:
                        is_last = response.status not in ("queued", "in_progress")
                        last.append(chunk) if is_last else log.add(chunk)
            except asyncio.CancelledError:
                if not running.is_cancelled:  # this server ends, and another one may take it up
                    raise
                response.status = "cancelled"
            except Exception as error:
                last = [failed_event(fault_of(error), response, len(log.events))]
            await cancel_all(running.tasks[1])
            await keep(log.packed(last))
            exchange.service.settings.log(f"{response.id} {response.status}")
        finally:
            exchange.leave()
            exchange.pay()
            log.add(*last, is_last=True)
            del self._running[exchange.owner, response.id]
            running.ended.set()

    async def _beat(self, exchange: Exchange, name: str) -> None:
        """Tell the cluster that a response is being made."""
        while True:
            await asyncio.sleep(BEAT_S)
            with contextlib.suppress(ShardnetError, HttpError):
                await self._kept.touch(exchange.service.client, exchange.owner, name)

    async def _keep(
        self,
        exchange: Exchange,
        body: ResponseBody,
        earlier: list[ItemBody],
        response: Response,
        events: bytes,
    ) -> None:
        """Keep a response if it is to be; note in it where no node could."""
        if not response.store:
            return
        items = msgspec.json.encode([*earlier, *input_items(body), *response.output])
        answer = msgspec.json.encode(response)
        kept = _KeptResponse(answer=answer, items=items, events=events)
        content = msgspec.msgpack.encode(kept)
        try:
            client = exchange.service.client
            await self._kept.put(client, exchange.owner, response.id, b"", content)
        except ShardnetError as error:
            response.store = False
            exchange.service.settings.log(f"{response.id} is not kept: {error}")

    async def _earlier(self, exchange: Exchange, name: str | None) -> list[ItemBody]:
        """Return the conversation of a response. Raises HttpError 400 if it is not kept."""
        if not name:
            return []
        items = await self._items(exchange, name)
        if items is None:
            raise refused(
                f"{self._kept.gone(name)}; send the whole conversation as input",
                "previous_response_id",
                code="previous_response_not_found",
            )
        return items

    async def _put_in_place(self, exchange: Exchange, items: list[ItemBody]) -> None:
        """Replace references by the items they name. Raises HttpError 400 for what is not kept."""
        found: dict[str | None, ItemBody] = {}
        for place in reversed(range(len(items))):  # the last one's response has those before, too
            name = items[place].id or ""
            if items[place].type != "item_reference":
                continue
            if name not in found:
                kept = await self._items(exchange, f"{_PREFIX}{name.partition('_')[2][:_HEX]}")
                found |= {item.id: item for item in kept or ()}
            if name not in found:
                raise refused(
                    f"input[{place}] refers to {shown(name)}, which is not kept: send the item",
                    f"input[{place}].id",
                )
            items[place] = found[name]

    async def _items(self, exchange: Exchange, name: str) -> list[ItemBody] | None:
        """Return the conversation of a response, None if it is not kept."""
        content = await self._kept.find(exchange.service.client, exchange.owner, name)
        if content is None:
            return None
        return msgspec.json.decode(_decoded(content).items, type=list[ItemBody])


def _decoded(content: bytes) -> _KeptResponse:
    return msgspec.msgpack.decode(content, type=_KeptResponse)


def _told(found: Background | _KeptResponse) -> Reply:
    if isinstance(found, Background):
        return Json(value=found.response)
    return Text(text=found.answer, media_type="application/json")


async def _made(
    exchange: Exchange, request: ChatRequest, running: Background
) -> AsyncGenerator[bytes, None]:
    """Write the events of a response in the background, which other servers may go on with.

    Where nobody has what another server began it is made anew: its seed says what it is.
    """
    while True:
        events = _events(exchange, request, running.response, _nothing, is_streamed=True)
        try:
            n_before = len(running.log.events)
            async with aclosing(_chunks(events, running.response, n_before)) as chunks:
                async for chunk in chunks:
                    yield chunk
            return
        except UsageError:
            if not exchange.resumes:
                raise
            exchange.resumes = False


async def _nothing() -> None:
    """Keep nothing yet."""


async def _chunks(
    events: AsyncGenerator[StreamEvent, None], response: Response, n_before: int = 0
) -> AsyncGenerator[bytes, None]:
    """Write the events of a stream, without the first `n_before`.

    That a prompt is too long is one of them, as OpenAI has it: Codex takes a status for a fault of
    its own, and shortens the conversation when it reads the event.
    """
    number = 0
    async with aclosing(events):
        try:
            async for event in events:
                event.sequence_number = number
                number += 1
                if number > n_before:
                    yield named_event(str(event.__struct_config__.tag), event)
        except ContextExceededError as error:
            yield failed_event(fault_of(error), response, number)


async def _events(
    exchange: Exchange,
    request: ChatRequest,
    response: Response,
    keep: Callable[[], Awaitable[None]],
    *,
    is_streamed: bool,
) -> AsyncGenerator[StreamEvent, None]:
    """Yield the events of a stream, and fill the response; `keep` it before its end is sent."""
    digits, numbers = response.id.removeprefix(_PREFIX), count()
    items = ItemEvents(lambda prefix: f"{prefix}_{digits}{next(numbers):04x}")
    if response.background:
        yield ResponseCreated(response=response)
        yield ResponseQueued(response=response)
    try:
        async with aclosing(exchange.chat(request, is_streamed=is_streamed)) as told_events:
            async for told in told_events:
                match told:
                    case Accepted():
                        if not response.background:
                            yield ResponseCreated(response=response)
                        response.status = "in_progress"
                        yield ResponseInProgress(response=response)
                    case Piece():
                        for event in _of_piece(items, told):
                            yield event
                    case Ended():
                        is_cut = told.finish_reason == "length"
                        response.status = "incomplete" if is_cut else "completed"
                        for event in items.end(response.status):
                            yield event
                        response.output = items.output
                        response.usage = _usage(told)
                        if is_cut:
                            response.incomplete_details = Incomplete(reason="max_output_tokens")
                        await keep()
                        if is_cut:
                            yield ResponseIncomplete(response=response)
                        else:
                            yield ResponseCompleted(response=response)
    finally:
        if response.status == "in_progress":  # it is cut off here
            _ = [*items.end("incomplete")]
            response.output = items.output


def _of_piece(items: ItemEvents, piece: Piece) -> Iterator[StreamEvent]:
    logprobs = chat_logprobs(piece.logprobs).content
    for delta in piece.deltas:
        yield from items.take(delta, logprobs)
        logprobs = []
    items.wait(logprobs)


def _response(body: ResponseBody, model: str) -> Response:
    """Make the response that has nothing yet."""
    return Response(
        id=_PREFIX + uuid.uuid4().hex,
        created_at=int(time.time()),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        model=model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=msgspec.to_builtins(body.reasoning) or {"effort": None, "summary": None},
        store=body.store is not False,
        temperature=1.0 if body.temperature is None else body.temperature,
        text=msgspec.to_builtins(body.text) or {"format": {"type": "text"}},
        tool_choice=msgspec.to_builtins(body.tool_choice) or "auto",
        tools=[msgspec.to_builtins(tool) for tool in body.tools or ()],
        top_logprobs=body.top_logprobs or 0,
        top_p=1.0 if body.top_p is None else body.top_p,
        user=body.user,
    )


def _usage(ended: Ended) -> ResponseUsage:
    usage = ended.result.usage
    return ResponseUsage(
        input_tokens=usage.n_prompt,
        input_tokens_details=InputTokens(cached_tokens=usage.n_reused),
        output_tokens=usage.n_generated,
        output_tokens_details=OutputTokens(reasoning_tokens=ended.n_thought),
        total_tokens=usage.n_prompt + usage.n_generated,
    )


def failed_event(fault: Fault, response: Response | None = None, number: int = 0) -> bytes:
    """Write a fault as the end of a stream, event `number`; of a new response for None."""
    response = response or Response(
        id=_PREFIX + uuid.uuid4().hex, created_at=int(time.time()), model=""
    )
    response.status = "failed"
    response.error = ResponseError(code=fault.code or fault.kind, message=fault.message)
    event = ResponseFailed(response=response, sequence_number=number)
    return named_event("response.failed", event)


RESPONSES: Final = Dialect(
    name="responses", fault=error_answer, fault_in_stream=failed_event, fault_type=ErrorAnswer
)


def endpoints() -> list[Endpoint[Any]]:
    """List these endpoints."""
    responses = Responses()
    return [
        RESPONSES.at(
            "POST /v1/responses",
            "Continue a conversation of items",
            responses.respond,
            Response,
            chunk=StreamEvent,
            counts=True,
        ),
        RESPONSES.at(
            "POST /v1/responses/input_tokens",
            "How many tokens a conversation of items has",
            responses.count,
            InputCounted,
            counts=True,
        ),
        RESPONSES.at(
            "GET /v1/responses/{response_id}",
            "A response that is kept or being made, or the rest of its stream",
            responses.show,
            Response,
        ),
        RESPONSES.at(
            "POST /v1/responses/{response_id}/cancel",
            "Make no more of a response in the background",
            responses.cancel,
            Response,
        ),
        RESPONSES.at(
            "DELETE /v1/responses/{response_id}",
            "Keep a response no longer",
            responses.delete,
            Deleted,
        ),
    ]
