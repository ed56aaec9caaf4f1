"""The source of what is installed, as text: its rooms, its modules, and what each says it does."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path

ROOT = Path(__file__).parents[2]

ROOMS: dict[str, list[str]] = {
    "guard": [""],
    "wire": ["framing", "messages", "payloads", "connection"],
    "transport": [""],
    "model": [
        "config",
        "kernels",
        "arithmetic",
        "cache",
        "shards",
        "layers",
        "mixers",
        "vision",
        "drivers",
        "devices",
        "fused",
        "drafters",
        "modules",
        "families",
        "sampling",
    ],
    "checkpoint": ["tensors", "quantization", "formats", "adapters", ""],
    "tokenizers": ["chat", "backends", "formats", "", "grammar"],
    "stage": ["estimate", "packs", "streaming", "prefixes", "shards", "moves", "adapters", ""],
    "runtime": [
        "scheduling",
        "processors",
        "stage",
        "shards",
        "loading",
        "encoding",
        "ring",
        "engine",
    ],
    "cluster": [
        "pressure",
        "machine",
        "discovery",
        "peers",
        "store",
        "download",
        "sharing",
        "placement",
        "member",
        "ring",
        "measuring",
        "planning",
        "deputy",
        "head",
        "household",
        "router",
        "recovery",
        "diagnosis",
        "node",
    ],
    "api": [
        *("chat_formats", "chat_grammars", "", "chat", "switching", "server"),
        *("openai", "responses", "anthropic", "ollama", "batches", "dashboard", "serve"),
    ],
    "cli": ["output", "flags", "finding", "conversation", "commands", "services", ""],
}
"""Low to high: a room may import those before it. "" is the package's own folder."""

UNLIMITED = {"shardnet/model/families"}
"""Rooms that grow by one file for each model family: nobody reads them from end to end."""
TEXTS = {
    "csrc": "shardnet/model/kernels/csrc/*.[ch]",
    "kernel text": "shardnet/model/devices/text/*.h",
    "page": "shardnet/api/dashboard/page/*.*s",
}
"""What is installed beside Python: the compiled library, the kernels of GPUs, the dashboard."""
_COMMENT = re.compile(r"^\s*(?:/\*.*?\*/|//[^\n]*)[ \t]*$", re.DOTALL | re.MULTILINE)
TABLE_HEAD = "| module | what it does |\n|---|---|\n"


def sources() -> dict[str, str]:
    """Path relative to the checkout → source, of every module that is installed."""
    files = [*ROOT.glob("shardnet/**/*.py"), *ROOT.glob("cli/**/*.py")]
    return {file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8") for file in files}


@lru_cache(maxsize=1)
def nodes(source: str) -> list[ast.AST]:
    """All of a module but how a name is used and which operator stands.

    Of one module at a time: all take 200 MB, and twice the time. ast.walk is slower too.
    """
    found: list[ast.AST] = [ast.parse(source)]
    for node in found:  # which grows meanwhile
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, list):
                found += [each for each in value if isinstance(each, ast.AST)]
            elif isinstance(value, ast.AST) and name not in ("ctx", "op"):
                found.append(value)
    return found


def module_of(path: str) -> str:
    """The absolute name of the module at a path."""
    return path.removesuffix(".py").replace("cli/", "shardnet_cli/").replace("/", ".")


@cache
def imported_modules(path: str, source: str) -> tuple[str, ...]:
    """Everything named by an import statement anywhere in the source, by absolute names."""
    return tuple(_imported(path, source))


def _imported(path: str, source: str) -> Iterator[str]:
    package = module_of(path).split(".")[:-1]
    for node in nodes(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module.startswith("shardnet"):
                yield from (f"{module}.{alias.name}" for alias in node.names)
            else:
                yield module


def importers(modules: dict[str, str]) -> dict[str, set[str]]:
    """Path → paths of the modules that import it."""
    paths = {module_of(path): path for path in modules}
    found: dict[str, set[str]] = {path: set() for path in modules}
    for path, source in modules.items():
        for name in imported_modules(path, source):
            for module in (name, name.rpartition(".")[0]):
                if module in paths and paths[module] != path:
                    found[paths[module]].add(path)
    return found


@cache
def code_lines(source: str) -> int:
    """Count the lines of code: none that are blank, comments or docstrings."""
    lines = enumerate(source.split("\n"), 1)
    code = {number for number, line in lines if line.strip() and line.strip()[0] != "#"}
    docstrings: set[int] = set()
    for node in nodes(source):
        if isinstance(node, ast.Expr) and _is_text(node.value):
            docstrings |= _lines_of(node)
        elif isinstance(node, ast.expr) and _is_text(node):
            code |= _lines_of(node)
    return len(code - docstrings)


def _is_text(node: ast.expr) -> bool:
    is_constant = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_constant or isinstance(node, ast.JoinedStr)


def _lines_of(node: ast.expr | ast.stmt) -> set[int]:
    return {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def modules_of(folder: Path) -> list[Path]:
    """The modules of one folder, by name, its __init__.py and __main__.py left out."""
    return [path for path in sorted(folder.glob("*.py")) if not path.name.startswith("__")]


def room_folders() -> Iterator[tuple[str, Path]]:
    """Each room's name as people write it, and its folder, low to high."""
    for package, rooms in ROOMS.items():
        for room in rooms:
            name = f"{package}/{room}".rstrip("/")
            yield name, (ROOT if package == "cli" else ROOT / "shardnet") / name


def summary(path: Path) -> str:
    """The first paragraph of a module's docstring, which says what the module does."""
    text = path.read_text(encoding="utf-8")
    head = re.match(r'(?:#.*\n|\s)*(""".*?""")', text, re.DOTALL)  # to parse it all takes long
    docstring = "" if head is None else inspect.cleandoc(ast.literal_eval(head[1]))
    return " ".join(docstring.partition("\n\n")[0].split())


@cache
def structure_table() -> str:
    """The table of docs/structures.md: every room and every module, as their docstrings say."""
    rows = [_row(f"`{path.name}`", path) for path in modules_of(ROOT / "shardnet")]
    for name, folder in room_folders():
        rows.append(_row(f"**{name}/**", folder / "__init__.py"))
        rows += [_row(f"`{path.name}`", path) for path in modules_of(folder)]
    return TABLE_HEAD + "".join(rows)


def lines_by_package() -> dict[str, int]:
    """How many lines of code each package has, and each kind of text beside Python."""
    sums: dict[str, int] = {}
    for path, source in sources().items():
        sums[_package(path)] = sums.get(_package(path), 0) + code_lines(source)
    for name, pattern in TEXTS.items():
        texts = (_COMMENT.sub("", file.read_text(encoding="utf-8")) for file in ROOT.glob(pattern))
        sums[name] = sum(bool(line.strip()) for text in texts for line in text.splitlines())
    return sums


def _package(path: str) -> str:
    parts = path.removeprefix("shardnet/").split("/")
    return parts[0] if len(parts) > 1 else "root"


def size_table() -> str:
    """How many files, lines and lines of code each package has."""
    sizes: dict[str, list[int]] = {}
    for path, source in sources().items():
        sums = sizes.setdefault(_package(path), [0, 0, 0])
        for place, n in enumerate((1, source.count("\n"), code_lines(source))):
            sums[place] += n
    rows = sorted(sizes.items(), key=lambda one: -one[1][2])
    rows.append(("sum", [sum(column) for column in zip(*sizes.values(), strict=True)]))
    head = "| room | files | lines | code |\n|---|---|---|---|\n"
    return head + "".join(
        f"| {name} | {n} | {all_of} | {code} |\n" for name, (n, all_of, code) in rows
    )


def _row(name: str, path: Path) -> str:
    cell = re.sub(r"docs/([\w-]+)\.md", r"[\1](\1.md)", summary(path).replace("|", r"\|"))
    return f"| {name} | {cell} |\n"
