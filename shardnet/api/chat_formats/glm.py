"""Tool calls of GLM 4.5 and later: a name, then keys and values between marks that are tokens.

Values are bare text; only the tool's schema says what they are. Hy3 and Hunyuan 4 write the same in
a section, by marks with a suffix. Before, GLM-4 wrote a line with the name and an object, without
any mark.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import ClassVar, Final

from shardnet.api.chat_formats.json_text import ObjectWriter, Tool
from shardnet.api.chat_formats.marked import MarkedReader
from shardnet.api.chat_formats.reader import SPACE, NotACallError, Steps

_SUFFIXED: Final = re.compile(r"<arg_key(:[^<>\s]+)>")


class GlmReader(MarkedReader):
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>…</arg_value></tool_call>`."""

    SUFFIX: ClassVar[str] = ""
    MARKS: ClassVar[tuple[str, ...]] = (
        *("<think>", "</think>", "<tool_call>", "</tool_call>"),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    )
    OPENERS = ("<tool_call>",)

    def _char(self, name: str) -> str:
        """Return the character of the mark of this name, "" for none."""
        mark = f"<{name}{self.SUFFIX}>"
        return self.marks.char(mark) if mark in self.MARKS else ""

    def calls(self) -> Steps[bool]:
        """Read one call."""
        return (yield from self.attempt(self._call()))

    def _call(self) -> Steps[None]:
        close, key_mark, divider = map(self._char, ("/tool_call", "arg_key", "tool_sep"))
        self.take()
        yield from self.skip_space()
        name = (yield from self.until("\n" + key_mark + close + divider)).strip()
        yield from self.optional(divider)
        tool = self.tools.get(name, Tool(name, {}))
        self.start_call(name)
        writer = ObjectWriter(self.arguments)
        while True:
            yield from self.skip_space()
            yield from self.need()
            if not (yield from self.optional(key_mark)):
                yield from self.expect(close)
                break
            key = yield from self.until(self._char("/arg_key"))
            self.take()
            yield from self.skip_space()
            yield from self.expect(self._char("arg_value"))
            writer.begin(key, tool.types_of(key))
            yield from self._value(writer)
            writer.end_value()
        writer.end()

    def _value(self, writer: ObjectWriter) -> Steps[None]:
        """Read a value to its closing mark or, where that was forgotten, to that of the call."""
        own, close, opener = map(self._char, ("/arg_value", "/tool_call", "tool_call"))
        behind = opener + self._char("/tool_calls")
        while True:
            places = [p for c in (own, close) if (p := self._text.find(c, self._at)) >= 0]
            end = min(places, default=len(self._text))
            text, self._at = self.marks.plain(self._text[self._at : end]), end
            if text:
                writer.push(text)
            if not places:
                self.cut()
                yield from self.need()
                continue
            if self._text[end] == own:
                self.take()
                return
            rest = self._text[end + 1 :].lstrip(SPACE)
            if (rest and rest[0] in behind) or (not rest and self._ended):
                return
            if rest:
                writer.push(self.marks.plain(close))
                self.take()
            else:
                yield


def suffix_of(tokens: Iterable[str]) -> str:
    """Return what stands at the end of each of Hunyuan's marks, as in `<think:opensource>`."""
    return next((found[1] for token in tokens if (found := _SUFFIXED.fullmatch(token))), "")


@cache
def hunyuan_reader(suffix: str) -> type[GlmReader]:
    """Make the reader of Hy3's and Hunyuan 4's calls, whose marks end with a suffix.

    They stand between `<tool_calls>` and its end; Hy3 writes `<tool_sep>` behind names.
    """

    def mark(name: str) -> str:
        return f"<{name}{suffix}>"

    class HunyuanReader(GlmReader):
        """Reads marks with this suffix."""

        SUFFIX = suffix
        THINK = ((mark("think"), mark("/think")),)
        OPENERS = (mark("tool_call"),)
        AROUND = (mark("tool_calls"), mark("/tool_calls"))
        MARKS = (
            *(mark(known[1:-1]) for known in GlmReader.MARKS),
            *(*AROUND, mark("tool_sep")),
        )

    return HunyuanReader


class Glm4Reader(MarkedReader):
    """`NAME`, a new line and an object, at the beginning of the output, as often as they come.

    Any text may begin so: it is a call only if it names a tool that was offered.
    """

    KEEPS_SPACE = True

    def read(self) -> Steps[None]:
        """Read the whole output."""
        while self.tools and (yield from self.attempt(self._call(), drops=False)):
            pass
        yield from super().read()

    def _call(self) -> Steps[None]:
        yield from self.skip_space()
        yield from self.json_call((yield from self._name()))

    def _name(self) -> Steps[str]:
        """Read a line that is a tool's name, no further than it can be one."""
        length = 1
        while True:
            line = yield from self.peek(length)
            if line[-1:] == "\n" and line[:-1] in self.tools:
                self.take(length)
                return line[:-1]
            if len(line) < length or not any(f"{name}\n".startswith(line) for name in self.tools):
                raise NotACallError
            length += 1
