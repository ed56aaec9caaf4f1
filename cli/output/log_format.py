"""How lines on standard error are written: for people, or as JSON for programs that collect logs.

Knows the fields of such a line. Must not know who writes it.
"""

from __future__ import annotations

import datetime
import os
from typing import Final

VARIABLE: Final = "SHARDNET_LOG_FORMAT"
FORMATS: Final = ("text", "json")

_LEVELS: Final = ("warning", "error")


def keep_log_format(wanted: str) -> None:
    """Have this process and the nodes that it starts write their lines so; "" changes nothing."""
    if wanted:
        os.environ[VARIABLE] = wanted
    if wanted == "json":
        _take_logging()


def is_json() -> bool:
    """Whether lines are written as JSON."""
    return os.environ.get(VARIABLE) == "json"


def as_json(line: str, level: str = "") -> str:
    """Write a line as one JSON object: time, level, message, and the facts that it carries.

    A level that is not given is what the line begins with, `warning: ` or `error: `, else info.
    """
    import json  # --help has no use for it

    from shardnet.api.server.settings import LogLine

    facts = line.facts if isinstance(line, LogLine) else {}
    begins_with, _, rest = line.partition(": ")
    if not level and begins_with in _LEVELS:
        level, line = begins_with, rest
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    told = {"time": now, "level": level or "info", "message": str(line).strip(), "pid": os.getpid()}
    return json.dumps({**told, **{n: f for n, f in facts.items() if n not in told}}, default=str)


def _take_logging() -> None:
    """Write what libraries and our own modules log in the same way."""
    import logging

    from .exit_codes import say_as

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            say_as(record.getMessage(), record.levelname.lower())

    logging.basicConfig(handlers=[Handler()], level=logging.WARNING, force=True)
