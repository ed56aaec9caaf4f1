"""The section of docs/protocol.md that fixes sampling, and the vectors in it."""

from __future__ import annotations

import re
from pathlib import Path


def sampling_section() -> str:
    """The text that fixes sampling: a section of the protocol document."""
    text = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text(encoding="utf-8")
    return re.split(r"^## .*Sampling$", text, flags=re.MULTILINE)[1]


def rows_of(header: str) -> list[list[str]]:
    """The cells of the table under `header`, code marks removed."""
    table = sampling_section().split(header + "\n", 1)[1].split("\n\n", 1)[0].splitlines()[1:]
    rows = [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in table]
    assert rows
    return rows
