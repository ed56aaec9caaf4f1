"""Conversations in files: `/save` and `/load` of `shardnet chat`.

Knows the format: a JSON object whose `messages` have a role and a content each, as OpenAI's API
has them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from shardnet.api.requests import Message
from shardnet.errors import UsageError
from shardnet.files import write_whole
from shardnet.wire.framing.schema import MAX_TEXT

MAX_BYTES: Final = 16 << 20
"""Most bytes of a file that is loaded."""


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant"]
    content: Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]


class _Saved(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    messages: Annotated[list[_Message], msgspec.Meta(max_length=1 << 14)]


def save(messages: Sequence[Message], path: Path) -> None:
    """Write messages to a file, for its owner alone.

    Raises UsageError for a file that is there and holds no conversation, or cannot be written.
    """
    if path.exists():
        try:
            load(path)
        except UsageError as error:
            raise UsageError(
                f"{path} is there and is not replaced: it holds no conversation",
                remedy="name another file",
            ) from error
    lines = ",\n".join(json.dumps(message, ensure_ascii=False) for message in messages)
    try:
        write_whole(path, f'{{"messages": [\n{lines}\n]}}\n'.encode())
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror or error}", remedy="name another file"
        ) from error


def load(path: Path) -> list[Message]:
    """Read messages from a file. Raises UsageError for one that holds no conversation."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise UsageError(f"{path} has more than {MAX_BYTES} bytes")
        saved = msgspec.json.decode(content, type=_Saved)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path} holds no conversation: {error}", remedy="load a file that /save wrote"
        ) from error
    return [{"role": said.role, "content": said.content} for said in saved.messages]
