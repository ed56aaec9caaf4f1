"""Progress bars of bytes on standard error, for loading, downloading and measuring."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .exit_codes import one_line, say

if TYPE_CHECKING:  # rich takes longer to import than most commands to run
    from rich.console import Console
    from rich.progress import Progress, TaskID


def make_bars(*, has_rate: bool = False, console: Console | None = None) -> Progress:
    """Make bars that vanish at the end; disabled unless standard error is a terminal.

    After description, bar and bytes they show with `has_rate` bytes per second and the seconds
    left. Only what is known is shown: of an unknown total the bytes so far, of none nothing.
    `console` is for tests.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        Task,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.text import Text

    class Bytes(DownloadColumn):
        def render(self, task: Task) -> Text:
            if task.total is None:
                return Text(f"{task.completed / 2**20:.1f} MiB" if task.completed else "")
            return super().render(task)

    class Rate(TransferSpeedColumn):
        def render(self, task: Task) -> Text:
            return super().render(task) if task.finished_speed or task.speed else Text("")

    class TimeLeft(TimeRemainingColumn):
        def render(self, task: Task) -> Text:
            return super().render(task) if task.time_remaining is not None else Text("")

    console = console or Console(stderr=True)
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        Bytes(binary_units=True),
        *([Rate(), TimeLeft()] if has_rate else []),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


class DownloadBars:
    """One bar of all bytes on a terminal, with the current file; elsewhere a line per file."""

    def __init__(self) -> None:
        self._progress = make_bars(has_rate=True)
        self._bar: TaskID | None = None
        self._file = ""

    def __enter__(self) -> DownloadBars:
        return self

    def __exit__(self, *_: object) -> None:
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
