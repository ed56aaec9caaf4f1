"""Who may import whom, as the design says; which modules stay pure; what stays clear of torch.

What is imported is declared, and what is declared is imported, each for a reason.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from functools import cache

import pytest
from support.source import (
    ROOMS,
    ROOT,
    UNLIMITED,
    imported_modules,
    module_of,
    nodes,
    sources,
)

# Low to high: a package may import itself and those named beside it, which stand above it here.
BASE = {
    "errors",
    "json_references",
    "json_schemas",
    "constraints",
    "types",
    "assets",
    "windows",
    "__init__",
} | {
    *("sampling_params", "output_params", "slot_operations", "stage_form"),
}
PACKAGES: dict[str, set[str]] = {
    "errors": set(),
    "json_references": {"errors"},
    "json_schemas": {"errors", "json_references"},
    "constraints": {"errors", "json_schemas"},
    "types": {"errors", "constraints"},
    "sampling_params": {"errors", "types"},
    "output_params": {"errors", "types", "sampling_params"},
    "slot_operations": {"errors", "types", "sampling_params", "output_params"},
    "stage_form": {"errors", "types"},
    "assets": set(),
    "windows": set(),
    "permissions": {"windows"},
    "files": {"permissions", "windows"},
    "plugins": {"errors"},
    "installation": {"errors"},
    "threads": {"windows"},
    "__init__": set(),
    "guard": {"errors", "windows"},
    "wire": {*BASE},
    "transport": {"wire", *BASE},
    "model": {"threads", *BASE},
    "checkpoint": {"model", "files", *BASE},
    "tokenizers": {"guard", "checkpoint", "model", "files", *BASE},
    "stage": {"tokenizers", "checkpoint", "model", "files", "threads", *BASE},
}
PACKAGES["runtime"] = {
    *("wire", "transport", "model", "checkpoint", "tokenizers", "stage", "threads", "plugins"),
    *BASE,
}
PACKAGES["cluster"] = {
    *("runtime", "files", "permissions", "guard", "installation"),
    *PACKAGES["runtime"],
}
PACKAGES["api"] = {"cluster", *PACKAGES["cluster"]}
PACKAGES["cli"] = {"api", *PACKAGES["api"]}

MOST_FILES = 16
"""In a room, beside its __init__.py."""
NETWORK = {"asyncio", "uvloop", "socket", "socketserver", "ssl", "select", "selectors"}
CLOCKS_AND_CHANCE = {"time", "datetime", "random", "secrets", "uuid"}
IMPURE = NETWORK | CLOCKS_AND_CHANCE | {"os", "threading", "subprocess", "torch", "numpy"}
NOWHERE = {"transformers", "pickle", "cPickle", "marshal", "shelve", "importlib", "imp"}
ALLOWED = {
    "shardnet/plugins.py": {"importlib"},
    "shardnet/installation.py": {"importlib"},
    "cli/main.py": {"importlib"},
    "shardnet/runtime/encoding/encoder.py": {"transformers"},
}
"""What installed packages add, and what of shardnet is installed; the commands in a table; classes
of the extra."""
OWN = {"shardnet", "shardnet_cli"}
IMPORTED_AS = {"pillow": "PIL"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module", autouse=True)
def _look_once() -> None:
    """Look at a module for all tests while it is parsed; what was found is kept, its tree not."""
    for path, source in sources().items():
        imported_modules(path, source)
        asks_for_family(source)


def is_pure(path: str) -> bool:
    """Say whether a module decides and does nothing: no IO, no clocks, no chance, no tensors."""
    return path.startswith(
        (
            "shardnet/wire/",
            "shardnet/runtime/scheduling/",
            "shardnet/model/config/",
            "shardnet/cluster/placement/",
            "shardnet/cluster/pressure/",
            "shardnet/cluster/diagnosis/",
            "shardnet/cluster/deputy/copied_requests.py",
            "shardnet/cluster/recovery/policy.py",
            "shardnet/cluster/router/choosing.py",
            "shardnet/api/chat_formats/",
            "shardnet/api/chat_grammars/",
            "shardnet/cluster/peers/rejected_handshakes.py",
        )
    )


def forbidden_by(package: str, path: str) -> set[str]:
    """Foreign modules that a module may not import. `path` is relative to the checkout."""
    forbidden = set(NOWHERE) - ALLOWED.get(path, set())
    if path.startswith("shardnet/model/modules/"):
        forbidden -= {"transformers"}
    if is_pure(path):
        forbidden |= IMPURE
    if package in {"model", "checkpoint", "tokenizers", "stage"}:
        forbidden |= NETWORK
    return forbidden


def place_of(module: str) -> tuple[str, str]:
    """The package and the room of a module, by its absolute name."""
    top, *parts = module.split(".")
    if top == "shardnet_cli":
        parts = ["cli", *parts]
    package = parts[0] if parts and not parts[0].startswith("__") else "__init__"
    room = parts[1] if len(parts) > 1 and parts[1] in ROOMS.get(package, ()) else ""
    return package, room


def complaints(path: str, source: str) -> list[str]:
    """What a module's imports break, one line each."""
    package, room = place_of(module_of(path))
    found = []
    for module in imported_modules(path, source):
        top = module.split(".")[0]
        if not top.startswith("shardnet"):
            if top in forbidden_by(package, path):
                found.append(f"{path} imports {module}: not allowed there")
            continue
        target, target_room = place_of(module)
        rooms = ROOMS.get(package, [])
        if target != package:
            if target not in PACKAGES[package]:
                found.append(f"{path} imports {module}: {package} may not import {target}")
        elif room in rooms and rooms.index(target_room) > rooms.index(room):
            found.append(f"{path} imports {module}: {room} may not import {target_room or target}")
    # Python before 3.11.4 makes a group of what is raised there, a cancellation too.
    for node in nodes(source):
        handlers = node.handlers if isinstance(node, ast.TryStar) else []
        inner = [each for handler in handlers for each in ast.walk(handler)]
        if any(isinstance(each, ast.Raise | ast.Await) for each in inner):
            found.append(f"{path} raises or awaits in an except*")
    return found


def test_every_module_is_in_a_room() -> None:
    for path in sources():
        package, *inside = path.removeprefix("shardnet/").split("/")
        if path in {"cli/main.py", "cli/__main__.py"} or "__init__" in path or not inside:
            continue
        if package == "assets":
            continue
        room = inside[0] if len(inside) > 1 else ""
        assert room in ROOMS[package], f"{path} is in no room"
        assert len(inside) <= 2, f"{path} is a room in a room"


def test_no_room_is_crowded() -> None:
    folders = Counter(path.rpartition("/")[0] for path in sources() if "__init__" not in path)
    crowded = {folder: n for folder, n in folders.items() if n > MOST_FILES}
    assert crowded.keys() <= UNLIMITED, crowded


def test_imports_go_downward_only() -> None:
    modules = sources()
    assert len(modules) > 10
    assert [line for path, source in modules.items() for line in complaints(path, source)] == []


@cache
def asks_for_family(source: str) -> bool:
    """Whether something is decided by the name of a model's family."""
    decisions: list[ast.AST] = []
    for node in nodes(source):
        if isinstance(node, ast.Compare):
            decisions += [node.left, *node.comparators]
        elif isinstance(node, ast.Match):
            decisions.append(node.subject)
        elif isinstance(node, ast.Subscript):
            decisions.append(node.slice)
    return any(isinstance(node, ast.Attribute) and node.attr == "family" for node in decisions)


def test_no_other_room_asks_which_family_a_model_is_of() -> None:
    assert asks_for_family("if config.family == 'llama': pass")
    assert asks_for_family("NAMES[config.family]")
    rest = {path: text for path, text in sources().items() if "/model/families/" not in path}
    assert [path for path, text in rest.items() if asks_for_family(text)] == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("shardnet/wire/framing/frames.py", "import asyncio"),
        ("shardnet/api/client.py", "try: f()\nexcept* OSError as group: raise group"),
        ("shardnet/wire/framing/frames.py", "def f():\n    from time import monotonic"),
        ("shardnet/wire/framing/frames.py", "from shardnet.transport.link import Link"),
        ("shardnet/wire/framing/frames.py", "from ...model.kernels import codec"),
        ("shardnet/wire/framing/frames.py", "from shardnet import model"),
        ("shardnet/wire/framing/frames.py", "from ..messages import stages"),
        ("shardnet/wire/messages/plans.py", "import shardnet.wire.payloads.data"),
        ("shardnet/runtime/scheduling/scheduler.py", "import random"),
        ("shardnet/runtime/scheduling/scheduler.py", "from shardnet.runtime import engine"),
        ("shardnet/cluster/placement/placement.py", "import torch.nn"),
        ("shardnet/cluster/placement/split.py", "import random"),
        ("shardnet/cluster/machine/profile.py", "from shardnet.cluster.ring import ring"),
        ("shardnet/cluster/sharing/sharing.py", "from shardnet.cluster.head.head import Head"),
        ("shardnet/model/config/fields.py", "import torch"),
        ("shardnet/model/kernels/codec.py", "from shardnet.wire.framing.frames import Frame"),
        ("shardnet/model/kernels/codec.py", "import asyncio.tasks"),
        ("shardnet/model/layers/modules.py", "from shardnet.model.families import llama"),
        ("shardnet/model/layers/modules.py", "from shardnet.stage.weights import StageWeights"),
        ("shardnet/checkpoint/tensors/manifest.py", "from shardnet.checkpoint import replica"),
        ("shardnet/checkpoint/checkpoint.py", "import socket"),
        ("shardnet/stage/weights.py", "import pickle"),
        ("shardnet/cluster/node/node.py", "from importlib import metadata"),
        ("shardnet/tokenizers/tokenizer.py", "from shardnet.stage import load"),
        ("shardnet/transport/tcp.py", "from shardnet.model.kernels.codec import from_bytes"),
        ("shardnet/runtime/engine/engine.py", "import shardnet.cluster.ring.ring"),
        ("shardnet/errors.py", "from shardnet.types import DType"),
        ("shardnet/api/client.py", "import shardnet_cli.main"),
        ("cli/output/progress.py", "from ..commands import generate"),
    ],
)
def test_a_broken_rule_is_found(path: str, source: str) -> None:
    assert len(complaints(path, source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("shardnet/wire/framing/frames.py", "import struct\nfrom shardnet.types import DType"),
        ("shardnet/wire/messages/plans.py", "from ..framing import schema\nfrom . import narrow"),
        ("shardnet/wire/messages/plans.py", "from .narrow import NarrowWire"),
        ("shardnet/runtime/engine/engine.py", "import asyncio\nfrom shardnet.wire import messages"),
        ("shardnet/cluster/node/node.py", "from shardnet import __version__"),
        ("shardnet/stage/load.py", "from shardnet.stage.streaming import buffers"),
        ("cli/main.py", "from shardnet.api.client import Client\nfrom .commands import generate"),
    ],
)
def test_what_is_allowed_passes(path: str, source: str) -> None:
    assert complaints(path, source) == []


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )


def importable_without_torch() -> list[str]:
    light = (
        "shardnet/wire/",
        "shardnet/transport/",
        "shardnet/api/",
        "shardnet/model/families/",
        "shardnet/checkpoint/checkpoint",
        "shardnet/stage/estimate/memory_estimate",
    )
    paths = [path for path in sources() if path.startswith(light) or is_pure(path)]
    names = (path.removesuffix(".py").removesuffix("/__init__") for path in paths)
    return sorted(name.replace("/", ".") for name in names)


def test_light_modules_are_imported_without_torch() -> None:
    modules = importable_without_torch()
    assert "shardnet.wire.framing.frames" in modules
    imports = "".join(f"import {module}\n" for module in modules)
    result = run_python(imports + "import sys\nprint('torch' in sys.modules)")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "False"


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


def test_the_declared_dependencies_are_the_imported_ones() -> None:
    extras = PROJECT["optional-dependencies"]
    lines = [*PROJECT["dependencies"], *extras["transformers"], *extras["opencl"]]
    declared = {IMPORTED_AS.get(name, name.replace("-", "_")) for name in map(package_of, lines)}
    found = {
        module.partition(".")[0]
        for path, source in sources().items()
        for module in imported_modules(path, source)
    }
    assert found - sys.stdlib_module_names - OWN == declared


def test_every_dependency_has_its_reason() -> None:
    reasons = (ROOT / "docs" / "adr" / "0001-libraries.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\*\*([\w-]+)\*\*", reasons))
    for line in PROJECT["dependencies"]:
        assert package_of(line) in named


def package_of(line: str) -> str:
    """The package that a line of pyproject.toml names."""
    found = re.match(r"[\w-]+", line)
    assert found is not None
    return found[0]
