"""Builds the compiled library; everything else is in pyproject.toml.

The source is GNU C and needs no Python headers: the library is called through ctypes, so one wheel
serves every Python of a platform. GCC compiles it (on Windows MinGW's), Apple's Clang, or where
neither is at hand the C compiler of ziglang, which pip installs for the build alone
(docs/adr/0088). CC names another one, _PYTHON_HOST_PLATFORM another platform to build for. Where
nothing compiles it installing succeeds too: torch does the work, slower.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

PLATFORM = sysconfig.get_platform()
IS_FOR_WINDOWS = PLATFORM.startswith("win")
ZIG = (sys.executable, "-m", "ziglang", "cc", "-mcpu=baseline")
ZIG_PACKAGE = "ziglang>=0.17,<0.18"  # before, functions for AVX-512 do not compile
ZIG_PLATFORMS = ("win-amd64", "linux-x86_64", "linux-aarch64")


class BuildKernels(build_ext):
    """Builds plain shared libraries: no init function, and no Python's name in the file's."""

    def get_export_symbols(self, ext: Extension) -> list[str]:
        """Export what the source exports."""
        return list(ext.export_symbols)

    def get_ext_filename(self, ext_name: str) -> str:
        """Name the file as kernels/library.py looks for it."""
        return str(Path(*ext_name.split("."))) + (".dll" if IS_FOR_WINDOWS else ".so")

    def build_extension(self, ext: Extension) -> None:
        """Compile the sources side by side: one after the other they take minutes."""
        if not setuptools_has_compiler():
            build_library(find_compiler(), ext, Path(self.get_ext_fullpath(ext.name)))
            return
        compile_all = self.compiler.compile

        def compile_each(sources: list[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                made = pool.map(lambda source: compile_all([source], **options), sources)
                return [name for names in made for name in names]

        self.compiler.compile = compile_each
        super().build_extension(ext)


def setuptools_has_compiler() -> bool:
    """Whether setuptools finds a compiler of GNU C by itself; it looks for none of Windows."""
    if IS_FOR_WINDOWS or os.environ.get("CC"):
        return not IS_FOR_WINDOWS and "ziglang" not in os.environ["CC"]
    return shutil.which((sysconfig.get_config_var("CC") or "cc").split()[0]) is not None


def find_compiler() -> list[str]:
    """Find another one: that of CC, MinGW's GCC for Windows, or ziglang's."""
    if named := shlex.split(os.environ.get("CC", "")):
        return named
    for name in ("x86_64-w64-mingw32-gcc", "gcc") if IS_FOR_WINDOWS else ():
        if (found := shutil.which(name)) and b"mingw" in _output(found, "-dumpmachine"):
            return [found]
    if find_spec("ziglang"):
        return [*ZIG, "-target", "x86_64-windows-gnu"] if IS_FOR_WINDOWS else [*ZIG]
    raise CompileError(
        "no C compiler was found: install gcc (on Windows MinGW's), or name one in CC"
    )


def build_library(compiler: list[str], ext: Extension, library: Path) -> None:
    """Compile the sources side by side, and link what is not the system's own into `library`."""
    is_clang = b"clang" in _output(*compiler, "--version")
    options = [one for one in ext.extra_compile_args if not (is_clang and "reassoc" in one)]
    if not IS_FOR_WINDOWS:
        options.append("-fPIC")
    elif not is_clang:  # GCC aligns its stack to 16 bytes there, and moves 32 as if aligned
        options.append("-Wa,-muse-unaligned-vector-move")
    library.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        made = [str(Path(folder, f"{Path(source).stem}.o")) for source in ext.sources]
        pairs = zip(ext.sources, made, strict=True)
        command = [*compiler, *options, "-c"]
        for _ in pool.map(lambda pair: _output(*command, pair[0], "-o", pair[1]), pairs):
            pass
        linked = ["-s"] if IS_FOR_WINDOWS else ["-lm"]
        if IS_FOR_WINDOWS and not is_clang:  # zig links nothing else, and took it for an archive
            linked.append("-static")
        _output(*compiler, "-shared", *made, *linked, "-o", str(library))


def build_requirements() -> list[str]:
    """Name ziglang where nothing else would compile the source, and there is a wheel of it."""
    if os.environ.get("CC") or setuptools_has_compiler():
        return []
    try:
        find_compiler()
    except CompileError:
        return [ZIG_PACKAGE] if PLATFORM in ZIG_PLATFORMS else []
    return []


def _output(*command: str) -> bytes:
    try:
        return subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise CompileError(str(error)) from error


class PlatformWheel(bdist_wheel):
    """Names the platform that the library is for, and no Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """Keep the platform of what would be the name."""
        return "py3", "none", super().get_tag()[2]


FOLDER = "shardnet/model/kernels/csrc"
SOURCES = (
    "tiles_avx512",
    "sublayers",
    "tiles_avx2",
    "recurrence",
    "tiles_avx2_many",
    "floats",
    "quantize",
    "linear",
    "tiles_avx2_plain",
    "tiles_amx",
    "pack",
    "panels",
    "delta_net",
    "experts",
    "gather",
    "threads",
    "wait",
)
"""Those first that take longest to compile: four take 45 of 55 s."""

flags = ["-O3", "-g0", "-std=c11", "-ffp-contract=off", "-fno-tree-reassoc", "-Wno-psabi"]
"""Sums are written in the order in which registers hold them: reassociated they would not fit."""
packages = find_packages(include=["shardnet", "shardnet.*"])
commands = find_packages(include=["cli", "cli.*"])
setup(
    setup_requires=build_requirements(),
    packages=[*packages, *(f"shardnet_{package}" for package in commands)],
    ext_modules=[
        Extension(
            "shardnet.model.kernels._quantized",
            sources=[f"{FOLDER}/{name}.c" for name in SOURCES],
            depends=sorted(str(path) for path in Path(FOLDER).glob("*.h")),
            extra_compile_args=flags,
            libraries=["m"],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel},
)
