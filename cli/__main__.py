"""Where the `shardnet` command, and `python -m shardnet_cli`, begins and ends.

Knows signals before the rest is imported and after it is done. Must not know any command.
"""

from __future__ import annotations

import os
import signal
import sys


def _blind_to_current_folder() -> None:
    """Take the current folder, which `python -m` puts first, off the module search path.

    A numpy.py that lies there is not ours, and a folder called shardnet may be anything. It stays
    if this package was found there.
    """
    own = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if not sys.flags.safe_path and sys.path and sys.path[0] != own:
        del sys.path[0]


def main() -> None:
    """Run the command line. No Ctrl-C shows a traceback, however early or late it comes.

    The exit code is the command's, also where a thread hangs.
    """
    code: object = 0
    try:
        from . import main as command_line

        command_line.main()
    except KeyboardInterrupt:  # the commands know their own
        code = 130
    except SystemExit as end:
        code = end.code
    finally:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    from shardnet.threads import end_process

    end_process(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    _blind_to_current_folder()
    main()
