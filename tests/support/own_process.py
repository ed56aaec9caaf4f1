"""Measuring memory in a process that does nothing else, and a model that is worth measuring."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
END_S = 300
"""Ends a process that hangs; one that imports torch on a busy machine may need a minute."""


def figures_of(source: str, *arguments: str) -> dict[str, Any]:
    """Run Python source in a process of its own; return the JSON that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", source, *arguments],
        check=True,
        capture_output=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=END_S,
    )
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def make_large(folder: Path) -> Path:
    """Write a model that weighs more than what the libraries take now and then.

    In this process, since one of its own would only import torch once more for it.
    """
    shape = ["--layers=8", "--hidden=1024", "--intermediate=2816", "--heads=16", "--kv-heads=4"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["make_checkpoint.py", str(folder), *shape, "--vocab=4000"])
        runpy.run_path(str(ROOT / "scripts/make_checkpoint.py"), run_name="__main__")
    return folder
