"""Tool calls with one element for each argument, as Qwen3-Coder and Qwen 3.5 write them.

MiniMax-M2 and Seed-OSS have the same form with other words.

A value is bare text: on lines of its own, or directly between its marks. Only the tool's schema
says what it is. The marks within a call are ordinary text, which values may contain too: those of
values on lines of their own count at the beginning of a line only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from shardnet.api.chat_formats.json_text import ObjectWriter, Tool
from shardnet.api.chat_formats.marked import MarkedReader
from shardnet.api.chat_formats.reader import SPACE, Steps

_END_PARAMETER = "</parameter>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """What a call is written with: `section` stands around it, `quote` behind names."""

    section: str = "tool_call"
    function: str = "<function="
    end: str = "</function>"
    parameter: str = "<parameter="
    quote: str = ""

    @property
    def open(self) -> str:
        """The mark before a call."""
        return f"<{self.section}>"

    @property
    def close(self) -> str:
        """The mark behind it."""
        return f"</{self.section}>"


QWEN: Final = Words()
SEED: Final = Words(section="seed:tool_call")
MINIMAX: Final = Words(
    section="minimax:tool_call",
    function='<invoke name="',
    end="</invoke>",
    parameter='<parameter name="',
    quote='"',
)


class QwenXmlReader(MarkedReader):
    """`<tool_call><function=NAME><parameter=KEY>…</parameter></function></tool_call>`."""

    WORDS: ClassVar[Words] = QWEN
    OPENERS = (QWEN.open, QWEN.function)
    MARKS = ("<think>", "</think>", QWEN.close, *OPENERS)
    ENDS_THOUGHT = OPENERS

    def calls(self) -> Steps[bool]:
        """Read one call. Some models leave out the mark before the function."""
        return (yield from self.attempt(self._call()))

    def _call(self) -> Steps[None]:
        yield from self.optional(self.marks.char(self.WORDS.open))
        yield from self.skip_space()
        yield from self.expect(self.marks.char(self.WORDS.function))
        name = (yield from self.until(">\n")).strip().removesuffix(self.WORDS.quote)
        yield from self.expect(">")
        tool = self.tools.get(name, Tool(name, {}))
        self.start_call(name)
        writer = ObjectWriter(self.arguments)
        while True:
            yield from self.skip_space()
            yield from self.need()
            if (yield from self.optional(self.WORDS.parameter)):
                yield from self._argument(tool, writer)
            else:
                yield from self.expect(self.WORDS.end)
                break
        writer.end()
        yield from self.skip_space()
        yield from self.optional(self.marks.char(self.WORDS.close))

    def _argument(self, tool: Tool, writer: ObjectWriter) -> Steps[None]:
        key = (yield from self.until(">\n")).removesuffix(self.WORDS.quote)
        yield from self.expect(">")
        yield from self.need()
        newline = "\n" if (yield from self.optional("\n")) else ""
        close = self.marks.char(self.WORDS.close)

        def decide(text: str) -> int | None:
            return _end_of_value(text, newline, close, tool, self.WORDS)

        writer.begin(key, tool.types_of(key))
        if newline and (yield from self._is_empty(close, tool)):
            writer.end_value()
            return
        yield from self.value(newline or "<", decide, writer.push)
        writer.end_value()

    def _is_empty(self, close: str, tool: Tool) -> Steps[bool]:
        """Take the end of a value that has no line."""
        while True:
            length = _end_of_value(self._text[self._at :], "", close, tool, self.WORDS)
            if length is not None:
                self.take(max(length, 0))
                return length >= 0
            yield from self.peek(len(self._text) - self._at + 1)
            if self._ended:
                return False


class SeedReader(QwenXmlReader):
    """The same between `<seed:tool_call>` and its end, with reasoning by marks of its own."""

    WORDS = SEED
    THINK = (("<seed:think>", "</seed:think>"),)
    OPENERS = (SEED.open, SEED.function)
    MARKS = (*THINK[0], SEED.close, *OPENERS)
    ENDS_THOUGHT = OPENERS


class MinimaxReader(QwenXmlReader):
    """`<minimax:tool_call><invoke name="NAME"><parameter name="KEY">…</parameter></invoke>…`."""

    WORDS = MINIMAX
    OPENERS = (MINIMAX.open, MINIMAX.function)
    MARKS = ("<think>", "</think>", MINIMAX.close, *OPENERS)
    ENDS_THOUGHT = OPENERS


def _end_of_value(text: str, newline: str, close: str, tool: Tool, words: Words) -> int | None:
    """Decide whether a value ends here; `newline` stands before the marks that may end it.

    It ends with its own closing mark if another part of the call follows, and where that mark was
    forgotten with the next argument or the end of the function.
    """
    ends = newline + _END_PARAMETER
    if text.startswith(ends):
        return _if_follows(text[len(ends) :], (words.parameter, words.end, close), len(ends))
    if text.startswith(newline + words.end):
        rest = text[len(newline + words.end) :].lstrip(SPACE)
        if not rest:
            return None
        return len(newline) if rest[0] == close else -1
    if text.startswith(newline + words.parameter):
        name, found, _ = text[len(newline + words.parameter) :].partition(words.quote + ">")
        if not found and "\n" not in name:
            return None
        return len(newline) if name in (tool.properties or ()) else -1
    begins = (newline + word for word in (_END_PARAMETER, words.end, words.parameter))
    return None if any(word.startswith(text) for word in begins) else -1


def _if_follows(rest: str, words: tuple[str, ...], length: int) -> int | None:
    """Return `length` if one of the words follows, -1 if not, None where that is not known yet."""
    rest = rest.lstrip(SPACE)
    if any(rest.startswith(word) for word in words):
        return length
    return None if any(word.startswith(rest) for word in words) else -1
