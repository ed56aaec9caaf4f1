"""The sampling that a model's makers recommend, by generation_config.json.

Knows the keys of that file which say how to draw. Nothing depends on them but defaults, so what
cannot be used counts as missing. Must not know how tokens are drawn.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

from shardnet.checkpoint.tensors.checkpoint_files import has_file
from shardnet.checkpoint.tensors.json_files import read_json
from shardnet.errors import CheckpointError, SamplingError
from shardnet.sampling_params import SamplingParams

RECOMMENDED: Final = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""The sampling parameters that are read; each is called there as here."""
_FILE: Final = "generation_config.json"


def read_recommended(path: Path) -> dict[str, float]:
    """Return the recommended values of a checkpoint folder by name, {} where there are none.

    A file with `do_sample` false recommends none, and one that names no temperature means 1, as in
    transformers.
    """
    try:
        said = read_json(path / _FILE) if path.is_dir() and has_file(path / _FILE) else {}
    except (CheckpointError, OSError):
        return {}  # the tokenizer, which needs the file, says why
    if said.get("do_sample") is False:
        return {}
    found = {name: said[name] for name in RECOMMENDED if _is_usable(name, said.get(name))}
    return {"temperature": 1.0, **found} if found else {}


def _is_usable(name: str, value: object) -> bool:
    is_count = type(value) is int
    if not (is_count or (name != "top_k" and isinstance(value, float) and math.isfinite(value))):
        return False
    try:
        SamplingParams(**{name: value}).check()  # type: ignore[arg-type]  # a number of its kind
    except SamplingError:
        return False
    return True
