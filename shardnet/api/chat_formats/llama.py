"""Tool calls of Llama 3, bare JSON objects, and of Llama 4, LFM2 and OLMo 3, calls as in Python.

Llama's stand at the beginning of the output or behind a tag. Anything else may begin like them: it
is a call only if it names a tool that was offered.
"""

from __future__ import annotations

from typing import ClassVar

from shardnet.api.chat_formats.json_text import MAX_DEPTH, ObjectWriter, as_json, json_of
from shardnet.api.chat_formats.marked import MarkedReader
from shardnet.api.chat_formats.reader import NotACallError, Steps

_TAGS = ("<|python_tag|>", "<|python_start|>")
_END = "<|python_end|>"
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "a": "\a", "v": "\v"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


class LlamaReader(MarkedReader):
    """`{"name": …, "parameters": {…}}` or `[NAME(KEY=VALUE, …), …]`."""

    MARKS: ClassVar[tuple[str, ...]] = ("<think>", "</think>", *_TAGS, _END)
    OPENERS: ClassVar[tuple[str, ...]] = _TAGS
    KEEPS_SPACE = True

    def read(self) -> Steps[None]:
        """Read the whole output."""
        if self.tools:
            yield from self.calls()
        yield from super().read()

    def calls(self) -> Steps[bool]:
        """Read calls, with a tag before them or without."""
        if not (yield from self.attempt(self._first(), drops=False)):
            return False
        while (yield from self._goes_on()):
            if not (yield from self.attempt(self._next(), drops=False)):
                break
        return True

    def _first(self) -> Steps[None]:
        for tag in _TAGS:
            yield from self.optional(self.marks.char(tag))
        if (yield from self.look()) == "[":
            yield from self._python_list()
            yield from self.optional(self.marks.char(_END))
        else:
            yield from self.call_object(is_strict=True)

    def _goes_on(self) -> Steps[bool]:
        """Say whether another object follows."""
        place = self._at
        yield from self.skip_space()
        char = yield from self.peek()
        self._at = place
        return char in (";", "{")

    def _next(self) -> Steps[None]:
        yield from self.skip_space()
        yield from self.optional(";")
        yield from self.skip_space()
        yield from self.call_object(is_strict=True)

    # --- calls as in Python ---------------------------------------------------------------------

    def _python_list(self) -> Steps[None]:
        self.take()
        while True:
            yield from self._python_call()
            if not (yield from self.optional(",")):
                break
        yield from self.expect("]")

    def _python_call(self) -> Steps[None]:
        yield from self.skip_space()
        name = (yield from self.until("([{]}),=:\"'")).strip()
        yield from self.expect("(")
        if name not in self.tools:
            raise NotACallError
        self.start_call(name)
        yield from self._python_arguments()
        yield from self.skip_space()

    def _python_arguments(self) -> Steps[None]:
        writer = ObjectWriter(self.arguments)
        yield from self.skip_space()
        while not (yield from self.optional(")")):
            key = (yield from self.until("=([{]}),:\"'")).strip()
            yield from self.expect("=")
            text = yield from self._python_value(0)
            writer.put(key, text)
            yield from self.skip_space()
            if (yield from self.peek()) != ")":
                yield from self.expect(",")
                yield from self.skip_space()
        writer.end()

    def _python_value(self, depth: int) -> Steps[str]:
        """Read a literal; return it as JSON text."""
        first = yield from self.look()
        if depth > MAX_DEPTH:
            raise NotACallError
        if first in "\"'":
            return as_json((yield from self._python_string()))
        if first in "[(":
            items = yield from self._python_items("]" if first == "[" else ")", depth, is_map=False)
            return "[" + ", ".join(items) + "]"
        if first == "{":
            items = yield from self._python_items("}", depth, is_map=True)
            return "{" + ", ".join(items) + "}"
        scalar = json_of((yield from self.until(",)]}:")), frozenset({"number", "boolean", "null"}))
        if scalar.startswith('"'):
            raise NotACallError
        return scalar

    def _python_items(self, close: str, depth: int, *, is_map: bool) -> Steps[list[str]]:
        self.take()
        items: list[str] = []
        yield from self.skip_space()
        while not (yield from self.optional(close)):
            item = yield from self._python_value(depth + 1)
            yield from self.skip_space()
            if is_map:
                if not item.startswith('"'):
                    raise NotACallError
                yield from self.expect(":")
                item += ": " + (yield from self._python_value(depth + 1))
                yield from self.skip_space()
            items.append(item)
            if (yield from self.peek()) != close:
                yield from self.expect(",")
                yield from self.skip_space()
        return items

    def _python_string(self) -> Steps[str]:
        quote = yield from self.peek()
        self.take()
        parts: list[str] = []
        while True:
            yield from self.need()
            char = yield from self.peek()
            self.take()
            if char == quote:
                return "".join(parts)
            parts.append((yield from self._escaped()) if char == "\\" else self.marks.plain(char))

    def _escaped(self) -> Steps[str]:
        yield from self.need()
        char = yield from self.peek()
        self.take()
        if char == "\n":
            return ""
        if char not in _HEX_DIGITS:
            return _ESCAPES.get(char, char if char in "\\'\"" else "\\" + self.marks.plain(char))
        n_digits = _HEX_DIGITS[char]
        digits = yield from self.peek(n_digits)
        try:
            found = chr(int(digits, 16))
            found.encode()
        except (ValueError, OverflowError):
            raise NotACallError from None
        self.take(n_digits)
        return found


class Lfm2Reader(LlamaReader):
    """`<|tool_call_start|>[NAME(KEY=VALUE, …), …]<|tool_call_end|>`, at any place."""

    OPENERS = ("<|tool_call_start|>",)
    MARKS = ("<think>", "</think>", *OPENERS, "<|tool_call_end|>")
    KEEPS_SPACE = False

    def read(self) -> Steps[None]:
        """Read the whole output: without the mark nothing is a call."""
        yield from MarkedReader.read(self)

    def calls(self) -> Steps[bool]:
        """Read one list of calls."""
        return (yield from self.attempt(self._list()))

    def _list(self) -> Steps[None]:
        yield from self.expect(self.marks.char("<|tool_call_start|>"))
        yield from self.skip_space()
        if (yield from self.peek()) != "[":
            raise NotACallError
        yield from self._python_list()
        yield from self.skip_space()
        yield from self.optional(self.marks.char("<|tool_call_end|>"))


class OlmoReader(Lfm2Reader):
    """`<function_calls>`, a line `NAME(KEY=VALUE, …)` for each call, `</function_calls>`."""

    OPENERS = ("<function_calls>",)
    MARKS = ("<think>", "</think>", *OPENERS, "</function_calls>")

    def _list(self) -> Steps[None]:
        close = self.marks.char("</function_calls>")
        yield from self.expect(self.marks.char("<function_calls>"))
        yield from self._python_call()
        while (yield from self.peek()) not in ("", close):
            yield from self._python_call()
        yield from self.optional(close)
