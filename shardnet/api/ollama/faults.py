"""How Ollama writes that something is wrong."""

from __future__ import annotations

import msgspec

from shardnet.api.server.endpoint import Dialect
from shardnet.api.server.errors import Fault


class OllamaError(msgspec.Struct, kw_only=True):
    """The answer of a request that failed, and the last line of a stream that did."""

    error: str


def error_answer(fault: Fault) -> OllamaError:
    """Write a fault as an answer."""
    return OllamaError(error=fault.message)


def error_line(fault: Fault) -> bytes:
    """Write a fault as the end of a stream."""
    return line(error_answer(fault))


def line(value: object) -> bytes:
    """Write one line of a stream."""
    return msgspec.json.encode(value) + b"\n"


OLLAMA = Dialect(
    name="ollama",
    fault=error_answer,
    fault_in_stream=error_line,
    fault_type=OllamaError,
    paths=("/api",),
)
