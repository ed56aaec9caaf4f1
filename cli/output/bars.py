"""Bars of bytes on standard error, the same for loading, downloading and measuring."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # rich takes longer to import than most commands to run
    from rich.progress import Progress, ProgressColumn


def make_bars(*more: ProgressColumn) -> Progress:
    """Make bars of bytes on standard error that vanish at the end; no bars where it is no terminal.

    `more` are columns behind description, bar and bytes.
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
