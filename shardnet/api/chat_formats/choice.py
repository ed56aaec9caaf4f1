"""Which format a model writes, and how the tools of a request may be used."""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from shardnet.api.chat_formats.deepseek import DeepSeekReader, DsmlReader
from shardnet.api.chat_formats.gemma import GemmaReader
from shardnet.api.chat_formats.glm import Glm4Reader, GlmReader, hunyuan_reader, suffix_of
from shardnet.api.chat_formats.harmony import HarmonyReader
from shardnet.api.chat_formats.json_text import Tool, read_tools
from shardnet.api.chat_formats.kimi import KimiElementsReader, KimiReader
from shardnet.api.chat_formats.llama import Lfm2Reader, LlamaReader, OlmoReader
from shardnet.api.chat_formats.marked import MarkedReader
from shardnet.api.chat_formats.marks import (
    CallDelta,
    OutputDelta,
    OutputParser,
    TokenText,
    ToolCallCut,
    ToolCallDelta,
    ToolCallStarted,
)
from shardnet.api.chat_formats.mistral import (
    ApertusReader,
    CommandReader,
    HunyuanReader,
    ListReader,
    MistralReader,
)
from shardnet.api.chat_formats.qwen_xml import MinimaxReader, QwenXmlReader, SeedReader
from shardnet.api.chat_formats.reader import HOLD, Reader, ReaderSettings, Steps

Mode = Literal["none", "auto", "required", "named"]

_LETTERS: Final = string.ascii_letters + string.digits
_ID_LENGTHS: Final = {"mistral": 9}
"""Of ids that a format's template insists on; others get a prefix and 24 characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Which calls an answer may have: none, any, at least one, or only of the tool `name`.

    At most one with `is_parallel` False, and of a tool that is named. "required" and "named" are
    kept by constraining what is generated; reading an answer does not invent a call.
    """

    mode: Mode = "auto"
    name: str = ""
    is_parallel: bool = True

    @property
    def must_call(self) -> bool:
        """Whether an answer must have a call."""
        return self.mode in ("required", "named")

    @property
    def max_calls(self) -> int | None:
        """Most calls of one answer, None for any number."""
        return None if self.is_parallel and self.mode != "named" else 1

    def offered(self, tools: Mapping[str, Tool]) -> dict[str, Tool]:
        """Return the tools whose calls are read."""
        if self.mode == "none":
            return {}
        return {n: tool for n, tool in tools.items() if self.mode != "named" or n == self.name}


MOST_EQUAL_CALLS: Final = 3
"""So many equal calls, one after the other, may be meant; a model that writes more is in a loop."""


class EqualCalls:
    """Drops each call that `most` equal ones came before, and numbers the others anew.

    A call is held back while its text may still become that of the ones before. With 0 none is
    dropped.
    """

    def __init__(self, most: int = MOST_EQUAL_CALLS) -> None:
        self._most = most
        self._n_equal = 0
        self._before: tuple[str, str] | None = None
        self._name = self._text = ""
        self._held: list[CallDelta] = []
        self._n_given = 0

    def feed(self, deltas: Sequence[OutputDelta]) -> list[OutputDelta]:
        """Return what is known by now to be given."""
        out: list[OutputDelta] = []
        for delta in deltas:
            match delta:
                case ToolCallStarted():
                    out += self.finish()
                    self._next(delta)
                case ToolCallDelta(text=text):
                    self._text += text
                    self._held.append(delta)
                case ToolCallCut():
                    self._held = [] if self._held else [delta]
                    out += self._give()
                    continue
                case _:
                    out += [*self.finish(), delta]
                    continue
            if not self._may_be_dropped():
                out += self._give()
        return out

    def finish(self) -> list[OutputDelta]:
        """Return what was held back of a call that has ended: nothing of one that is dropped."""
        if (self._name, self._text) == self._before:
            self._held = []
        return self._give()

    def _next(self, started: ToolCallStarted) -> None:
        """Take note of the call that has ended, and hold back the next one."""
        ended = (self._name, self._text)
        self._n_equal = self._n_equal + 1 if ended == self._before else 1
        self._before, self._name, self._text, self._held = ended, started.name, "", [started]

    def _may_be_dropped(self) -> bool:
        if self._before is None or self._before[0] != self._name:
            return False
        return 0 < self._most <= self._n_equal and self._before[1].startswith(self._text)

    def _give(self) -> list[OutputDelta]:
        held, self._held = self._held, []
        self._n_given += sum(isinstance(delta, ToolCallStarted) for delta in held)
        return [replace(delta, index=self._n_given - 1) for delta in held]


def with_ids(
    deltas: Sequence[OutputDelta], format_name: str, draw: Callable[[str], str]
) -> list[OutputDelta]:
    """Give an id to each call that has none.

    `draw` returns one of the characters that it gets. Mistral's templates want ids of 9 letters
    and digits; those of Kimi write the tool's name and its number.
    """
    return [
        replace(delta, call_id=_new_id(delta, format_name, draw))
        if isinstance(delta, ToolCallStarted) and not delta.call_id
        else delta
        for delta in deltas
    ]


def _new_id(started: ToolCallStarted, format_name: str, draw: Callable[[str], str]) -> str:
    if format_name == "kimi-k2":
        return f"functions.{started.name}:{started.index}"
    length = _ID_LENGTHS.get(format_name)
    drawn = "".join(draw(_LETTERS) for _ in range(length or 24))
    return drawn if length else f"call_{drawn}"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    """How a model writes reasoning and tool calls.

    `signs` are texts that a chat template of this format, or else the tokenizer's added tokens,
    have all of.
    """

    name: str
    signs: tuple[str, ...]
    reader: type[Reader]
    has_tools: bool = True

    def parser(
        self,
        *,
        tokens: Mapping[int, TokenText],
        tools: Sequence[Mapping[str, Any]] = (),
        choice: ToolChoice | None = None,
        prompt_tail: str = "",
        hold: int | None = HOLD,
    ) -> OutputParser:
        """Make a parser for one output.

        `tokens` are the tokenizer's added tokens by their ids, `tools` those of the request in
        OpenAI's form, `choice` how they may be used. `prompt_tail` is the end of the prompt, as
        events before the first token tell it: reasoning may begin there. A call of at most `hold`
        characters comes whole, so that it is none if it is cut off; a longer one as it is written.
        None holds all back, for an answer that is not streamed.
        """
        choice = choice or ToolChoice()
        offered = choice.offered(read_tools(tools)) if self.has_tools else {}
        return self.reader(
            ReaderSettings(
                tokens=tokens,
                tools=offered,
                prompt_tail=prompt_tail,
                hold=hold,
                max_calls=choice.max_calls,
            )
        )


PLAIN: Final = ChatFormat(name="plain", signs=(), reader=MarkedReader, has_tools=False)
"""Content, and reasoning between <think> and </think>."""

FORMATS: Final = (
    ChatFormat(name="harmony", signs=("<|channel|>", "<|message|>"), reader=HarmonyReader),
    ChatFormat(name="gemma", signs=("<|tool_call>", "<tool_call|>"), reader=GemmaReader),
    ChatFormat(name="kimi-k2", signs=("<|tool_calls_section_begin|>",), reader=KimiReader),
    ChatFormat(
        name="kimi-k3", signs=("<|open|>", "<|close|>", "<|sep|>"), reader=KimiElementsReader
    ),
    ChatFormat(name="deepseek-dsml", signs=("｜DSML｜",), reader=DsmlReader),
    ChatFormat(name="deepseek", signs=("<｜tool▁calls▁begin｜>",), reader=DeepSeekReader),
    ChatFormat(name="hy", signs=("<tool_calls", "<arg_key"), reader=hunyuan_reader("")),
    ChatFormat(name="glm", signs=("<arg_key>", "<tool_call>"), reader=GlmReader),
    ChatFormat(name="minimax", signs=("<minimax:tool_call>",), reader=MinimaxReader),
    ChatFormat(name="seed", signs=("<seed:tool_call>",), reader=SeedReader),
    ChatFormat(name="qwen-xml", signs=("<function=", "<parameter="), reader=QwenXmlReader),
    ChatFormat(name="mistral", signs=("[TOOL_CALLS]",), reader=MistralReader),
    ChatFormat(name="lfm2", signs=("<|tool_call_start|>",), reader=Lfm2Reader),
    ChatFormat(name="olmo", signs=("<function_calls>",), reader=OlmoReader),
    ChatFormat(name="command", signs=("<|START_ACTION|>",), reader=CommandReader),
    ChatFormat(name="apertus", signs=("<|tools_prefix|>",), reader=ApertusReader),
    ChatFormat(name="hunyuan", signs=("<tool_calls>", "<answer>"), reader=HunyuanReader),
    ChatFormat(name="hermes", signs=("<tool_call>",), reader=HermesReader),
    ChatFormat(name="list", signs=("<|tool_call|>",), reader=ListReader),
    ChatFormat(name="llama", signs=("<|python_tag|>",), reader=LlamaReader),
    ChatFormat(name="llama", signs=("<|python_start|>",), reader=LlamaReader),
    ChatFormat(name="llama", signs=("<|eot_id|>", '"parameters"'), reader=LlamaReader),
    ChatFormat(name="glm-4", signs=("[gMASK]", "<|observation|>"), reader=Glm4Reader),
)
"""The first that fits is taken: a more telling sign stands before a common one."""


def choose_format(template: str, tokens: Mapping[int, TokenText]) -> ChatFormat:
    """Return the format of a model with this chat template and these added tokens.

    The template decides. Where it names no format the tokens do, but only if there is no template
    or it knows tools; else the model writes none.
    """
    written = [token.text for token in tokens.values()]
    texts = [template, " ".join(written)] if not template or "tools" in template else [template]
    for text in texts:
        for found in FORMATS:
            if all(sign in text for sign in found.signs):
                suffix = suffix_of(written) if found.name == "hy" else ""
                return replace(found, reader=hunyuan_reader(suffix)) if suffix else found
    return PLAIN
