"""How the tools of a request may be used, and the ids of calls that have none.

Pure: randomness comes in as an argument.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from shardnet.api.chat_formats.deltas import OutputDelta, ToolCallDelta, ToolCallStarted
from shardnet.api.chat_formats.json_text import Tool
from shardnet.errors import UsageError

Mode = Literal["none", "auto", "required", "named"]

_LETTERS: Final = string.ascii_letters + string.digits
_ID_LENGTHS: Final = {"mistral": 9}
"""Of ids that a format's template insists on; others get a prefix and 24 characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Which calls an answer may have: none, any, at least one, or only of the tool `name`.

    At most one with `is_parallel` False, and of a tool that is named. "required" and "named" are
    kept by constraining what is generated; reading an answer does not invent a call.
    """

    mode: Mode = "auto"
    name: str = ""
    is_parallel: bool = True

    @classmethod
    def of(
        cls, value: object, tools: Mapping[str, Tool], *, is_parallel: bool = True
    ) -> ToolChoice:
        """Read OpenAI's `tool_choice`, None for its default.

        Raises UsageError for anything else, and for a tool that was not offered.
        """
        match value:
            case None:
                return cls(mode="auto" if tools else "none", is_parallel=is_parallel)
            case "none" | "auto" | "required":
                mode: Mode = value
            case {"type": "function", "function": {"name": str(name)}} | {
                "type": "function",
                "name": str(name),
            }:
                if name not in tools:
                    raise UsageError(
                        f"tool_choice names {name!r}, which is none of the tools",
                        remedy=f"name one of {', '.join(tools)}" if tools else "send tools too",
                    )
                return cls(mode="named", name=name, is_parallel=is_parallel)
            case _:
                raise UsageError(
                    "tool_choice must be none, auto, required or the name of a function",
                    remedy='write {"type": "function", "function": {"name": "…"}} to name one',
                )
        if mode == "required" and not tools:
            raise UsageError("tool_choice is required, but there are no tools", remedy="send tools")
        return cls(mode=mode, is_parallel=is_parallel)

    @property
    def must_call(self) -> bool:
        """Whether an answer must have a call."""
        return self.mode in ("required", "named")

    @property
    def max_calls(self) -> int | None:
        """Most calls of one answer, None for any number."""
        return None if self.is_parallel and self.mode != "named" else 1

    def offered(self, tools: Mapping[str, Tool]) -> dict[str, Tool]:
        """Return the tools whose calls are read."""
        if self.mode == "none":
            return {}
        return {n: tool for n, tool in tools.items() if self.mode != "named" or n == self.name}

    def shown(self, tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return the tools that the chat template should show."""
        if self.mode == "none":
            return []
        if self.mode != "named":
            return list(tools)
        return [t for t in tools if t.get("function", t).get("name") == self.name]


class DistinctCalls:
    """Drops each call that is the one before it once more, and numbers the others anew.

    A call is held back while its text may still become that of the one before.
    """

    def __init__(self) -> None:
        self._before: tuple[str, str] | None = None
        self._name = self._text = ""
        self._held: list[ToolCallStarted | ToolCallDelta] = []
        self._n_given = 0

    def feed(self, deltas: Sequence[OutputDelta]) -> list[OutputDelta]:
        """Return what is known by now to be given."""
        out: list[OutputDelta] = []
        for delta in deltas:
            match delta:
                case ToolCallStarted(name=name):
                    out += self.finish()
                    self._before = (self._name, self._text) if self._name else None
                    self._name, self._text, self._held = name, "", [delta]
                case ToolCallDelta(text=text):
                    self._text += text
                    self._held.append(delta)
                case _:
                    out += [*self.finish(), delta]
                    continue
            if not self._may_be_again():
                out += self._give()
        return out

    def finish(self) -> list[OutputDelta]:
        """Return what was held back of a call that has ended: nothing of one that is dropped."""
        if (self._name, self._text) == self._before:
            self._held = []
        return self._give()

    def _may_be_again(self) -> bool:
        if self._before is None or self._before[0] != self._name:
            return False
        return self._before[1].startswith(self._text)

    def _give(self) -> list[OutputDelta]:
        held, self._held = self._held, []
        self._n_given += sum(isinstance(delta, ToolCallStarted) for delta in held)
        return [replace(delta, index=self._n_given - 1) for delta in held]


def with_ids(
    deltas: Sequence[OutputDelta], format_name: str, draw: Callable[[str], str]
) -> list[OutputDelta]:
    """Give an id to each call that has none.

    `draw` returns one of the characters that it gets. Mistral's templates want ids of 9 letters
    and digits; those of Kimi write the tool's name and its number.
    """
    return [
        replace(delta, call_id=_new_id(delta, format_name, draw))
        if isinstance(delta, ToolCallStarted) and not delta.call_id
        else delta
        for delta in deltas
    ]


def _new_id(started: ToolCallStarted, format_name: str, draw: Callable[[str], str]) -> str:
    if format_name == "kimi-k2":
        return f"functions.{started.name}:{started.index}"
    length = _ID_LENGTHS.get(format_name)
    drawn = "".join(draw(_LETTERS) for _ in range(length or 24))
    return drawn if length else f"call_{drawn}"
