"""The middle of a text as llama-server's programs ask for it: editors that complete code."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Final

import msgspec
from msgspec import UNSET, Meta, UnsetType

from shardnet.api.events import GenerationEvent, GenerationResult
from shardnet.api.infilling import added_ids, infill
from shardnet.api.openai.sampling import SamplingBody, options_of, sampling_of
from shardnet.api.server.endpoint import Json, Reply, Stream, comment, event
from shardnet.api.server.service import Exchange

TEMPERATURE: Final = 0.8
"""llama-server's, unless it is given."""
MAX_EXTRA: Final = 256
_STOPS: Final = {"length": "limit", "stop": "eos"}


class ExtraText(msgspec.Struct, kw_only=True):
    """A text from another place that the model is shown before."""

    text: str
    filename: str = ""


class InfillBody(SamplingBody, kw_only=True):
    """The body: texts before and behind what is wanted, `prompt` how that begins.

    An `n_predict` below 0 sets no limit; with 0 the prompt is computed, and kept for the next one.
    """

    input_prefix: str | None = None
    input_suffix: str | None = None
    input_extra: Annotated[list[ExtraText], Meta(max_length=MAX_EXTRA)] | None = None
    prompt: str | None = None
    n_predict: Annotated[int, Meta(ge=-2, le=2**32 - 1)] | None = None


class InfillAnswer(msgspec.Struct, kw_only=True):
    """The text, or in a stream more of it; with `stop` it has ended, and the rest is said."""

    content: str
    stop: bool
    model: str | UnsetType = UNSET
    stop_type: str | UnsetType = UNSET
    tokens_predicted: int | UnsetType = UNSET
    tokens_evaluated: int | UnsetType = UNSET
    tokens_cached: int | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET


async def fill_in(exchange: Exchange, body: InfillBody) -> Reply:
    """Write what stands between two texts."""
    served = await exchange.service.models.find(body.model)
    added = added_ids(await exchange.describe_tokenizer(model=served.choice))
    extra = [(one.filename, one.text) for one in body.input_extra or ()]
    infilling = infill(
        body.input_prefix or "", body.input_suffix or "", added, extra, field="input_suffix"
    )
    most = body.max_tokens if body.n_predict is None else body.n_predict
    options = options_of(body, None if most is not None and most < 0 else most)
    options["stop_token_ids"] = [*options.get("stop_token_ids", ()), *infilling.stop_ids]
    if body.temperature is None:
        body.temperature = TEMPERATURE
    events = exchange.generate(
        infilling.prompt + (body.prompt or ""),
        sampling_of(body, None),
        model=served.choice,
        **options,
    )
    if body.stream:
        chunks = _chunks(events, served.name)
        return Stream(chunks=chunks, heartbeat=lambda: comment(exchange.note))
    async with aclosing(events):
        results = [told.result async for told in events if told.result is not None]
    return Json(value=_ended(results[0], served.name, results[0].text))


async def _chunks(
    events: AsyncGenerator[GenerationEvent, None], model: str
) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        async for told in events:
            if told.text:
                yield event(InfillAnswer(content=told.text, stop=False))
            if told.result is not None:
                yield event(_ended(told.result, model))


def _ended(result: GenerationResult, model: str, text: str = "") -> InfillAnswer:
    usage = result.usage
    return InfillAnswer(
        content=text,
        stop=True,
        model=model,
        stop_type=_STOPS.get(result.finish_reason, result.finish_reason),
        tokens_predicted=usage.n_generated,
        tokens_evaluated=usage.n_prompt,
        tokens_cached=usage.n_reused,
        truncated=False,
    )
