"""Log-probabilities in both of OpenAI's forms, and the tokens that an answer took.

In each the chosen token stands among the likeliest ones, with the identical number: programs that
score texts look for it there.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Generic, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from shardnet.api.events import GenerationResult, LikelyToken, TokenLogprob


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    """Tokens of the prompt whose keys and values were there already."""

    cached_tokens: int


class UsageBody(msgspec.Struct, kw_only=True):
    """Tokens of the prompts, each counted once, and of all samples."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


Choice = TypeVar("Choice")


Timings: TypeAlias = dict[str, float]


def timings_of(results: Sequence[GenerationResult]) -> Timings:
    """Sum up the tokens and milliseconds of a request, as llama-server tells them.

    The `prompt_n` tokens that were computed of a prompt, without `cache_n`, took `prompt_ms`, waits
    included. With several samples the times are means.
    """
    used, times = [one.usage for one in results], [one.timing for one in results]
    told: Timings = {"cache_n": sum(one.n_reused for one in used)}
    first_s = fmean(one.ttft_s for one in times)
    rest_s = fmean(max(0.0, one.total_s - one.load_s - one.ttft_s) for one in times)
    n_prompt = sum(one.n_prompt - one.n_reused for one in used)
    n_made = sum(one.n_generated for one in used)
    for name, n, took_s in (("prompt", n_prompt, first_s), ("predicted", n_made, rest_s)):
        told |= {f"{name}_n": n, f"{name}_ms": 1e3 * took_s}
        told[f"{name}_per_token_ms"] = 1e3 * took_s / max(1, n)
        told[f"{name}_per_second"] = n / took_s if took_s else 0.0
    if n_drafted := sum(one.n_drafted for one in times):
        told |= {"draft_n": n_drafted, "draft_n_accepted": sum(x.n_accepted for x in times)}
    return told


class Answer(msgspec.Struct, Generic[Choice], kw_only=True):
    """A whole answer, or an event of a stream: its samples, or more of them."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: UsageBody | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET
    system_fingerprint: str | None = None


def usage_of(results: Iterable[GenerationResult]) -> UsageBody:
    """Add up the results of a request."""
    n_prompt = n_cached = n_generated = 0
    for result in results:
        n_generated += result.usage.n_generated
        if result.sample == 0:
            n_prompt += result.usage.n_prompt
            n_cached += result.usage.n_reused
    return UsageBody(
        prompt_tokens=n_prompt,
        completion_tokens=n_generated,
        total_tokens=n_prompt + n_generated,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=n_cached),
    )


_INCOMPLETE = "\ufffd"
"""What stands for a part of a character."""


class TopLogprob(msgspec.Struct, kw_only=True):
    """One of the likeliest tokens; `bytes` are null where they are not known."""

    token: str
    logprob: float
    bytes: list[int] | None


class ContentLogprob(TopLogprob, kw_only=True):
    """The chosen token, and the likeliest ones in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """Those of a chat completion, token by token."""

    content: list[ContentLogprob]


class TextLogprobs(msgspec.Struct, kw_only=True):
    """Those of a completion: lists of one length. The first token of all has null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


def chat_logprobs(logprobs: Sequence[TokenLogprob]) -> ChatLogprobs:
    """Write logprobs as chat completions have them."""
    return ChatLogprobs(content=[_content(chosen) for chosen in logprobs])


def _content(chosen: TokenLogprob) -> ContentLogprob:
    top = [
        TopLogprob(
            token=likely.token,
            logprob=_finite(likely.logprob),
            bytes=list(chosen.bytes)
            if likely.token_id == chosen.token_id
            else _bytes(likely.token),
        )
        for likely in _top(chosen)
    ]
    return ContentLogprob(
        token=chosen.token,
        logprob=_finite(chosen.logprob),
        bytes=list(chosen.bytes),
        top_logprobs=top,
    )


def _top(chosen: TokenLogprob) -> tuple[LikelyToken, ...]:
    """Return the likeliest tokens and, if any were asked for, the chosen one among them."""
    if not chosen.top or any(likely.token_id == chosen.token_id for likely in chosen.top):
        return chosen.top
    return (*chosen.top, LikelyToken(chosen.token_id, chosen.token, chosen.logprob))


def top_dict(chosen: TokenLogprob) -> dict[str, float]:
    """Return the likeliest tokens by name, the chosen one among them.

    Two tokens may read alike: of them the chosen one has the name, another one `token_id:ID`.
    """
    named = {token_name(chosen.token_id, chosen.token): _finite(chosen.logprob)}
    for likely in chosen.top:
        name = token_name(likely.token_id, likely.token)
        if likely.token_id != chosen.token_id:
            name = f"token_id:{likely.token_id}" if name in named else name
            named[name] = _finite(likely.logprob)
    return named


def token_name(token_id: int, text: str) -> str:
    """Return a token's text, or `token_id:ID` where that is no whole characters."""
    return f"token_id:{token_id}" if _INCOMPLETE in text else text


Token: TypeAlias = tuple[int, str, TokenLogprob | None]
"""A token's id, its text, and its logprob unless it is the first of all."""


def n_characters(tokens: Sequence[Token]) -> int:
    """Count the characters of tokens, each once, however many of them it is split over."""
    return len(b"".join(map(_token_bytes, tokens)).decode(errors="replace"))


class TextLogprobsWriter:
    """Makes the lists of a completion piece by piece; `text_offset` counts characters.

    All tokens of one character have its place. The first token is at `start`: below 0 it, or the
    space that it begins with, is no part of the text.
    """

    def __init__(self, *, start: int = 0) -> None:
        self._offset = start
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, tokens: Sequence[Token]) -> TextLogprobs:
        """Write the next tokens."""
        lists = TextLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for token in tokens:
            token_id, text, logprob = token
            lists.tokens.append(token_name(token_id, text))
            lists.text_offset.append(max(0, self._offset))
            lists.token_logprobs.append(None if logprob is None else _finite(logprob.logprob))
            lists.top_logprobs.append(None if logprob is None else top_dict(logprob))
            self._offset += len(self._characters.decode(_token_bytes(token)))
        return lists


def _token_bytes(token: Token) -> bytes:
    _, text, logprob = token
    return text.encode() if logprob is None else logprob.bytes


def _finite(logprob: float) -> float:
    """JSON has no infinity: what cannot be drawn has the least float32."""
    return max(logprob, -3.4028234663852886e38)


def _bytes(text: str) -> list[int] | None:
    return None if _INCOMPLETE in text else list(text.encode())
