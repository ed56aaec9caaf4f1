"""The helper's side: one job after another, each under its limits; the frames of both sides.

A frame has one JSON value and one block of bytes: the lengths of both as two 32-bit numbers, then
both.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import struct
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardnet.errors import ShardnetError, shortage
from shardnet.guard.children import limit_this_process

MAX_FRAME_BYTES = 256 << 20
"""Limit of a frame in either direction."""

_LENGTHS = struct.Struct("<II")
_MOST_AT_ONCE = 1 << 20


def write_frame(pipe: int, value: object, block: bytes = b"") -> None:
    """Write a frame. Raises ValueError if it is too large, OSError if nobody reads."""
    text = json.dumps(value).encode()
    if len(text) + len(block) > MAX_FRAME_BYTES:
        raise ValueError(f"{len(text) + len(block)} bytes, at most {MAX_FRAME_BYTES} are sent")
    for part in (_LENGTHS.pack(len(text), len(block)) + text, block):
        rest = memoryview(part)
        while rest:
            rest = rest[os.write(pipe, rest[:_MOST_AT_ONCE]) :]


def read_frame(pipe: int, most_bytes: int = MAX_FRAME_BYTES) -> tuple[Any, bytes]:
    """Read a frame. Raises EOFError at the end, ValueError for more than `most_bytes`."""
    n_text, n_block = _LENGTHS.unpack(_read(pipe, _LENGTHS.size))
    if n_text + n_block > most_bytes:
        raise ValueError(f"{n_text + n_block} bytes, at most {most_bytes} are read")
    return json.loads(_read(pipe, n_text)), _read(pipe, n_block)


def _read(pipe: int, n_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < n_bytes:
        more = os.read(pipe, min(n_bytes - len(data), _MOST_AT_ONCE))
        if not more:
            raise EOFError
        data += more
    return bytes(data)


Job = Callable[..., tuple[object, bytes]]
"""Takes the arguments of a request by name, with its block of bytes, if any, as `block`; gives a
JSON value and a block of bytes.
"""


def serve(jobs: Mapping[str, Job]) -> None:
    """Do the jobs that standard input asks for until it ends.

    A job that runs out of memory, or whose library panics, is answered and ends the process. The
    system ends it with SIGXCPU when a job has used up its processor time.
    """
    requests, replies = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)  # what a library prints is no reply
    _be_expendable()
    while True:
        try:
            request, given = read_frame(requests)
        except EOFError:
            return
        if given:
            request["arguments"]["block"] = given
        _limit(request["cpu_s"], request["memory_bytes"])
        reply, block = _answer(jobs, request)
        write_frame(replies, reply, block)
        if reply.get("is_last"):
            return


def _answer(jobs: Mapping[str, Job], request: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
    """Do one job. Returns the reply, with `is_last` if the process should end with it."""
    try:
        value, block = jobs[request["job"]](**request["arguments"])
    except ShardnetError as error:
        return _named(error), b""
    except MemoryError:
        why = f"it needs more than {request['memory_bytes'] >> 20} MiB"
        return {"failed": why, "is_last": True}, b""
    except RecursionError:
        return {"failed": "it is nested too deeply", "is_last": False}, b""
    except BaseException as error:  # a panic of a Rust library is no Exception
        if (short := shortage(error, request["job"])) and not _is_own_limit(error):
            return _named(short), b""
        why = f"{type(error).__name__}: {error}"[:500]
        return {"failed": why, "is_last": not isinstance(error, Exception)}, b""
    return {"value": value}, block


def _named(error: ShardnetError) -> dict[str, Any]:
    return {"error": {"code": error.code, "message": error.message, "remedy": error.remedy}}


def _is_own_limit(error: BaseException) -> bool:
    """Say whether the limit of this process' memory may be the cause, and not the machine."""
    return isinstance(error, OSError) and error.errno == errno.ENOMEM


def _be_expendable() -> None:
    """Write no core dump, and be what Linux ends first when memory runs out."""
    if sys.platform != "win32":
        import resource

        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")


def _limit(cpu_s: int, memory_bytes: int) -> None:
    """Limit this process to further `cpu_s` and `memory_bytes`, where the system supports it."""
    if sys.platform == "win32":
        limit_this_process(cpu_s, memory_bytes)
        return
    import resource

    for what, most in (
        (resource.RLIMIT_CPU, math.ceil(time.process_time() + cpu_s)),
        (resource.RLIMIT_AS, _address_space_bytes() + memory_bytes),
    ):
        _, hard = resource.getrlimit(what)
        if hard != resource.RLIM_INFINITY:
            most = min(most, hard)
        with contextlib.suppress(ValueError, OSError):  # macOS refuses some
            resource.setrlimit(what, (most, hard))


def _address_space_bytes() -> int:
    """Return the size of this process' address space; 0 if unknown."""
    if sys.platform != "linux":
        return 0
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    return pages * os.sysconf("SC_PAGE_SIZE")
