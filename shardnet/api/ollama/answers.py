"""The answers of Ollama's endpoints, which are also the lines of streams."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from shardnet.api.chat.run import Ended
from shardnet.api.events import LikelyToken, TokenLogprob

_SECOND: Final = 1_000_000_000
_LEAST: Final = -3.4028234663852886e38
"""The logprob of what cannot be drawn: JSON has no infinity."""


class OllamaTokenLogprob(msgspec.Struct, kw_only=True):
    """A token, its logprob, and the likeliest tokens in its place."""

    token: str
    logprob: float
    top_logprobs: list[OllamaTokenLogprob] | UnsetType = UNSET


class OllamaLine(msgspec.Struct, kw_only=True):
    """What every answer and every line says. The last line has the counts; times are in ns."""

    model: str
    created_at: str
    done: bool
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[OllamaTokenLogprob] | UnsetType = UNSET


class OllamaCallMade(msgspec.Struct, kw_only=True):
    """The function of a call, with all of its arguments."""

    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCall(msgspec.Struct, kw_only=True):
    """A call that the model makes."""

    id: str
    function: OllamaCallMade


class OllamaAnswerMessage(msgspec.Struct, kw_only=True):
    """The message of the assistant, or more of it."""

    role: str = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET


class OllamaChatAnswer(OllamaLine, kw_only=True):
    """The answer of a chat, or a line of it."""

    message: OllamaAnswerMessage


class OllamaGenerated(OllamaLine, kw_only=True):
    """The answer of a generation, or a line of it."""

    response: str
    thinking: str | UnsetType = UNSET


class AnswerForm:
    """Writes the lines of one request, as those of a chat or of a generation."""

    def __init__(self, model: str, *, is_chat: bool) -> None:
        self._model = model
        self._is_chat = is_chat

    def write(
        self,
        content: str = "",
        *,
        thinking: str = "",
        calls: Sequence[OllamaCall] = (),
        logprobs: Sequence[TokenLogprob] = (),
        done_reason: str = "",
    ) -> OllamaLine:
        """Write a line; it is the last one if it has a `done_reason`."""
        common: dict[str, Any] = {
            "model": self._model,
            "created_at": now(),
            "done": bool(done_reason),
            "done_reason": done_reason or UNSET,
            "logprobs": [_logprob(one) for one in logprobs] or UNSET,
        }
        if not self._is_chat:
            return OllamaGenerated(response=content, thinking=thinking or UNSET, **common)
        message = OllamaAnswerMessage(
            content=content, thinking=thinking or UNSET, tool_calls=list(calls) or UNSET
        )
        return OllamaChatAnswer(message=message, **common)


def now(ahead_s: float = 0.0) -> str:
    """Return the time, or a later one, as Ollama writes it."""
    at = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=ahead_s)
    return at.isoformat().replace("+00:00", "Z")


def count(line: OllamaLine, end: Ended) -> None:
    """Add to the last line what the request took."""
    timing, usage = end.result.timing, end.result.usage
    decoding_s = max(0.0, timing.total_s - timing.load_s - timing.ttft_s)
    line.total_duration = int(timing.total_s * _SECOND)
    line.load_duration = int(timing.load_s * _SECOND)
    line.prompt_eval_count = usage.n_prompt
    line.prompt_eval_duration = int(timing.ttft_s * _SECOND)
    line.eval_count = usage.n_generated
    line.eval_duration = int(decoding_s * _SECOND)


def _logprob(chosen: TokenLogprob) -> OllamaTokenLogprob:
    own = OllamaTokenLogprob(token=chosen.token, logprob=max(chosen.logprob, _LEAST))
    if chosen.top:
        own.top_logprobs = [_likely(one) for one in chosen.top]
    return own


def _likely(one: LikelyToken) -> OllamaTokenLogprob:
    return OllamaTokenLogprob(token=one.token, logprob=max(one.logprob, _LEAST))
