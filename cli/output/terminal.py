"""The terminal is left as it was found, also by a command that is told to end.

Knows what a line editor and progress bars change of it. Must not know what is written there.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Final

SHOW_CURSOR: Final = b"\x1b[?25h"


def restore_at_sigterm() -> None:
    """Have SIGTERM end this process as it always does, once echo and cursor are back.

    Without this, who ends a command at its prompt, or while bars move, gets a shell in which what
    is typed cannot be seen. Does nothing without a terminal.
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
            os.write(stderr, SHOW_CURSOR)
        signal.raise_signal(number)

    signal.signal(signal.SIGTERM, end)
