"""The corpus of hostile input as a node meets it: checkpoints, and frames.

Checkpoints are laid over a good one; those that are large are made here.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from support.hostile.hostile_files import CASES, FOLDER
from support.hostile.small_files import GOOD, safetensors

HOSTILE = Path(__file__).parents[2] / "hostile"
FRAMES = HOSTILE / "frames"
TOKENIZERS = HOSTILE / "tokenizers"
N_TENSORS = 100_000
"""In the largest header: some 4 s of work."""


def hostile_checkpoints(folder: Path) -> Iterator[Path]:
    """Write every checkpoint of the corpus below `folder`: stored ones, a large one, odd files."""
    for name, case in CASES.items():
        place = _good(folder / name, case.base)
        for path in (FOLDER / name).iterdir():
            shutil.copy(path, place)
        yield place
    large = _good(folder / "large", "safetensors")
    entries = {
        f"t{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(N_TENSORS)
    }
    (large / "model.safetensors").write_bytes(safetensors(json.dumps(entries).encode()))
    yield large
    link = _good(folder / "link", "safetensors")
    (link / "config.json").unlink()
    (link / "config.json").symlink_to("/etc/passwd")
    yield link
    fifo = _good(folder / "fifo", "safetensors")
    (fifo / "config.json").unlink()
    os.mkfifo(fifo / "config.json")
    yield fifo


def good_checkpoint(folder: Path) -> Path:
    """Write the checkpoint over which most of the corpus is laid."""
    return _good(folder, "safetensors")


def hostile_tokenizers(folder: Path, checkpoint: Path) -> Iterator[Path]:
    """Write copies of a good checkpoint, each with a tokenizer of the corpus."""
    for path in sorted(TOKENIZERS.glob("*.json")):
        place = folder / path.stem
        shutil.copytree(checkpoint, place)
        shutil.copy(path, place / "tokenizer.json")
        yield place


def _good(folder: Path, base: str) -> Path:
    folder.mkdir(parents=True)
    for name, content in GOOD[base]().items():
        (folder / name).write_bytes(content)
    return folder
