"""A request to a chat model, whatever dialect it came in, with the pictures of its turns."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeAlias
from urllib.parse import urljoin, urlsplit

import httpx2

from shardnet.api.requests import ContentPart, GenerationOptions
from shardnet.errors import UsageError, shown
from shardnet.sampling_params import SamplingParams
from shardnet.wire.messages.chat import MAX_PICTURES_BYTES, ToolCall
from shardnet.wire.messages.plans import ModelChoice

Detail: TypeAlias = Literal["auto", "low", "high"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPicture:
    """A picture in a turn: the bytes of its file, or a URL of the web."""

    image: bytes | str
    detail: Detail = "auto"


Part: TypeAlias = str | TurnPicture
"""What a turn with pictures consists of."""


def text_of(parts: Sequence[Part]) -> str:
    """Return the texts of a content, a line each."""
    return "\n".join(part for part in parts if isinstance(part, str))


def only_pictured(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Return the parts of a content that has pictures, () for one of text alone."""
    return tuple(parts) if any(isinstance(part, TurnPicture) for part in parts) else ()


def written(parts: Sequence[Part]) -> list[ContentPart]:
    """Write the parts as a client's messages have them."""
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image", "image": part.image, "detail": part.detail}
        for part in parts
    ]


FETCH_S: Final = 20.0
"""How long one picture may take, redirects included."""
MAX_HOPS: Final = 4
"""So many redirects are followed."""

BILLING: Final = "x-anthropic-billing-header:"
"""How a line of system prompts begins that is no part of them, and differs in every request: no
prompt would begin as the one before, and nothing of the KV cache could be used again."""

_PORTS: Final = {"http": 80, "https": 443}


async def fetch_picture(url: str) -> bytes:
    """Return what is at `url`.

    Raises UsageError for addresses that are none or not public, at redirects too, for answers other
    than 200, for more bytes than a picture may have, and for what takes more than FETCH_S.
    """
    try:
        async with asyncio.timeout(FETCH_S):
            for _ in range(MAX_HOPS + 1):
                content, url = await _ask(url)
                if content is not None:
                    return content
    except TimeoutError:
        raise _failed(url, f"it took more than {FETCH_S:g} s") from None
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError) as error:
        raise _failed(url, str(error) or type(error).__name__) from None
    raise _failed(url, f"it redirects more than {MAX_HOPS} times")


async def _ask(url: str) -> tuple[bytes | None, str]:
    """Ask one server; return what it gives, or None and where it redirects to."""
    parts = urlsplit(url)
    host, scheme = (parts.hostname or "").encode("idna").decode(), parts.scheme.lower()
    if scheme not in _PORTS or not host:
        raise _failed(url, "it is no URL of the web")
    try:
        port = parts.port or _PORTS[scheme]
    except ValueError:
        raise _failed(url, "its port is none") from None
    address = await _public(url, host, port)
    where = f"[{address}]" if ":" in address else address
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    target = f"{scheme}://{where}:{port}{path}"
    named = (f"[{host}]" if ":" in host else host) + (f":{parts.port}" if parts.port else "")
    async with (
        httpx2.AsyncClient(trust_env=False, follow_redirects=False, timeout=FETCH_S) as client,
        client.stream(
            "GET",
            target,
            headers={"host": named, "accept": "image/*", "accept-encoding": "identity"},
            extensions={"sni_hostname": host},
        ) as answer,
    ):
        if answer.status_code in (301, 302, 303, 307, 308) and "location" in answer.headers:
            return None, urljoin(url, answer.headers["location"])
        if answer.status_code != 200:
            raise _failed(url, f"its server answers {answer.status_code}")
        content = bytearray()
        async for piece in answer.aiter_raw():
            content += piece
            if len(content) > MAX_PICTURES_BYTES:
                raise _failed(url, f"it has more than {MAX_PICTURES_BYTES} bytes")
        return bytes(content), url


async def _public(url: str, host: str, port: int) -> str:
    """Resolve a host once. Raises UsageError if any of its addresses is not public."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(entry[4][0]) for entry in found]
    for address in addresses:
        known = ipaddress.ip_address(address.partition("%")[0])
        inner = getattr(known, "ipv4_mapped", None) or known
        if not inner.is_global or inner.is_multicast:
            raise _failed(url, f"{host} is at {address}, which is no public address")
    if not addresses:
        raise _failed(url, f"{host} has no address")
    return addresses[0]


def _failed(url: str, why: str) -> UsageError:
    return UsageError(f"the picture at {shown(url[:200])} cannot be fetched: {why}")


ToolChoice = Literal["auto", "none", "required"]
OptionValue: TypeAlias = bool | int | float | str | None

_SWITCHES: Final = ("enable_thinking", "thinking")
"""What chat templates call the switch of reasoning: Qwen, GLM, Gemma and SmolLM have the first
name, DeepSeek, Granite and Kimi the second."""


def thinking_options(
    wanted: bool | str | None, given: Mapping[str, OptionValue] | None = None
) -> dict[str, OptionValue]:
    """Return the options of a chat template by which a model thinks as it is `wanted`.

    False and the effort none switch reasoning off, True and any other effort switch it on, None
    leaves it to the template. Options that are `given` win.
    """
    options: dict[str, OptionValue] = dict(given or {})
    if wanted is None or wanted == "":
        return options
    is_on = wanted not in (False, "none")
    if not options.keys() & set(_SWITCHES):
        options |= dict.fromkeys(_SWITCHES, is_on)
    if is_on and isinstance(wanted, str):
        options.setdefault("reasoning_effort", wanted)
    return options


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTurn:
    """One message. `role` is system, user, assistant, tool or another that the template knows.

    An assistant's turn may have `reasoning` and `tool_calls`; the turn of a tool has the result of
    the call `tool_call_id`, and may have the `name` of the tool. One with pictures has `parts`, of
    whose texts its content consists.
    """

    role: str
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    parts: tuple[Part, ...] = ()

    @classmethod
    def of(cls, role: str, parts: Sequence[Part], **fields: Any) -> ChatTurn:
        """Make a turn whose content consists of `parts`."""
        return cls(role=role, content=text_of(parts), parts=only_pictured(parts), **fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call. `parameters` is a JSON schema, None without any."""

    name: str
    description: str | None = None
    parameters: Mapping[str, object] | None = None
    strict: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A conversation, and how it is continued.

    `model` is what the nodes are sent, not the dialect's name. With `tool_choice` required the
    model must call a tool, with `forced_tool` that one; without `parallel_tool_calls` one at most.
    The chat template shows `shown_tools` if there are any, else `tools`: where a call must come a
    grammar keeps it among the tools, and prompts of one conversation begin alike.
    `template_options` are passed to the chat template. The sampling's `n_logprobs` asks for
    logprobs, the options' `constraint` for JSON. Reasoning ends after `thought_budget` tokens, with
    -1 after any number, behind `thought_message`; None leaves it to the server.
    """

    turns: tuple[ChatTurn, ...]
    model: ModelChoice
    sampling: SamplingParams
    options: GenerationOptions
    n: int = 1
    tools: tuple[Tool, ...] = ()
    shown_tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = "auto"
    forced_tool: str = ""
    parallel_tool_calls: bool = True
    template_options: Mapping[str, OptionValue] = field(default_factory=dict)
    thought_budget: int | None = None
    thought_message: str = ""


def without_bills(turns: Iterable[ChatTurn]) -> Iterator[ChatTurn]:
    """Yield the turns, system prompts without Claude Code's line of each request."""
    for turn in turns:
        if turn.role == "system" and BILLING in turn.content:
            lines = turn.content.split("\n")
            kept = "\n".join(line for line in lines if not line.startswith(BILLING))
            if kept:
                yield replace(turn, content=kept)
            continue
        yield turn


def joined_turns(turns: Iterable[ChatTurn], *, roles: tuple[str, ...]) -> Iterator[ChatTurn]:
    """Yield the turns, those of one of the `roles` that follow each other as one.

    Templates may insist on turns that alternate, and on one system turn at the beginning.
    """
    last: ChatTurn | None = None
    for turn in turns:
        if last is not None and last.role == turn.role and turn.role in roles:
            last = _joined(last, turn)
            continue
        if last is not None:
            yield last
        last = turn
    if last is not None:
        yield last


def _joined(turn: ChatTurn, more: ChatTurn) -> ChatTurn:
    parts: tuple[Part, ...] = ()
    if turn.parts or more.parts:
        parts = (*(turn.parts or (turn.content,)), *(more.parts or (more.content,)))
    return replace(turn, content=f"{turn.content}\n{more.content}", parts=parts)
