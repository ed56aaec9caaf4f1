"""Renders one chat template, in the process that does nothing else (template_program.py).

Knows jinja2. The template is untrusted: it runs in jinja2's sandbox, and its process has limits of
memory and processor time, so that no expression can exceed them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from shardnet.errors import CheckpointError, UsageError
from shardnet.tokenizers.chat.chat_template import AGAIN, ChatTemplate, TemplateMessage

MAX_TEXT_BYTES = 8 * 2**20
"""Limit of a rendered prompt: more than any context holds."""


class RefusedByTemplateError(Exception):
    """The template refuses the messages."""


class Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the model's output for training: here its body is left unchanged."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Return the body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def render_template(
    template: ChatTemplate, messages: Sequence[TemplateMessage], memory_bytes: int
) -> str:
    """Render a conversation to a prompt, up to the start of the model's reply.

    `memory_bytes` is this process' limit, for the error. Raises UsageError for messages that the
    template refuses, with its own text, CheckpointError for a template that is damaged, does
    something forbidden, or needs too much memory.
    """
    variables = {
        **template.tokens,
        "messages": [dict(message) for message in messages],
        "tools": None,
        "documents": None,
        "add_generation_prompt": True,
    }
    line: int | None = None
    try:
        return render(template.source, variables, MAX_TEXT_BYTES)
    except RefusedByTemplateError as error:
        raise UsageError(f"{template.where} refuses these messages: {error}") from None
    except jinja2.TemplateSyntaxError as error:
        failed, line = error.message or "syntax error", error.lineno
    except MemoryError:
        failed = f"it needs more than {memory_bytes >> 20} MiB"
    except RecursionError:
        failed = "it calls itself without end"
    except Exception as error:  # an untrusted expression may raise anything
        failed, line = f"{type(error).__name__}: {error}"[:500], line_of(error)
    where = f"{template.where} line {line}" if line else template.where
    raise CheckpointError(f"{where}: {failed}", remedy=AGAIN)


def render(template: str, variables: dict[str, Any], most_bytes: int) -> str:
    """Render the template. Raises ValueError if the text exceeds `most_bytes`."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda style: datetime.now().strftime(style)
    parts: list[str] = []
    n_bytes = 0
    for part in environment.from_string(template).generate(**variables):
        n_bytes += len(part.encode())
        if n_bytes > most_bytes:
            raise ValueError(f"its text grows beyond {most_bytes} bytes")
        parts.append(part)
    return "".join(parts)


def to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **rest: Any) -> str:
    """Serialize to JSON as templates expect: jinja2's own filter would escape for HTML."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **rest)


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
