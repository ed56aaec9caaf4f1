"""The wheel that is built from this checkout brings everything it needs, the bundled model too."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.soak import cases, is_soak

from shardnet.model.kernels import library

ROOT = Path(__file__).parents[2]
KERNELS = "shardnet/model/kernels/_quantized.so"
BUILD_S = 300
PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet")
HOOK = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
ASK = "from setuptools.build_meta import get_requires_for_build_wheel as ask; print(ask())"
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "shardnet", "cli")


def run(*command: str, cwd: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=BUILD_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def build(sources: Path, folder: Path, environment: dict[str, str]) -> None:
    """Build the wheel into `folder`: as pip does, which asks twice, or by what pip calls for it."""
    if not is_soak():
        run("-c", HOOK, str(folder), cwd=sources, environment=environment)
        return
    run(
        *(*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)),
        str(sources),
        cwd=folder,
        environment=environment,
    )


def install(wheel: Path, target: Path, environment: dict[str, str]) -> None:
    """Install the wheel: as pip does, or by what that comes to without scripts and compiling."""
    if not is_soak():
        shutil.unpack_archive(wheel, target, "zip")
        return
    run(
        *(*PIP, "install", "--no-deps", "--no-compile", "--target", str(target), str(wheel)),
        cwd=target.parent,
        environment=environment,
    )


@pytest.mark.parametrize("has_compiler", cases([False], [True]), ids="compiler={}".format)
def test_a_wheel_installed_elsewhere_runs_the_bundled_model(
    has_compiler: bool, tmp_path: Path
) -> None:
    """With the compiled library in it, or without where nothing compiles it.

    What setting up this checkout compiled, from the same sources by the same setup.py, is compiled
    again only if a source has changed since. In the platform's name stands no Python.
    """
    sources, target = tmp_path / "sources", tmp_path / "target"
    sources.mkdir()
    for name in SOURCES:
        (sources / name).symlink_to(ROOT / name)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"SHARDNET_RUNTIME_DIR": str(tmp_path / "run"), "HOME": str(tmp_path)}
    environment["SHARDNET_NO_MDNS"] = "1"
    if has_compiler:
        keep_compiled(sources)
    else:
        environment |= {name: str(tmp_path / "no-such-compiler") for name in ("CC", "CXX")}
    build(sources, tmp_path, environment)
    (wheel,) = tmp_path.glob("shardnet-*.whl")
    assert wheel.name.split("-")[2:4] == ["py3", "none"]
    assert not wheel.name.endswith("-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert "shardnet/assets/default_model/model.safetensors" in names
    page = ROOT / "shardnet/api/dashboard/page"
    shown = {str(path.relative_to(ROOT)) for path in page.rglob("*") if path.is_file()}
    assert len(shown) > 20
    assert shown <= names
    assert {name for name in names if name.endswith(".so")} == (
        {KERNELS} if has_compiler else set()
    )
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {
        "shardnet",
        "shardnet_cli",
    }
    install(wheel, target, environment)
    output = run(
        "-c",
        "import shardnet, shardnet_cli.main as m, sys; "
        "from shardnet.model.kernels.library import native_kernels; "
        f"assert shardnet.__file__.startswith({str(target)!r}), shardnet.__file__; "
        f"assert (native_kernels() is not None) is {has_compiler}; "
        "sys.argv = ['shardnet', 'generate', 'It was', '--max-tokens', '4', '--json']; m.main()",
        cwd=tmp_path,
        environment=environment | {"PYTHONPATH": str(target)},
    )
    assert len(json.loads(output)["token_ids"]) == 4


@pytest.mark.skipif(find_spec("ziglang") is not None, reason="ziglang is installed here")
@pytest.mark.parametrize("named", [False, True], ids="named={}".format)
def test_pip_installs_ziglang_only_where_nothing_else_compiles(named: bool, tmp_path: Path) -> None:
    for name in SOURCES:
        (tmp_path / name).symlink_to(ROOT / name)
    environment = {key: value for key, value in os.environ.items() if key != "CC"}
    environment |= {"PATH": str(tmp_path)} | ({"CC": "a-compiler"} if named else {})
    asked = run("-c", ASK, cwd=tmp_path, environment=environment).splitlines()[-1]
    assert ("ziglang" in asked) is not named


def keep_compiled(sources: Path) -> None:
    """Put the library of this checkout where the build of `sources` would leave it."""
    compiled = Path(library.__file__).with_name(Path(KERNELS).name)
    if compiled.is_file():
        (sources / "setup.cfg").write_text("[build]\nbuild_platlib = build/lib\n")
        place = sources / "build" / "lib" / KERNELS
        place.parent.mkdir(parents=True)
        shutil.copy2(compiled, place)
