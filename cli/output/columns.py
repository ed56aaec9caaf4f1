"""Text that fits a terminal: columns without lines around them; a warning before nodes start."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence

from shardnet.cluster.machine.folders import CACHE_DIR_VARIABLE, cache_dir, why_not_written

from .exit_codes import one_line, say

GAP = "  "


def terminal_width() -> int | None:
    """Return the columns of the terminal of standard output, None where it is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def columns(rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """Lay out rows of cells, the header first; each is a line where it fits into `width`.

    The first cell of a row stands on a line of its own where it would leave the others too little
    room, the last one, which may be "", on a line behind it. `width` None has no limit.
    """
    shown = [[one_line(cell) for cell in row] for row in rows]
    middle = [max(map(len, cells)) for cells in zip(*(row[1:-1] for row in shown), strict=True)]
    first = max(len(row[0]) for row in shown)
    if width is not None:
        left = width - sum(len(GAP) + size for size in middle) - len(GAP) - len(shown[0][-1])
        first = min(first, max(left, len(shown[0][0])))
    lines = []
    for number, row in enumerate(shown):
        cells = [f"{cell:{size}}" for cell, size in zip(row[1:-1], middle, strict=True)]
        if len(row[0]) > first:
            lines.append(row[0])
        name = row[0] if len(row[0]) <= first else ""
        line = GAP.join([f"{name:{first}}", *cells, row[-1]]).rstrip()
        if width is not None and len(line) > width and row[-1]:
            line = GAP.join([f"{name:{first}}", *cells]).rstrip()
            lines += [line, *(wrapped([f"{2 * GAP}{row[-1]}"], width) if number else [])]
        else:
            lines.append(line)
    return lines


def wrapped(lines: Iterable[str], width: int | None, indent: int = 4) -> list[str]:
    """Break lines between words where they are longer than `width`, None for no limit.

    What continues a line is indented by `indent` columns more.
    """
    if width is None:
        return [*lines]
    broken = []
    for line in lines:
        before = line[: len(line) - len(line.lstrip())]
        broken += textwrap.wrap(
            line,
            width,
            subsequent_indent=before + " " * indent,
            break_long_words=False,
            break_on_hyphens=False,
        ) or [line]
    return broken


def warn_of_cache() -> None:
    """Warn where the cache folder cannot be written; nodes work without it, but start slower."""
    folder = cache_dir(os.environ)
    why = why_not_written(folder)
    if why:
        say(
            f"warning: the cache folder {folder} cannot be written ({why}): measured figures and "
            f"quantised weights are not kept; make it writable or make room, or name another with "
            f"{CACHE_DIR_VARIABLE}"
        )
