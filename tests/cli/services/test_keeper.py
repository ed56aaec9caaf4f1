"""A keeper: what it installs, takes back and passes on. What it keeps here is no node."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.system.environments import make_environment, make_wheel

from shardnet import installation
from shardnet.errors import ConfigurationError
from shardnet.installation import EXIT_UPDATE, KeeperFolder

MAX_BYTES = 25 << 20
WAIT_S = 60.0
MAIN = """
import os, signal, sys, threading, time
from pathlib import Path
from shardnet import __version__

def end():
    sys.stdin.read()
    os._exit(9)

threading.Thread(target=end, daemon=True).start()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
folder = Path(os.environ["SHARDNET_KEEPER"])
print(__version__, folder, *sys.argv[1:], flush=True)
while True:
    time.sleep(0.01)
    if (told := folder / "exit").exists():
        status = int(told.read_text())
        told.unlink()
        sys.exit(status)
"""
BROKEN = "raise ImportError('broken')\n"


class Kept:
    """A keeper, and what it keeps."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.process = subprocess.Popen(
            [python, "-P", "-m", "shardnet_cli.services.keeper", "node", "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.folder = folder
        self.place = KeeperFolder(Path("/"))

    def runs(self) -> str:
        """Wait for the start of a node; return its version."""
        assert self.process.stdout is not None
        version, place, *arguments = self.process.stdout.readline().split()
        assert arguments == ["node", "--port", "0"]
        self.place = KeeperFolder(Path(place))
        return version

    def order(self, wheel: Path, within_s: float = WAIT_S) -> None:
        """Have the node end for a wheel, as one does that was ordered to."""
        sent = self.place.path / wheel.name
        sent.write_bytes(wheel.read_bytes())
        self.place.order(sent, within_s, "127.0.0.1:1")
        self.end(EXIT_UPDATE)

    def end(self, status: int) -> None:
        written = self.place.path / "status"
        written.write_text(str(status))
        written.rename(self.place.path / "exit")

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    python = make_environment(tmp_path / "env", make_wheel(tmp_path, "1.0", main=MAIN))
    one = Kept(python, tmp_path)
    yield one
    one.close()


def test_a_version_stays_once_it_is_kept_and_else_the_one_before_comes_back(kept: Kept) -> None:
    wheel = make_wheel(kept.folder, "2.0", main=MAIN)
    assert kept.runs() == "1.0"
    kept.order(wheel)
    assert kept.runs() == "2.0"
    assert kept.place.read("successor") == "127.0.0.1:1"
    kept.place.write("kept", "")

    broken = make_wheel(kept.folder, "3.0", {"shardnet_cli/__main__.py": BROKEN}, main=MAIN)
    kept.order(broken)
    assert kept.runs() == "2.0"
    assert kept.place.read("failure") == "it ended with status 1"
    assert not list(kept.place.path.glob("*.whl"))

    kept.order(make_wheel(kept.folder, "4.0", main=MAIN), within_s=0.5)
    assert kept.runs() == "4.0"
    assert kept.runs() == "2.0"  # nobody has kept the other one
    assert kept.place.read("failure") == "it was not back within 0.5 s"

    nothing = kept.folder / wheel.name.replace("2.0", "5.0")
    nothing.write_bytes(b"no wheel")
    kept.order(nothing)
    assert kept.runs() == "2.0"
    assert "5.0" in kept.place.read("failure")

    assert psutil.Process(kept.process.pid).memory_info().rss < MAX_BYTES
    kept.end(3)
    assert kept.process.wait(WAIT_S) == 3
    assert not kept.place.path.exists()


def test_signals_reach_the_node_which_ends_with_its_keeper(kept: Kept) -> None:
    kept.runs()
    kept.process.send_signal(signal.SIGTERM)
    assert kept.process.wait(WAIT_S) == 7

    other = Kept(kept.folder / "env/bin/python", kept.folder)
    try:
        other.runs()
        [node] = psutil.Process(other.process.pid).children()
        other.process.kill()
        node.wait(WAIT_S)
    finally:
        other.close()


def test_a_keeper_that_is_stopped_while_nobody_has_kept_a_version_goes_back(kept: Kept) -> None:
    kept.runs()
    kept.order(make_wheel(kept.folder, "2.0", main=MAIN))
    assert kept.runs() == "2.0"
    kept.process.send_signal(signal.SIGTERM)
    assert kept.process.wait(WAIT_S) == 0
    ask = "import shardnet; print(shardnet.__version__)"
    python = kept.folder / "env/bin/python"
    told = subprocess.run([python, "-P", "-c", ask], capture_output=True, text=True, check=True)
    assert told.stdout == "1.0\n"


def test_what_does_not_fit_is_found_before_anything_is_installed(tmp_path: Path) -> None:
    lacking = make_wheel(tmp_path, "2.0", requires="no-such-thing>=3", main=MAIN)
    with pytest.raises(ConfigurationError, match="no-such-thing"):
        installation.check(lacking)
    foreign = tmp_path / "shardnet-2.0-py3-none-win_arm64.whl"
    foreign.write_bytes(lacking.read_bytes())
    with pytest.raises(ConfigurationError, match="not a supported wheel on this platform"):
        installation.check(foreign)
    assert "update that checkout" in installation.why_fixed()
