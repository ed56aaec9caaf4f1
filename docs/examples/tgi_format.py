"""Another client format: that of Hugging Face's text-generation-inference. docs/extending.md
explains it.

A package adds it to shardnet's HTTP servers by an entry point:

    [project.entry-points."shardnet.endpoints"]
    tgi = "tgi_format:endpoints"
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from shardnet.api.events import GenerationEvent
from shardnet.api.server.endpoint import Dialect, Endpoint, Json, Reply, Stream, comment, event
from shardnet.api.server.errors import Fault
from shardnet.api.server.service import Exchange
from shardnet.sampling_params import SamplingParams

# --- bodies and answers: msgspec checks them, and the OpenAPI document is made of them


class Parameters(msgspec.Struct, kw_only=True):
    """How to generate. Without `do_sample` the most likely token is taken."""

    max_new_tokens: Annotated[int, Meta(ge=1, le=1 << 20)] = 100
    do_sample: bool = False
    temperature: Annotated[float, Meta(gt=0, le=100)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=1 << 20)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None
    stop: Annotated[list[str], Meta(max_length=64)] = []


class TgiBody(msgspec.Struct, kw_only=True):
    """The body of both endpoints."""

    inputs: str
    parameters: Parameters = msgspec.field(default_factory=Parameters)


class TgiAnswer(msgspec.Struct, kw_only=True):
    """A whole answer."""

    generated_text: str


class TgiToken(msgspec.Struct, kw_only=True):
    """One token of a stream."""

    id: int
    text: str
    logprob: float
    special: bool = False


class TgiChunk(msgspec.Struct, kw_only=True):
    """An event of a stream; the last one has the whole text."""

    index: int
    token: TgiToken
    generated_text: str | None = None
    details: None = None


class TgiError(msgspec.Struct, kw_only=True):
    """What went wrong."""

    error: str
    error_type: str


def error_of(fault: Fault) -> TgiError:
    """Write a fault as this format does."""
    return TgiError(
        error=fault.message, error_type="validation" if fault.status < 500 else "generation"
    )


TGI = Dialect(
    name="tgi",
    fault=error_of,
    fault_in_stream=lambda fault: event(error_of(fault)),
    fault_type=TgiError,
)


# --- handlers


async def generate(exchange: Exchange, body: TgiBody) -> Reply:
    """Answer at once."""
    text = ""
    async with aclosing(await _events(exchange, body)) as events:
        async for one in events:
            text += one.text
    return Json(value=TgiAnswer(generated_text=text))


async def generate_stream(exchange: Exchange, body: TgiBody) -> Reply:
    """Answer token by token; a comment keeps the connection alive while nothing comes."""
    events = await _events(exchange, body)
    return Stream(chunks=_chunks(events), heartbeat=lambda: comment(exchange.note))


async def _events(exchange: Exchange, body: TgiBody) -> AsyncGenerator[GenerationEvent, None]:
    given = body.parameters
    served = await exchange.service.models.find(None)  # the format names no model
    sampling = SamplingParams(
        temperature=(given.temperature or 1.0) if given.do_sample else 0.0,
        top_k=given.top_k or 0,
        top_p=given.top_p or 1.0,
        repetition_penalty=given.repetition_penalty or 1.0,
        seed=secrets.randbits(63) if given.seed is None else given.seed,
        n_logprobs=0,
    )
    return exchange.generate(
        body.inputs,
        sampling,
        model=served.choice,
        max_tokens=given.max_new_tokens,
        stop=given.stop,
    )


async def _chunks(events: AsyncGenerator[GenerationEvent, None]) -> AsyncGenerator[bytes, None]:
    """Write an event for each token; the last waits until the whole text is known."""
    whole, index, last = "", 0, None
    async with aclosing(events):
        async for one in events:
            whole += one.text
            for token in one.logprobs or ():
                if last is not None:
                    yield event(last)
                index += 1
                written = TgiToken(id=token.token_id, text=token.token, logprob=token.logprob)
                last = TgiChunk(index=index, token=written)
        if last is not None:
            last.generated_text = whole
            yield event(last)


def endpoints() -> list[Endpoint[Any]]:
    """List the endpoints: what the entry point names."""
    return [
        Endpoint(
            method="POST",
            path="/generate",
            summary="Continue a text (text-generation-inference)",
            handle=generate,
            dialect=TGI,
            body=TgiBody,
            answer=TgiAnswer,
            counts=True,
        ),
        Endpoint(
            method="POST",
            path="/generate_stream",
            summary="Continue a text token by token (text-generation-inference)",
            handle=generate_stream,
            dialect=TGI,
            body=TgiBody,
            answer=TgiChunk,
            chunk=TgiChunk,
            counts=True,
        ),
    ]
