"""Measuring memory in a process that does nothing else, and a model that is worth measuring."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
END_S = 300
"""Ends a process that hangs; one that imports torch on a busy machine may need a minute."""


def figures_of(source: str, *arguments: str) -> dict[str, Any]:
    """Run Python source in a process of its own; return the JSON that it prints."""
    return json.loads(_output("-c", source, *arguments))  # type: ignore[no-any-return]


def make_large(folder: Path) -> Path:
    """Write a model that weighs more than what the libraries take now and then."""
    shape = ["--layers=8", "--hidden=1024", "--intermediate=2816", "--heads=16", "--kv-heads=4"]
    _output("scripts/make_checkpoint.py", str(folder), *shape, "--vocab=4000")
    return folder


def _output(*arguments: str) -> bytes:
    done = subprocess.run(
        [sys.executable, *arguments],
        check=True,
        capture_output=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=END_S,
    )
    return done.stdout
