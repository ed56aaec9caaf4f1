"""Tool calls of Kimi: K2's sections of calls by tokens, and K3's elements."""

from __future__ import annotations

import re

from shardnet.api.chat_formats.json_text import ObjectWriter
from shardnet.api.chat_formats.marked import MarkedReader
from shardnet.api.chat_formats.reader import Reader, Steps

_SECTION, _END_SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _END_CALL = "<|tool_call_begin|>", "<|tool_call_end|>"
_ARGUMENTS = "<|tool_call_argument_begin|>"
_CALL_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")
_OPEN, _CLOSE, _SEP, _END_MESSAGE = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')
_ELEMENT = re.compile(r"<\|open\|>(\w+)[^<]*<\|sep\|>\s*\Z")


class KimiReader(MarkedReader):
    """`<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}<|tool_call_end|>`."""

    MARKS = ("<think>", "</think>", _SECTION, _END_SECTION, _CALL, _END_CALL, _ARGUMENTS)
    OPENERS = (_SECTION, _CALL)
    KEEPS_SPACE = True

    def calls(self) -> Steps[bool]:
        """Read a section; what stands in it beside calls is dropped."""
        char = self.marks.char
        if not (yield from self.attempt(self._opened())):
            return False
        while not (yield from self.optional(char(_END_SECTION))):
            if not (yield from self.peek()):
                return True
            if (yield from self.peek()) != char(_CALL):
                self.take()
            elif not (yield from self.attempt(self._call())):
                self.content(char(_CALL))
                self.take()
                return True
        return True

    def _opened(self) -> Steps[None]:
        """Take the mark of a section if a call or its end follows."""
        char = self.marks.char
        if (yield from self.optional(char(_SECTION))):
            yield from self.until(char(_CALL) + char(_END_SECTION))
        if (yield from self.peek()) == char(_CALL):
            yield from self._call()

    def _call(self) -> Steps[None]:
        char = self.marks.char
        yield from self.expect(char(_CALL))
        call_id = (yield from self.until(char(_ARGUMENTS) + char(_END_CALL))).strip()
        yield from self.expect(char(_ARGUMENTS))
        found = _CALL_ID.fullmatch(call_id)
        yield from self.json_call(found[1] if found else "", call_id)
        yield from self.skip_space()
        yield from self.optional(char(_END_CALL))


class KimiElementsReader(Reader):
    """`<|open|>call tool="…"<|sep|><|open|>argument key="…" type="…"<|sep|>…`, as K3 writes."""

    THINK = ((f"think{_SEP}", f"{_CLOSE}think{_SEP}"),)
    BEFORE_THINK = _OPEN
    ENDS_THOUGHT = (_CLOSE, _OPEN, _END_MESSAGE)
    MARKS = (_OPEN, _CLOSE, _SEP, _END_MESSAGE)

    def read(self) -> Steps[None]:
        """Read element after element. The prompt ends within the first."""
        found = _ELEMENT.search(self.settings.prompt_tail)
        element = found[1] if found else ""
        marks = re.compile("[" + "".join(map(self.marks.char, (_OPEN, _CLOSE, _END_MESSAGE))) + "]")
        while True:
            stop = marks.search(self._text, self._at)
            end = stop.start() if stop else len(self._text)
            text, self._at = self._text[self._at : end], end
            if element == "think":
                self.reasoning(text)
            else:
                self.content(text)
            if stop is None:
                if self._ended:
                    return
                self.cut()
                yield
                continue
            element = yield from self._mark(element)

    def _mark(self, element: str) -> Steps[str]:
        """Take a tag, or a call; return which element is open behind it."""
        char = self.marks.char
        if (yield from self.optional(char(_END_MESSAGE))):
            return ""
        place = self._at
        mark = yield from self.peek()
        self.take()
        is_call = mark == char(_OPEN) and (yield from self.peek(5)) == "call "
        self._at = place
        self._out += self.reasoning_text.end(keeps_space=True)
        if is_call and self.tools:
            if not (yield from self.attempt(self._call())):
                self.content(mark)
                self.take()
            return ""
        if not (yield from self.attempt(self._tag())):
            self.content(mark)
            self.take()
            return element
        return self._opened if mark == char(_OPEN) else ""

    _opened = ""
    """The element that the last tag has opened."""

    def _tag(self) -> Steps[None]:
        self.take()
        tag = yield from self.until(self.marks.char(_SEP))
        self.take()
        self._opened = tag.partition(" ")[0].strip()

    def _call(self) -> Steps[None]:
        char = self.marks.char
        name = (yield from self._attributes("call")).get("tool", "")
        self.start_call(name)
        writer = ObjectWriter(self.arguments)
        while True:
            if (yield from self.look()) == char(_CLOSE):
                break
            said = yield from self._attributes("argument")
            kind = said.get("type")
            writer.begin(said.get("key", ""), frozenset({kind} if kind else ()))
            yield from self.value(char(_CLOSE), lambda _: 0, writer.push)
            yield from self._closed("argument")
            writer.end_value()
        yield from self._closed("call")
        writer.end()

    def _attributes(self, element: str) -> Steps[dict[str, str]]:
        """Take the tag that opens an element; return its attributes."""
        yield from self.expect(self.marks.char(_OPEN) + element + " ")
        tag = yield from self.until(self.marks.char(_SEP))
        self.take()
        return {
            key: value.replace("&quot;", '"').replace("&lt;", "<").replace("&amp;", "&")
            for key, value in _ATTRIBUTE.findall(tag)
        }

    def _closed(self, element: str) -> Steps[None]:
        yield from self.expect(self.marks.char(_CLOSE) + element + self.marks.char(_SEP))
