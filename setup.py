"""Builds the compiled library where a C compiler is at hand; everything else is in pyproject.toml.

It is optional: without it torch does the work, slower, and installing never fails for want of
a compiler. The source needs no Python headers: the library is called through ctypes, so one wheel
serves every Python of a platform. The source is GNU C: for Windows MinGW's GCC compiles it, there
or elsewhere. CC names another compiler, and _PYTHON_HOST_PLATFORM another platform to build for.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

IS_FOR_WINDOWS = sysconfig.get_platform().startswith("win")
UNALIGNED = ("-Wa,-muse-unaligned-vector-move",)
"""GCC for Windows aligns the stack to 16 bytes, and moves wider vectors as if it were more."""


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
        if IS_FOR_WINDOWS:
            build_dll(mingw(), ext, Path(self.get_ext_fullpath(ext.name)))
            return
        compile_all = self.compiler.compile

        def compile_each(sources: list[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                made = pool.map(lambda source: compile_all([source], **options), sources)
                return [name for names in made for name in names]

        self.compiler.compile = compile_each
        super().build_extension(ext)


def mingw() -> list[str]:
    """Find a compiler of GNU C for Windows, which setuptools does not look for."""
    if named := shlex.split(os.environ.get("CC", "")):
        return named
    for name in ("x86_64-w64-mingw32-gcc", "gcc"):
        if (found := shutil.which(name)) and b"mingw" in _output(found, "-dumpmachine"):
            return [found]
    raise CompileError("no compiler of MinGW was found: put its gcc in PATH, or name it in CC")


def build_dll(compiler: list[str], ext: Extension, library: Path) -> None:
    """Compile the sources side by side, and link all that is not Windows' own into `library`."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        made = [str(Path(folder, f"{Path(source).stem}.o")) for source in ext.sources]
        pairs = zip(ext.sources, made, strict=True)
        options = [*compiler, *ext.extra_compile_args, *UNALIGNED]
        for _ in pool.map(lambda pair: _output(*options, "-c", pair[0], "-o", pair[1]), pairs):
            pass
        _output(*compiler, "-shared", "-static", "-s", *made, "-o", str(library))


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
    "tiles_avx2",
    "tiles_avx2_plain",
    "tiles_avx2_many",
    "tiles_avx512",
    "tiles_amx",
    "linear",
    "quantize",
    "floats",
    "sublayers",
    "experts",
    "delta_net",
    "gather",
    "pack",
    "panels",
    "recurrence",
    "threads",
    "wait",
)

flags = ["-O3", "-g0", "-std=c11", "-ffp-contract=off", "-fno-tree-reassoc", "-Wno-psabi"]
"""Sums are written in the order in which registers hold them: reassociated they would not fit."""
packages = find_packages(include=["shardnet", "shardnet.*"])
commands = find_packages(include=["cli", "cli.*"])
setup(
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
