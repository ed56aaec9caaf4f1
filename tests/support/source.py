"""The source of what is installed, as text: its rooms, its modules, and what each says it does."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
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
        "fused",
        "families",
        "sampling",
    ],
    "checkpoint": ["tensors", "quantization", "formats", ""],
    "tokenizers": ["chat", "backends", "formats", "", "grammar"],
    "stage": ["estimate", "packs", "streaming", "prefixes", "shards", ""],
    "runtime": ["scheduling", "processors", "stage", "shards", "loading", "ring", "engine"],
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
        "router",
        "recovery",
        "diagnosis",
        "node",
    ],
    "api": [
        *("chat_formats", "chat_grammars", "", "chat", "switching", "server"),
        *("openai", "responses", "anthropic", "ollama", "dashboard", "serve"),
    ],
    "cli": ["output", "flags", "finding", "conversation", "commands", "services", ""],
}
"""Low to high: a room may import those before it. "" is the package's own folder."""

TABLE_HEAD = "| module | what it does |\n|---|---|\n"


def sources() -> dict[str, str]:
    """Path relative to the checkout → source, of every module that is installed."""
    files = [*ROOT.glob("shardnet/**/*.py"), *ROOT.glob("cli/**/*.py")]
    return {file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8") for file in files}


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
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.partition("\n\n")[0].split())


def structure_table() -> str:
    """The table of docs/structures.md: every room and every module, as their docstrings say."""
    rows = [_row(f"`{path.name}`", path) for path in modules_of(ROOT / "shardnet")]
    for name, folder in room_folders():
        rows.append(_row(f"**{name}/**", folder / "__init__.py"))
        rows += [_row(f"`{path.name}`", path) for path in modules_of(folder)]
    return TABLE_HEAD + "".join(rows)


def _row(name: str, path: Path) -> str:
    cell = re.sub(r"docs/([\w-]+)\.md", r"[\1](\1.md)", summary(path).replace("|", r"\|"))
    return f"| {name} | {cell} |\n"
