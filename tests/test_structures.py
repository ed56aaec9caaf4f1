"""docs/structures.md says of every module what its docstring says, and names real files."""

from __future__ import annotations

import re

from support.source import ROOT, sources, structure_table

PAGE = (ROOT / "docs" / "structures.md").read_text(encoding="utf-8")


def test_the_table_is_what_the_docstrings_say() -> None:
    written = PAGE[PAGE.index("| module") : PAGE.index("\n## A request's life")]
    assert written == structure_table(), "run python scripts/write_structures.py"


def test_the_table_has_a_row_for_every_module() -> None:
    modules = [path for path in sources() if not re.search(r"assets/|__", path)]
    assert len(re.findall(r"^\| `\w+\.py` \| .+\. \|$", structure_table(), re.M)) == len(modules)


def test_the_steps_of_a_request_name_files_and_classes_that_exist() -> None:
    life = PAGE.partition("## A request's life")[2]
    assert re.findall(r"^(\d)\. ", life, re.M) == list("12345678")
    paths = re.findall(r"`([\w/]+\.py)`", life)
    assert len(paths) > 20
    modules = sources()
    unknown = {path for path in paths if not {path, f"shardnet/{path}"} & modules.keys()}
    assert unknown == set()
    defined = {
        name for source in modules.values() for name in re.findall(r"^class (\w+)", source, re.M)
    }
    assert set(re.findall(r"`([A-Z]\w+)`", life)) <= defined
