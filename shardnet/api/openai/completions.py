"""Completions of texts and token ids, alone or in lists, and of the middle of a text."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from statistics import fmean
from typing import Annotated, Final

import msgspec
from msgspec import UNSET, Meta, UnsetType

from shardnet.api.client import raising
from shardnet.api.events import GenerationEvent, GenerationResult, TokenLogprob
from shardnet.api.openai.faults import DONE
from shardnet.api.openai.logprobs import (
    Answer,
    TextLogprobs,
    TextLogprobsWriter,
    Timings,
    Token,
    UsageBody,
    n_characters,
    timings_of,
    usage_of,
)
from shardnet.api.openai.sampling import (
    MAX_SAMPLES,
    PromptBody,
    SamplingBody,
    adapted_by,
    options_of,
    prompts_of,
    sampling_of,
    settle_biases,
    wants_usage,
)
from shardnet.api.requests import GenerationOptions, Prompts, added_ids, infill
from shardnet.api.server.endpoint import Json, Reply, Stream, comment, event
from shardnet.api.server.errors import refused
from shardnet.api.server.service import Exchange
from shardnet.output_params import OutputParams
from shardnet.sampling_params import MAX_LOGPROBS, SamplingParams
from shardnet.wire.messages.generation import MAX_DETOKENIZED
from shardnet.wire.messages.plans import ModelChoice

MAX_PROMPTS = 4096
DEFAULT_TOKENS = 16
"""OpenAI's number for a body without max_tokens."""


class CompletionBody(SamplingBody, kw_only=True):
    """The body of a completion."""

    prompt: PromptBody
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One sample of one prompt, or more of it; `index` counts samples, prompt by prompt."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: str | None


class Completion(Answer[CompletionChoice], kw_only=True):
    """The answer, or an event of a stream."""

    object: str = "text_completion"


@dataclass(slots=True, kw_only=True)
class _Job:
    """What to generate, and how it is written: of `n` samples the `n_best` likeliest by token."""

    prompts: list[str] | list[list[int]]
    sampling: SamplingParams
    options: GenerationOptions
    n: int
    n_best: int
    echo: bool
    has_logprobs: bool
    model: ModelChoice
    name: str
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def completion(
        self,
        choices: list[CompletionChoice],
        usage: UsageBody | UnsetType | None,
        timings: Timings | UnsetType = UNSET,
    ) -> Completion:
        """Write an answer or an event."""
        return Completion(
            id=self.id,
            created=self.created,
            model=self.name,
            choices=choices,
            usage=usage,
            timings=timings,
        )


async def complete(exchange: Exchange, body: CompletionBody) -> Reply:
    """Answer a completion."""
    prompts = prompts_of(body.prompt, "prompt")
    n_best, n = body.n or 1, body.best_of or body.n or 1
    if n < n_best or (n > n_best and body.stream):
        raise refused("best_of must be n or more, and n in a stream", "best_of")
    if len(prompts) * n > MAX_PROMPTS:
        raise refused(f"prompt has {len(prompts)}: give at most {MAX_PROMPTS} samples", "prompt")
    served = await exchange.service.models.find(body.model)
    max_tokens = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    options = options_of(body, max_tokens)
    if body.echo and body.logprobs is not None:
        options["outputs"] = OutputParams(n_prompt_logprobs=body.logprobs)
    if body.add_special_tokens is not None:
        options["bos"] = "auto" if body.add_special_tokens else "off"
    if body.suffix:
        prompts = await _middles(exchange, prompts, body.suffix, served.choice, options)
    await settle_biases(exchange, body, served.choice)
    n_logprobs = 0 if n > n_best and body.logprobs is None else body.logprobs
    job = _Job(
        prompts=prompts,
        sampling=sampling_of(body, n_logprobs),
        options=options,
        n=n,
        n_best=n_best,
        echo=bool(body.echo),
        has_logprobs=body.logprobs is not None,
        model=adapted_by(body, served.choice),
        name=served.name,
    )
    if body.stream:
        chunks = _chunks(exchange, job, with_usage=wants_usage(body))
        return Stream(chunks=chunks, heartbeat=lambda: comment(exchange.note))
    return Json(value=await _whole(exchange, job))


async def _middles(
    exchange: Exchange,
    prompts: list[str] | list[list[int]],
    suffix: str,
    model: ModelChoice,
    options: GenerationOptions,
) -> list[str]:
    """Return the prompts for what stands between each text and the suffix."""
    added = added_ids(await exchange.describe_tokenizer(model=model))
    made = []
    for prompt in prompts:
        if not isinstance(prompt, str):
            raise refused("suffix needs a prompt that is text", "suffix")
        made.append(infill(prompt, suffix, added))
    options["stop_token_ids"] = [*options.get("stop_token_ids", ()), *made[0].stop_ids]
    return [one.prompt for one in made]


def _events(exchange: Exchange, job: _Job) -> AsyncGenerator[GenerationEvent, None]:
    """Yield the events of all samples. Raises the first error."""
    prompts: Prompts = job.prompts
    options = job.options
    return raising(exchange.generate(prompts, job.sampling, n=job.n, model=job.model, **options))


async def _whole(exchange: Exchange, job: _Job) -> Completion:
    results: list[GenerationResult] = []
    async with aclosing(_events(exchange, job)) as events:
        async for told in events:
            if told.result is not None:
                results.append(told.result)
    results.sort(key=lambda result: (result.index, result.sample))
    best = results
    if job.n > job.n_best:
        ranked = sorted(results, key=lambda result: (result.index, -_likelihood(result)))
        best = [one for at, one in enumerate(ranked) if at % job.n < job.n_best]
    choices = []
    for number, result in enumerate(best):
        writer = TextLogprobsWriter()
        text, tokens = result.text, _scored(result.logprobs)
        if job.echo:
            prompt, known = result.prompt_token_ids, filter(None, result.prompt_logprobs or ())
            echoed = await _echo_of(exchange, job, result.index, [*known], prompt)
            writer = TextLogprobsWriter(start=echoed.start)
            text, tokens = echoed.text + text, [*echoed.tokens, *tokens]
        logprobs = writer.write(tokens) if job.has_logprobs else None
        reason = result.finish_reason
        choices.append(
            CompletionChoice(index=number, text=text, logprobs=logprobs, finish_reason=reason)
        )
    return job.completion(choices, usage_of(results), timings_of(results))


def _likelihood(result: GenerationResult) -> float:
    """Return the mean logprob of its tokens."""
    return fmean([one.logprob for one in result.logprobs or ()] or [0.0])


async def _chunks(
    exchange: Exchange, job: _Job, *, with_usage: bool
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream. With `echo` the prompt comes first, its logprobs with it."""
    usage: UnsetType | None = None if with_usage else UNSET
    writers: dict[tuple[int, int], TextLogprobsWriter] = {}
    scored: dict[tuple[int, int], list[TokenLogprob]] = {}
    results: list[GenerationResult] = []
    is_accepted = False
    async with aclosing(_events(exchange, job)) as events:
        async for told in events:
            if not is_accepted:
                is_accepted = True
                yield comment("accepted")
            place = told.index, told.sample
            scored.setdefault(place, []).extend(told.prompt_logprobs or ())
            text, tokens = told.text, _scored(told.logprobs)
            has_output = bool(told.token_ids) or told.result is not None
            if has_output and place not in writers:
                writers[place] = TextLogprobsWriter()
                if job.echo:
                    echoed = await _echo_of(exchange, job, told.index, scored[place])
                    writers[place] = TextLogprobsWriter(start=echoed.start)
                    text, tokens = echoed.text + text, [*echoed.tokens, *tokens]
            if told.result is not None:
                results.append(told.result)
            reason = told.result.finish_reason if told.result is not None else None
            if not (text or tokens or reason):
                continue
            choice = CompletionChoice(
                index=told.index * job.n + told.sample,
                text=text,
                logprobs=writers[place].write(tokens) if job.has_logprobs and tokens else None,
                finish_reason=reason,
            )
            timings = timings_of([told.result]) if told.result is not None else UNSET
            yield event(job.completion([choice], usage, timings))
    if with_usage:
        yield event(job.completion([], usage_of(results)))
    yield DONE


@dataclass(frozen=True, slots=True)
class _Echo:
    """The prompt as a part of the answer."""

    text: str
    tokens: list[Token]

    @property
    def start(self) -> int:
        """Where the first token begins: before the text, if that leaves it or its space out."""
        return len(self.text) - n_characters(self.tokens)


async def _echo_of(
    exchange: Exchange,
    job: _Job,
    index: int,
    scored: Sequence[TokenLogprob],
    token_ids: Sequence[int] | None = None,
) -> _Echo:
    """Return prompt number `index` with its logprobs, which its first token has none of."""
    prompt = job.prompts[index]
    if not job.has_logprobs and isinstance(prompt, str):
        return _Echo(prompt, [])
    if not isinstance(prompt, str):
        token_ids = prompt
    elif token_ids is None:
        told = await exchange.tokenize(prompt, model=job.model, bos=job.options.get("bos", "auto"))
        token_ids = told.token_ids
    if not scored:  # only the first token's text is not known from its logprob
        text = prompt if isinstance(prompt, str) else ""
        pieces: list[str] = []
        for start in range(0, len(token_ids), MAX_DETOKENIZED):
            part = token_ids[start : start + MAX_DETOKENIZED]
            answer = await exchange.detokenize(part, model=job.model)
            pieces += answer.tokens
            text += "" if isinstance(prompt, str) else answer.text
        bare = [(one, piece, None) for one, piece in zip(token_ids, pieces, strict=True)]
        return _Echo(text, [*bare] if job.has_logprobs else [])
    first = (await exchange.detokenize(token_ids[:1], model=job.model)).tokens[0]
    tokens: list[Token] = [(token_ids[0], first, None), *_scored(scored)]
    if isinstance(prompt, str):
        return _Echo(prompt, tokens)
    return _Echo((await exchange.detokenize(token_ids, model=job.model)).text, tokens)


def _scored(logprobs: Sequence[TokenLogprob] | None) -> list[Token]:
    return [(logprob.token_id, logprob.token, logprob) for logprob in logprobs or ()]


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
    model = adapted_by(body, served.choice)
    added = added_ids(await exchange.describe_tokenizer(model=model))
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
        model=model,
        **options,
    )
    if body.stream:
        chunks = _infill_chunks(events, served.name)
        return Stream(chunks=chunks, heartbeat=lambda: comment(exchange.note))
    async with aclosing(events):
        results = [told.result async for told in events if told.result is not None]
    return Json(value=_ended(results[0], served.name, results[0].text))


async def _infill_chunks(
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
