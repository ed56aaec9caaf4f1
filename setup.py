"""Builds the compiled library where a C compiler is at hand; everything else is in pyproject.toml.

It is optional: without it torch does the work, slower, and installing never fails for want of
a compiler. The source needs no Python headers: the library is called through ctypes.
"""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext


class BuildKernels(build_ext):
    """Builds plain shared libraries: no init function is exported."""

    def get_export_symbols(self, ext: Extension) -> list[str]:
        """Export what the source exports."""
        return list(ext.export_symbols)


FOLDER = "shardnet/model/kernels/csrc"

flags = ["-O3", "-std=c11", "-ffp-contract=off", "-Wno-psabi"] if sys.platform != "win32" else []
packages = find_packages(include=["shardnet", "shardnet.*"])
commands = find_packages(include=["cli", "cli.*"])
setup(
    packages=[*packages, *(f"shardnet_{package}" for package in commands)],
    ext_modules=[
        Extension(
            "shardnet.model.kernels._quantized",
            sources=[f"{FOLDER}/{name}.c" for name in ("linear", "sublayers", "pack")],
            depends=sorted(str(path) for path in Path(FOLDER).glob("*.h")),
            extra_compile_args=flags,
            libraries=[] if sys.platform == "win32" else ["m"],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildKernels},
)
