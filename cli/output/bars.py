"""Progress bars of bytes on standard error, for loading, downloading and measuring."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # rich takes longer to import than most commands to run
    from rich.console import Console
    from rich.progress import Progress


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
