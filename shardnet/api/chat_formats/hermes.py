"""Tool calls as JSON between two marks, as Hermes, Qwen 2.5 and Qwen 3 write them."""

from __future__ import annotations

from shardnet.api.chat_formats.marked import MarkedReader
from shardnet.api.chat_formats.reader import Steps


class HermesReader(MarkedReader):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, one after the other.

    Granite writes a list of objects between the marks.
    """

    MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    OPENERS = ("<tool_call>",)

    def calls(self) -> Steps[bool]:
        """Read one call."""
        return (yield from self.attempt(self._call()))

    def _call(self) -> Steps[None]:
        self.take()
        yield from self.skip_space()
        is_list = yield from self.optional("[")
        yield from self.skip_space()
        yield from self.call_object()
        yield from self.skip_space()
        while (yield from self.peek()) in ("{", "," if is_list else "{"):
            yield from self.optional(",")
            yield from self.skip_space()
            yield from self.call_object()
            yield from self.skip_space()
        if is_list:
            yield from self.expect("]")
            yield from self.skip_space()
        yield from self.optional(self.marks.char("</tool_call>"))
