"""Tool calls of DeepSeek: V3 and R1 and V3.1 by tokens, V3.2 and later by DSML elements."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from shardnet.api.chat_formats.json_text import ObjectWriter, Tool
from shardnet.api.chat_formats.marked import MarkedReader
from shardnet.api.chat_formats.reader import NotACallError, ReaderSettings, Steps

_CALLS, _END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_DSML = "｜DSML｜"
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')
_TYPES: Mapping[str, frozenset[str]] = {"true": frozenset({"string"}), "false": frozenset()}


class DeepSeekReader(MarkedReader):
    """A section of calls: `NAME<sep>{…}`, or in V3 `function<sep>NAME` and a block of JSON."""

    MARKS = ("<think>", "</think>", _CALLS, _END_CALLS, _CALL, _END_CALL, _SEPARATOR)
    OPENERS = (_CALLS, _CALL)

    def calls(self) -> Steps[bool]:
        """Read a section of calls."""
        is_read = yield from self.attempt(self._call())
        while is_read:
            yield from self.skip_space()
            if (yield from self.optional(self.marks.char(_END_CALLS))):
                return True
            if (yield from self.peek()) != self.marks.char(_CALL):
                return True
            is_read = yield from self.attempt(self._call())
            if not is_read:
                return False
        return False

    def _call(self) -> Steps[None]:
        char = self.marks.char
        yield from self.optional(char(_CALLS))
        yield from self.skip_space()
        yield from self.expect(char(_CALL))
        name = (
            yield from self.until(char(_SEPARATOR) + char(_END_CALL) + char(_END_CALLS))
        ).strip()
        yield from self.expect(char(_SEPARATOR))
        has_fence = (yield from self.look()) != "{"
        if has_fence:
            if name != "function":
                raise NotACallError
            name = (yield from self.until("\n" + char(_END_CALL))).strip()
            yield from self.expect("\n```json\n")
        self.start_call(name)
        yield from self.json_value(self.arguments)
        yield from self.skip_space()
        if has_fence:
            yield from self.optional("```")
            yield from self.skip_space()
        yield from self.optional(char(_END_CALL))


class DsmlReader(MarkedReader):
    """`<｜DSML｜invoke name="…"><｜DSML｜parameter name="…" string="true">…` within a section.

    The section is named function_calls, tool_calls or calls; V4.1 writes spaces before the names.
    """

    MARKS = ("<think>", "</think>", "<" + _DSML, "</" + _DSML)
    OPENERS = ("<" + _DSML,)

    def __init__(self, settings: ReaderSettings) -> None:
        """Read the token in the marks as text: it is only a part of them."""
        tokens = {n: token for n, token in settings.tokens.items() if token.text != _DSML}
        super().__init__(replace(settings, tokens=tokens))

    def calls(self) -> Steps[bool]:
        """Read a section of calls."""
        is_read = yield from self.attempt(self._call())
        while is_read:
            yield from self.skip_space()
            if (yield from self.peek()) == self.marks.char("</" + _DSML):
                self.take()
                yield from self._rest_of_tag()
                return True
            if (yield from self.peek()) != self.marks.char("<" + _DSML):
                return True
            is_read = yield from self.attempt(self._call())
        return False

    def _rest_of_tag(self) -> Steps[None]:
        """Take the rest of a closing tag that stands behind the calls."""
        while (yield from self.peek()) not in ("", ">", "\n"):
            self.take()
        yield from self.optional(">")

    def _tag(self) -> Steps[str]:
        """Read what stands in a tag."""
        inside = (yield from self.until(">")).strip()
        self.take()
        return inside

    def _call(self) -> Steps[None]:
        self.take()
        tag = yield from self._tag()
        if tag in ("function_calls", "tool_calls", "calls"):
            yield from self.skip_space()
            yield from self.expect(self.marks.char("<" + _DSML))
            tag = yield from self._tag()
        attributes = dict(_ATTRIBUTE.findall(tag))
        name = attributes.get("name", "")
        if not tag.startswith("invoke"):
            raise NotACallError
        tool = self.tools.get(name, Tool(name, {}))
        self.start_call(name)
        writer = ObjectWriter(self.arguments)
        while not tag.endswith("/"):
            yield from self.skip_space()
            yield from self.need()
            if (yield from self.optional(self.marks.char("</" + _DSML))):
                if (yield from self._tag()) != "invoke":
                    raise NotACallError
                break
            yield from self.expect(self.marks.char("<" + _DSML))
            yield from self._argument(tool, writer)
        writer.end()

    def _argument(self, tool: Tool, writer: ObjectWriter) -> Steps[None]:
        tag = yield from self._tag()
        attributes = dict(_ATTRIBUTE.findall(tag))
        key = attributes.get("name")
        if key is None or not tag.startswith("parameter"):
            raise NotACallError
        types = _TYPES.get(attributes.get("string", ""), tool.types_of(key))
        close = self.marks.char("</" + _DSML)

        def decide(text: str) -> int | None:
            for end in (close + "parameter>", close + " parameter>"):
                if text.startswith(end):
                    return len(end)
            return None if len(text) < len(" parameter>") + 1 else -1

        writer.begin(key, types)
        yield from self.value(close, decide, writer.push)
        writer.end_value()
