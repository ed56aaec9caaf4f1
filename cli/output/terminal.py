"""Restores the terminal when SIGTERM ends a command.

Knows what a line editor and progress bars change of it. Must not know what is written there.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Final

RESTORE: Final = b"\x1b[?2004l\x1b[?25h"
"""Pasted text comes as if typed, and the cursor shows."""


def restore_at_sigterm() -> None:
    """Make SIGTERM restore echo and cursor before it ends this process.

    Without this a command that is ended at its prompt, or while bars move, leaves a shell in which
    typed text cannot be seen. Does nothing without a terminal.
    """
    if sys.platform == "win32" or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    import termios

    stdin, stderr = sys.stdin.fileno(), sys.stderr.fileno()
    found = termios.tcgetattr(stdin)

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)  # a second signal ends it wherever it stands
        if os.tcgetpgrp(stdin) == os.getpgrp():  # else the shell has it, and changing it stops us
            termios.tcsetattr(stdin, termios.TCSANOW, found)
            os.write(stderr, RESTORE)
        signal.raise_signal(number)

    signal.signal(signal.SIGTERM, end)
