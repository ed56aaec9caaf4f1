"""Environments with a version of shardnet of their own: all else is that of the tests.

A wheel is what is in this checkout, with the library that is compiled here, under any version.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import shutil
import sysconfig
import venv
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import distribution
from importlib.util import MAGIC_NUMBER, cache_from_source, source_hash
from pathlib import Path
from types import MappingProxyType

from shardnet import __version__

ROOT = Path(__file__).parents[3]
TAG = f"py3-none-{re.sub('[-.]', '_', sysconfig.get_platform())}"
WHEEL = f"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: false\nTag: {TAG}\n"
KEEPERS = ("__init__", "errors", "windows", "installation", "guard/__init__", "guard/children")
"""What a keeper imports of shardnet."""


def make_wheel(
    folder: Path,
    version: str,
    before: Mapping[str, str] = MappingProxyType({}),
    *,
    requires: str = "",
    main: str = "",
) -> Path:
    """Write a wheel of this checkout as `version`, with text `before` that of some files.

    It `requires` one thing more. With a `main` it has little more than a keeper needs, and that
    text as what `python -m shardnet_cli` runs.
    """
    path, info = folder / f"shardnet-{version}-{TAG}.whl", f"shardnet-{version}.dist-info"
    found = distribution("shardnet")  # in a checkout it may be what setuptools left there
    metadata = found.read_text("METADATA") or found.read_text("PKG-INFO") or ""
    metadata = re.sub(r"(?m)^Version: .*$", f"Version: {version}", metadata, count=1)
    if requires:
        metadata = metadata.replace(
            "\nRequires-Dist:", f"\nRequires-Dist: {requires}\nRequires-Dist:", 1
        )
    files = dict(_small(main) if main else _all())
    if not main:
        files |= dict(_bytecode(files.keys() - before.keys() - {"shardnet/__init__.py"}))
    init = files["shardnet/__init__.py"].replace(__version__.encode(), version.encode())
    files["shardnet/__init__.py"] = init
    for name, text in before.items():
        files[name] = text.encode() + files[name]
    files |= {f"{info}/METADATA": metadata.encode(), f"{info}/WHEEL": WHEEL.encode()}
    record = io.StringIO(newline="")
    rows = csv.writer(record)
    with zipfile.ZipFile(path, "w") as wheel:
        for name, content in files.items():
            wheel.writestr(name, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode()
            rows.writerow((name, f"sha256={digest.rstrip('=')}", len(content)))
        rows.writerow((f"{info}/RECORD", "", ""))
        wheel.writestr(f"{info}/RECORD", record.getvalue())
    return path


def _all() -> Iterator[tuple[str, bytes]]:
    for top, to in (("shardnet", "shardnet"), ("cli", "shardnet_cli")):
        for path in sorted((ROOT / top).rglob("*")):
            if path.is_file() and path.suffix != ".pyc" and "csrc" not in path.parts:
                yield f"{to}/{path.relative_to(ROOT / top).as_posix()}", path.read_bytes()


def _bytecode(names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """What this checkout has compiled, as files that need no source's time: that saves 5 s a node.

    Of other files, as of those that are no longer what was compiled, there is none.
    """
    for name in names:
        top, _, inside = name.partition("/")
        path = ROOT / ("cli" if top == "shardnet_cli" else top) / inside
        if path.suffix != ".py" or not path.exists():
            continue
        cached, found = Path(cache_from_source(str(path))), path.stat()
        of = int(found.st_mtime).to_bytes(4, "little") + found.st_size.to_bytes(4, "little")
        if cached.exists() and (compiled := cached.read_bytes())[8:16] == of:
            header = MAGIC_NUMBER + (1).to_bytes(4, "little") + source_hash(path.read_bytes())
            yield (
                f"{Path(name).parent.as_posix()}/__pycache__/{cached.name}",
                header + compiled[16:],
            )


def _small(main: str) -> Iterator[tuple[str, bytes]]:
    for name in KEEPERS:
        yield f"shardnet/{name}.py", (ROOT / "shardnet" / f"{name}.py").read_bytes()
    yield "shardnet_cli/__init__.py", b""
    yield "shardnet_cli/__main__.py", main.encode()
    yield "shardnet_cli/services/__init__.py", b""
    yield "shardnet_cli/services/keeper.py", (ROOT / "cli/services/keeper.py").read_bytes()


def make_environment(folder: Path, wheel: Path) -> Path:
    """Make an environment with what is in a wheel, and else with what the tests run with.

    Returns its Python.
    """
    venv.EnvBuilder(symlinks=True).create(folder)
    [packages] = folder.glob("lib/*/site-packages")
    (packages / "all_else.pth").write_text(sysconfig.get_path("purelib") + "\n")
    shutil.unpack_archive(wheel, packages, "zip")
    return folder / "bin" / "python"
