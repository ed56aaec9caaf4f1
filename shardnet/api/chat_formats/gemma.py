"""Tool calls of Gemma 4: objects with bare keys, whose strings stand between two equal marks."""

from __future__ import annotations

import json

from shardnet.api.chat_formats.json_text import MAX_DEPTH, in_string, json_of
from shardnet.api.chat_formats.marked import MarkedReader
from shardnet.api.chat_formats.reader import NotACallError, Steps

_QUOTE = '<|"|>'


class GemmaReader(MarkedReader):
    """`<|tool_call>call:NAME{KEY:<|"|>TEXT<|"|>,KEY:1}<tool_call|>`; thoughts in a channel."""

    THINK = (("<|channel>", "<channel|>"),)
    MARKS = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", _QUOTE)
    OPENERS = ("<|tool_call>",)
    KEEPS_SPACE = True

    def think(self, close: str, openers: str) -> Steps[None]:
        """Read reasoning, behind the channel's name."""
        yield from self.optional("thought")
        yield from super().think(close, openers)

    def calls(self) -> Steps[bool]:
        """Read one call."""
        return (yield from self.attempt(self._call()))

    def _call(self) -> Steps[None]:
        close = self.marks.char("<tool_call|>")
        self.take()
        yield from self.skip_space()
        yield from self.expect("call:")
        name = (yield from self.until("{" + close)).strip()
        yield from self.need()
        if (yield from self.peek()) != "{":
            raise NotACallError
        self.start_call(name)
        yield from self._object(0)
        yield from self.skip_space()
        yield from self.optional(close)

    def _value(self, depth: int) -> Steps[None]:
        first = yield from self.look()
        if depth > MAX_DEPTH:
            raise NotACallError
        if first == self.marks.char(_QUOTE):
            yield from self._string()
        elif first == "{":
            yield from self._object(depth)
        elif first == "[":
            yield from self._list(depth)
        else:
            scalar = yield from self.until(",}]" + self.marks.char("<tool_call|>"))
            if not scalar.strip():
                raise NotACallError
            self.arguments(json_of(scalar.strip(), frozenset()))

    def _string(self) -> Steps[None]:
        self.take()
        self.arguments('"')
        yield from self.value(
            self.marks.char(_QUOTE), lambda _: 1, lambda text: self.arguments(in_string(text))
        )
        self.arguments('"')

    def _object(self, depth: int) -> Steps[None]:
        self.take()
        self.arguments("{")
        lead = ""
        yield from self.skip_space()
        while not (yield from self.optional("}")):
            key = yield from self._key()
            self.arguments(f"{lead}{json.dumps(key, ensure_ascii=False)}: ")
            yield from self._value(depth + 1)
            yield from self._divider("}")
            lead = ", "
        self.arguments("}")

    def _list(self, depth: int) -> Steps[None]:
        self.take()
        self.arguments("[")
        lead = ""
        yield from self.skip_space()
        while not (yield from self.optional("]")):
            self.arguments(lead)
            yield from self._value(depth + 1)
            yield from self._divider("]")
            lead = ", "
        self.arguments("]")

    def _key(self) -> Steps[str]:
        """Read a key, bare or between marks, and the colon behind it."""
        quote = self.marks.char(_QUOTE)
        if (yield from self.optional(quote)):
            key = yield from self.until(quote)
            self.take()
            yield from self.skip_space()
        else:
            key = (yield from self.until(":{}[]," + quote)).strip()
        yield from self.expect(":")
        return key

    def _divider(self, close: str) -> Steps[None]:
        if (yield from self.look()) != close:
            yield from self.expect(",")
            yield from self.skip_space()
