"""Who may import whom, as the design says; which modules stay pure; what stays clear of torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Top to bottom: a room may import itself and what stands right of it here.
BASE = {"errors", "types", "assets", "__init__"}
MAY_IMPORT = {
    "errors": set(),
    "types": {"errors"},
    "assets": set(),
    "__init__": set(),
    "wire": {*BASE},
    "model": {*BASE},
    "transport": {"wire", *BASE},
    "runtime": {"model", "transport", "wire", *BASE},
    "cluster": {"runtime", "model", "transport", "wire", *BASE},
    "api": {"cluster", "runtime", "model", "transport", "wire", *BASE},
    "cli": {"api", "cluster", "runtime", "model", "transport", "wire", *BASE},
}

NETWORK = {"asyncio", "uvloop", "socket", "socketserver", "ssl", "select", "selectors"}
CLOCKS_AND_CHANCE = {"time", "datetime", "random", "secrets", "uuid"}
IMPURE = NETWORK | CLOCKS_AND_CHANCE | {"os", "threading", "subprocess", "torch", "numpy"}
NOWHERE = {"transformers", "pickle", "cPickle", "marshal", "shelve", "importlib", "imp"}


def is_pure(path: str) -> bool:
    """Say whether a module decides and does nothing: no IO, no clocks, no chance, no tensors."""
    return path.startswith(
        (
            "shardnet/wire/",
            "shardnet/runtime/scheduler.py",
            "shardnet/runtime/roster.py",
            "shardnet/runtime/sequences.py",
            "shardnet/runtime/slot_book.py",
            "shardnet/runtime/step_cost.py",
            "shardnet/runtime/drafting.py",
            "shardnet/model/quantization.py",
            "shardnet/cluster/placement",
            "shardnet/cluster/diagnosis",
            "shardnet/cluster/refusals.py",
        )
    )


def forbidden_by(room: str, path: str) -> set[str]:
    """Foreign modules that a module may not import. `path` is relative to the checkout."""
    forbidden = set(NOWHERE)
    if is_pure(path):
        forbidden |= IMPURE
    if room == "model":
        forbidden |= NETWORK
    return forbidden


def room_of(path: str) -> str:
    parts = path.removesuffix(".py").split("/")
    return "cli" if parts[0] == "cli" else parts[1]


def imported_modules(path: str, source: str) -> Iterator[str]:
    """Every module named by an import statement anywhere in the source, as an absolute name."""
    package = path.removesuffix(".py").replace("cli/", "shardnet_cli/").split("/")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module in {"shardnet", "shardnet_cli"}:
                yield from (f"{module}.{alias.name}" for alias in node.names)
            else:
                yield module


def complaints(path: str, source: str) -> list[str]:
    """What a module's imports break, one line each."""
    room, found = room_of(path), []
    for module in imported_modules(path, source):
        top, *rest = module.split(".")
        if top == "shardnet_cli" and room != "cli":
            found.append(f"{path} imports {module}: only the command line may")
        elif top == "shardnet":
            target = rest[0] if rest and not rest[0].startswith("__") else "__init__"
            if target != room and target not in MAY_IMPORT[room]:
                found.append(f"{path} imports {module}: {room} may not import {target}")
        elif top in forbidden_by(room, path):
            found.append(f"{path} imports {module}: not allowed there")
    return found


def sources() -> dict[str, str]:
    """Path relative to the checkout → source, of every module that is installed."""
    files = [*ROOT.glob("shardnet/**/*.py"), *ROOT.glob("cli/**/*.py")]
    return {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in files}


def test_imports_go_downward_only() -> None:
    modules = sources()
    assert len(modules) > 10
    assert [line for path, source in modules.items() for line in complaints(path, source)] == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("shardnet/wire/frames.py", "import asyncio"),
        ("shardnet/wire/frames.py", "def f():\n    from time import monotonic"),
        ("shardnet/wire/frames.py", "from shardnet.transport.link import Link"),
        ("shardnet/wire/frames.py", "from ..model import codec"),
        ("shardnet/wire/frames.py", "from shardnet import model"),
        ("shardnet/runtime/scheduler.py", "import random"),
        ("shardnet/cluster/placement.py", "import torch.nn"),
        ("shardnet/cluster/placement_search.py", "import random"),
        ("shardnet/model/codec.py", "from shardnet.wire.frames import Frame"),
        ("shardnet/model/codec.py", "import asyncio.tasks"),
        ("shardnet/model/weights.py", "import pickle"),
        ("shardnet/transport/tcp.py", "from shardnet.model.codec import from_bytes"),
        ("shardnet/runtime/engine.py", "import shardnet.cluster.ring"),
        ("shardnet/errors.py", "from shardnet.types import DType"),
        ("shardnet/api/client.py", "import shardnet_cli.main"),
    ],
)
def test_a_broken_rule_is_found(path: str, source: str) -> None:
    assert len(complaints(path, source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("shardnet/wire/frames.py", "import struct\nfrom shardnet.types import DType"),
        ("shardnet/wire/frames.py", "from . import messages\nfrom .inbox import Inbox"),
        ("shardnet/runtime/engine.py", "import asyncio\nfrom shardnet.wire import messages"),
        ("shardnet/cluster/node.py", "from shardnet import __version__"),
        ("cli/main.py", "from shardnet.api.client import Client\nimport shardnet_cli.generate"),
    ],
)
def test_what_is_allowed_passes(path: str, source: str) -> None:
    assert complaints(path, source) == []


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )


def importable_without_torch() -> list[str]:
    rooms = {"wire", "transport", "api"}
    light = ("shardnet/model/config", "shardnet/model/layout", "shardnet/model/checkpoint")
    paths = [
        path
        for path in sources()
        if room_of(path) in rooms or path.startswith(light) or is_pure(path)
    ]
    names = (path.removesuffix(".py").removesuffix("/__init__") for path in paths)
    return sorted(name.replace("/", ".") for name in names)


def test_light_modules_are_imported_without_torch() -> None:
    modules = importable_without_torch()
    assert "shardnet.wire.frames" in modules
    imports = "".join(f"import {module}\n" for module in modules)
    result = run_python(imports + "import sys\nprint('torch' in sys.modules)")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "False"


@pytest.mark.skipif(not (ROOT / "cli" / "main.py").exists(), reason="no command line yet")
def test_help_is_shown_without_torch() -> None:
    code = """
import sys
from shardnet_cli.main import main
sys.argv = ["shardnet", "--help"]
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
heavy = {"torch", "transformers", "numpy", "tokenizers"} & set(sys.modules)
print("heavy:", *sorted(heavy))
"""
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    assert "generate" in result.stdout
    assert result.stdout.splitlines()[-1] == "heavy:"
