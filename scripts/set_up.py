"""Makes .venv and installs this checkout into it, once; for every system.

What was installed is remembered by a hash of what decides what is installed and built, so a second
call does nothing; nor does one where no library could be built. One that is gone is built again.

On Linux a plain package index serves torch built for CUDA, gigabytes of it. Without an NVIDIA
driver torch alone therefore comes from PyTorch's index of CPU builds, unless pip is configured
with an index of its own. SHARDNET_TORCH_INDEX names another index for torch; empty, pip's own.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PROGRAMS = VENV / ("Scripts" if sys.platform == "win32" else "bin")
PYTHON = PROGRAMS / ("python.exe" if sys.platform == "win32" else "python")
LIBRARY = "_quantized.dll" if sys.platform == "win32" else "_quantized.so"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
REACHED_S = 8
"""Deadline for the first answer of that index, of all its addresses together."""
OLDEST = (3, 11)


class SetUpError(Exception):
    """What could not be installed, and what to do."""


def say(line: str) -> None:
    """Print a line on standard error."""
    print(f"==> {line}", file=sys.stderr, flush=True)


def set_up(extra: str = "") -> None:
    """Install what it takes to run shardnet, with `dev` what it takes to test it too.

    Raises SetUpError.
    """
    version = python_version()
    if version is None:
        make_environment()
        version = python_version() or ""
    found = installation_hash(version)
    stamps = [VENV / ".installed-dev", VENV / (f".installed-{extra}" if extra else ".installed")]
    if any(stamp.exists() and stamp.read_text().strip() == found for stamp in stamps):
        return
    say("installing shardnet and what it needs into .venv (once)")
    if not install_packages(extra):
        raise SetUpError("pip could not install the packages; its message stands above")
    stamps[-1].write_text(installation_hash(version))


def python_version() -> str | None:
    """Return sys.version of the environment's interpreter, None if it cannot be used."""
    ask = f"import sys; sys.version_info < {OLDEST} and sys.exit(1); print(sys.version)"
    try:
        asked = subprocess.run([PYTHON, "-c", ask], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return asked.stdout.removesuffix("\n") if asked.returncode == 0 else None


def make_environment() -> None:
    """Make the virtual environment anew. Raises SetUpError."""
    say(f"making a virtual environment in {VENV} with {sys.executable}")
    made = [sys.executable, "-m", "venv", "--clear", str(VENV)]
    if subprocess.run(made, check=False).returncode:
        raise SetUpError(
            f"{sys.executable} cannot make a virtual environment; install its venv module "
            "(for example: apt install python3-venv)"
        )


def installation_hash(version: str, root: Path = ROOT) -> str:
    """Return what identifies an installation: the files that name its packages, and where it is."""
    digest = hashlib.sha256(f"{root} {version}".encode())
    kernels = root / "shardnet" / "model" / "kernels"
    sources = sorted((kernels / "csrc").iterdir())
    for path in (root / "pyproject.toml", root / "constraints.txt", root / "setup.py", *sources):
        digest.update(path.read_bytes())
    if not (kernels / LIBRARY).exists():
        digest.update(b"without the library")
    return digest.hexdigest()


def install_packages(extra: str) -> bool:
    """Install what shardnet needs; return whether that went well.

    Meanwhile its library is compiled: each takes a minute.
    """
    with subprocess.Popen(pip("--no-deps", "-e", str(ROOT)), stdout=sys.stderr) as building:
        install_torch()
        went_well = pip_install(*requirements(extra))
        return building.wait() == 0 and went_well


def pip(*arguments: str) -> list[str]:
    """Return a call of pip, blind to what lies in the current folder.

    Bytecode is made of what is imported, when it is: of everything it takes longer, and 170 MB.
    """
    own = ["--disable-pip-version-check", "install", "--no-compile"]
    return [str(PYTHON), "-P", "-m", "pip", *own, "-c", str(ROOT / "constraints.txt"), *arguments]


def pip_install(*arguments: str) -> bool:
    """Have pip install; return whether it did."""
    return subprocess.run(pip(*arguments), stdout=sys.stderr, check=False).returncode == 0


def requirements(extra: str) -> list[str]:
    """Return what pyproject.toml says shardnet needs, an extra's packages included."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    more = project["optional-dependencies"][extra] if extra else []
    return [*project["dependencies"], *more]


def install_torch() -> None:
    """Install torch from where this machine's build of it is, or leave it to pip's own index."""
    if has_torch():
        return
    named = os.environ.get("SHARDNET_TORCH_INDEX")
    if named:
        say(f"torch comes from {named}")
        if not pip_install("--no-deps", "--index-url", named, "torch"):
            raise SetUpError(
                "SHARDNET_TORCH_INDEX: pip could not install torch; its message stands above"
            )
    elif named is not None:
        say("torch comes from pip's own index")
    elif (platform.system(), platform.machine()) not in (("Linux", "x86_64"), ("Linux", "aarch64")):
        return
    elif has_own_index():
        say("torch comes from where pip is configured to look for packages")
    elif has_nvidia():
        say("here is an NVIDIA driver: torch comes with CUDA (about 2.7 GB, 5 GB on disk)")
    elif not is_reachable(CPU_INDEX):
        say(
            "PyTorch's CPU index does not answer: torch comes from pip's own index, perhaps with "
            "CUDA (2.7 GB)"
        )
    else:
        say("no NVIDIA driver: torch comes from PyTorch's CPU index (about 200 MB)")
        if not pip_install("--no-deps", "--index-url", CPU_INDEX, "torch"):
            say("that failed: torch comes from pip's own index, perhaps with CUDA (2.7 GB)")


def has_torch() -> bool:
    """Whether the torch that constraints.txt names is installed, whichever build of it."""
    ask = 'from importlib.metadata import version; print(version("torch").partition("+")[0])'
    asked = subprocess.run([PYTHON, "-P", "-c", ask], capture_output=True, text=True, check=False)
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return asked.returncode == 0 and f"torch=={asked.stdout.strip()}" in pinned


def has_own_index() -> bool:
    """Whether pip has been told, by a file or its variables, where packages come from."""
    ask = [str(PYTHON), "-P", "-m", "pip", "config", "list"]
    told = subprocess.run(ask, capture_output=True, text=True, check=False).stdout
    return re.search(r"\.((extra-)?index-url|find-links|no-index)=", told) is not None


def has_nvidia() -> bool:
    """Whether NVIDIA's driver is there."""
    signs = ("/proc/driver/nvidia", "/etc/nv_tegra_release", "/usr/lib/wsl/lib/nvidia-smi")
    return any(map(os.path.exists, signs)) or shutil.which("nvidia-smi") is not None


def is_reachable(index: str) -> bool:
    """Whether an index answers at all: pip itself would ask again and again for minutes."""
    answered = threading.Event()

    def ask() -> None:
        try:
            urllib.request.urlopen(f"{index}/torch/").read(1)
        except OSError:
            return
        answered.set()

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(REACHED_S)
    return answered.is_set()


def set_up_or_exit(extra: str = "") -> None:
    """Set up; end this process with a line where that fails."""
    if sys.version_info < OLDEST:
        sys.exit("error: Python 3.11 or newer is needed; install one and run this with it")
    try:
        set_up(extra)
    except SetUpError as error:
        sys.exit(f"error: {error}")


def main() -> None:
    """Set up as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--dev", action="store_true", help="also install what it takes to test shardnet"
    )
    set_up_or_exit("dev" if parser.parse_args().dev else "")


if __name__ == "__main__":
    main()
