"""Builds the compiled library where a C compiler is at hand; everything else is in pyproject.toml.

It is optional: without it torch does the work, slower, and installing never fails for want of
a compiler. The source needs no Python headers: the library is called through ctypes, so one wheel
serves every Python of a platform. (No library is built on Windows: the source is GNU C, and what
it shares torch's threads by is not in the OpenMP that torch has there.)
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext


class BuildKernels(build_ext):
    """Builds plain shared libraries: no init function, and no Python's name in the file's."""

    def get_export_symbols(self, ext: Extension) -> list[str]:
        """Export what the source exports."""
        return list(ext.export_symbols)

    def get_ext_filename(self, ext_name: str) -> str:
        """Name the file as kernels/library.py looks for it."""
        return str(Path(*ext_name.split("."))) + ".so"

    def build_extension(self, ext: Extension) -> None:
        """Compile the sources side by side: one after the other they take minutes."""
        compile_all = self.compiler.compile

        def compile_each(sources: list[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                made = pool.map(lambda source: compile_all([source], **options), sources)
                return [name for names in made for name in names]

        self.compiler.compile = compile_each
        super().build_extension(ext)


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
    "wait",
)

flags = ["-O3", "-g0", "-std=c11", "-ffp-contract=off", "-fno-tree-reassoc", "-Wno-psabi"]
"""Sums are written in the order in which registers hold them: reassociated they would not fit."""
if sys.platform == "win32":
    flags = []
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
            libraries=[] if sys.platform == "win32" else ["m"],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel},
)
