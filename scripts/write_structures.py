"""Prints the table of docs/structures.md anew, from the first line of every module's docstring.

The drawing above the table and the request's life below it are written by hand and stay.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.source import TABLE_HEAD, size_table, structure_table  # noqa: E402

TABLE = re.compile(re.escape(TABLE_HEAD) + r".*?(?=\n## )", re.DOTALL)
"""Up to the next heading, whatever a merge has left between."""


def main() -> None:
    """Write the page, or print how large the packages are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--sizes", action="store_true", help="print files and lines of each package; write nothing"
    )
    if parser.parse_args().sizes:
        print(size_table(), end="")
        return
    page = ROOT / "docs" / "structures.md"
    written = page.read_text(encoding="utf-8")
    page.write_text(TABLE.sub(lambda _: structure_table(), written, count=1), encoding="utf-8")


if __name__ == "__main__":
    main()
