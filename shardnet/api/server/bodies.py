"""Reads the bodies of requests: at most so many bytes, then JSON or a form, then a struct.

A wrong value is refused by the name of its field. Must not know any dialect.
"""

from __future__ import annotations

import asyncio
import codecs
import re
import zlib
from collections.abc import Iterator
from email import message_from_string
from email.message import Message
from email.utils import collapse_rfc2231_value
from typing import Any, Final, TypeVar

import msgspec
from starlette.types import Receive

from shardnet.api.server.endpoint import FORM
from shardnet.api.server.errors import HttpError, refused
from shardnet.api.validation import find_half_pair, find_refused
from shardnet.errors import shown

Body = TypeVar("Body")

_FIELD: Final = re.compile(r"(?:a (?:key|value) of )?([\w.\[\]]+)(?=:| is | has )")


BODY_S: Final = 30.0
LEAST_BYTES_PER_S: Final = 1 << 16
"""A body may take BODY_S, and as much longer as it takes at this speed."""
MAX_PARTS: Final = 33
"""One more than the fields that a form may have."""
MAX_LISTS: Final = 1 << 20
MAX_VALUES: Final = 2 << 20
"""Most lists and objects, and most values, of one body: each takes 50 bytes of memory or more."""


class Disconnected(Exception):
    """The client went away before its body had come."""


async def read_body(receive: Receive, headers: dict[bytes, bytes], most_bytes: int) -> bytes:
    """Read a body. Raises HttpError 413 for one that is too large, 408 too slow; Disconnected."""
    announced = headers.get(b"content-length", b"0")
    if announced.isdigit() and int(announced[:20]) > most_bytes:
        raise _too_large(f"{most_bytes} bytes")
    body = bytearray()
    began_s = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(BODY_S) as limit:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Disconnected
                body += message.get("body", b"")
                if len(body) > most_bytes:
                    raise _too_large(f"{most_bytes} bytes")
                if not message.get("more_body", False):
                    return _unpacked(bytes(body), headers, most_bytes)
                limit.reschedule(began_s + BODY_S + len(body) / LEAST_BYTES_PER_S)
    except TimeoutError:
        why = f"the body came too slowly: {len(body)} bytes in {BODY_S:g} s or more"
        raise refused(why, status=408) from None


def _unpacked(raw: bytes, headers: dict[bytes, bytes], most_bytes: int) -> bytes:
    """Unpack a body in gzip. Raises HttpError 413 for one that is too large, 400 for no gzip."""
    packing = headers.get(b"content-encoding", b"identity").decode("latin-1").lower()
    if packing == "identity":
        return raw
    if packing != "gzip":
        raise refused(
            f"bodies in Content-Encoding {shown(packing)} are not read: send gzip, or none"
        )
    unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        body = unpacker.decompress(raw, most_bytes + 1)
    except zlib.error as error:
        raise refused(f"the body is not gzip: {error}") from error
    if len(body) > most_bytes:
        raise _too_large(f"{most_bytes} bytes")
    if not unpacker.eof:
        raise refused("the body is not gzip: it is cut off")
    return body


def decode_body(raw: bytes, kind: type[Body]) -> Body:
    """Decode JSON to a struct.

    Raises HttpError 400, which names the first wrong field, 413 for a body of too many values.
    """
    raw = raw.removeprefix(codecs.BOM_UTF8)  # RFC 8259 section 8.1; editors on Windows write it
    n_lists = raw.count(b"[") + raw.count(b"{")
    if n_lists > MAX_LISTS or raw.count(b",") > MAX_VALUES:  # those in texts are counted too
        raise _too_large(f"{MAX_LISTS} lists or {MAX_VALUES} values")
    try:
        try:
            return msgspec.json.decode(raw, type=kind)
        except msgspec.ValidationError as error:
            why = find_refused(msgspec.json.decode(raw), kind) or str(error)
            found = _FIELD.match(why)
            raise refused(why, found[1] if found else None) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        why = find_half_pair(raw)
        found = _FIELD.match(why)
        if not why:
            why = (
                f"the body is not JSON: {error}" if raw.strip() else "the body is empty: send JSON"
            )
        raise refused(why, found[1] if found else None, code="invalid_json") from error


def decode_form(raw: bytes, content_type: str, kind: type[Body]) -> Body:
    """Decode the fields of a form to a struct: a file as its `filename` and `content`, else a text.

    Raises HttpError 400 for no form in `multipart/form-data`, or a wrong field.
    """
    try:
        return msgspec.convert(dict(_fields(raw, content_type)), kind, builtin_types=(bytes,))
    except (msgspec.ValidationError, ValueError) as error:
        raise refused(f"a field of the form is wrong: {error}") from error


def _fields(raw: bytes, content_type: str) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a form. Raises HttpError 400, and ValueError for a wrong one."""
    described = Message()
    described["content-type"] = content_type
    boundary = described.get_boundary("")
    if described.get_content_type() != FORM or not boundary:
        raise refused(f"the body is to be a form: send it as {FORM}")
    mark = b"\r\n--" + boundary.encode("latin-1", "replace")
    first, *parts = (b"\r\n" + raw).split(mark, MAX_PARTS)
    if first.strip() or not parts or not parts[-1].startswith(b"--"):
        raise refused(f"the body is no form of at most {MAX_PARTS - 1} fields, or is cut off")
    yield from map(_field, parts[:-1])


def _field(part: bytes) -> tuple[str, Any]:
    """Read the name and the value of one field. Raises ValueError."""
    head, _, content = part.removeprefix(b"\r\n").partition(b"\r\n\r\n")
    described = message_from_string(head.decode(errors="replace"))
    name = described.get_param("name", "", header="content-disposition")
    filename = described.get_filename()
    if filename is None:
        return collapse_rfc2231_value(name or ""), content.decode()
    return collapse_rfc2231_value(name or ""), {"filename": filename, "content": content}


def _too_large(most: str) -> HttpError:
    return refused(f"the body has more than {most}", status=413)
