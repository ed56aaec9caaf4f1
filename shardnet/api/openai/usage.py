"""What OpenAI's answers to chats and completions have in common, such as the tokens they took."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from shardnet.api.events import GenerationResult


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    """Tokens of the prompt whose keys and values were there already."""

    cached_tokens: int


class UsageBody(msgspec.Struct, kw_only=True):
    """Tokens of the prompts, each counted once, and of all samples."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


Choice = TypeVar("Choice")


class Answer(msgspec.Struct, Generic[Choice], kw_only=True):
    """A whole answer, or an event of a stream: its samples, or more of them."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: UsageBody | UnsetType | None = UNSET
    system_fingerprint: str | None = None


def usage_of(results: Iterable[GenerationResult]) -> UsageBody:
    """Add up the results of a request."""
    n_prompt = n_cached = n_generated = 0
    for result in results:
        n_generated += result.usage.n_generated
        if result.sample == 0:
            n_prompt += result.usage.n_prompt
            n_cached += result.usage.n_reused
    return UsageBody(
        prompt_tokens=n_prompt,
        completion_tokens=n_generated,
        total_tokens=n_prompt + n_generated,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=n_cached),
    )
