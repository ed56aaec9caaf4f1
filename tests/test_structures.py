"""docs/structures.md has one line for every module, none for what is gone, and names real files."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]


def listed() -> Counter[str]:
    """Every module of the table, as its path."""
    found: Counter[str] = Counter()
    folder = ""
    for line in (ROOT / "docs" / "structures.md").read_text(encoding="utf-8").splitlines():
        room = re.match(r"\| \*\*([\w/]+)/\*\*", line)
        if room:
            folder = room[1] if room[1].startswith("cli") else f"shardnet/{room[1]}"
        elif folder and line.startswith("|"):
            found.update(
                f"{folder}/{name}" for name in re.findall(r"`(\w+\.py)`", line.split("|")[1])
            )
    return found


def test_every_module_has_its_line() -> None:
    modules = {
        str(path.relative_to(ROOT))
        for path in [*ROOT.glob("shardnet/*/**/*.py"), *ROOT.glob("cli/**/*.py")]
        if not path.name.startswith("__")
    }
    found = listed()
    assert {path for path in modules if "assets" not in path} == set(found)
    assert [path for path, n in found.items() if n > 1] == []


def test_the_steps_of_a_request_name_files_and_classes_that_exist() -> None:
    text = (ROOT / "docs" / "structures.md").read_text(encoding="utf-8")
    life = text.partition("## A request's life")[2]
    assert re.findall(r"^(\d)\. ", life, re.M) == list("12345678")
    paths = re.findall(r"`([\w/]+\.py)`", life)
    assert len(paths) > 20
    modules = {f"shardnet/{path}" if f"shardnet/{path}" in listed() else path for path in paths}
    assert modules <= set(listed()), modules - set(listed())
    sources = [(ROOT / path).read_text(encoding="utf-8") for path in listed()]
    defined = {name for source in sources for name in re.findall(r"^class (\w+)", source, re.M)}
    assert set(re.findall(r"`([A-Z]\w+)`", life)) <= defined
