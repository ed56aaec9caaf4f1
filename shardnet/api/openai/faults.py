"""How OpenAI writes that something is wrong, and pages of lists, as Anthropic names them too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Protocol, TypeVar

import msgspec

from shardnet.api.server.endpoint import Dialect, event
from shardnet.api.server.errors import Fault, refused
from shardnet.errors import shown
from shardnet.types import whole_number

DONE = b"data: [DONE]\n\n"
"""The last event of every stream."""


class Error(msgspec.Struct, kw_only=True):
    """What is wrong. The numbers are those of a prompt that is longer than the context."""

    message: str
    type: str
    param: str | None
    code: str | None
    n_prompt_tokens: int | msgspec.UnsetType = msgspec.UNSET
    n_ctx: int | msgspec.UnsetType = msgspec.UNSET


class ErrorAnswer(msgspec.Struct, kw_only=True):
    """The answer of a request that failed."""

    error: Error


def error_answer(fault: Fault) -> ErrorAnswer:
    """Write a fault as an answer."""
    error = Error(
        message=fault.message,
        type=fault.kind,
        param=fault.parameter,
        code=fault.code,
    )
    if fault.n_prompt is not None:  # programs shorten the conversation by these
        error.n_prompt_tokens, error.n_ctx = fault.n_prompt, fault.n_context or 0
    return ErrorAnswer(error=error)


def error_event(fault: Fault) -> bytes:
    """Write a fault as the end of a stream."""
    return event(error_answer(fault)) + DONE


OPENAI = Dialect(
    name="openai", fault=error_answer, fault_in_stream=error_event, fault_type=ErrorAnswer
)


MAX_LIMIT: Final = 1000


class Named(Protocol):
    """What has an id."""

    id: str


Item = TypeVar("Item", bound=Named)


def page_of(items: Sequence[Item], query: Mapping[str, str]) -> tuple[list[Item], bool]:
    """Return the items that a query wants, all without a limit, and whether there are more.

    Raises HttpError 400 for a limit that is none, or an id that no item has.
    """
    text = query.get("limit", str(MAX_LIMIT))
    limit = whole_number(text)
    if limit is None or not 1 <= limit <= MAX_LIMIT:
        raise refused(f"limit is {shown(text)}: give a number from 1 to {MAX_LIMIT}", "limit")
    if "before_id" in query:
        rest = items[: _place(items, query, "before_id")]
        return [*rest[-limit:]], len(rest) > limit
    first = next((name for name in ("after", "after_id") if name in query), None)
    rest = items if first is None else items[_place(items, query, first) + 1 :]
    return [*rest[:limit]], len(rest) > limit


def _place(items: Sequence[Item], query: Mapping[str, str], name: str) -> int:
    for place, item in enumerate(items):
        if item.id == query[name]:
            return place
    raise refused(f"{name} is {shown(query[name])}, which is not in this list", name)
