"""Renders one chat template in a process of its own: a program for chat_template.py to run.

Reads a JSON object from standard input and writes one to standard output. Knows jinja2 and nothing
of shardnet. The template is a stranger's: it runs in jinja2's sandbox, and this process has bounds
of memory and processor time, so that no expression can take more than its deadline.
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
    """The template itself refuses the messages."""


class Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the model says, for training: here its body stands as it is."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Give the body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def main() -> None:
    """Render what standard input asks for."""
    asked = json.load(sys.stdin)
    limit(asked["memory_bytes"], asked["seconds"])
    answer: dict[str, Any]
    try:
        answer = {"text": render(asked["template"], asked["variables"], asked["most_bytes"])}
    except RefusedByTemplateError as error:
        answer = {"refused": str(error)}
    except jinja2.TemplateSyntaxError as error:
        answer = {"failed": error.message or "syntax error", "line": error.lineno}
    except MemoryError:
        answer = {"failed": f"it needs more than {asked['memory_bytes'] >> 20} MiB"}
    except RecursionError:
        answer = {"failed": "it calls itself without end"}
    except Exception as error:  # whatever a stranger's expression raises
        answer = {"failed": f"{type(error).__name__}: {error}"[:500], "line": line_of(error)}
    json.dump(answer, sys.stdout)


def limit(memory_bytes: int, seconds: int) -> None:
    """Bound this process where the system can: its memory, and its processor time from now on.

    The system ends it with SIGXCPU then, and with SIGKILL a second later. It leaves no core.
    """
    try:
        import resource
    except ImportError:  # Windows: only the deadline of the parent bounds it
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
    """Run the template; raises ValueError when its text grows beyond `most_bytes`."""
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
    """Write JSON as templates expect it: jinja2's own filter would escape for HTML."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **rest)


def refuse(why: object) -> None:
    """Let the template say what it does not take."""
    raise RefusedByTemplateError(str(why))


def line_of(error: BaseException) -> int | None:
    """Return the template's line that raised, None where it is not known."""
    trace, line = error.__traceback__, None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


if __name__ == "__main__":
    main()
