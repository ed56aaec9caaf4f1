"""The bodies of requests and of answers in Ollama's form, and how it writes what is wrong."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from shardnet.api.chat.run import Ended
from shardnet.api.events import LikelyToken, TokenLogprob
from shardnet.api.server.endpoint import Dialect
from shardnet.api.server.errors import Fault
from shardnet.sampling_params import MAX_LOGPROBS

MAX_MESSAGES: Final = 1 << 14
MAX_TOOLS: Final = 1024
MAX_STOPS: Final = 64

StopText = Annotated[str, Meta(min_length=1, max_length=4096)]
ModelName = Annotated[str, Meta(max_length=4096)]
Budget = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Exact = Annotated[float, Meta(ge=-(2**53), le=2**53)]
"""What a float64 holds exactly of whole numbers."""


class OllamaOptions(msgspec.Struct, kw_only=True):
    """How tokens are drawn, and when the text ends. Below 1, `num_predict` sets no limit.

    Whole numbers may be written as 5.0: Home Assistant does.
    """

    num_predict: Annotated[float, Meta(ge=-2, le=2**32 - 1)] | None = None
    num_ctx: float | None = None
    temperature: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    top_k: Annotated[float, Meta(ge=-1, le=2**32 - 1)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | Exact | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | None = None
    repeat_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None


class OllamaRequest(msgspec.Struct, kw_only=True):
    """What both kinds of generation take. `format` is "json" or a JSON schema."""

    model: ModelName | None = None
    stream: bool | None = None
    options: OllamaOptions | None = None
    format: str | dict[str, Any] | None = None
    think: bool | Budget | Annotated[str, Meta(max_length=64)] | None = None
    keep_alive: float | str | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None


class OllamaCalledFunction(msgspec.Struct, kw_only=True):
    """A called function; `arguments` is an object."""

    name: str
    arguments: dict[str, Any] | None = None


class OllamaToolCall(msgspec.Struct, kw_only=True):
    """A call that the assistant made. Older programs send no ids back."""

    function: OllamaCalledFunction
    id: str | None = None


class OllamaMessage(msgspec.Struct, kw_only=True):
    """One message of the conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: Annotated[list[OllamaToolCall], Meta(max_length=MAX_TOOLS)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaFunction(msgspec.Struct, kw_only=True):
    """A function that may be called; `parameters` is a JSON schema."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class OllamaTool(msgspec.Struct, kw_only=True):
    """A tool. Those of other types than function are passed over."""

    type: str | None = None
    function: OllamaFunction | None = None


class OllamaChat(OllamaRequest, kw_only=True):
    """The body of a chat; without messages the model is only loaded."""

    messages: Annotated[list[OllamaMessage], Meta(max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[OllamaTool], Meta(max_length=MAX_TOOLS)] | None = None


class OllamaGenerate(OllamaRequest, kw_only=True):
    """The body of a generation; without a prompt the model is only loaded.

    A `raw` prompt is continued as it is, another one answered by the model's chat template.
    """

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    template: str | None = None
    suffix: str | None = None
    context: list[Any] | None = None
    images: list[Any] | None = None


class OllamaShow(msgspec.Struct, kw_only=True):
    """Which model to describe; `name` is what `model` was called before."""

    model: ModelName | None = None
    name: ModelName | None = None


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


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """Writes the lines of one request, as those of a chat or of a generation.

    `began_s` is when that came, by the monotonic clock.
    """

    model: str
    began_s: float
    is_chat: bool

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
            "model": self.model,
            "created_at": now(),
            "done": bool(done_reason),
            "done_reason": done_reason or UNSET,
            "logprobs": [_logprob(one) for one in logprobs] or UNSET,
        }
        if not self.is_chat:
            return OllamaGenerated(response=content, thinking=thinking or UNSET, **common)
        message = OllamaAnswerMessage(
            content=content, thinking=thinking or UNSET, tool_calls=list(calls) or UNSET
        )
        return OllamaChatAnswer(message=message, **common)

    def last(self, end: Ended, now_s: float, content: str = "", **more: Any) -> OllamaLine:
        """Write the last line, with what the request took: first it waited for its model."""
        reason = "length" if end.finish_reason == "length" else "stop"
        line, took_s = self.write(content, done_reason=reason, **more), now_s - self.began_s
        timing, usage = end.result.timing, end.result.usage
        ran_s = timing.total_s - timing.load_s
        line.total_duration = int(took_s * _SECOND)
        line.load_duration = int(max(0.0, took_s - ran_s) * _SECOND)
        line.prompt_eval_count = usage.n_prompt
        line.prompt_eval_duration = int(timing.ttft_s * _SECOND)
        line.eval_count = usage.n_generated
        line.eval_duration = int(max(0.0, ran_s - timing.ttft_s) * _SECOND)
        return line


def now(ahead_s: float = 0.0) -> str:
    """Return the time, or a later one, as Ollama writes it."""
    at = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=ahead_s)
    return at.isoformat().replace("+00:00", "Z")


def _logprob(chosen: TokenLogprob) -> OllamaTokenLogprob:
    own = OllamaTokenLogprob(token=chosen.token, logprob=max(chosen.logprob, _LEAST))
    if chosen.top:
        own.top_logprobs = [_likely(one) for one in chosen.top]
    return own


def _likely(one: LikelyToken) -> OllamaTokenLogprob:
    return OllamaTokenLogprob(token=one.token, logprob=max(one.logprob, _LEAST))
