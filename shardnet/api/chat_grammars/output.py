"""What a whole output must be: reasoning, then calls, or an answer in their place.

Pure. Knows where reasoning may stand. Must not know how a request is run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from shardnet.api.chat_formats.choice import ChatFormat, ToolChoice, choose_format
from shardnet.api.chat_formats.json_text import read_tools
from shardnet.api.chat_formats.marked import MarkedReader
from shardnet.api.chat_formats.marks import TokenText
from shardnet.api.chat_formats.reader import SPACE, Reader
from shardnet.api.chat_grammars import calls, elements
from shardnet.api.chat_grammars.calls import CallForm, Lark
from shardnet.constraints import Constraint
from shardnet.errors import UsageError

_WRITERS: Final = {**calls.WRITERS, **elements.WRITERS}
_LINES: Final = '"\\n"? "\\n"?'
"""What models write behind reasoning."""


def output_constraint(
    *,
    template: str,
    tokens: Mapping[int, TokenText],
    tools: Sequence[Mapping[str, Any]],
    choice: ToolChoice,
    answer: Constraint | None,
    prompt_tail: str,
) -> Constraint | None:
    """Return what an output must match, None for anything.

    `template` is the model's chat template, `tokens` its added tokens by their ids, `tools` those
    of the request in OpenAI's form, of which `choice` says whether one must be called; `answer`, a
    JSON constraint, is what content must be. `prompt_tail` is the end of the prompt: reasoning may
    begin there. Raises UsageError for a model whose calls cannot be written.
    """
    offered = choice.offered(read_tools(tools))
    must_call = choice.must_call
    if not must_call and answer is None:
        return None
    form = choose_format(template, tokens)
    lark = Lark(tokens)
    if form.name == "harmony":
        thought, must_end = _analysis(lark), True
    else:
        thought, must_end = _thought(lark, form.reader, template, prompt_tail)
    if form.name not in _WRITERS:
        if must_call or (offered and form.has_tools):
            raise UsageError(
                f"tool_choice cannot ask for calls in this model's format ({form.name})"
                if form.has_tools
                else "tool_choice needs a model whose chat template knows tools",
                remedy="give auto or none, and no format of the answer beside tools",
            )
        offered = {}
    if not offered and not must_end:
        return answer
    has_answer = answer is not None and not must_call
    written = []
    if offered:
        one = CallForm(
            lark=lark,
            tools=[*offered.values()],
            template=template,
            is_parallel=choice.max_calls is None,
            has_answer=has_answer,
        )
        written.append(_WRITERS[form.name](one))
    if answer is not None and has_answer:
        head = f'{lark.mark("<|channel|>")} "final" {lark.mark("<|message|>")} '
        written.append((head if form.name == "harmony" else "") + lark.json(_schema(answer)))
    return Constraint(kind="lark", text=lark.text(f"{thought} {lark.any_of(written)}"))


def may_begin_thought(form: ChatFormat, template: str) -> bool:
    """Say whether prompts by this template may end within reasoning, or behind it."""
    return any(first.partition(":")[0] in template for first, _ in _thoughts(form.reader))


def _thoughts(reader: type[Reader]) -> tuple[tuple[str, str], ...]:
    """Return the marks around reasoning."""
    return reader.THINK if issubclass(reader, MarkedReader) else ()


def _analysis(lark: Lark) -> str:
    """Write a message of reasoning, which may be left out."""
    head = f'{lark.mark("<|channel|>")} "analysis" {lark.mark("<|message|>")}'
    body = f'{lark.text_to("<|end|>")} {lark.mark("<|start|>")} "assistant"'
    return f"({head} {body})?"


def _thought(lark: Lark, reader: type[Reader], template: str, prompt_tail: str) -> tuple[str, bool]:
    """Write reasoning, if the model has marks for it, and say whether the prompt has begun it.

    It may be left out unless the prompt has, and does not stand where that has ended it.
    """
    marks = _thoughts(reader)
    tail = prompt_tail.rstrip(SPACE)
    for first, last in marks:
        if tail.endswith(first):
            return f"{lark.text_to(last)} {_LINES}", True
        if tail.endswith(last):
            return "", False
    known = [(first, last) for first, last in marks if lark.has(first) or first in template]
    if not known:
        return "", False
    first, last = known[0]
    return f"({lark.mark(first)} {lark.text_to(last)} {_LINES})?", False


def _schema(answer: Constraint) -> Mapping[str, Any]:
    """Return the schema of a JSON constraint."""
    schema = {"type": "object"} if answer.kind == "json" else json.loads(answer.text)
    return schema if isinstance(schema, dict) else {}
