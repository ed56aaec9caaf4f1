"""Tool calls of GLM 4.5 and later: a name, then keys and values between marks that are tokens.

Values are bare text; only the tool's schema says what they are.
"""

from __future__ import annotations

from shardnet.api.chat_formats.json_text import ObjectWriter, Tool
from shardnet.api.chat_formats.marked import MarkedReader
from shardnet.api.chat_formats.reader import SPACE, Steps


class GlmReader(MarkedReader):
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>…</arg_value></tool_call>`."""

    MARKS = (
        *("<think>", "</think>", "<tool_call>", "</tool_call>"),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    )
    OPENERS = ("<tool_call>",)

    def calls(self) -> Steps[bool]:
        """Read one call."""
        return (yield from self.attempt(self._call()))

    def _call(self) -> Steps[None]:
        char = self.marks.char
        close, key_mark = char("</tool_call>"), char("<arg_key>")
        self.take()
        yield from self.skip_space()
        name = (yield from self.until("\n" + key_mark + close)).strip()
        tool = self.tools.get(name, Tool(name, {}))
        self.start_call(name)
        writer = ObjectWriter(self.arguments)
        while True:
            yield from self.skip_space()
            yield from self.need()
            if not (yield from self.optional(key_mark)):
                yield from self.expect(close)
                break
            key = yield from self.until(char("</arg_key>"))
            self.take()
            yield from self.skip_space()
            yield from self.expect(char("<arg_value>"))
            writer.begin(key, tool.types_of(key))
            yield from self._value(writer)
            writer.end_value()
        writer.end()

    def _value(self, writer: ObjectWriter) -> Steps[None]:
        """Read a value to its closing mark or, where that was forgotten, to that of the call."""
        own, close = self.marks.char("</arg_value>"), self.marks.char("</tool_call>")
        opener = self.marks.char("<tool_call>")
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
            if rest[:1] == opener or (not rest and self._ended):
                return
            if rest:
                writer.push(self.marks.plain(close))
                self.take()
            else:
                yield
