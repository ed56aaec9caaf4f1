"""The fields of a body that say what is continued, how tokens are drawn, and when the text ends.

Chat completions and completions share them. Unknown fields are ignored; null means left out.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from shardnet.api.requests import GenerationOptions
from shardnet.api.server.errors import refused
from shardnet.api.server.service import Exchange
from shardnet.sampling_params import (
    MAX_LOGIT_BIASES,
    NEWER,
    Bias,
    Deviations,
    DryBase,
    DryBreakers,
    DryMultiplier,
    SamplingParams,
)
from shardnet.slot_operations import MAX_ADAPTER_SCALE, MAX_ADAPTERS
from shardnet.types import MAX_POSITIONS, whole_number
from shardnet.wire.messages.plans import AdapterScale, ModelChoice

MAX_SAMPLES: Final = 128
"""Samples of one prompt."""

_LEAST_TOP_P: Final = 1e-9
"""What a top_p of 0 means: only the most likely token."""

AnyText = Annotated[str, Meta(max_length=4096)]
StopText = Annotated[str, Meta(min_length=1, max_length=4096)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Count = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Budget = Annotated[int, Meta(ge=-1, le=2**32 - 1)]


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream has beside the text."""

    include_usage: bool | None = None


class LoraScale(msgspec.Struct, kw_only=True):
    """A LoRA adapter by its place among those of --lora, as llama-server has it."""

    id: Annotated[int, Meta(ge=0)]
    scale: Annotated[float, Meta(ge=-MAX_ADAPTER_SCALE, le=MAX_ADAPTER_SCALE)] = 1.0


class ReasoningOptions(msgspec.Struct, kw_only=True):
    """How hard the model thinks, and for how many tokens at most."""

    effort: Annotated[str, Meta(max_length=64)] | None = None
    summary: str | None = None
    max_tokens: Count | None = None


class SamplingBody(msgspec.Struct, kw_only=True):
    """Fields that both kinds of completions have; from `top_k` on they are not OpenAI's."""

    model: Annotated[str, Meta(max_length=4096)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: AnyText | Annotated[list[StopText], Meta(max_length=64)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: (
        Annotated[dict[str, Bias | bool], Meta(max_length=MAX_LOGIT_BIASES)]
        | Annotated[list[tuple[int | str, Bias | bool]], Meta(max_length=MAX_LOGIT_BIASES)]
        | None
    ) = None
    user: str | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**32 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    min_tokens: Count | None = None
    stop_token_ids: Annotated[list[Count], Meta(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    speculate: Literal["off", "ngram", "mtp", "auto"] | None = None
    draft_tokens: Count | None = None
    priority: Annotated[int, Meta(ge=-100, le=100)] | None = None
    deadline_s: Annotated[float, Meta(ge=0, le=1e9)] | None = None
    deterministic: bool | None = None
    lora: Annotated[list[LoraScale], Meta(max_length=MAX_ADAPTERS)] | None = None
    top_n_sigma: Deviations | None = None
    typical_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    dry_multiplier: DryMultiplier | None = None
    dry_base: DryBase | None = None
    dry_allowed_length: Count | None = None
    dry_sequence_breakers: DryBreakers | None = None
    reasoning: ReasoningOptions | None = None
    reasoning_budget_tokens: Budget | None = None
    thinking_budget_tokens: Budget | None = None
    reasoning_budget_message: Annotated[str, Meta(max_length=4096)] | None = None

    @property
    def thought_budget(self) -> int | None:
        """How many tokens the model may think, by any of the names; -1 for any number."""
        asked = self.reasoning.max_tokens if self.reasoning is not None else None
        named = (self.reasoning_budget_tokens, self.thinking_budget_tokens, asked)
        return next((budget for budget in named if budget is not None), None)


def adapted_by(body: SamplingBody, choice: ModelChoice) -> ModelChoice:
    """Return the choice with the adapters of `lora`, where that is given, and no others.

    Raises HttpError 400 for an adapter that there is not.
    """
    if body.lora is None:
        return choice
    used = []
    for lora in body.lora:
        if lora.id >= len(choice.adapters):
            n = len(choice.adapters)
            raise refused(f"lora has id {lora.id}, and the model has {n} adapters", "lora")
        used.append(AdapterScale(choice.adapters[lora.id].name, lora.scale))
    return replace(choice, used_adapters=used)


async def settle_biases(exchange: Exchange, body: SamplingBody, model: ModelChoice) -> None:
    """Put token ids in the place of texts in a body's `logit_bias`: each of a text's tokens.

    Raises HttpError 400 for a text without tokens.
    """
    given = body.logit_bias or {}
    settled: dict[str, float | bool] = {}
    for name, bias in given.items() if isinstance(given, dict) else given:
        ids = [name] if isinstance(name, int) else [whole_number(name)]
        if ids == [None] and name:
            ids = [*(await exchange.tokenize(str(name), model=model, bos="off")).token_ids]
        if not ids or None in ids:
            raise refused(f"logit_bias names {name!r}: give token ids or texts", "logit_bias")
        settled |= dict.fromkeys(map(str, ids), bias)
    body.logit_bias = settled


def sampling_of(body: SamplingBody, n_logprobs: int | None) -> SamplingParams:
    """Return how tokens are drawn. Without a seed it is another one each time.

    `settle_biases` has to have settled these.
    """
    seed = secrets.randbits(63) if body.seed is None else body.seed % 2**64
    given: dict[str, Any] = {name: getattr(body, name) for name in NEWER}
    biases = dict(body.logit_bias or ()).items()
    return SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=max(0, body.top_k or 0),
        top_p=1.0 if body.top_p is None else max(body.top_p, _LEAST_TOP_P),
        min_p=body.min_p or 0.0,
        repetition_penalty=body.repetition_penalty or 1.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=tuple((int(name), -100.0 if x is False else float(x)) for name, x in biases),
        min_tokens=body.min_tokens or 0,
        seed=seed,
        n_logprobs=n_logprobs,
        dry_breakers=body.dry_sequence_breakers or (),
        **given,
    )


def options_of(body: SamplingBody, max_tokens: int | None) -> GenerationOptions:
    """Return the other options. `max_tokens` None is as many as the context holds."""
    if body.draft_tokens and body.speculate in (None, "off"):
        raise refused("draft_tokens needs speculate: give 'auto', 'ngram' or 'mtp'", "draft_tokens")
    options = GenerationOptions(
        max_tokens=MAX_POSITIONS if max_tokens is None else max_tokens,
        stop=[body.stop] if body.stop and isinstance(body.stop, str) else [*(body.stop or ())],
        stop_token_ids=body.stop_token_ids or [],
        ignore_eos=bool(body.ignore_eos),
        draft_tokens=body.draft_tokens or 0,
        priority=body.priority or 0,
        deadline_s=body.deadline_s,
        deterministic=bool(body.deterministic),
    )
    if body.speculate is not None:
        options["speculate"] = body.speculate
    return options


def wants_usage(body: SamplingBody) -> bool:
    """Say whether a stream ends with a chunk that has the usage."""
    return body.stream_options is not None and bool(body.stream_options.include_usage)


TokenIdList = Annotated[list[Count], Meta(max_length=1 << 20)]
PromptBody: TypeAlias = str | Annotated[list[str | Count | TokenIdList], Meta(max_length=1 << 20)]


def prompts_of(given: PromptBody, name: str) -> list[str] | list[list[int]]:
    """List the prompts, all of them texts or all of them ids.

    Raises HttpError 400, which calls the field `name`, for none or several kinds.
    """
    if isinstance(given, str):
        return [given]
    listed: list[Any] = given
    kinds = {type(one) for one in listed}
    if kinds == {int}:
        return [listed]
    if kinds in ({str}, {list}):
        return listed
    raise refused(
        f"{name} is empty or a list of several kinds: give text, token ids, or a list of either",
        name,
    )
