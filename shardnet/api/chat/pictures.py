"""Texts and pictures of which a turn consists. Must not know dialects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from shardnet.api.requests import ContentPart

Detail: TypeAlias = Literal["auto", "low", "high"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPicture:
    """A picture in a turn: the bytes of its file, or a URL of the web."""

    image: bytes | str
    detail: Detail = "auto"


Part: TypeAlias = str | TurnPicture
"""What a turn with pictures consists of."""


def text_of(parts: Sequence[Part]) -> str:
    """Return the texts of a content, a line each."""
    return "\n".join(part for part in parts if isinstance(part, str))


def only_pictured(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Return the parts of a content that has pictures, () for one of text alone."""
    return tuple(parts) if any(isinstance(part, TurnPicture) for part in parts) else ()


def written(parts: Sequence[Part]) -> list[ContentPart]:
    """Write the parts as a client's messages have them."""
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image", "image": part.image, "detail": part.detail}
        for part in parts
    ]
