"""What the documents say of the repository is so: links, paths, tests, commands, flags.

Commands are parsed by the command line's own parser here and run in tests/system/test_readme.py.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.main import get_command

from shardnet_cli.flags.lazy_group import SECTIONS, SectionedCommand
from shardnet_cli.main import app

ROOT = Path(__file__).parents[1]
TOP = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")]
PAGES = [*TOP, *sorted((ROOT / "docs").glob("*.md"))]
DECISIONS = sorted((ROOT / "docs" / "adr").glob("*.md"))
NAMING = [page for page in [*PAGES, *DECISIONS] if page.name != "structures.md"]
"""Pages whose paths are looked at here; test_structures.py holds the other one."""
USAGE = ROOT / "docs" / "usage.md"
FOR_USERS = [
    ROOT / "README.md",
    *(
        ROOT / "docs" / f"{name}.md"
        for name in ("usage", "hardware", "comparison", "troubleshooting")
    ),
]
FOLDERS = ("", "shardnet", "shardnet/model", "docs", "tests", "tests/support", "scripts")
"""Paths in the documents are relative to one of these, or to the document."""
FILE = re.compile(r"(?:[\w.-]+/)*[\w-]+(?:\.[\w-]+)*\.(?:py|md|c|h|svg|toml|sh|cfg)")
ALL = ("plan", "generate", "chat", "serve", "bench", "inspect")
"""What `all` in the flags' second column means."""
OTHERS_FLAGS = {"--no-deps", "--force-reinstall", "--install", "--help", "--version"} | {
    "--install-completion",
    "--show-completion",
}


def ids(pages: Sequence[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


@cache
def tracked() -> frozenset[str]:
    """Every file of the checkout, by its path."""
    found = {
        path.relative_to(ROOT).as_posix()
        for top in ("shardnet", "cli", "tests", "scripts", "docs")
        for path in (ROOT / top).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    return frozenset(found | {path.name for path in ROOT.iterdir() if path.is_file()})


@cache
def file_names() -> frozenset[str]:
    return frozenset(path.rsplit("/", 1)[-1] for path in tracked())


@cache
def names_of_tests() -> frozenset[str]:
    sources = (ROOT / path for path in tracked() if path.startswith("tests/") and ".py" in path)
    found = (re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8")) for path in sources)
    return frozenset(name for names in found for name in names)


def text_of(page: Path) -> str:
    """The page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def inline_code(page: Path) -> list[str]:
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text_of(page))]


def anchors(page: Path) -> set[str]:
    """What links into a page may name, as forges make it of headings."""
    headings = re.findall(r"^#+ (.+)$", text_of(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *DECISIONS], ids=ids([*PAGES, *DECISIONS]))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if re.match(r"[a-z]+:", target) or not re.search(r"[./#]|^adr$", target):
            continue  # another site, or a formula
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        assert file.is_relative_to(ROOT), target
        assert not anchor or anchor in anchors(file), target


def test_every_page_and_decision_is_in_its_index() -> None:
    docs = ROOT / "docs"
    pages = {page.name for page in docs.glob("*.md")} - {"README.md"}
    assert pages - linked(docs / "README.md") == set()
    decisions = {page.name for page in DECISIONS} - {"README.md"}
    assert decisions - linked(docs / "adr" / "README.md") == set()


def linked(page: Path) -> set[str]:
    return set(re.findall(r"\]\(([\w-]+\.md)\)", text_of(page)))


def test_decisions_have_one_heading_with_their_number() -> None:
    for page in DECISIONS:
        if page.name != "README.md":
            headings = re.findall(r"^#+ .+", text_of(page), re.M)
            assert len(headings) == 1, page.name
            assert re.match(rf"# {page.name[:4]} \S", headings[0]), page.name


@pytest.mark.parametrize("page", NAMING, ids=ids(NAMING))
def test_files_and_tests_that_are_named_exist(page: Path) -> None:
    missing = []
    for code in inline_code(page):
        path, _, test = code.partition("::")
        if re.fullmatch(r"test_\w+(\[.*\])?", code):
            missing += [code] if code.partition("[")[0] not in names_of_tests() else []
            continue
        path = path.partition("[")[0]
        if FILE.fullmatch(path) and not re.search(r"[A-Z]{3}", path):
            missing += [code] if not is_here(path, page) else []
        if test.startswith("test_"):
            missing += [code] if test.partition("[")[0] not in names_of_tests() else []
    assert not missing


def is_here(path: str, page: Path) -> bool:
    """Whether a path, or a name without folders, is that of a file of the checkout."""
    if "/" not in path:
        return path in file_names()
    places = [ROOT / folder / path for folder in FOLDERS] + [page.parent / path]
    return any(place.exists() for place in places)


# --- commands -----------------------------------------------------------------------------------


def blocks(page: Path) -> str:
    """What the page has a shell run."""
    found = re.findall(r"^```bash\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)
    return "\n".join(found)


def commands(page: Path) -> Iterator[list[str]]:
    """Every command of the page's shell blocks, each one of a pipe by itself."""
    for line in blocks(page).splitlines():
        words = shlex.shlex(line, posix=True, punctuation_chars=True)
        words.whitespace_split = True
        command: list[str] = []
        for word in [*words, "|"]:
            if set(word) <= set("|&;<>"):
                if command:
                    yield command
                command = []
            else:
                command.append(word)


def parse(arguments: Sequence[str], *, is_whole: bool = True) -> None:
    """Have the command line parse these without doing them.

    Raises AssertionError for a command or a flag that is not there, and what the parser raises.
    Without `is_whole` an argument may be missing.
    """
    command: Any = get_command(app)
    name, left = "shardnet", list(arguments)
    while isinstance(command, TyperGroup):
        if left in ([], ["--help"], ["--version"]) or left[0].endswith("-completion"):
            return
        assert left[0] in command.commands, f"there is no command {left[0]!r} of {name}"
        name, command = left[0], command.commands[left.pop(0)]
    try:
        command.make_context(name, left)
    except Exception as error:
        if is_whole or type(error).__name__ != "MissingParameter":
            raise


WITH_COMMANDS = [page for page in PAGES if list(commands(page))]


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=ids(WITH_COMMANDS))
def test_commands_can_be_typed(page: Path) -> None:
    for command in commands(page):
        match command:
            case ["shardnet", *arguments]:
                parse(arguments)
            case ["python", script, *_]:
                assert (ROOT / script).is_file()
            case ["pip", "install", *_, "torch" | "."] | ["echo", *_] | ["results.jsonl"]:
                pass  # no index has shardnet itself
            case [script, *_]:
                assert script.startswith("./scripts/")
                assert os.access(ROOT / script, os.X_OK)


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_commands_in_a_sentence_can_be_typed(page: Path) -> None:
    for code in inline_code(page):
        if re.match(r"shardnet [a-z-]", code) and "…" not in code:
            for command in code.split(" | "):
                if command.startswith("shardnet "):
                    parse(shlex.split(command)[1:], is_whole=False)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("generate --nope Once", "--nope"),
        ("generat Once", "generat"),
        ("key make", "make"),
        ("generate --top-k many Once", "integer"),
        ("pull", "Missing"),
    ],
)
def test_what_cannot_be_typed_is_found(line: str, complaint: str) -> None:
    with pytest.raises(Exception, match=complaint):
        parse(line.split())


# --- flags --------------------------------------------------------------------------------------


def options(
    command: object | None = None, name: str = ""
) -> Iterator[tuple[str, str, TyperOption]]:
    """Every option that help shows: its flag, its command, itself."""
    command = get_command(app) if command is None else command
    if isinstance(command, TyperGroup):
        for part, nested in command.commands.items():
            yield from options(nested, f"{name} {part}".strip())
        return
    assert isinstance(command, TyperCommand)
    for option in command.params:
        if isinstance(option, TyperOption) and not option.hidden:
            yield from ((flag, name, option) for flag in option.opts if flag != "--help")


def documented() -> list[tuple[str, str]]:
    """Flag and command of every row of the tables of flags."""
    text = USAGE.read_text(encoding="utf-8").partition("\n## Flags\n")[2]
    rows = re.findall(r"^\| `(--[\w-]+)[^`]*` \| ([^|]+) \|", text, re.M)
    return [
        (flag, command)
        for flag, told in rows
        for part in told.split(", ")
        for command in (ALL if part.strip() == "all" else [part.strip().strip("`")])
    ]


def test_every_flag_of_every_command_is_documented_once() -> None:
    assert sorted(documented()) == sorted((flag, command) for flag, command, _ in options())


def test_every_variable_of_a_flag_is_documented() -> None:
    variables = {str(option.envvar) for _, _, option in options() if option.envvar}
    named = set(re.findall(r"`(SHARDNET_\w+)`", USAGE.read_text(encoding="utf-8")))
    assert len(variables) > 20
    assert variables <= named


def test_help_has_the_flags_in_the_sections_of_the_page() -> None:
    text = USAGE.read_text(encoding="utf-8").partition("\n## Flags\n")[2]
    sections = dict(re.findall(r"^### (.+?)\n(.*?)(?=^##)", text, re.M | re.S))
    rows = {name: re.findall(r"^\| `(--[\w-]+)", rows, re.M) for name, rows in sections.items()}
    assert {name: set(rows[name]) for name in SECTIONS} == {
        name: set(flags) for name, flags in SECTIONS.items()
    }


@pytest.mark.parametrize("name", ["generate", "chat", "plan", "bench", "node"])
def test_help_of_a_command_with_many_flags_has_sections_and_examples(
    name: str,
) -> None:
    group: Any = get_command(app)
    command = group.commands[name]
    assert isinstance(command, SectionedCommand)
    context = command.make_context(f"shardnet {name}", [], resilient_parsing=True)
    context.terminal_width = context.max_content_width = 80
    shown = command.get_help(context)
    assert max(map(len, shown.splitlines())) <= 80
    titles = re.findall(r"^([A-Z].+):$", shown, re.M)
    assert {"Which model, and how", "Where a model runs", "Options", "Examples"} <= {*titles}
    assert shown.count("--threads") == shown.count("--help") == 1
    for line in shown.partition("Examples:\n")[2].splitlines():
        parse(shlex.split(line.partition(" <")[0].partition(" >")[0])[1:])


@pytest.mark.parametrize("page", FOR_USERS, ids=ids(FOR_USERS))
def test_flags_in_a_sentence_exist(page: Path) -> None:
    known = {flag for flag, _, _ in options()} | OTHERS_FLAGS
    named = {flag for code in inline_code(page) for flag in re.findall(r"(?<!\S)--[\w-]+", code)}
    assert named <= known


# --- the README ---------------------------------------------------------------------------------


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


RUN = {
    "model": "a/model & more",
    "stages": [{"rank": 0, "layers": [0, 5]}, {"rank": 1, "layers": [5, 6]}],
    "timing": {
        "decode_tok_s": 40.0,
        "per_stage": [
            {"rank": 0, "compute_ms": 12.2, "queue_ms": 0.5, "wire_ms": 1.3},
            {"rank": 1, "compute_ms": 7.5, "queue_ms": 0.5, "wire_ms": 1.3},
        ],
    },
}
PLAN = {
    "stages": [
        {
            "layers": [0, 5],
            "weight_bytes": 6 << 20,
            "kv_bytes": 1 << 20,
            "parts": [{"devices": ["nvidia:0"]}],
        },
        {"layers": [5, 6], "weight_bytes": 1 << 20, "kv_bytes": 1 << 19},
    ]
}


def draw(tmp_path: Path, plan: object) -> subprocess.CompletedProcess[str]:
    (tmp_path / "run.json").write_text(json.dumps(RUN), encoding="utf-8")
    (tmp_path / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    files = [f"--{name}={tmp_path / name}.json" for name in ("run", "plan")]
    return subprocess.run(
        [sys.executable, ROOT / "scripts/draw_ring.py", *files, f"--out={tmp_path / 'ring.svg'}"],
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_picture_of_a_ring_shows_the_figures_of_its_run(tmp_path: Path) -> None:
    done = draw(tmp_path, PLAN)
    assert done.returncode == 0, done.stderr
    picture = (tmp_path / "ring.svg").read_text(encoding="utf-8")
    told = re.findall(r">([^<>\n]+)</text>", picture)
    assert "a/model &amp; more" in told
    assert "40 tokens/s" in told
    assert {"embedding, 5 layers", "1 layer, LM head"} <= set(told)
    assert {"7.0 MiB of memory", "1.5 MiB of memory"} <= set(told)
    assert {"12 ms a token", "7.5 ms a token", "the 25 ms of one token"} <= set(told)
    assert "1.3 ms" in told
    assert {"rank 0 · head · nvidia:0", "rank 1 · tail · CPU"} <= set(told)
    assert "http" not in picture.replace('xmlns="http://www.w3.org/2000/svg"', "")


def test_a_plan_of_other_layers_is_refused(tmp_path: Path) -> None:
    done = draw(tmp_path, {"stages": PLAN["stages"][:1]})
    assert done.returncode == 1
    assert "other layers" in done.stderr
