"""What a model's makers say of it beside its weights: its licence, and the sampling it needs.

Knows the model card's header, a GGUF file's metadata, and the keys of generation_config.json that
say how to draw. Nothing depends on them but defaults and what people are told, so what cannot be
used counts as missing. Must not know how tokens are drawn.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Final

from shardnet.checkpoint.formats.gguf_header import first_texts, gguf_files
from shardnet.checkpoint.tensors.checkpoint_files import has_file, open_file
from shardnet.checkpoint.tensors.json_files import read_json
from shardnet.errors import CheckpointError, SamplingError
from shardnet.sampling_params import SamplingParams

RECOMMENDED: Final = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""The sampling parameters that are read; each is called there as here."""
_FILE: Final = "generation_config.json"


_CARD: Final = "README.md"
_HEAD_BYTES: Final = 1 << 14
_KEYS: Final = ("general.license", "general.license.name")
_LICENCE: Final = re.compile(rb"^license(?:_name)?:[ \t]*[\"']?([^\s\"'\[{]+)", re.MULTILINE)
MAX_LICENCE: Final = 256


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


def read_licence(path: Path) -> str:
    """Return the name of the licence of the checkpoint at `path`, "" where none is named."""
    try:
        if not path.is_dir():
            said = first_texts(gguf_files(path)[0], _KEYS)
            return next((said[key] for key in reversed(_KEYS) if key in said), "")[:MAX_LICENCE]
        return _of_card(path / _CARD) if has_file(path / _CARD) else ""
    except (CheckpointError, OSError, IndexError):
        return ""


def _of_card(card: Path) -> str:
    """Read the header of a model card, YAML between two lines of dashes: the last name counts."""
    with open_file(card) as file:
        begin, _, rest = (file.read(_HEAD_BYTES) or b"").partition(b"---")
    header, end, _ = rest.partition(b"\n---")
    found = _LICENCE.findall(header) if end and not begin.strip() else []
    return found[-1].decode("utf-8", "replace")[:MAX_LICENCE] if found else ""
