"""What grows again fails here: lines, small modules, copied structs, files that hand options on.

tests/golden has what there was when this was first held; both lists are to become empty, and the
table of lines (lines.txt: of code, without blanks, comments and docstrings) is the price of growth.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest
from support.golden import check_counts, check_shrinking, miscounts
from support.source import (
    ROOT,
    UNLIMITED,
    code_lines,
    imported_modules,
    importers,
    lines_by_package,
    nodes,
    sources,
)

from shardnet.stage_form import StageForm

SMALL = 50
"""A module with fewer lines of code and one importer is better a part of it."""
FEW_FIELDS = 5
"""Structs with fewer fields may be alike by chance."""
ALIKE = 0.7
"""The share of the fields of the larger one that two structs may not have in common."""

MOST_LINES = 60
"""Of a function, without its docstring."""
MOST_PARAMETERS = 8

WIDER = {
    "cli/commands/generate.py generate": "the flags of a command are its parameters",
    "cli/services/update.py update": "the flags of a command are its parameters",
    "shardnet/cluster/planning/candidates.py candidates_of": "all that a plan weighs meets here",
    "shardnet/cluster/planning/model_shape.py model_shape": "all that a plan weighs meets here",
    "shardnet/model/arithmetic/row_functions.py _call": "the arguments of functions in C",
    "shardnet/model/cache/kv_cache.py KvCache.__init__": "what layers keep differs in so much",
    "shardnet/model/config/decoder_config.py read_decoder": "what families' configs differ in",
    "shardnet/model/config/rope.py read_rope": "what families' configs differ in",
    "shardnet/runtime/engine/engine.py Engine.generate": "a request from its begin to its end",
    "shardnet/runtime/loading/loading.py kv_room": "all that takes memory beside keys",
    "shardnet/runtime/loading/measuring.py measure_stage": "what a measurement stands for",
    "shardnet/stage/load.py load_stage": "all that a stage is made of meets here",
}
"""Functions that are longer, or take more, and why. Who shortens one takes it out of here."""

OPTIONS = frozenset(StageForm.__struct_fields__) - {"model", "model_id", "dtype", "context"} | {
    *("arith", "nodes_per_stage", "stream_layers", "wire_dtype"),
}
"""What a ring is asked to compute with, but for words that mean more than that."""

AT_THE_ORDER = """
import sys
from pathlib import Path
from unittest.mock import Mock
from typer.main import get_command
from shardnet.cluster.head.ring_builder import ring_spec
from shardnet.cluster.machine.profile import Device
from shardnet.cluster.member.stage_orders import StageOrders
from shardnet.cluster.planning.placing import make_plan
from shardnet.types import Epoch
from shardnet.wire.framing.frames import Frame, FrameKind
from shardnet.wire.framing.schema import encode
from shardnet.wire.messages.control import read_control
from shardnet_cli.flags.ring_options import RingOptions
from shardnet_cli.main import app
from tests.cluster.planning.test_planning import facts, node

chosen, choose = [], RingOptions.choice
RingOptions.choice = lambda options: chosen.append(choose(options)) or sys.exit()
for command in (["plan"], ["generate", "a"], ["chat"], ["serve"], ["bench"]):
    flags = ["--model", sys.argv[1], "--nodes", "a:1,b:1", "--added", "as asked"]
    try:
        get_command(app)([*command, *flags])
    except SystemExit:
        pass
for choice in chosen:
    spec = ring_spec(make_plan(choice, facts(), [node("a"), node("b")]))
    sent = spec.order(1, ring="r", epoch=Epoch(1), sources=["a:1"], instead_of="")
    read = read_control(Frame(kind=FrameKind.CONTROL, meta=encode(sent)))
    cpu = Device(kind="cpu", description="cpu", dtypes=())
    parts = {name: Mock() for name in ("host", "sharing", "local_nodes", "watch", "latest", "log")}
    orders = StageOrders(**parts, budget=Mock(device=cpu, devices=[cpu]), asked_threads=1)
    print(orders._order(read, Path("/m"), ()).form.added)
"""

AN_OPTION = {
    "shardnet/stage_form.py": [("    mtp: bool = False\n", '    added: PathText = ""\n')],
    "cli/flags/ring_options.py": [
        (
            "    ignore_unknown_config: IgnoreUnknownConfig = False\n",
            '    added: str = env_flag("", "--added X", "Added.")\n',
        ),
        ("            mtp=self.mtp,\n", "            added=self.added,\n"),
    ],
}
"""All that an option of every stage takes, but for the place that uses it: what stands behind which
line of which file."""


@pytest.fixture(scope="module", autouse=True)
def _look_once() -> None:
    """Look at a module for all tests while it is parsed; what was found is kept, its tree not."""
    for path, source in sources().items():
        imported_modules(path, source)
        code_lines(source)
        structs_of(source)
        handed_on(source)
        wide_of(source)


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
    return {
        f"{path} {name}": fields
        for path, source in modules.items()
        for name, fields in structs_of(source).items()
    }


@cache
def structs_of(source: str) -> dict[str, set[str]]:
    """The same of one module."""
    found = {}
    for node in nodes(source):
        if isinstance(node, ast.ClassDef) and (node.bases or node.decorator_list):
            fields = {
                line.target.id
                for line in node.body
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
                if "ClassVar" not in ast.unparse(line.annotation)
            }
            if len(fields) >= FEW_FIELDS:
                found[node.name] = fields
    return found


def alike(structs: dict[str, set[str]]) -> set[str]:
    """The pairs of structs that have most of their fields in common."""
    return {
        f"{first} = {second}"
        for (first, mine), (second, theirs) in combinations(sorted(structs.items()), 2)
        if len(mine & theirs) >= ALIKE * max(len(mine), len(theirs))
    }


def wide(modules: dict[str, str]) -> set[str]:
    """The functions that are too long or take too much."""
    return {f"{path} {name}" for path, source in modules.items() for name in wide_of(source)}


@cache
def handed_on(source: str) -> set[str]:
    """Return the options that a module names only to hand them on.

    It passes or keeps one by its name, converted at most, or passes its own parameter. Who takes an
    option out of a form and gives it to what computes with it has a use for it.
    """
    named: set[str] = set()
    read: list[tuple[str, ast.AST]] = []
    handed: set[ast.AST] = set()
    for node in nodes(source):
        named.add(name := _name(node))
        if isinstance(node, ast.keyword) and name in OPTIONS:
            handed |= _reads(node.value, name)
            if not _reads(node.value, name):
                read.append((name, node))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            to = node.targets[0] if isinstance(node, ast.Assign) else node.target
            handed |= _reads(node.value, _name(to))
        elif isinstance(node, ast.Call):
            handed |= {each for each in node.args if isinstance(each, ast.Name)}
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            read.append((name, node))
    return (named & OPTIONS) - {name for name, node in read if node not in handed}


def _reads(value: ast.AST | None, name: str) -> set[ast.AST]:
    """Return where `value` reads what has that name, if it is that or a call with it."""
    parts = [*value.args, value] if isinstance(value, ast.Call) else [value]
    return {each for each in parts if each is not None and _name(each) == name}


def _name(node: ast.AST) -> str:
    """Return the name that a node reads, sets or takes, "" for none."""
    return next((getattr(node, key) for key in ("id", "attr", "arg") if hasattr(node, key)), "")


@cache
def wide_of(source: str) -> set[str]:
    """The same of one module."""
    found = set()
    owners = {
        each: f"{owner.name}."
        for owner in nodes(source)
        if isinstance(owner, ast.ClassDef)
        for each in owner.body
    }
    for node in nodes(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) and node.body[1:] else node.body
            n_lines = (node.end_lineno or 0) - body[0].lineno + 1
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            n_parameters = sum(each.arg not in ("self", "cls") for each in given)
            if n_lines > MOST_LINES or n_parameters > MOST_PARAMETERS:
                found.add(f"{owners.get(node, '')}{node.name}")
    return found


def test_functions_are_short_and_take_little() -> None:
    assert wide(sources()) == set(WIDER)


def test_no_package_has_more_lines_than_the_table_says() -> None:
    check_counts("lines.txt", lines_by_package())


def test_more_lines_are_named_and_far_fewer_too() -> None:
    allowed = {"api": 1000, "cli": 101, "wire": 102, "stage": 5}
    assert miscounts(allowed, {"api": 1000, "cli": 100, "wire": 102, "stage": 5}) == []
    assert miscounts(allowed, {"api": 1001, "cli": 101, "wire": 100, "model": 1}) == [
        "api: 1001, the table says 1000",
        "model: 1, the table says 0",
        "stage: 0, the table says 5",
        "wire: 100, the table says 102",
    ]


def test_no_new_small_module_has_one_importer() -> None:
    check_shrinking("small_modules.txt", small_modules(sources()))


def test_no_new_struct_copies_another() -> None:
    check_shrinking("alike_structs.txt", alike(fields_of_structs(sources())))


def test_no_new_module_only_hands_an_option_on() -> None:
    at_both_ends = {"cli/flags/ring_options.py", "shardnet/stage_form.py"}
    found = {f"{name} {path}" for path, each in sources().items() for name in handed_on(each)}
    ends = {f"{name} {path}" for path in at_both_ends for name in OPTIONS}
    check_shrinking("options_handed_on.txt", found - ends)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def f(mtp):\n    g(mtp, mtp=mtp)\n    h(mtp=bool(x.mtp))\n", {"mtp"}),
        ("class C:\n    mtp: bool = False\n", {"mtp"}),
        ("f(mtp=True)", set()),
        ("def f(mtp):\n    g(mtp)\n    return a if mtp else b\n", set()),
        ("f(mtp=x.mtp or y)", set()),
        ("f(x.mtp)", set()),
    ],
)
def test_options_that_are_only_handed_on_are_found(source: str, found: set[str]) -> None:
    assert handed_on(source) == found


def test_what_should_be_found_is_found() -> None:
    source = "@dataclass\nclass {}:\n" + "".join(f"    f{n}: int\n" for n in range(10))
    modules = {"shardnet/wire/a.py": source.format("A"), "shardnet/wire/b.py": source.format("B")}
    modules["shardnet/wire/b.py"] += "    b: int\n\n\ndef f() -> None:\n    from . import a\n"
    assert small_modules(modules) == {"shardnet/wire/a.py"}
    assert alike(fields_of_structs(modules)) == {"shardnet/wire/a.py A = shardnet/wire/b.py B"}
    long = "class C:\n    def f(self):\n" + "        pass\n" * (MOST_LINES + 1)
    many = f"def g({', '.join(f'a{n}' for n in range(MOST_PARAMETERS + 1))}): pass\n"
    assert wide({"a.py": long + many + "def h(): pass\n"}) == {"a.py C.f", "a.py g"}
    modules["shardnet/wire/c.py"] = "from .a import A\n"
    assert small_modules(modules) == set()


def test_an_option_of_all_stages_is_a_flag_and_a_field(tmp_path: Path) -> None:
    """One that is added to these, and nowhere else, arrives at the order of a stage."""
    for name, package in (("shardnet", "shardnet"), ("cli", "shardnet_cli")):
        changed = {ROOT / path: lines for path, lines in AN_OPTION.items() if path.startswith(name)}
        copy_with(changed, ROOT / name, tmp_path / package)
    path = os.pathsep.join(map(str, (tmp_path, ROOT, ROOT / "tests")))
    told = subprocess.run(
        [sys.executable, "-c", AT_THE_ORDER, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (told.stdout, told.stderr) == ("as asked\n" * 5, "")


def copy_with(changed: dict[Path, list[tuple[str, str]]], folder: Path, to: Path) -> None:
    """Link what `folder` has, and write copies of the files in it that are `changed`."""
    to.mkdir()
    for each in folder.iterdir():
        if each in changed:
            source = each.read_text(encoding="utf-8")
            for line, added in changed[each]:
                assert source.count(line) == 1, line
                source = source.replace(line, line + added)
            (to / each.name).write_text(source, encoding="utf-8")
        elif any(each in path.parents for path in changed):
            copy_with(changed, each, to / each.name)
        else:
            (to / each.name).symlink_to(each)
