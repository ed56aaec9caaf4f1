"""Progress bars of bytes on standard error, for loading, downloading and measuring."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # rich takes longer to import than most commands to run
    from rich.progress import Progress, ProgressColumn


def make_bars(*more: ProgressColumn) -> Progress:
    """Make bars that vanish at the end; disabled unless standard error is a terminal.

    `more` are columns after description, bar and bytes.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        *more,
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
