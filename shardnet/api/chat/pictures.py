"""Texts and pictures of which a turn consists; pictures of the web are fetched within bounds."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias
from urllib.parse import urljoin, urlsplit

import httpx2

from shardnet.api.requests import ContentPart
from shardnet.errors import UsageError, shown
from shardnet.wire.messages.chat import MAX_PICTURES_BYTES

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
_PORTS: Final = {"http": 80, "https": 443}


async def fetch_picture(url: str) -> bytes:
    """Return what is at `url`.

    Raises UsageError for addresses that are not public, at redirects too, for answers other than
    200, for more bytes than a picture may have, and for what takes more than FETCH_S.
    """
    try:
        async with asyncio.timeout(FETCH_S):
            for _ in range(MAX_HOPS):
                content, url = await _ask(url)
                if content is not None:
                    return content
    except TimeoutError:
        raise _failed(url, f"it took more than {FETCH_S:g} s") from None
    except (httpx2.HTTPError, OSError) as error:
        raise _failed(url, str(error) or type(error).__name__) from None
    raise _failed(url, f"it redirects more than {MAX_HOPS} times")


async def _ask(url: str) -> tuple[bytes | None, str]:
    """Ask one server; return what it gives, or None and where it redirects to."""
    parts = urlsplit(url)
    host, scheme = parts.hostname or "", parts.scheme.lower()
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
    named = parts.netloc.rpartition("@")[2]
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
