"""Renders one chat template, in the process that does nothing else (template_program.py).

Knows jinja2. The template is untrusted: it runs in jinja2's sandbox, and its process has limits of
memory and processor time, so that no expression can exceed them.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache, partial
from typing import Any, Literal

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from shardnet.errors import CheckpointError, UsageError
from shardnet.tokenizers.chat.chat_template import (
    AGAIN,
    CONTINUES,
    NO_OPTIONS,
    PLAIN,
    ChatTemplate,
    OptionValue,
    TemplateMessage,
    TemplateOptions,
)
from shardnet.tokenizers.chat.template_forms import (
    EFFORT,
    Shown,
    efforts_of,
    forms_of,
    nested_call,
    read_nested,
)

MAX_TEXT_BYTES = 8 * 2**20
"""Limit of a rendered prompt: more than any context holds."""
_END = "\ue000last message ends\ue000 "
"""Marks the end of a message that goes on; the space shows whether the template cuts space."""
_PROBE = "\ue000a text\ue000"
_CALLED = "\ue000name"
"""Texts that no template has, the second as the name of a tool."""
OWN_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_SEARCH_S = 1
"""Processor time in which the message that a template fails at is looked for."""


class RefusedByTemplateError(Exception):
    """The template refuses the messages."""


class Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the model's output for training: here its body is left unchanged."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Return the body, whose variables are its own, as transformers has it."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [jinja2.nodes.Scope(body, lineno=line)]


class DictMaker:
    """`dict` in a template: it makes objects, and is no type to look into."""

    def __call__(self, *args: Any, **named: Any) -> dict[Any, Any]:
        """Make an object."""
        return dict(*args, **named)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """Make an object of its keys."""
        return dict.fromkeys(*args)


class Namespace(jinja2.utils.Namespace):
    """`namespace` in a template: its names do not begin with an underscore, as Python's own do."""

    def __init__(self, /, *args: Any, **named: Any) -> None:
        for name in dict(*args, **named):
            check_name(name)
        super().__init__(*args, **named)

    def __setitem__(self, name: str, value: Any) -> None:
        check_name(name)
        super().__setitem__(name, value)


def check_name(name: object) -> None:
    """Raise jinja2's SecurityError for a name that begins with an underscore."""
    if str(name).startswith("_"):
        raise jinja2.exceptions.SecurityError(f"{name!r} is no name for a namespace")


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a template gave no text, and at which of its lines, None if unknown."""

    why: str
    line: int | None = None
    kind: Literal["refused", "damaged", "failed"] = "failed"


def render_template(
    template: ChatTemplate,
    messages: Sequence[TemplateMessage],
    memory_bytes: int,
    options: TemplateOptions = NO_OPTIONS,
) -> str:
    """Render a conversation to a prompt, up to the start of the model's reply.

    With the option CONTINUES it ends within the last message, which the model goes on with.
    `memory_bytes` is this process' limit, for the error. Raises UsageError for messages that the
    template refuses, with its own text, for tools and options that cannot be used, and for what
    makes a template fail that shows a plain conversation; CheckpointError for one that fails there
    too: it is damaged, does something forbidden, or needs too much memory.
    """
    for name in options.values:
        if not name.isidentifier() or name in OWN_NAMES or name in template.tokens:
            raise UsageError(
                f"{name!r} is not the name of an option of chat templates",
                remedy="give names such as enable_thinking",
            )
    continues = bool(options.values.get(CONTINUES))
    tools = read_tools(options.tools)
    source = (template.with_tools if tools else "") or template.source
    has_parts = shows_only_parts(source, tuple(template.tokens.items()))
    plain, shown = (
        [in_parts(said) if has_parts else dict(said) for said in each] for each in (PLAIN, messages)
    )
    if continues:
        if not shown:
            raise UsageError("there is no last message, which was to go on")
        shown[-1]["content"] = with_end(shown[-1].get("content"))
    variables = {
        **template.tokens,
        **with_known_effort(source, template.tokens, options.values, plain),
        "tools": tools,
        "documents": None,
        "add_generation_prompt": not continues,
    }
    attempt = partial(rendered, source, variables, memory_bytes)
    failures: list[tuple[Sequence[Shown], Failure]] = []
    may_join = not continues or shown[-1]["role"] != "system"  # the last one stays the last
    for form in forms_of(shown, tools or [], may_join=may_join):
        text = attempt(messages=form.messages)
        if isinstance(text, Failure):
            if form.is_usual():
                failures.append((form.messages, text))
        elif form.is_shown(text):
            return up_to_end(text, template) if continues else text
    given, failure = failures[0]
    where = f"{template.where} line {failure.line}" if failure.line else template.where
    if failure.kind == "refused":
        raise UsageError(f"{template.where} refuses these messages: {failure.why}")
    if failure.kind == "damaged" or not takes_plain(template, plain, memory_bytes):
        raise CheckpointError(f"{where}: {failure.why}", remedy=AGAIN)
    what = what_fails(lambda **other: attempt(**other) == failure, plain, given, tools or [])
    raise UsageError(
        f"{what} cannot be shown by the chat template ({where}: {failure.why})",
        remedy="correct it, or leave it out",
    )


def with_known_effort(
    source: str,
    tokens: Mapping[str, str],
    values: Mapping[str, OptionValue],
    plain: Sequence[Mapping[str, Any]],
) -> dict[str, OptionValue]:
    """Give the options of a template an effort that it takes with a plain conversation."""
    tries = [{**values, EFFORT: effort} for effort in efforts_of(source, values)]
    for tried in tries if len(tries) > 1 else ():
        if shown_text(source, {**tokens, **tried}, plain):
            return tried
    return tries[0] if tries[0][EFFORT] is not None or EFFORT in values else dict(values)


def rendered(
    source: str, variables: Mapping[str, Any], memory_bytes: int, **other: Any
) -> str | Failure:
    """Render a template with these and `other` variables, or say why that fails."""
    try:
        return render(source, {**variables, **other}, MAX_TEXT_BYTES)
    except RefusedByTemplateError as error:
        return Failure(str(error), kind="refused")
    except jinja2.TemplateSyntaxError as error:
        return Failure(error.message or "syntax error", error.lineno, kind="damaged")
    except MemoryError:
        return Failure(f"it needs more than {memory_bytes >> 20} MiB")
    except RecursionError:
        return Failure("it calls itself without end")
    except Exception as error:  # an untrusted expression may raise anything
        return Failure(f"{type(error).__name__}: {error}"[:500], line_of(error))


def takes_plain(
    template: ChatTemplate, plain: Sequence[Mapping[str, Any]], memory_bytes: int
) -> bool:
    """Say whether a template shows a plain conversation, or refuses it in words of its own."""
    variables = {**template.tokens, "tools": None, "documents": None, "add_generation_prompt": True}
    text = rendered(template.source, variables, memory_bytes, messages=plain)
    return isinstance(text, str) or text.kind == "refused"


def what_fails(
    fails: Callable[..., bool],
    plain: Sequence[Mapping[str, Any]],
    messages: Sequence[Shown],
    tools: Sequence[Mapping[str, Any]],
) -> str:
    """Name the part of a request with which a template `fails` as it does with the whole.

    It is looked for by halves, as each try takes as long as the whole may.
    """
    if not messages:
        return "a conversation without messages"
    until_s = time.process_time() + _SEARCH_S

    def is_in(**other: Any) -> bool:
        return time.process_time() < until_s and fails(**other)

    if is_in(messages=plain, tools=None):
        return "an option or the tools of this request"
    if is_in(messages=plain):
        tries = range(1, len(tools))
        number = bisect_left(tries, True, key=lambda n: is_in(messages=plain, tools=tools[:n]))
        what = f"tool {number + 1} of {len(tools)}"
    else:
        tries = range(1, len(messages))
        number = bisect_left(tries, True, key=lambda n: is_in(messages=messages[:n]))
        what = f"message {number + 1} of {len(messages)} ({messages[number]['role']})"
    return what if time.process_time() < until_s else "a part of this conversation"


@lru_cache(maxsize=8)
def shows_only_parts(source: str, tokens: tuple[tuple[str, str], ...]) -> bool:
    """Say whether a template shows a text where it is a part in a list, and no other: those of
    LLaVA, Idefics and SmolVLM loop over parts, and find none in a text.
    """
    message = {"role": "user", "content": _PROBE}
    as_text, as_part = (
        partial(shows_probe, source, dict(tokens), one) for one in (message, in_parts(message))
    )
    return not as_text() and as_part()


def shows_probe(source: str, tokens: Mapping[str, str], message: Mapping[str, Any]) -> bool:
    """Say whether a template shows a message's text."""
    return _PROBE in shown_text(source, tokens, [message])


def shown_text(
    source: str, tokens: Mapping[str, str], messages: Sequence[Mapping[str, Any]]
) -> str:
    """Render messages; "" for those that the template refuses, or fails at."""
    try:
        variables = {**tokens, "messages": messages, "add_generation_prompt": False}
        return render(source, variables, MAX_TEXT_BYTES)
    except Exception:  # an untrusted expression may raise anything
        return ""


def behind_answer(template: ChatTemplate) -> tuple[list[str], str]:
    """Return what the template writes behind an assistant's text: where that is the last message,
    and where the user answers; and what between reasoning, a text and a call of one turn.
    """
    asked: Shown = {"role": "user", "content": "a"}
    said: Shown = {"role": "assistant", "content": _PROBE}
    call = nested_call({"name": _CALLED, "id": "call00000"}, {})
    calling: Shown = {**said, "reasoning_content": _PROBE, "tool_calls": [call]}
    if shows_only_parts(template.source, tuple(template.tokens.items())):
        asked, said, calling = map(in_parts, (asked, said, calling))
    shown = partial(shown_text, tokens=template.tokens)
    talks = ([asked, said], [asked, said, asked])
    texts = [shown(template.source, messages=talk) for talk in talks]
    within = shown(template.with_tools or template.source, messages=[asked, calling])
    rest = within.partition(_PROBE)[2]
    return (
        [text.rpartition(_PROBE)[2] for text in texts if _PROBE in text],
        rest[: max(rest.rfind(_PROBE), rest.rfind(_CALLED), 0)],
    )


def in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Write a message's text as the one part of a list."""
    content = message.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return {**message, "content": parts}


def with_end(content: str | Sequence[Mapping[str, Any]] | None) -> str | list[Mapping[str, Any]]:
    """Put the mark behind a content, which is a text or parts."""
    if content is None or isinstance(content, str):
        return f"{content or ''}{_END}"
    before, last = content[:-1], content[-1]
    if last["type"] == "text":
        return [*before, {**last, "text": f"{last['text']}{_END}"}]
    return [*content, {"type": "text", "text": _END}]


def up_to_end(text: str, template: ChatTemplate) -> str:
    """Return a prompt up to the end of its last message, without space where the template cuts it.

    Raises UsageError where the template does not show that message.
    """
    shown, mark, rest = text.rpartition(_END.rstrip())
    if not mark:
        raise UsageError(f"{template.where} does not show the last message, which was to go on")
    return shown if rest.startswith(" ") else shown.rstrip()


def read_tools(text: str) -> list[dict[str, Any]] | None:
    """Read the tools of a request; None if there are none. Raises UsageError for anything else."""
    if not text:
        return None
    try:
        tools = read_nested(text)
    except ValueError as error:
        raise UsageError(f"the tools cannot be read: {error}") from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UsageError("the tools must be a list of objects")
    return tools or None


def render(template: str, variables: dict[str, Any], most_bytes: int) -> str:
    """Render the template. Raises ValueError if the text exceeds `most_bytes`."""
    parts: list[str] = []
    n_bytes = 0
    for part in compiled(template).generate(**variables):
        n_bytes += len(part.encode())
        if n_bytes > most_bytes:
            raise ValueError(f"its text grows beyond {most_bytes} bytes")
        parts.append(part)
    return "".join(parts)


@lru_cache(maxsize=8)
def compiled(template: str) -> jinja2.Template:
    """Compile a template for an environment with what transformers' has."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {
        "raise_exception": refuse,
        "strftime_now": lambda style: datetime.now().strftime(style),
        "dict": DictMaker(),
        "namespace": Namespace,
    }
    return environment.from_string(template)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Serialize to JSON as templates expect: jinja2's own filter would escape for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def refuse(why: object) -> None:
    """Raise the template's own error."""
    raise RefusedByTemplateError(str(why))


def line_of(error: BaseException) -> int | None:
    """Return the line of the template that raised, None if unknown."""
    trace, line = error.__traceback__, None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
