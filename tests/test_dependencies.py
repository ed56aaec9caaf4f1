"""What is imported is declared, and what is declared is imported."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
OWN = {"shardnet", "shardnet_cli"}
IMPORTED_AS = {"pillow": "PIL"}


def imported(path: Path) -> Iterator[str]:
    """The foreign packages that a module imports anywhere."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names = [node.module]
        yield from (name.partition(".")[0] for name in names)


def test_the_declared_dependencies_are_the_imported_ones() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *extras["transformers"], *extras["opencl"]]
    names = [re.match(r"[\w-]+", line)[0] for line in lines]  # type: ignore[index]
    declared = {IMPORTED_AS.get(name, name.replace("-", "_")) for name in names}
    files = [*ROOT.glob("shardnet/**/*.py"), *ROOT.glob("cli/**/*.py")]
    found = {name for file in files for name in imported(file)}
    assert found - sys.stdlib_module_names - OWN == declared


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    reasons = (ROOT / "docs" / "adr" / "0001-libraries.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\*\*([\w-]+)\*\*", reasons))
    for line in project["dependencies"]:
        found = re.match(r"[\w-]+", line)
        assert found is not None
        assert found[0] in named
