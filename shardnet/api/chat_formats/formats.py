"""Which format a model writes: chosen by its chat template and its added tokens.

Knows every format's name, marks and call ids. Must not know how they are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from shardnet.api.chat_formats.choice import ToolChoice
from shardnet.api.chat_formats.deepseek import DeepSeekReader, DsmlReader
from shardnet.api.chat_formats.deltas import OutputParser
from shardnet.api.chat_formats.gemma import GemmaReader
from shardnet.api.chat_formats.glm import Glm4Reader, GlmReader
from shardnet.api.chat_formats.harmony import HarmonyReader
from shardnet.api.chat_formats.json_text import read_tools
from shardnet.api.chat_formats.kimi import KimiElementsReader, KimiReader
from shardnet.api.chat_formats.llama import Lfm2Reader, LlamaReader, OlmoReader
from shardnet.api.chat_formats.marked import MarkedReader
from shardnet.api.chat_formats.marks import TokenText
from shardnet.api.chat_formats.mistral import (
    ApertusReader,
    CommandReader,
    HunyuanReader,
    ListReader,
    MistralReader,
)
from shardnet.api.chat_formats.qwen_xml import MinimaxReader, QwenXmlReader, SeedReader
from shardnet.api.chat_formats.reader import HOLD, Reader, ReaderSettings, Steps


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
    for found in FORMATS:
        if all(sign in template for sign in found.signs):
            return found
    if not template or "tools" in template:
        written = {token.text for token in tokens.values()}
        for found in FORMATS:
            if all(sign in written for sign in found.signs):
                return found
    return PLAIN
