"""Draws what nodes held in a soak, minute by minute: a panel of each quantity, a line of each node.

Knows the samples that `scripts/soak --owner` writes. Every point is one of them; a line stops where
its node was away.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

import msgspec
from support.chaos.memory import Sample

WIDTH, LEFT, RIGHT, TOP = 880, 70, 20, 44
PANEL, GAP = 110, 30
PANELS = (
    ("resident memory, MiB", "resident_bytes", 1 << 20),
    ("descriptors", "n_descriptors", 1),
    ("threads", "n_threads", 1),
    ("files of a node, KiB", "disk_bytes", 1 << 10),
)
COLOURS = ("#2f6fb3", "#c07a1c", "#2b8573", "#7a57b8")
AWAY_S = 100.0
"""A node of which no sample was taken for so long was away."""
STYLE = (
    "text { font-family: system-ui, sans-serif; font-size: 12px; fill: #7b8693; }"
    "path { fill: none; stroke-width: 1.3; } line { stroke: #7b8693; stroke-opacity: 0.4; }"
)


def read_samples(text: str) -> list[Sample]:
    """Read a file of data, a sample in each line."""
    return msgspec.json.Decoder(Sample).decode_lines(text)


def drawn(samples: Sequence[Sample]) -> str:
    """Draw samples as an SVG picture. Raises ValueError where there are none."""
    height = TOP + len(PANELS) * (PANEL + GAP)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}">',
        f"<style>{STYLE}</style>",
        *_legend(samples),
    ]
    for number, (title, what, unit) in enumerate(PANELS):
        lines += _panel(samples, title, what, unit, TOP + number * (PANEL + GAP))
    return "\n".join([*lines, "</svg>\n"])


def _names(samples: Sequence[Sample]) -> list[str]:
    return sorted({one.node for one in samples})


def _legend(samples: Sequence[Sample]) -> Iterator[str]:
    for number, name in enumerate(_names(samples)):
        colour = COLOURS[number % len(COLOURS)]
        x = LEFT + 110 * number
        yield f'<path d="M{x} 14h24" style="stroke: {colour}"/>'
        yield f'<text x="{x + 30}" y="18">{escape(name)}</text>'


def _panel(samples: Sequence[Sample], title: str, what: str, unit: int, top: int) -> Iterator[str]:
    most = max(getattr(one, what) for one in samples) / unit
    last_s = max(one.at_s for one in samples) or 1.0
    bottom, wide = top + PANEL, WIDTH - LEFT - RIGHT
    yield f'<text x="{LEFT}" y="{top - 6}">{escape(title)}</text>'
    for value in (0.0, most):
        y = bottom - PANEL * value / (most or 1.0)
        yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.0f}</text>'
    end = f"{last_s / 60:.0f} min"
    yield f'<text x="{WIDTH - RIGHT}" y="{bottom + 14}" text-anchor="end">{end}</text>'
    for number, name in enumerate(_names(samples)):
        path, before_s = "", -math.inf
        for one in (one for one in samples if one.node == name):
            x = LEFT + wide * one.at_s / last_s
            y = bottom - PANEL * getattr(one, what) / unit / (most or 1.0)
            path += f"{'M' if one.at_s - before_s > AWAY_S else 'L'}{x:.1f} {y:.1f}"
            before_s = one.at_s
        yield f'<path d="{path}" style="stroke: {COLOURS[number % len(COLOURS)]}"/>'


def main(arguments: Sequence[str]) -> int:
    """Draw a file of data, the first argument, as the second one."""
    data, picture = map(Path, arguments)
    picture.write_text(drawn(read_samples(data.read_text(encoding="utf-8"))), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
