"""What of shardnet is installed here, how it is replaced, and files between a node and its keeper.

A keeper (cli/services/keeper.py) runs a node as its child, and installs another version when the
node has ended for that. Imports next to nothing: who replaces an installation has all it needs in
memory before, and stays small.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Final
from zipfile import ZipFile

from shardnet.errors import ConfigurationError

PACKAGE: Final = "shardnet"
WHEEL_NAME: Final = re.compile(rf"{PACKAGE}-[\w.+!]+(-\w+)?-[\w.]+-[\w.]+-[\w.]+\.whl", re.ASCII)
INSTALL_S: Final = 300.0
"""How long an installer may take."""
_NOT_IN_WHEELS: Final = {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"}
"""Files of the folder *.dist-info that an installer writes itself."""
_MOST_SAID: Final = 600
_CHECKOUT: Final = "it runs from a checkout: update that checkout"


def why_fixed() -> str:
    """Return why the running installation cannot be replaced from here, "" if it can."""
    try:
        found = distribution(PACKAGE)
    except PackageNotFoundError:
        return _CHECKOUT
    origin = json.loads(found.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):
        return f"it is an editable install of {origin.get('url')}: update that checkout"
    folder = Path(str(found.locate_file("")))
    is_here = folder.joinpath(PACKAGE).is_dir() and Path(__file__).is_relative_to(folder)
    if not is_here or found.read_text("WHEEL") is None:  # else a build has left its metadata there
        return _CHECKOUT
    if found.files is None:
        return f"who installed it in {folder} has left no list of its files (RECORD)"
    if not os.access(folder / PACKAGE, os.W_OK) or not os.access(folder, os.W_OK):
        return f"{folder} may not be written here: update it as its owner, an image by a new one"
    if _installer() is None:
        return f"neither pip nor uv is there to install into {sys.prefix}"
    return ""


def check(wheel: Path) -> None:
    """Raise ConfigurationError if a wheel does not fit this Python, or needs what is not there."""
    _install("--dry-run", str(wheel))


def install(wheel: Path) -> None:
    """Put a wheel in the place of what is installed. Raises ConfigurationError."""
    _install("--no-deps", "--force-reinstall", str(wheel))


def save(folder: Path) -> Path:
    """Write what is installed into `folder` as a wheel, and return its path.

    Raises OSError if that fails, or a file of it is gone.
    """
    found = distribution(PACKAGE)
    files = [f for f in found.files or () if f.suffix != ".pyc" and f.parts[0] != ".."]
    kept = [file for file in files if not (_is_info(file.parts[0]) and file.name in _NOT_IN_WHEELS)]
    [info] = {file.parts[0] for file in kept if _is_info(file.parts[0])}
    path = folder / f"{PACKAGE}-{found.version}-{_tag(found)}.whl"
    record = io.StringIO(newline="")
    rows = csv.writer(record, lineterminator="\n")
    with ZipFile(path, "w") as wheel:
        for file in kept:
            wheel.write(str(found.locate_file(file)), file.as_posix())
            hashed = f"{file.hash.mode}={file.hash.value}" if file.hash else ""
            rows.writerow((file.as_posix(), hashed, file.size or ""))
        rows.writerow((f"{info}/RECORD", "", ""))
        wheel.writestr(f"{info}/RECORD", record.getvalue())
    return path


def _is_info(folder: str) -> bool:
    return folder.endswith(".dist-info")


def _tag(found: Distribution) -> str:
    tag = re.search(r"^Tag: *(\S+)", found.read_text("WHEEL") or "", re.MULTILINE)
    return tag[1] if tag else "py3-none-any"


def _installer() -> list[str] | None:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    uv = shutil.which("uv")
    return None if uv is None else [uv, "pip", "install", "--python", sys.executable]


def _install(*arguments: str) -> None:
    """Install without asking any index. Raises ConfigurationError with what the installer says."""
    command = [*(_installer() or ["pip", "install"]), "--quiet", "--no-index", *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=INSTALL_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(f"`{' '.join(command[:4])}` failed: {error}") from error
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())[:_MOST_SAID]
        raise ConfigurationError(said or f"the installer ended with status {done.returncode}")


ENDS_WITH_STDIN: Final = "SHARDNET_ENDS_WITH_STDIN"
"""Set for a node whose parent tells it to end by closing its standard input: as it does when it is
gone, and on Windows, where what ends a task sends no signal."""
KEEPER_VARIABLE: Final = "SHARDNET_KEEPER"
"""Names the folder of the keeper whose child a node is."""
EXIT_UPDATE: Final = 75
"""The status of a node that has ended for its keeper to install another version."""


@dataclass(frozen=True, slots=True)
class KeeperFolder:
    """The folder through which a node and its keeper speak; they may be of unlike versions.

    Files in it: `order`, what the node has the keeper do when it has ended; `kept`, that the
    version which was installed last stays; `failure`, why it does not; `successor`, where the node
    is that leads in place of the one which has ended for it.
    """

    path: Path

    def read(self, name: str) -> str:
        """Return the text of a file, "" without one."""
        file = self.path / name
        return file.read_text(encoding="utf-8") if file.exists() else ""

    def write(self, name: str, text: str) -> None:
        """Write a file."""
        (self.path / name).write_text(text, encoding="utf-8")

    def drop(self, *patterns: str) -> None:
        """Delete files."""
        for pattern in patterns:
            for file in self.path.glob(pattern):
                file.unlink()

    def order(self, wheel: Path, within_s: float, successor: str) -> None:
        """Have a wheel installed when the node has ended; it stays if kept within so long."""
        self.drop("failure")
        self.write("successor", successor)
        self.write("order", json.dumps({"wheel": wheel.name, "within_s": within_s}))

    def take_order(self) -> tuple[Path, float] | None:
        """Return what was ordered since, None without an order."""
        if not (told := self.read("order")):
            return None
        self.drop("order", "kept")
        ordered = json.loads(told)
        return self.path / Path(ordered["wheel"]).name, float(ordered["within_s"])
