"""Renders one chat template in a separate process: the program that chat_template.py runs.

Reads a JSON object from standard input and writes one to standard output. Knows jinja2 and nothing
of shardnet. The template is untrusted: it runs in jinja2's sandbox, and this process has limits of
memory and CPU time, so that no expression can exceed its deadline.
"""

from __future__ import annotations

import json
import math
import sys
import time
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox


class RefusedByTemplateError(Exception):
    """The template refuses the messages."""


class Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the model's output for training: here its body is left unchanged."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Return the body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def main() -> None:
    """Render the request on standard input."""
    request = json.load(sys.stdin)
    limit(request["memory_bytes"], request["seconds"])
    reply: dict[str, Any]
    try:
        reply = {"text": render(request["template"], request["variables"], request["most_bytes"])}
    except RefusedByTemplateError as error:
        reply = {"refused": str(error)}
    except jinja2.TemplateSyntaxError as error:
        reply = {"failed": error.message or "syntax error", "line": error.lineno}
    except MemoryError:
        reply = {"failed": f"it needs more than {request['memory_bytes'] >> 20} MiB"}
    except RecursionError:
        reply = {"failed": "it calls itself without end"}
    except Exception as error:  # an untrusted expression may raise anything
        reply = {"failed": f"{type(error).__name__}: {error}"[:500], "line": line_of(error)}
    json.dump(reply, sys.stdout)


def limit(memory_bytes: int, seconds: int) -> None:
    """Limit this process' memory and its further CPU time, where the system supports it.

    The system ends it with SIGXCPU at the limit, and with SIGKILL a second later, without a core
    dump.
    """
    try:
        import resource
    except ImportError:  # Windows: only the parent's deadline applies
        return
    most_s = math.ceil(time.process_time() + seconds)
    for what, soft, hard in (
        (resource.RLIMIT_AS, memory_bytes, memory_bytes),
        (resource.RLIMIT_CPU, most_s, most_s + 1),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        try:
            resource.setrlimit(what, (soft, hard))
        except (ValueError, OSError):  # macOS refuses some
            continue


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


if __name__ == "__main__":
    main()
