"""Tool calls of Mistral: a list of objects behind one mark or, later, name and arguments by marks.

Granite, Phi, Hunyuan, Command R7B and Apertus write such a list behind a mark of their own.
"""

from __future__ import annotations

from typing import ClassVar

from shardnet.api.chat_formats.marked import MarkedReader
from shardnet.api.chat_formats.reader import Steps

_CALLS, _ARGUMENTS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class ListReader(MarkedReader):
    """A mark, and `[{"name": …, "arguments": {…}}, …]`."""

    MARKS: ClassVar[tuple[str, ...]] = (
        *("<think>", "</think>", "<|tool_call|>", "<|/tool_call|>"),
    )
    OPENERS: ClassVar[tuple[str, ...]] = ("<|tool_call|>",)

    def calls(self) -> Steps[bool]:
        """Read all calls behind a mark."""
        is_read = yield from self.attempt(self._first())
        while is_read:
            yield from self.skip_space()
            if (yield from self.peek()) != ",":
                yield from self.optional("]")
                return True
            is_read = yield from self.attempt(self._next())
            if not is_read:
                self.content(",")
                self.take()
                return True
        return False

    def _first(self) -> Steps[None]:
        self.take()
        yield from self.skip_space()
        yield from self.expect("[")
        yield from self.skip_space()
        yield from self.call_object()

    def _next(self) -> Steps[None]:
        self.take()
        yield from self.skip_space()
        yield from self.call_object()


class HunyuanReader(ListReader):
    """The same list between `<tool_calls>` and its end; content between `<answer>` and its end."""

    OPENERS = ("<tool_calls>",)
    AROUND = ("<answer>", "</answer>", "</tool_calls>")
    MARKS = ("<think>", "</think>", *OPENERS, *AROUND)


class CommandReader(ListReader):
    """`<|START_ACTION|>[{"tool_call_id": …, "tool_name": …, "parameters": {…}}]`, and its end."""

    THINK = (("<|START_THINKING|>", "<|END_THINKING|>"),)
    OPENERS = ("<|START_ACTION|>",)
    AROUND = ("<|END_ACTION|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>")
    MARKS = (*THINK[0], *OPENERS, *AROUND)
    NAME_KEY = "tool_name"


class ApertusReader(ListReader):
    """`<|tools_prefix|>[{NAME: {…}}, …]<|tools_suffix|>`."""

    THINK = (("<|inner_prefix|>", "<|inner_suffix|>"),)
    OPENERS = ("<|tools_prefix|>",)
    AROUND = ("<|tools_suffix|>",)
    MARKS = (*THINK[0], *OPENERS, *AROUND)
    ENDS_THOUGHT = OPENERS

    def call_object(self, *, is_strict: bool = False) -> Steps[None]:
        """Read a call as an object whose only key is the tool's name."""
        yield from self.expect("{")
        yield from self.skip_space()
        name = yield from self.json_string()
        yield from self.skip_space()
        yield from self.expect(":")
        self.start_call(name)
        yield from self.arguments_value(self.arguments)
        yield from self.skip_space()
        yield from self.expect("}")


class MistralReader(ListReader):
    """`[TOOL_CALLS]NAME[ARGS]{…}` for each call, with `[CALL_ID]` or without, or one list."""

    THINK = (("[THINK]", "[/THINK]"), ("<think>", "</think>"))
    MARKS = ("[THINK]", "[/THINK]", "<think>", "</think>", _CALLS, _ARGUMENTS, _ID)
    OPENERS = (_CALLS,)

    def calls(self) -> Steps[bool]:
        """Read what stands behind a mark: a call or a list of them."""
        place = self._at
        yield from self.peek(2)
        self.take()
        yield from self.skip_space()
        is_list = (yield from self.peek()) == "["
        self._at = place
        if is_list:
            return (yield from super().calls())
        return (yield from self.attempt(self._call()))

    def _call(self) -> Steps[None]:
        char = self.marks.char
        self.take()
        name = (yield from self.until("{" + char(_ARGUMENTS) + char(_ID))).strip()
        call_id = None
        if (yield from self.optional(char(_ID))):
            call_id = (yield from self.until("{" + char(_ARGUMENTS))).strip()
        yield from self.optional(char(_ARGUMENTS))
        if (yield from self.look()) == "{":
            self.start_call(name, call_id)
        yield from self.arguments_value(self.arguments)
