"""Runs `shardnet node` as its child, and installs another version when the child asks for that.

A version that is not kept by who ordered it, or ends before, is taken back: the one before is
installed and started again. This process stays of the version that it began with, and imports
little: it stands beside the node for as long as that runs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Final

from shardnet.errors import ConfigurationError
from shardnet.guard.children import OWN_SESSION, end_with_this_process
from shardnet.installation import (
    ENDS_WITH_STDIN,
    EXIT_UPDATE,
    KEEPER_VARIABLE,
    KeeperFolder,
    install,
    save,
)

STOP_S: Final = 60.0
"""How long a node may take to end when it is told to."""
LOOK_S: Final = 0.1


def main(arguments: Sequence[str]) -> int:
    """Run `shardnet` with `arguments` until it ends for good; return its exit status."""
    with (
        tempfile.TemporaryDirectory(prefix="shardnet-keeper-") as folder,
        closing(Keeper(arguments, KeeperFolder(Path(folder)))) as keeper,
    ):
        return keeper.run()


class Keeper:
    """Keeps one node."""

    def __init__(self, arguments: Sequence[str], folder: KeeperFolder) -> None:
        self._command = [sys.executable, "-P", "-m", "shardnet_cli", *arguments]
        self._folder = folder
        self._child: subprocess.Popen[bytes] | None = None
        self._is_told = False
        """Whether this process was told to end, and has passed it on."""
        self._ends_with_stdin = ENDS_WITH_STDIN in os.environ
        for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGBREAK"):
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._pass_on)

    def run(self) -> int:
        """Run the node, and other versions of it, until one ends otherwise than for the next."""
        status = self._start().wait()
        while status == EXIT_UPDATE and (order := self._folder.take_order()) is not None:
            status = self._update(*order)
        return status if status >= 0 else 128 - status  # as a shell says which signal ended it

    def _update(self, wheel: Path, within_s: float) -> int:
        """Run the version of a wheel, or else the one of now; return how that has ended."""
        saved: Path | None = None
        (aside := self._folder.path / "saved").mkdir(exist_ok=True)
        try:
            saved = save(aside)
            install(wheel)
            wheel.unlink()
            why = self._try(self._start(), within_s)
        except (OSError, ValueError, ConfigurationError) as error:
            why = str(error)
        if why and saved is not None:
            _say(f"the other version is taken back: {why}")
            try:
                install(saved)
            except ConfigurationError as error:
                why = f"{why}; and the one before cannot be installed: {error}"
        self._folder.write("failure", why)
        self._folder.drop("saved/*")
        child = self._child if not why else None if self._is_told else self._start()
        return 0 if child is None else child.wait()

    def _try(self, child: subprocess.Popen[bytes], within_s: float) -> str:
        """Wait until a version is kept; return why it is not, and has ended, "" if it is."""
        until_s = time.monotonic() + within_s
        while not (self._folder.path / "kept").exists():
            if child.poll() is not None:
                return f"it ended with status {child.returncode}"
            if self._is_told or time.monotonic() > until_s:
                _end(child)
                return f"it was not back within {within_s:g} s" if not self._is_told else "stopped"
            time.sleep(LOOK_S)
        self._folder.drop("kept")
        return ""

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the node. It ends if this process does, however that ends."""
        self.close()
        self._child = child = subprocess.Popen(
            self._command,
            env={**os.environ, KEEPER_VARIABLE: str(self._folder.path), ENDS_WITH_STDIN: "1"},
            stdin=None if self._ends_with_stdin else subprocess.PIPE,
            **OWN_SESSION,
        )
        end_with_this_process(child.pid)
        return child

    def close(self) -> None:
        """Close the pipe to a node that has ended."""
        if self._child is not None and self._child.stdin is not None:
            self._child.stdin.close()

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._is_told = True
        if self._child is not None and self._child.poll() is None:
            if sys.platform != "win32":
                self._child.send_signal(number)
            else:
                self.close()


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a node, which may hang."""
    if sys.platform != "win32":
        child.terminate()
    elif child.stdin is not None:
        child.stdin.close()
    try:
        child.wait(STOP_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
