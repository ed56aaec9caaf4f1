"""Where the `shardnet` command, and `python -m shardnet_cli`, begins and ends.

Knows signals before the rest is imported and after it is done. Must not know any command.
"""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Run the command line. No Ctrl-C shows a traceback, however early or late it comes."""
    try:
        from . import main as command_line

        command_line.main()
    except KeyboardInterrupt:  # the commands know their own
        sys.exit(130)
    finally:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
