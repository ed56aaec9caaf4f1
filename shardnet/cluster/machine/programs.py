"""Ask other programs, of which none is trusted: what they print is bounded, and so is how long."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from shardnet.errors import ConfigurationError
from shardnet.transport.loop import at_most

MAX_OUTPUT_BYTES: Final = 16 << 20
_KILLED_S: Final = 1.0
"""How long a program may take to end when it is killed."""
NO_WINDOW: Final = getattr(subprocess, "CREATE_NO_WINDOW", 0)


class _Output(asyncio.SubprocessProtocol):
    """What a program prints, to its end or to the first byte beyond MAX_OUTPUT_BYTES."""

    def __init__(self) -> None:
        self.pipes = {1: bytearray(), 2: bytearray()}
        self.is_complete = asyncio.Event()
        self.has_ended = asyncio.Event()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Keep what comes."""
        if not self.is_too_long:
            self.pipes[fd] += data
        if self.is_too_long:
            self.is_complete.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that the program has ended and its pipes are closed."""
        self.is_complete.set()
        self.has_ended.set()

    @property
    def is_too_long(self) -> bool:
        """Whether more came than is read."""
        return sum(map(len, self.pipes.values())) > MAX_OUTPUT_BYTES


async def ask(command: Sequence[str], environment: Mapping[str, str], *, answer_s: float) -> bytes:
    """Return what a program prints within `answer_s` seconds, at most MAX_OUTPUT_BYTES.

    Raises ConfigurationError, which names the program.
    """
    name = f"`{Path(command[0]).stem} {' '.join(command[1:])}`"
    try:
        program, output = await asyncio.get_running_loop().subprocess_exec(
            _Output,
            *command,
            stdin=subprocess.DEVNULL,
            env={**environment},  # uvloop takes no other mapping
            creationflags=NO_WINDOW,
        )
    except OSError as error:
        raise ConfigurationError(f"{name} cannot be run: {error.strerror}") from error
    try:
        async with asyncio.timeout(answer_s):
            await output.is_complete.wait()
    except TimeoutError:
        raise ConfigurationError(f"{name} did not answer within {answer_s:g} s") from None
    finally:
        code = program.get_returncode()
        program.close()
        async with at_most(_KILLED_S):
            await output.has_ended.wait()
    if output.is_too_long:
        raise ConfigurationError(f"{name} printed more than {MAX_OUTPUT_BYTES} bytes")
    if code:
        words = " ".join(output.pipes[2].decode(errors="replace").split())[:200]
        raise ConfigurationError(f"{name} failed: {words or f'its exit code is {code}'}")
    return bytes(output.pipes[1])
