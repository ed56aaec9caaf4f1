"""Progress of a download: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from .bars import make_bars
from .exit_codes import one_line, say

if TYPE_CHECKING:
    from rich.progress import TaskID


class DownloadBars:
    """One bar of all bytes on a terminal, with the current file; elsewhere a line per file."""

    def __init__(self) -> None:
        self._progress = make_bars(has_rate=True)
        self._bar: TaskID | None = None
        self._file = ""

    def __enter__(self) -> DownloadBars:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def update(self, file: str, done: int, total: int) -> None:
        """Show progress: `done` of `total` bytes of all files (hub.Report)."""
        file = one_line(file)
        if self._bar is None:
            self._progress.start()
            self._bar = self._progress.add_task(file, total=total or None, completed=done)
        if file != self._file:
            self._file = file
            if not self._progress.console.is_terminal:
                say(f"{file}: {total / 2**20:.1f} MiB")
        self._progress.update(self._bar, description=file, completed=done, total=total or None)

    def stop(self) -> None:
        """Remove the bar."""
        self._progress.stop()
