"""Prompts as OpenAI takes them: a text, token ids, or a list of either."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from msgspec import Meta

from shardnet.api.openai.sampling import Count
from shardnet.api.server.errors import refused

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
