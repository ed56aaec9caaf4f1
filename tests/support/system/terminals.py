"""A `shardnet` command at a terminal of its own, as a person has it before them.

Knows the terminal: what is typed, what is seen, its settings, and how it is closed. Must not know
what commands do.
"""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from support.system.nodes import STOP_S, Machine, Output
from support.system.warm_start import WarmProcess

CTRL_C = "\x03"
RUN = """
import os, signal, sys
os.setsid()
os.close(os.open(os.ttyname(0), os.O_RDWR))
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""Python code: become the leader of a session whose terminal is standard input, and the command."""

Process = subprocess.Popen[bytes] | WarmProcess


class Terminal:
    """A terminal at which a command runs. `screen` is what has come to it."""

    def __init__(self, begin: Callable[[int], Process]) -> None:
        """Begin the command, which has the terminal of this descriptor."""
        self._outside, inside = pty.openpty()
        self._settings = termios.tcgetattr(inside)[:4]
        self.process = begin(inside)
        os.close(inside)
        self._closed, self._close = os.pipe()
        shown, self._show = os.pipe()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.screen = Output(os.fdopen(shown, "rb"))

    def type(self, keys: str, then: str | re.Pattern[str] = "") -> None:
        """Press keys, and wait until `then` comes to the screen."""
        seen = len(self.screen.text)
        os.write(self._outside, keys.encode())
        if then:
            self.screen.wait_for(then, after=seen)

    def terminate(self) -> int:
        """Send the command SIGTERM and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def has_its_settings(self) -> bool:
        """Whether the terminal has the settings with which it was found."""
        return termios.tcgetattr(self._outside)[:4] == self._settings

    def wait(self) -> int:
        """Wait for the command's end and return its exit code."""
        return self.process.wait(STOP_S)

    def close(self) -> None:
        """Close the window: whoever is still there is hung up on."""
        with suppress(OSError):  # closed before
            os.close(self._close)
            self._reader.join()
            os.close(self._closed)
            os.close(self._outside)
            self.screen.close()

    def _read(self) -> None:
        ends = [self._outside, self._closed]
        with open(self._show, "wb", buffering=0) as screen, suppress(OSError):
            while self._closed not in select.select(ends, [], [])[0]:
                screen.write(os.read(self._outside, 1 << 16))  # fails when the command has gone


@contextmanager
def at_terminal(machine: Machine, *arguments: str) -> Iterator[Terminal]:
    """Run a command of a machine at a terminal; both are gone afterwards."""

    def begin(inside: int) -> Process:
        if machine.makes_copies:
            return WarmProcess(arguments, machine.environment, machine.folder, terminal=inside)
        return subprocess.Popen(
            [sys.executable, "-c", RUN, *machine.command_line(*arguments)],
            stdin=inside,
            stdout=inside,
            stderr=inside,
            env=machine.environment,
            cwd=machine.folder,
        )

    terminal = Terminal(begin)
    try:
        yield terminal
    finally:
        terminal.process.kill()
        terminal.process.wait()
        for pipe in (terminal.process.stdout, terminal.process.stderr):
            if pipe is not None:
                pipe.close()
        terminal.close()
