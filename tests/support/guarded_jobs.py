"""A helper's program whose jobs do what jobs should not."""

from __future__ import annotations

import os
import signal
import sys
import time

from shardnet.errors import UsageError
from shardnet.guard.job_loop import serve


class PanicError(BaseException):
    """As a panic of a Rust library: no Exception."""


def echo(value: object) -> tuple[object, bytes]:
    print("this is no reply", flush=True)
    return value, bytes([1, 2, 3])


def refuse() -> tuple[object, bytes]:
    raise UsageError("this text is refused", remedy="send another")


def fail() -> tuple[object, bytes]:
    raise LookupError("nowhere")


def lack(number: int) -> tuple[object, bytes]:
    raise OSError(number, os.strerror(number))


def panic() -> tuple[object, bytes]:
    raise PanicError("index out of bounds")


def nest() -> tuple[object, bytes]:
    return nest()


def crash() -> tuple[object, bytes]:
    os.kill(os.getpid(), signal.SIGSEGV)
    return echo(0)


def leave() -> tuple[object, bytes]:
    os._exit(3)


def spin() -> tuple[object, bytes]:
    while True:
        pass


def burn(cpu_s: float) -> tuple[object, bytes]:
    until_s = time.process_time() + cpu_s
    while time.process_time() < until_s:
        pass
    return None, b""


def stand() -> tuple[object, bytes]:
    time.sleep(3600)
    return echo(0)


def eat(n_bytes: int) -> tuple[object, bytes]:
    return len(bytes(n_bytes)), b""


def talk(n_bytes: int) -> tuple[object, bytes]:
    return None, bytes(n_bytes)


def main() -> None:
    jobs = [echo, refuse, fail, lack, panic, nest, crash, leave, spin, burn, stand, eat, talk]
    sys.setrecursionlimit(200)
    serve({job.__name__: job for job in jobs})
