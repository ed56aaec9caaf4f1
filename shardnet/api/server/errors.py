"""Errors of HTTP requests: their status, and their message for the client.

Knows which status each error of shardnet has. Each dialect writes it in its own form.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from shardnet.errors import (
    BusyError,
    CancelledRequestError,
    CapacityError,
    CheckpointError,
    ContextExceededError,
    DeadlineError,
    DiskSilentError,
    LinkError,
    PeerFailedError,
    PlanError,
    QueueFullError,
    ShardnetError,
    UnsupportedModelError,
    UsageError,
    first_error,
    shortage,
)

RETRY_S: Final = 2
"""Seconds after which a client should ask again where it is not known when it would succeed."""

CONTEXT_EXCEEDED: Final = "context_length_exceeded"
"""The code by which programs know that they have to shorten a conversation."""

_CONTEXT_EXCEEDED_KIND: Final = "exceed_context_size_error"
"""llama-server's type of the same error, by which others know."""

_KINDS: Final = MappingProxyType(
    {
        401: "authentication_error",
        403: "permission_error",
        429: "rate_limit_error",
        500: "server_error",
        503: "service_unavailable_error",
        504: "timeout_error",
    }
)
"""OpenAI's types of errors, by status; of all others invalid_request_error."""

_PARAMETERS: Final = frozenset(
    (
        "temperature",
        "top-k",
        "top-p",
        "min-p",
        "min-tokens",
        "max-tokens",
        "seed",
        "logprobs",
        "repetition-penalty",
        "presence-penalty",
        "frequency-penalty",
        "logit-bias",
        "dimensions",
        "suffix",
        "input_suffix",
        "tool_choice",
        "speculate",
    )
)
"""What messages about a field of the body begin with, perhaps as a flag; there it is written with
underscores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """An error as a client sees it.

    `parameter` is the wrong field of the body, `code` a word for programs. `retry_s` is what
    Retry-After says, None for nothing. `n_prompt` and `n_context` are the two numbers of
    a prompt that is too long, in tokens.
    """

    status: int
    message: str
    parameter: str | None = None
    code: str | None = None
    retry_s: int | None = None
    n_prompt: int | None = None
    n_context: int | None = None
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def kind(self) -> str:
        """OpenAI's type of the error."""
        if self.code == CONTEXT_EXCEEDED:
            return _CONTEXT_EXCEEDED_KIND
        return _KINDS.get(self.status, "invalid_request_error")


class HttpError(Exception):
    """Ends an HTTP request with a fault."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


def refused(
    message: str,
    parameter: str | None = None,
    *,
    status: int = 400,
    code: str | None = None,
    headers: tuple[tuple[str, str], ...] = (),
) -> HttpError:
    """Make the error of a request that can never succeed; `parameter` is the wrong field."""
    fault = Fault(status=status, message=message, parameter=parameter, code=code, headers=headers)
    return HttpError(fault)


def needed(value: str | None, field: str) -> str:
    """Return what a field has. Raises HttpError 400 where it is missing or empty."""
    if not value:
        raise refused(f"{field} is missing", field)
    return value


def too_many(message: str, retry_s: int) -> HttpError:
    """Make the error 429 of a request that came while too many others run."""
    return HttpError(Fault(status=429, message=message, retry_s=retry_s, code="busy"))


def fault_of(error: Exception) -> Fault:
    """Return the HTTP error of an exception, of a group its first one; 500 for a bug of ours."""
    if isinstance(error, ExceptionGroup):
        return fault_of(first_error(error))
    if isinstance(error, HttpError):
        return error.fault
    if isinstance(error, ContextExceededError):
        return _context_exceeded(error)
    error = shortage(error, "this machine") or error
    text = str(error)
    match error:
        case QueueFullError():
            return Fault(status=429, message=text, retry_s=RETRY_S, code="busy")
        case UsageError() | CapacityError() | UnsupportedModelError():
            return _wrong_request(error)
        case BusyError(retry_s=retry_s) if retry_s:
            return Fault(status=503, message=text, retry_s=retry_s, code="model_not_ready")
        case BusyError() | LinkError() | PeerFailedError() | PlanError() | DiskSilentError():
            return Fault(status=503, message=text, retry_s=RETRY_S)
        case CheckpointError():
            return Fault(status=404, message=_told(error), code="model_not_found")
        case CancelledRequestError():  # a status at which programs do not ask again
            return Fault(status=400, message=text, code="cancelled")
        case DeadlineError():
            return Fault(status=504, message=_told(error))
        case ShardnetError():
            return Fault(status=500, message=text)
        case _:
            is_check = isinstance(error, AssertionError)
            what = "a check of its own failed" if is_check else type(error).__name__
            return Fault(status=500, message=f"internal error: {what}, a bug of shardnet")


def _wrong_request(error: ShardnetError) -> Fault:
    """Say what of a request is wrong, and its field."""
    message = _unprefixed(error)
    name, _, rest = message.removeprefix("--").partition(" ")
    parameter = name.replace("-", "_") if name in _PARAMETERS else None
    if parameter is not None:
        message = f"{parameter} {rest}"
    return Fault(status=400, message=_told(error, message), parameter=parameter)


def _unprefixed(error: ShardnetError) -> str:
    """Return an error's message without the node that said so."""
    return error.message.removeprefix(f"{error.peer}: ")


def _told(error: ShardnetError, message: str = "") -> str:
    """Add what to do to an error's message, or another, unless that is for the node's owner."""
    message = message or _unprefixed(error)
    is_for_owner = "--" in error.remedy or "`" in error.remedy
    return f"{message}; {error.remedy}" if error.remedy and not is_for_owner else message


def _context_exceeded(error: ContextExceededError) -> Fault:
    message = (
        f"the request ({error.n_prompt} tokens) exceeds the available context size "
        f"({error.n_context} tokens): maximum context length is {error.n_context} tokens, "
        "shorten the conversation"
    )
    return Fault(
        status=400,
        message=message,
        code=CONTEXT_EXCEEDED,
        n_prompt=error.n_prompt,
        n_context=error.n_context,
    )
