"""Responses: their endpoints, the answer, its stream, and what is kept for the next one."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from functools import partial
from itertools import count
from typing import Any, Final

import msgspec

from shardnet.api.chat.request import ChatRequest
from shardnet.api.chat.run import Accepted, Ended, Piece
from shardnet.api.openai.endpoints import Kept
from shardnet.api.openai.faults import ErrorAnswer, error_answer
from shardnet.api.openai.logprobs import chat_logprobs
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
    ResponseUsage,
    StreamEvent,
)
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
from shardnet.api.server.errors import Fault, fault_of, refused
from shardnet.api.server.service import Exchange
from shardnet.errors import ContextExceededError, ShardnetError, shown

_PREFIX: Final = "resp_"
_HEX: Final = 32
"""Digits of a response's id. Those of its items begin with them: so a reference finds it."""


class _KeptResponse(msgspec.Struct, frozen=True, array_like=True):
    """A response as JSON, and the items of the conversation that it ends, as JSON too."""

    answer: bytes
    items: bytes


class Deleted(msgspec.Struct, kw_only=True):
    """Says that a response is kept no longer."""

    id: str
    object: str = "response"
    deleted: bool = True


class Responses:
    """Answers conversations, and keeps them for requests that follow."""

    def __init__(self) -> None:
        self._kept = Kept(what="response", prefix=_PREFIX)

    async def respond(self, exchange: Exchange, body: ResponseBody) -> Reply:
        """Answer a conversation."""
        served = await exchange.service.models.find(body.model)
        earlier = await self._earlier(exchange, body.previous_response_id)
        await self._put_in_place(exchange, input_items(body))
        request = response_request(body, served.choice, earlier)
        response = _response(body, served.name)
        events = _events(
            exchange,
            request,
            response,
            partial(self._keep, exchange, body, earlier, response),
            is_streamed=bool(body.stream),
        )
        if body.stream:
            return Stream(chunks=_chunks(events), heartbeat=lambda: comment(exchange.note))
        async with aclosing(events):
            async for _ in events:
                pass
        return Json(value=response)

    async def show(self, exchange: Exchange, body: None) -> Reply:
        """Return a response that is kept. Raises HttpError 404."""
        client, name = exchange.service.client, exchange.path_parameters["response_id"]
        kept = _decoded(await self._kept.get(client, exchange.owner, name))
        return Text(text=kept.answer, media_type="application/json")

    async def delete(self, exchange: Exchange, body: None) -> Reply:
        """Keep a response no longer. Raises HttpError 404."""
        name = exchange.path_parameters["response_id"]
        await self._kept.drop(exchange.service.client, exchange.owner, name)
        return Json(value=Deleted(id=name))

    async def _keep(
        self, exchange: Exchange, body: ResponseBody, earlier: list[ItemBody], response: Response
    ) -> None:
        """Keep a response if it is to be; note in it where no node could."""
        if not response.store:
            return
        items = msgspec.json.encode([*earlier, *input_items(body), *response.output])
        kept = _KeptResponse(answer=msgspec.json.encode(response), items=items)
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


async def _chunks(events: AsyncGenerator[StreamEvent, None]) -> AsyncGenerator[bytes, None]:
    """Write the events of a stream.

    That a prompt is too long is one of them, as OpenAI has it: Codex takes a status for a fault of
    its own, and shortens the conversation when it reads the event.
    """
    number = 0
    async with aclosing(events):
        try:
            async for event in events:
                event.sequence_number = number
                number += 1
                yield named_event(str(event.__struct_config__.tag), event)
        except ContextExceededError as error:
            yield failed_event(fault_of(error))


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
    async with aclosing(exchange.chat(request, is_streamed=is_streamed)) as told_events:
        async for told in told_events:
            match told:
                case Accepted():
                    yield ResponseCreated(response=response)
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


def failed_event(fault: Fault) -> bytes:
    """Write a fault as the end of a stream."""
    event = ResponseFailed(
        response=Response(
            id=_PREFIX + uuid.uuid4().hex,
            created_at=int(time.time()),
            status="failed",
            model="",
            error=ResponseError(code=fault.code or fault.kind, message=fault.message),
        )
    )
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
            ResponseBody,
            Response,
            chunk=StreamEvent,
            counts=True,
        ),
        RESPONSES.at(
            "GET /v1/responses/{response_id}",
            "A response that is kept",
            responses.show,
            answer=Response,
        ),
        RESPONSES.at(
            "DELETE /v1/responses/{response_id}",
            "Keep a response no longer",
            responses.delete,
            answer=Deleted,
        ),
    ]
