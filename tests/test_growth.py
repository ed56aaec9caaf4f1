"""What grows again fails here: small modules for one importer, structs that copy another.

tests/golden has what there was when this was first held; both lists are to become empty.
"""

from __future__ import annotations

import ast
from itertools import combinations

from support.golden import check_shrinking
from support.source import UNLIMITED, code_lines, importers, sources

SMALL = 50
"""A module with fewer lines of code and one importer is better a part of it."""
FEW_FIELDS = 5
"""Structs with fewer fields may be alike by chance."""
ALIKE = 0.7
"""The share of the fields of the larger one that two structs may not have in common."""


def small_modules(modules: dict[str, str]) -> set[str]:
    """The modules that should be a part of their one importer.

    A kind of layer that one family has is none: the family's file imports no torch before it loads.
    """
    return {
        path
        for path, by in importers(modules).items()
        if len(by) == 1 and code_lines(modules[path]) < SMALL
        if {one.rpartition("/")[0] for one in by}.isdisjoint(UNLIMITED)
        if "/__" not in path and path.rpartition("/")[0] not in UNLIMITED
    }


def fields_of_structs(modules: dict[str, str]) -> dict[str, set[str]]:
    """The fields of every dataclass and msgspec struct, without those of its bases."""
    found = {}
    for path, source in modules.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef) and (node.bases or node.decorator_list):
                fields = {
                    line.target.id
                    for line in node.body
                    if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
                    if "ClassVar" not in ast.unparse(line.annotation)
                }
                if len(fields) >= FEW_FIELDS:
                    found[f"{path} {node.name}"] = fields
    return found


def alike(structs: dict[str, set[str]]) -> set[str]:
    """The pairs of structs that have most of their fields in common."""
    return {
        f"{first} = {second}"
        for (first, mine), (second, theirs) in combinations(sorted(structs.items()), 2)
        if len(mine & theirs) >= ALIKE * max(len(mine), len(theirs))
    }


def test_no_new_small_module_has_one_importer() -> None:
    check_shrinking("small_modules.txt", small_modules(sources()))


def test_no_new_struct_copies_another() -> None:
    check_shrinking("alike_structs.txt", alike(fields_of_structs(sources())))


def test_what_should_be_found_is_found() -> None:
    source = "@dataclass\nclass {}:\n" + "".join(f"    f{n}: int\n" for n in range(10))
    modules = {"shardnet/wire/a.py": source.format("A"), "shardnet/wire/b.py": source.format("B")}
    modules["shardnet/wire/b.py"] += "    b: int\n\n\ndef f() -> None:\n    from . import a\n"
    assert small_modules(modules) == {"shardnet/wire/a.py"}
    assert alike(fields_of_structs(modules)) == {"shardnet/wire/a.py A = shardnet/wire/b.py B"}
    modules["shardnet/wire/c.py"] = "from .a import A\n"
    assert small_modules(modules) == set()
