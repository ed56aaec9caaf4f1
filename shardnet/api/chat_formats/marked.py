"""Formats of content, reasoning between two marks, and calls that begin with a mark.

Also plain chat models without tools, whose only marks are those of reasoning.
"""

from __future__ import annotations

import json
import re
from typing import ClassVar

from shardnet.api.chat_formats.json_text import escape_halves
from shardnet.api.chat_formats.reader import SPACE, NotACallError, Reader, Sink, Steps


class MarkedReader(Reader):
    """Reads content and reasoning; `calls` reads what begins with one of OPENERS."""

    THINK: ClassVar[tuple[tuple[str, str], ...]] = (("<think>", "</think>"),)
    OPENERS: ClassVar[tuple[str, ...]] = ()
    MARKS: ClassVar[tuple[str, ...]] = ("<think>", "</think>")
    AROUND: ClassVar[tuple[str, ...]] = ()
    """Marks that stand around content or calls and are no part of it."""
    NAME_KEY: ClassVar[str] = "name"
    """The key of a tool's name in a call that is an object."""

    def read(self) -> Steps[None]:
        """Read the whole output."""
        closes = {self.marks.char(first): self.marks.char(last) for first, last in self.THINK}
        openers = "".join(map(self.marks.char, self.OPENERS)) if self.tools else ""
        tail = self.settings.prompt_tail.rstrip(SPACE)
        for first, last in self.THINK:
            if tail.endswith(first):
                yield from self.think(self.marks.char(last), openers)
        while mark := (yield from self._prose(self.content, openers, *closes, *closes.values())):
            if mark in closes.values():
                self.take()
                self.content_text.drop_space()
            elif mark in closes and (
                self.content_text.is_empty or self.marks.is_token(self.marks.plain(mark))
            ):
                self.take()
                self.begin_thought()
                yield from self.think(closes[mark], openers)
            elif mark in closes or not (yield from self.calls()):
                self.take()
                self.content(mark)

    def calls(self) -> Steps[bool]:
        """Read calls from the mark on; return False if there are none, having read nothing."""
        yield from ()
        return False

    def content(self, text: str) -> None:
        """Add content."""
        around = {ord(self.marks.char(mark)): None for mark in self.AROUND}
        super().content(text.translate(around) if around else text)

    def begin_thought(self) -> None:
        """Take note that reasoning begins: space before it is no content."""
        self._out += self.content_text.end(keeps_space=False)

    def think(self, close: str, openers: str) -> Steps[None]:
        """Read reasoning up to its closing mark."""
        self.reasoning_text.drop_space()
        stops = openers if self.ENDS_THOUGHT else ""
        while mark := (yield from self._prose(self.reasoning, close, stops)):
            if mark != close and (yield from self.calls()):
                return
            self.take()
            if mark == close:
                self._out += self.reasoning_text.end(keeps_space=False)
                self.content_text.drop_space()
                return
            self.reasoning(mark)

    def _prose(self, sink: Sink, *stops: str) -> Steps[str]:
        """Pass text on up to one of these marks, which stays; return it, "" at the end."""
        chars = "".join(stops)
        pattern = re.compile(f"[{chars}]" if chars else r"(?!)")
        while True:
            found = pattern.search(self._text, self._at)
            end = found.start() if found else len(self._text)
            text, self._at = self._text[self._at : end], end
            sink(text)
            if found:
                return found[0]
            if self._ended:
                return ""
            self.cut()
            yield

    # --- calls as JSON objects ------------------------------------------------------------------

    def call_object(self, *, is_strict: bool = False) -> Steps[None]:
        """Read a call as an object with name and arguments.

        `is_strict`: it counts only with both, for a tool that was offered, and with no other keys
        than are usual: any object could stand there.
        """
        yield from self.expect("{")
        name, early, has_arguments = "", "", False
        yield from self.skip_space()
        while (yield from self.peek()) != "}":
            key = yield from self.json_string()
            yield from self.skip_space()
            yield from self.expect(":")
            yield from self.skip_space()
            if key == self.NAME_KEY:
                name = yield from self.json_string()
                if is_strict and name not in self.tools:
                    raise NotACallError
                if has_arguments:
                    self.start_call(name)
                    self.arguments(early)
            elif key in ("arguments", "parameters") and not has_arguments:
                has_arguments = True
                if name:
                    self.start_call(name)
                    yield from self.arguments_value(self.arguments)
                else:
                    parts: list[str] = []
                    yield from self.arguments_value(parts.append)
                    early = "".join(parts)
            elif is_strict and key not in ("type", "id"):
                raise NotACallError
            else:
                yield from self.json_value(lambda _: None)
            yield from self.skip_space()
            if not (yield from self.optional(",")):
                break
            yield from self.skip_space()
        yield from self.expect("}")
        if not name or (is_strict and not has_arguments):
            raise NotACallError
        if not has_arguments:
            self.start_call(name)
            self.arguments("{}")

    def arguments_value(self, sink: Sink) -> Steps[None]:
        """Read the arguments: an object, null for none, or a string that holds an object."""
        match (yield from self.look()):
            case "{":
                yield from self.json_value(sink)
            case "n":
                yield from self.expect("null")
                sink("{}")
            case '"':
                parts: list[str] = []
                yield from self.json_value(parts.append)
                sink(object_in("".join(parts)))
            case _:
                raise NotACallError


def object_in(text: str) -> str:
    """Return the object that a JSON string holds as text. Raises NotACallError."""

    try:
        inner = str(json.loads(text))
        if isinstance(json.loads(inner), dict):
            return escape_halves(inner)
    except (ValueError, RecursionError):
        pass
    raise NotACallError
