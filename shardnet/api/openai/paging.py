"""Pages of lists: `limit`, and the id behind or before which a page is, as OpenAI and Anthropic
name it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Protocol, TypeVar

from shardnet.api.server.errors import refused
from shardnet.errors import shown

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
    if not text.isdecimal() or not 1 <= int(text[:9]) <= MAX_LIMIT:
        raise refused(f"limit is {shown(text)}: give a number from 1 to {MAX_LIMIT}", "limit")
    limit = int(text)
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
