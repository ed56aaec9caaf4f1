"""The licence that a checkpoint's makers name: in the model card's header, or in a GGUF file.

Nothing depends on it but what people are told, so what cannot be read counts as missing.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from shardnet.checkpoint.formats.gguf_header import first_texts, gguf_files
from shardnet.checkpoint.tensors.checkpoint_files import has_file, open_file
from shardnet.errors import CheckpointError

_CARD: Final = "README.md"
_HEAD_BYTES: Final = 1 << 14
_KEYS: Final = ("general.license", "general.license.name")
_LICENCE: Final = re.compile(rb"^license(?:_name)?:[ \t]*[\"']?([^\s\"'\[{]+)", re.MULTILINE)
MAX_LICENCE: Final = 256


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
